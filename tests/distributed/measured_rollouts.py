"""Measures replayed completions on each process that torchrun starts; each saves its row of metrics."""

import json
import sys
from pathlib import Path

from accelerate import PartialState
from ending import end

sys.path.insert(0, str(Path(__file__).parents[1]))

from conftest import PROMPTS
from datasets import Dataset
from replay import REWARDS, Replay, second_half
from transformers import AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

from ragen2_trl import CostCallback, MutualInformationCallback


def main() -> None:
    policy_path, folder, generations = sys.argv[1:]  # eight prompts in all
    state = PartialState(cpu=True, backend="gloo")
    assert state.num_processes == 2
    args = GRPOConfig(
        output_dir=folder,
        per_device_train_batch_size=16 // int(generations),
        num_generations=4,
        max_completion_length=10,
        max_steps=int(generations),
        learning_rate=0.0,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        ddp_backend="gloo",
        bf16=False,
        gradient_checkpointing=False,
        disable_tqdm=True,
        shuffle_dataset=False,
        seed=3,
    )
    replay = Replay(AutoTokenizer.from_pretrained(policy_path), REWARDS)
    dataset = Dataset.from_dict({"prompt": PROMPTS})
    trainer = GRPOTrainer(policy_path, Replay.reward, args, dataset, rollout_func=replay.rollout)
    trainer.add_callback(MutualInformationCallback(trainer, every=1, num_completions=20, answer=second_half))
    trainer.add_callback(CostCallback(trainer))
    row = {}

    log = trainer.log

    def keep_and_log(*arguments, **keywords):  # `log` clears the metrics, and only process 0 keeps a history
        measured = {key: values[0] for key, values in trainer._metrics["train"].items()}
        row.update({key: value for key, value in measured.items() if key.startswith(("mi/", "cost/"))})
        return log(*arguments, **keywords)

    trainer.log = keep_and_log
    trainer.train()
    (Path(folder) / f"row_{state.process_index}.json").write_text(json.dumps(row))


if __name__ == "__main__":
    main()
    end()

"""Resumes a run with dynamic sampling on processes of torchrun; each saves what it should share with the others."""

import json
import sys
from pathlib import Path

from accelerate import PartialState
from ending import end

sys.path.insert(0, str(Path(__file__).parents[1]))

from conftest import PROMPTS
from datasets import Dataset
from replay import REWARDS, Replay
from transformers import AutoTokenizer

from ragen2_trl import SNRFilteredGRPOConfig, SNRFilteredGRPOTrainer


def train(policy_path: str, folder: str, rows: int, max_steps: int, resume: str | None = None, **settings):
    args = SNRFilteredGRPOConfig(
        output_dir=folder,
        per_device_train_batch_size=rows,
        num_generations=4,
        max_completion_length=10,
        max_steps=max_steps,
        snr_dynamic_sampling_rounds=3,
        snr_strategy="nonzero",
        save_strategy="steps",
        save_steps=2,
        report_to="none",
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        disable_tqdm=True,
        seed=3,
        **settings,
    )
    replay = Replay(AutoTokenizer.from_pretrained(policy_path), REWARDS)
    dataset = Dataset.from_dict({"prompt": PROMPTS})
    trainer = SNRFilteredGRPOTrainer(policy_path, Replay.reward, args, dataset, rollout_func=replay.rollout)
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def main() -> None:
    policy_path, folder = sys.argv[1:]
    state = PartialState(cpu=True, backend="gloo")
    checkpoint = str(Path(folder) / "checkpoint-2")
    trainer = train(policy_path, folder, 8, 4, checkpoint, ddp_backend="gloo")
    drawn, selected = trainer._sampler.policy.order.drawn, trainer._strategy.state()
    shared = {"drawn": drawn, "filter": selected, "step": trainer.state.global_step}
    (Path(folder) / f"shared_{state.process_index}.json").write_text(json.dumps(shared))


if __name__ == "__main__":
    main()
    end()

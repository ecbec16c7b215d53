"""Puzzles of reasoning-gym on two processes, each with a scorer of its own.

python -m torch.distributed.run --standalone --nproc_per_node=2 puzzles.py FOLDER
"""

import json
import sys
from pathlib import Path

from accelerate import PartialState
from backends import COMMON
from ending import end

from ragen2_trl import SNRFilteredGRPOConfig, SNRFilteredGRPOTrainer
from ragen2_trl.envs import make_env
from ragen2_trl.envs.reasoning_gym.environment import score_answer
from ragen2_trl.tiny import TINY_MODEL_PATH


def main(folder: str) -> None:
    env = make_env("reasoning_gym", task="leg_counting")
    settings = {**COMMON, "max_completion_length": 24, "per_device_train_batch_size": 8, "ddp_backend": "gloo"}
    # Every other group has no reward variance, and is dropped.
    dataset = env.dataset(16, seed=0).add_column("varied", [row % 2 == 0 for row in range(16)])
    scores, expected = [], []

    def half_of_them_right(completions, **columns):
        """Half of each varied group gives the right answer, which a model of this size does not find."""
        right = [varied and place % 2 == 0 for place, varied in enumerate(columns["varied"])]
        for completion, answer, is_right in zip(completions, columns["answer"], right, strict=True):
            completion[0]["content"] = f"<think>So.</think><answer>{answer if is_right else 'none'}</answer>"
        scored = env.reward_funcs[0](completions=completions, **columns)
        scores.extend(scored)
        expected.extend(map(float, right))
        return scored

    args = SNRFilteredGRPOConfig(folder, **settings)
    trainer = SNRFilteredGRPOTrainer(str(TINY_MODEL_PATH), half_of_them_right, args, dataset)
    before = trainer.model.get_input_embeddings().weight.detach().clone()
    trainer.train()
    rows = [row for row in trainer.state.log_history if "reward" in row]
    told = {
        "scores": scores,
        "expected": expected,
        "rewards": [row["reward"] for row in rows],
        "kept": [row["snr/kept_fraction"] for row in rows],
        "moved": not before.equal(trainer.accelerator.unwrap_model(trainer.model).get_input_embeddings().weight),
        "scorer": score_answer._process.pid,
    }
    (Path(folder) / f"{PartialState().process_index}.json").write_text(json.dumps(told))


if __name__ == "__main__":
    main(sys.argv[1])
    end()

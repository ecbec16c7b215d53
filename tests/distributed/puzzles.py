"""Puzzles of reasoning-gym on two processes, each with a scorer of its own.

python -m torch.distributed.run --standalone --nproc_per_node=2 puzzles.py FOLDER
"""

import json
import os
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
    args = SNRFilteredGRPOConfig(
        folder,
        **{**COMMON, "max_completion_length": 24, "per_device_train_batch_size": 8, "ddp_backend": "gloo"},
        snr_value=1.0,
        snr_include_zero=True,
    )
    dataset = env.dataset(16, seed=0)

    def at_the_end_of_a_thought(completions, **columns):
        """Half of each group gives the right answer, which a model of this size cannot find."""
        for place, completion in enumerate(completions):
            right = columns["answer"][place] if place % 2 else "none"
            completion[0]["content"] = f"<think>So.</think><answer>{right}</answer>"
        return env.reward_funcs[0](completions=completions, **columns)

    trainer = SNRFilteredGRPOTrainer(str(TINY_MODEL_PATH), at_the_end_of_a_thought, args, dataset)
    before = trainer.model.get_input_embeddings().weight.detach().clone()
    trainer.train()
    told = {
        "rewards": [row["reward"] for row in trainer.state.log_history if "reward" in row],
        "moved": not before.equal(trainer.accelerator.unwrap_model(trainer.model).get_input_embeddings().weight),
        "scorer": score_answer._process.pid,
        "process": os.getpid(),
    }
    (Path(folder) / f"{PartialState().process_index}.json").write_text(json.dumps(told))


if __name__ == "__main__":
    main(sys.argv[1])
    end()

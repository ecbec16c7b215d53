"""Held-out tasks on several processes, greedily, and a model that does not move.

python -m torch.distributed.run --standalone --nproc_per_node=2 held_out.py BACKEND FOLDER
"""

import json
import sys
from pathlib import Path

from accelerate import PartialState
from backends import COMMON, is_sharded, start
from ending import end
from trl.rewards import think_format_reward  # noqa: F401 -- imports TRL before deepspeed looks at it

from ragen2_trl import EnvironmentEvalCallback, SNRFilteredGRPOConfig, SNRFilteredGRPOTrainer
from ragen2_trl.envs import make_env
from ragen2_trl.rollouts import TextRollout
from ragen2_trl.tiny import TINY_MODEL_PATH


def run(folder: str, processes: int, **settings):
    """A trainer that has evaluated 7 tasks, which two processes do not share evenly, before and after a step."""
    layout = {"max_completion_length": 240, "per_device_train_batch_size": 8 // processes, "output_dir": folder}
    still = {"learning_rate": 0.0, "max_steps": 1}
    args = SNRFilteredGRPOConfig(**{**COMMON, **layout, **still, **settings})
    env = make_env("frozen_lake", max_turns=3, max_actions=1)
    dataset = env.dataset(8, seed=0)
    rollout = TextRollout(env, max_turn_tokens=40)
    trainer = SNRFilteredGRPOTrainer(str(TINY_MODEL_PATH), env.reward_funcs, args, dataset, rollout_func=rollout)
    tasks = [env, make_env("frozen_lake")]  # in several turns, and in one
    trainer.add_callback(
        EnvironmentEvalCallback(
            tasks, trainer, 1, num_prompts=7, num_samples=1, temperature=0.0, max_turn_tokens=40, batch_size=3
        )
    )
    trainer.train()
    return trainer


def main() -> None:
    backend, folder = sys.argv[1:]
    trainer = run(folder, 2, ddp_backend="gloo", **start(backend))
    if backend == "zero3":
        assert is_sharded(trainer)
    rows = [row for row in trainer.state.log_history if "eval/seconds" in row]
    (Path(folder) / f"{PartialState().process_index}.json").write_text(json.dumps(rows))


if __name__ == "__main__":
    main()
    end()

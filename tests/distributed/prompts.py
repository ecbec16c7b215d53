"""Which prompts a run with prompt selection samples; on the processes that torchrun starts, or on one.

python -m torch.distributed.run --standalone --nproc_per_node=2 prompts.py POLICY FOLDER
"""

import json
import sys
from pathlib import Path
from typing import Any

from accelerate import PartialState
from ending import end

sys.path.insert(0, str(Path(__file__).parents[1]))

from backends import COMMON
from conftest import PROMPTS
from datasets import Dataset
from replay import REWARDS, Replay
from transformers import AutoTokenizer, TrainerCallback

from ragen2_trl import SNRFilteredGRPOConfig, SNRFilteredGRPOTrainer


def decisions(policy_path: str, folder: str, rows: int, resume: str | None = None) -> dict[str, Any]:
    """The rows of each step's last draw, and what is known at the end."""
    settings = {**COMMON, "max_steps": 8, "save_strategy": "steps", "save_steps": 6, "snr_strategy": "nonzero"}
    args = SNRFilteredGRPOConfig(
        folder,
        **{**settings, "per_device_train_batch_size": rows, "snr_prompt_selection": True},
    )
    replay = Replay(AutoTokenizer.from_pretrained(policy_path), REWARDS)
    trainer = SNRFilteredGRPOTrainer(
        policy_path, Replay.reward, args, Dataset.from_dict({"prompt": PROMPTS}), rollout_func=replay.rollout
    )
    drawn: list[Any] = []

    class Steps(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            drawn.append(trainer._sampler.policy.order.rows.tolist())

    trainer.add_callback(Steps())
    trainer.train(resume_from_checkpoint=resume)
    posterior = trainer._sampler.policy.order.posterior
    return {"drawn": drawn, "seen": posterior.seen.tolist(), "evidence": posterior.evidence.tolist()}


def main() -> None:
    policy_path, folder = sys.argv[1:]
    state = PartialState(cpu=True, backend="gloo")
    found = decisions(policy_path, folder, 4)
    (Path(folder) / f"prompts_{state.process_index}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
    end()

"""Gradients of a step with pilots on two processes, which prompts were sampled whole, and what was scored.

python -m torch.distributed.run --standalone --nproc_per_node=2 pilots.py POLICY FOLDER
"""

import sys
from pathlib import Path

import torch
from accelerate import PartialState
from datasets import Dataset

sys.path.insert(0, str(Path(__file__).parents[1]))

from algorithms import GRPO, STILL
from backends import COMMON
from conftest import PROMPTS
from ending import end
from pilot_replay import PILOTS, replay_of_pilots, sampled_in_full
from replay import Recorder, move_away

SETTINGS = {**COMMON, **STILL, **PILOTS, "max_steps": 1, "beta": 0.1, "loss_type": "dapo", "shuffle_dataset": False}
# All eight prompts in a generation; or four, filled up with further ones.
CASES = {"alone": (16, {}), "filled up": (8, {"snr_dynamic_sampling_rounds": 10})}


def main() -> None:
    policy_path, folder = sys.argv[1:]
    state = PartialState(cpu=True, backend="gloo")
    found = {}
    for name, (rows, settings) in CASES.items():
        replay, recorder = replay_of_pilots(policy_path), Recorder()
        args = GRPO.config(folder, **{**SETTINGS, **settings, "per_device_train_batch_size": rows})
        dataset = Dataset.from_dict({"prompt": PROMPTS})
        trainer = GRPO.trainer(
            policy_path, replay.score, args, dataset, rollout_func=replay.rollout, callbacks=[recorder]
        )
        move_away(trainer.model)
        batches = []
        compute = trainer._compute_loss

        def note(model, inputs, compute=compute, batches=batches, trainer=trainer):
            prompts = trainer.processing_class.batch_decode(inputs["prompt_ids"], skip_special_tokens=True)
            batches.extend(prompts)
            return compute(model, inputs)

        trainer._compute_loss = note
        trainer.train()
        row = next(row for row in trainer.state.log_history if "snr/sampled_completions" in row)
        found[name] = {
            "gradient": recorder.gradients[0],
            "whole": sampled_in_full(trainer).tolist(),
            "scored": replay.scored,
            "trained": batches,
            "sampled": row["snr/sampled_completions"],
        }
    torch.save(found, Path(folder) / f"pilots_{state.process_index}.pt")


if __name__ == "__main__":
    main()
    end()

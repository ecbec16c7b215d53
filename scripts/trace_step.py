"""Print the path of one training step through the core, to see how far a reader has to jump to follow it.

    python scripts/trace_step.py top_p     # or lossless, or all_in

The tiny model trains for three steps. In the third, calls in the files of `CORE` are traced from `_prepare_inputs` to
the first loss. A stay is a stretch of calls in one file, named by its first function; repeated pairs of stays (loops)
count once. Printed are the stays in their order, then how many stays, files and functions there are: with fewer, the
step is easier to read.
"""

import os
import sys
import tempfile
from types import FrameType
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported

import torch
from transformers import PrinterCallback

import ragen2_trl
from ragen2_trl import MutualInformationCallback, SNRFilteredGRPOConfig, SNRFilteredGRPOTrainer
from ragen2_trl.envs import make_env
from ragen2_trl.tiny import resolve_model

MODES: dict[str, dict[str, Any]] = {
    "top_p": {},
    "lossless": {"snr_strategy": "lossless"},
    "all_in": {
        "snr_strategy": "nonzero",
        "snr_dynamic_sampling_rounds": 2,
        "snr_pilot_generations": 2,
        "snr_prompt_selection": True,
    },
}
ROOT = f"{os.path.dirname(ragen2_trl.__file__)}/"
CORE = ("trainers", "sampling", "filtering.py", "rollout_events.py")
LOSSES = ("_loss_of_kept_rows", "compute_loss", "_compute_loss")

Call = tuple[str, str]  # (file in the package, qualified name of the function)


def traced_step(mode: str) -> list[Call]:
    """Calls of the core's functions in a training step, in their order; comprehensions and lambdas are left out."""
    env = make_env("frozen_lake")
    with tempfile.TemporaryDirectory() as folder:
        args = SNRFilteredGRPOConfig(
            folder,
            per_device_train_batch_size=8,
            gradient_accumulation_steps=4,
            num_generations=8,
            max_completion_length=32,
            max_steps=3,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            use_cpu=True,
            bf16=False,
            **MODES[mode],
        )
        trainer = SNRFilteredGRPOTrainer(resolve_model("tiny"), env.reward_funcs, args, env.dataset(64, 0))
        trainer.remove_callback(PrinterCallback)
        trainer.add_callback(MutualInformationCallback(trainer, every=1, min_prompts=2))
        calls: list[Call] = []

        def note(frame: FrameType, event: str, _: Any) -> None:
            path = frame.f_code.co_filename
            if event == "call" and path.startswith(ROOT) and trainer.state.global_step >= 2:
                calls.append((path.removeprefix(ROOT), frame.f_code.co_qualname))

        sys.setprofile(note)
        try:
            trainer.train()
        finally:
            sys.setprofile(None)
    names = [short(name) for _, name in calls]
    start = names.index("_prepare_inputs")
    stop = next(number for number, name in enumerate(names) if number > start and name in LOSSES)
    return [(file, name) for file, name in calls[start:stop] if file.startswith(CORE) and short(name)[0] != "<"]


def short(name: str) -> str:
    """A qualified name without its class."""
    return name.split(".")[-1]


def stays_of(calls: list[Call]) -> list[Call]:
    """The first call of each stay in a file."""
    stays: list[Call] = []
    for call in calls:
        if not stays or stays[-1][0] != call[0]:
            stays.append(call)
        while len(stays) >= 4 and stays[-1][0] == stays[-3][0] and stays[-2][0] == stays[-4][0]:
            del stays[-2:]
    return stays


def main(mode: str) -> None:
    """Print the stays of a mode and the three numbers."""
    if mode not in MODES:
        raise SystemExit(f"mode={mode!r} is not supported; allowed: {', '.join(MODES)}.")
    torch.set_num_threads(1)
    calls = traced_step(mode)
    stays = stays_of(calls)
    print(" > ".join(f"{file.removesuffix('.py')}:{short(name)}" for file, name in stays))
    print(f"{mode}: stays {len(stays)}, files {len({file for file, _ in stays})}, functions {len(set(calls))}")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "top_p")

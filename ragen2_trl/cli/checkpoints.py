"""Where a training begins: anew, in a folder without leftovers of an earlier run, or at a checkpoint."""

import json
import shutil
from pathlib import Path

from transformers import TrainingArguments

from ragen2_trl.cli.arguments import TrainArguments
from ragen2_trl.reporting.files import DIAGNOSTICS, EPISODES, MEASUREMENTS, OUTCOMES


def last_complete_checkpoint(run: Path) -> Path | None:
    """The latest checkpoint that was written to its end; a run can be killed while it writes one.

    `trainer_state.json` is written after everything a resumed run needs, so one that can be read marks such a
    checkpoint.
    """

    def is_complete(folder: Path) -> bool:
        try:
            json.loads((folder / "trainer_state.json").read_text())
        except (FileNotFoundError, json.JSONDecodeError):
            return False
        return True

    folders = sorted(run.glob("checkpoint-*"), key=lambda folder: int(folder.name.split("-")[1]), reverse=True)
    return next(filter(is_complete, folders), None)


def checkpoint_to_resume(run: Path, script_args: TrainArguments, training_args: TrainingArguments) -> Path | None:
    """Where training begins, in a folder without outcomes of an earlier one."""
    checkpoint = _find_checkpoint(run, script_args, training_args)
    for name in OUTCOMES:
        (run / name).unlink(missing_ok=True)
    return checkpoint


def _find_checkpoint(run: Path, script_args: TrainArguments, training_args: TrainingArguments) -> Path | None:
    if training_args.resume_from_checkpoint is not None:
        return Path(training_args.resume_from_checkpoint)
    if script_args.resume:
        return last_complete_checkpoint(run)
    leftovers = [*run.glob("checkpoint-*"), *run.glob("evaluation_*.json")]
    if leftovers and not script_args.overwrite:
        raise ValueError(
            f"output_dir={str(run)!r} holds {leftovers[0].name} of an earlier run; allowed: --resume true to continue "
            "it, --overwrite true to replace it, or another --run_name."
        )
    for name in (MEASUREMENTS, EPISODES, DIAGNOSTICS, "completions", "*.safetensors", "*.safetensors.index.json"):
        leftovers += run.glob(name)  # none of it, and no weights, beside those of the run that begins
    for leftover in leftovers:
        shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink()
    return None

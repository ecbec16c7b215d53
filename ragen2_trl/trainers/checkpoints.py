"""The state of a filtered run in a checkpoint, and whether a checkpoint is complete."""

import json
import logging
import os
import re
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Protocol, Required, TypedDict, get_type_hints

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list, gather_object, recursively_apply, send_to_device
from safetensors import SafetensorError, safe_open

from ragen2_trl.saved_state import (
    check_form,
    load_tensors,
    of_checkpoint,
    remove_unfinished,
    replace_whole,
    wrong,
)
from ragen2_trl.trainers.backends import check_backend

logger = logging.getLogger(__name__)  # accelerate's fails where there is no trainer

STATE_FILE = "snr_state_{rank}.pt"
# Names and sizes of the files of a checkpoint, but for the last one to be written, the trainer's own state.
MANIFEST, TRAINER_STATE = "snr_manifest.json", "trainer_state.json"
_NUMBERED = re.compile(r"checkpoint-(\d+)")
# What a checkpoint must have to be resumed from, whichever trainer wrote it: for each part any of these.
PARTS = {
    "weights": ("model*.safetensors", "adapter_model.*", "*/adapter_model.*", "pytorch_model*", "global_step*"),
    "optimizer": ("optimizer.pt", "optimizer*.bin", "optimizer_*", "rank*-optimizer.pt", "global_step*"),
    "scheduler": ("scheduler.pt", "global_step*"),
    "random state": ("rng_state*.pth",),
}
# All that resuming reads. Others, such as a README, a tokenizer or a tool's marker, may change or go without harm.
READ = [pattern for patterns in PARTS.values() for pattern in patterns] + [
    *("snr_state_*.pt", "_critic/*", "entropy_ctrl_state.json", "rollout_state.json"),
    *("*.index.json", "adapter_config.json", "latest"),
]
# Settings by which a generation batch is laid out: under others, one in progress cannot go on.
LAYOUT_FIELDS = (
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "steps_per_generation",
    "num_generations",
    "num_iterations",
)


class TrainerStateForm(TypedDict, total=False):
    """Of `trainer_state.json`, as far as resuming reads it."""

    global_step: Required[int]
    max_steps: int
    epoch: float | None
    train_batch_size: int | None
    num_input_tokens_seen: float
    total_flos: float
    log_history: list[dict[str, Any]]
    best_metric: float | None
    best_global_step: int | None
    best_model_checkpoint: str | None
    stateful_callbacks: dict[str, Any]


class SavedRun(TypedDict):
    """What `RunState` writes for a process."""

    layout: dict[str, int]
    shared: dict[str, Any]
    own: dict[str, Any]


class Stateful(Protocol):
    """A part of a run with state of its own: plain values and tensors. The annotation of `load` is their form."""

    def state(self) -> Any: ...

    def load(self, state: Any) -> None: ...


class RunState:
    """The state of a run: each part of it is registered once, by name.

    Args:
        shared: Parts whose state is the same on every process.
    """

    def __init__(self, shared: dict[str, Stateful]):
        self.shared = shared
        self.own: dict[str, Stateful] = {}  # parts with a state of each process

    def save(self, folder: str, rank: int, layout: dict[str, int], own: Any) -> None:
        """Write one process's part into a checkpoint.

        Args:
            folder: of the checkpoint.
            rank: of the process.
            layout: settings under which this process's own state has a meaning.
            own: more of its own state.
        """
        os.makedirs(folder, exist_ok=True)
        shared = {name: part.state() for name, part in self.shared.items()}
        own = own | {name: part.state() for name, part in self.own.items()}
        state: Any = {"layout": layout, "shared": shared, "own": own}
        # What is read back without running code is made of tensors.
        state = recursively_apply(torch.from_numpy, state, test_type=lambda one: isinstance(one, np.ndarray))
        replace_whole(Path(folder) / STATE_FILE.format(rank=rank), partial(torch.save, state))

    def load(self, folder: str | None, accelerator: Accelerator, layout: dict[str, int], form: Any) -> Any:
        """Read what `save` wrote. A call for all processes together.

        Args:
            folder, layout: as for `save`.
            accelerator: of the trainer.
            form: of the `own` of `save`.

        Returns:
            The `own` of `save`; `None` in another layout, or where TRL's own trainer wrote the checkpoint.

        Raises:
            ValueError: where the file of a process has another form; on all of them.
        """
        path = Path(str(folder)) / STATE_FILE.format(rank=accelerator.process_index)
        with raised_on_all_processes():
            saved = load_tensors(path, SavedRun) if path.is_file() else None
        # The shared part comes from the first process: others may be new, or on another machine.
        (shared,) = broadcast_object_list([saved and saved["shared"]])
        if shared is None:
            return None
        _load(self.shared, shared, f"{folder}/{STATE_FILE.format(rank=0)}: shared")
        layouts = gather_object([saved and saved["layout"]])
        if any(other != layout for other in layouts):
            if accelerator.is_main_process:
                logger.warning(
                    f"The checkpoint was written with {layouts[0]} and is resumed with {layout}: the generation batch "
                    "in progress and surplus groups, if any, are sampled again."
                )
            return None
        assert saved is not None  # as its layout is this one
        with raised_on_all_processes():
            with of_checkpoint():
                check_form(saved["own"], form, f"{path}: own")
            own: Any = send_to_device(saved["own"], accelerator.device)
            _load(self.own, own, f"{path}: own")
        return own


def _load(parts: dict[str, Stateful], saved: dict[str, Any], field: str) -> None:
    with of_checkpoint():
        for name, part in parts.items():
            if name in saved:
                check_form(saved[name], get_type_hints(part.load)["state"], f"{field}.{name}")
                try:
                    part.load(saved[name])
                except (LookupError, RuntimeError) as error:  # of sizes
                    raise ValueError(f"{field}.{name} cannot be loaded ({error})") from error


@contextmanager
def raised_on_all_processes() -> Iterator[None]:
    """Raise a `ValueError` of any process on all of them: none waits for another for ever. For all together."""
    flaw = None
    try:
        yield
    except ValueError as error:
        flaw = str(error)
    for message in gather_object([flaw]):
        if message is not None:
            raise ValueError(message)


def open_checkpoint(folder: str) -> None:
    """Make a checkpoint that is written again an incomplete one until it is whole."""
    remove_unfinished(Path(folder))
    for name in (TRAINER_STATE, MANIFEST):
        (Path(folder) / name).unlink(missing_ok=True)


def write_manifest(folder: str) -> None:
    """List the files that resuming reads, once all processes have written; `trainer_state.json` comes after it."""
    files = {path.relative_to(folder).as_posix(): path.stat().st_size for path in _files(Path(folder), READ)}
    replace_whole(Path(folder) / MANIFEST, lambda file: file.write(json.dumps(files, indent=0).encode()))


def _files(folder: Path, patterns: Sequence[str]) -> list[Path]:
    """Files with a name of these patterns, and all files in folders with one."""
    found = [path for pattern in patterns for path in folder.glob(pattern)]
    return [file for path in found for file in (path, *path.rglob("*")) if file.is_file()]


def flaw_of(folder: Path) -> str | None:
    """What keeps a checkpoint from being resumed from, in words; `None` for a complete one.

    Ours has the files of its manifest. One without a manifest, of another trainer, has what resuming takes, and no
    file that was cut off.
    """
    try:
        _check_state(_read(folder / TRAINER_STATE, TrainerStateForm))
        if (folder / MANIFEST).exists():
            _check_sizes(folder, _read(folder / MANIFEST, dict[str, int]))
        else:
            _check_parts(folder)
    except ValueError as error:
        return str(error)
    except OSError as error:  # of the disk, or of a checkpoint that another process takes away
        return f"{error.filename or folder} cannot be read: {error.strerror or error}"
    return None


def _read(path: Path, form: Any) -> Any:
    """The content of a JSON file."""
    try:
        content = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None  # a pipe holds readers up
    except (ValueError, RecursionError):
        content = None
    if content is None:
        raise ValueError(f"{path.name} is missing or cut off")
    check_form(content, form, f"{path.name}:")
    return content


def _check_state(state: TrainerStateForm) -> None:
    step, epoch = state["global_step"], state.get("epoch") or 0
    if step < 0:
        raise wrong(f"{TRAINER_STATE}: global_step", "at least 0", step)
    if not 0 <= epoch <= step:  # also not NaN
        raise wrong(f"{TRAINER_STATE}: epoch", f"between 0 and global_step={step}", epoch)


def _check_sizes(folder: Path, sizes: dict[str, int]) -> None:
    for name, size in sizes.items():
        if not (folder / name).is_file():
            raise ValueError(f"{name} is missing")
        if (found := (folder / name).stat().st_size) != size:
            raise ValueError(f"{name} has {found} bytes of {size}")


def _check_parts(folder: Path) -> None:
    for part, names in PARTS.items():
        if not _files(folder, names):
            raise ValueError(f"{names[0].replace('*', '')} is missing, and with it the {part}")
    for path in _files(folder, READ):
        if _is_cut_off(path):
            raise ValueError(f"{path.relative_to(folder)} is cut off")


def _is_cut_off(path: Path) -> bool:
    """As far as the library tells that reads a file, by its beginning or its end alone."""
    if path.suffix in (".pt", ".pth"):
        return not zipfile.is_zipfile(path)  # torch's archives: their table is last
    if path.suffix == ".safetensors":
        try:
            with safe_open(path, framework="pt"):  # the header has the length of the file
                pass
        except SafetensorError:
            return True
    return False


def check_complete(folder: Path) -> Path:
    """The folder itself.

    Raises:
        ValueError: If it is no complete checkpoint.
    """
    if (flaw := flaw_of(folder)) is not None:
        raise ValueError(
            f"resume_from_checkpoint={str(folder)!r} cannot be resumed from: {flaw}; allowed: a complete checkpoint."
        )
    return folder


def last_complete_checkpoint(run: Path) -> Path | None:
    """The latest checkpoint of an `output_dir` that was written to its end; later ones are named in a line."""
    found = [(int(match[1]), path) for path in run.glob("*") if (match := _NUMBERED.fullmatch(path.name))]
    passed_over: list[str] = []
    for _, folder in sorted(found, reverse=True):
        if folder.is_dir():
            if (flaw := flaw_of(folder)) is None:
                if passed_over:
                    logger.warning(f"The run goes on from {folder.name}; passed over: {'; '.join(passed_over)}.")
                return folder
            passed_over.append(f"{folder.name}, where {flaw}")
    if passed_over:
        logger.warning(f"No checkpoint in {run} is complete: {'; '.join(passed_over)}.")
    return None


def checkpoint_to_resume(output_dir: str | None, asked: str | bool | None, accelerator: Accelerator) -> str | None:
    """What `resume_from_checkpoint` means; `True` is the last complete checkpoint. A call for all processes together.

    Raises:
        ValueError: If there is none, the one that is named is incomplete, or another backend has saved it.
    """
    if not asked:
        return None
    found: list[str | None] = [None]  # as the main process has it
    with raised_on_all_processes():
        if accelerator.is_main_process:
            folder = last_complete_checkpoint(Path(str(output_dir))) if asked is True else check_complete(Path(asked))
            if folder is None:
                raise ValueError(
                    f"resume_from_checkpoint=True finds no complete checkpoint in output_dir={output_dir!r}; allowed "
                    "there: None, to begin again."
                )
            check_backend(folder, accelerator)
            found = [str(folder)]
    checkpoint: str | None = broadcast_object_list(found)[0]
    return checkpoint

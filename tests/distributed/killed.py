"""Kills one of two processes at a chosen moment of a run, resumes the run, and compares it with an undisturbed one.

python tests/distributed/killed.py [LAYOUT...]    every layout and moment, as a table

On the processes of torchrun: killed.py LAYOUT POLICY FOLDER [RANK MOMENT N], where the process of that rank kills
itself at the N-th call of the moment's function. A run goes on from the last complete checkpoint of its folder.
"""

import os
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]

from launching import launch, launch_with_torchrun

LAYOUTS = ("ddp", "zero2", "zero3")
# Of a run of six steps with a checkpoint after every second: rank, moment, and which call of its function.
KILLS = (
    *((1, "sampling", 5), (0, "sampling", 6)),
    *((1, "further round", 2), (0, "further round", 3)),
    *((1, "measuring", 3), (0, "measuring", 2)),
    *((1, "update", 6), (0, "update", 9)),
    *((1, "before saving", 2), (0, "before the manifest", 2)),
)
STEPS = 6
DIED, RESUMED, PARAMETERS = "died.txt", "resumed_from.txt", "parameters.pt"


def train(layout: str, policy_path: str, folder: Path, kill: tuple[int, str, int] | None) -> None:
    from accelerate import PartialState
    from backends import ADAM, is_sharded, parameters_of, start
    from conftest import RUN
    from datasets import Dataset
    from transformers import PrinterCallback

    from ragen2_trl import MutualInformationCallback, SNRFilteredGRPOConfig, SNRFilteredGRPOTrainer
    from ragen2_trl.trainers.checkpoints import last_complete_checkpoint

    backend = {**start(layout), "ddp_backend": "gloo"}
    if layout == "zero3":
        backend["deepspeed"]["zero_optimization"]["stage3_gather_16bit_weights_on_model_save"] = True
    settings = {
        **{"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "num_generations": 4},
        **{"max_completion_length": 6, "max_steps": STEPS, "save_strategy": "steps", "save_steps": 2},
        **{"snr_dynamic_sampling_rounds": 3, "snr_strategy": "nonzero", "output_dir": str(folder)},
    }
    args = SNRFilteredGRPOConfig(**{**RUN, **ADAM, **settings, **backend})
    prompts = Dataset.from_dict({"prompt": [f"Go {number}" for number in range(8)]})
    trainer = SNRFilteredGRPOTrainer(policy_path, is_short, args, prompts)
    measuring = MutualInformationCallback(trainer, every=1, num_completions=12)
    trainer.add_callback(measuring)
    trainer.remove_callback(PrinterCallback)  # the table goes there
    functions = {
        "sampling": (trainer, "_generate_single_turn"),
        "further round": (trainer, "_sample_round"),
        "measuring": (measuring, "_measure"),
        "update": (trainer, "_compute_loss"),
        "before saving": (trainer, "_save_checkpoint"),
        "before the manifest": (trainer, "_save_rng_state"),
    }
    if kill is not None and kill[0] == PartialState().process_index:
        # A step has a first round, and in the first steps several further ones.
        earlier = 5 if kill[1] == "further round" else 0
        die_at(*functions[kill[1]], kill[2] + earlier, folder)
    last = last_complete_checkpoint(folder)
    trainer.train(resume_from_checkpoint=last is not None)
    assert layout != "zero3" or is_sharded(trainer)
    parameters = parameters_of(trainer)
    if PartialState().is_main_process:
        (folder / RESUMED).write_text(last.name if last else "the start")
        torch.save(parameters, folder / PARAMETERS)


def is_short(completion_ids, **columns):
    """Rare enough that many groups have no reward variance, and further prompts are sampled."""
    return [float(len(ids) <= 2) for ids in completion_ids]


def die_at(owner, name: str, number: int, folder: Path) -> None:
    function, calls = getattr(owner, name), 0

    def killing(*args, **kwargs):
        nonlocal calls
        calls += 1
        if calls == number:
            (folder / DIED).write_text(str(time.time()))
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*args, **kwargs)

    setattr(owner, name, killing)


def whole_run(layout: str, policy_path: str, folder: Path) -> dict[str, torch.Tensor]:
    folder.mkdir()
    launch("killed.py", 2, layout, policy_path, folder)
    return torch.load(folder / PARAMETERS)


@dataclass
class Outcome:
    told: str  # by the launcher
    seconds: float  # from the death of one process to the end of all
    resumed_from: str
    parameters: dict[str, torch.Tensor]

    def equals(self, whole: dict[str, torch.Tensor]) -> bool:
        return self.parameters.keys() == whole.keys() and all(
            torch.equal(value, whole[name]) for name, value in self.parameters.items()
        )

    def names(self, rank: int) -> bool:
        """Whether the signal and the process it ended were told."""
        cause = self.told.partition("Root Cause")[2]
        return "SIGKILL" in cause and f"(local_rank: {rank})" in cause


def kill_and_resume(layout: str, policy_path: str, folder: Path, kill: tuple[int, str, int]) -> Outcome:
    folder.mkdir()
    try:
        launch_with_torchrun("killed.py", 2, layout, policy_path, folder, *kill)
    except AssertionError as error:
        told, ended = str(error), time.time()
    else:
        raise AssertionError(f"{kill} killed nothing")
    if not (folder / DIED).exists():
        raise AssertionError(f"{kill} failed before: {told}")
    seconds = ended - float((folder / DIED).read_text())
    launch("killed.py", 2, layout, policy_path, folder)
    return Outcome(told, seconds, (folder / RESUMED).read_text(), torch.load(folder / PARAMETERS))


def print_all(layouts: list[str]) -> None:
    from conftest import make_policy

    def write(*cells) -> None:
        sys.stdout.write(f"| {' | '.join(map(str, cells))} |\n")
        sys.stdout.flush()

    write("layout", "rank", "moment", "call", "seconds to the end of all", "resumed from", "cause named", "equal")
    write(*["---"] * 8)
    with TemporaryDirectory() as scratch, ThreadPoolExecutor(2) as pool:
        policy = make_policy(Path(scratch) / "policy")
        wholes = {layout: pool.submit(whole_run, layout, policy, Path(scratch) / layout) for layout in layouts}

        def row(number: int, layout: str) -> None:
            kill = KILLS[number]
            outcome = kill_and_resume(layout, policy, Path(scratch) / f"{layout}_{number}", kill)
            is_equal, is_named = outcome.equals(wholes[layout].result()), outcome.names(kill[0])
            write(layout, *kill, f"{outcome.seconds:.1f}", outcome.resumed_from, is_named, is_equal)

        rows = [pool.submit(row, number, layout) for number in range(len(KILLS)) for layout in layouts]
        for one in rows:
            one.result()


def main() -> None:
    layout, policy_path, folder, *kill = sys.argv[1:]
    train(layout, policy_path, Path(folder), (int(kill[0]), kill[1], int(kill[2])) if kill else None)


if __name__ == "__main__":
    if "LOCAL_RANK" in os.environ:
        from ending import end

        main()
        end()
    else:
        print_all(sys.argv[1:] or list(LAYOUTS))

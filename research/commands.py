"""Which runs are trained, in which order, and the line that trains each."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import yaml

from ragen2_trl.record.files import write_private
from research.plan import Experiment, LargerScale, PlannedRun
from research.settings import VARIANT, WARM_START, Fields

ROOT = Path(__file__).parents[1]  # of the checkout
CONFIG = "config.yaml"  # of a run, in its folder
MODELS = "models"  # folder among those of runs: models that were made for them
# In the checkout's root this finds `research`, whose selectors settings may name; the installed command does not.
COMMAND_LINE = ["python", "-m", "ragen2_trl.cli"]
SAVES = 10  # checkpoints of a run, of which the last one is kept
# Tokens a second on an H100, sampled and trained on. Of Qwen2.5-0.5B they follow from what was measured of its updates
# and of its generation by transformers (benchmarks/results/gpu_*.md), of Qwen2.5-3B they are assumed.
SPEEDS = {"middle": (3_000, 25_000), "paper": (1_000, 10_000)}
# Of `ragen2-trl train`, where the estimate needs them and a run does not say.
DEFAULTS = {"max_completion_length": 512, "per_device_train_batch_size": 8, "eval_prompts": 256, "eval_samples": 4}


@dataclass(frozen=True)
class QueuedRun:
    """A run to run, and the experiments that it is part of."""

    planned: PlannedRun
    experiments: tuple[str, ...]
    name: str
    launch: LargerScale | None = None
    scale: str = "tiny"

    @property
    def max_steps(self) -> int:
        return int(self.planned.fields.get("max_steps", 0))

    @property
    def gpu_hours(self) -> float:
        """Estimate for its training at a larger scale, with every episode as long as it may be."""
        assert self.launch is not None
        own: Fields = {**DEFAULTS, **self.planned.fields}
        rows = own["per_device_train_batch_size"] * own.get("gradient_accumulation_steps", 1) * self.launch.processes
        trained = self.max_steps * rows
        evaluations = 1 + self.max_steps // own["eval_every"] if own.get("eval_every") else 2
        played = trained * (1 + own.get("snr_dynamic_sampling_rounds", 0))
        played += evaluations * own["eval_prompts"] * own["eval_samples"]
        models = 2 if own.get("value_head") == "separate" else 1
        sampling, training = SPEEDS[self.scale]
        return float(own["max_completion_length"] * (played / sampling + models * trained / training) / 3600)


def queue(
    experiments: Sequence[Experiment],
    quick: bool = False,
    scale: str = "tiny",
    only: Mapping[str, Sequence[str]] | None = None,
    seeds: Sequence[int] | None = None,
) -> list[QueuedRun]:
    """The runs of experiments, each once, in the order in which they run: the first seed of all before the second.

    Args:
        experiments: Whose runs.
        quick, scale: As `Experiment.runs` takes them.
        only: Levels by axis; runs at others, and of experiments without that axis, are left out.
        seeds: Those to run; default: all.

    Raises:
        ValueError: For an axis, a level or a seed that no experiment has.
    """
    sources = [(one, source) for one in experiments for source in one.others or (one,)]
    for axis, levels in (only or {}).items():
        known = list(dict.fromkeys(level for _, source in sources for level in source.axes.get(axis, {})))
        if wrong := [level for level in levels if level not in known]:
            axes = sorted({axis for _, source in sources for axis in source.axes})
            raise ValueError(f"only={axis}={wrong[0]} is in no experiment; allowed: {known or f'the axes {axes}'}.")
    known_seeds = {seed for _, source in sources for seed in source.seeds}
    if unknown := [seed for seed in seeds or () if seed not in known_seeds]:
        raise ValueError(f"seeds must be planned in an experiment ({sorted(known_seeds)}), got {unknown[0]}")
    found: list[tuple[int, str, Experiment, PlannedRun]] = []
    for one, source in sources:
        for planned in source.planned_runs(quick, scale):
            wanted = all(planned.levels.get(axis) in levels for axis, levels in (only or {}).items())
            if wanted and (seeds is None or planned.seed in seeds):
                found.append((source.seeds.index(planned.seed), one.id, source, planned))
    found.sort(key=lambda entry: entry[0])  # stable: within a seed as the experiments have them
    jobs: dict[str, QueuedRun] = {}
    for _, name, source, planned in found:
        own = QueuedRun(planned, (), f"{source.id}: {planned.name}", source.larger.get(scale), scale)
        job = jobs.setdefault(planned.key, own)
        jobs[planned.key] = replace(job, experiments=tuple(dict.fromkeys((*job.experiments, source.id, name))))
    return list(jobs.values())


def model_folder(folder: Path, planned: PlannedRun) -> Path | None:
    """Where the model that a run's warm start makes lies, beside the run's own folder."""
    return folder.parent / MODELS / planned.model_key if planned.model_key else None


def training_fields(folder: Path, planned: PlannedRun) -> Fields:
    """A run's settings with the model that its warm start makes in place of that."""
    model = model_folder(folder, planned)
    own = {name: value for name, value in planned.fields.items() if name not in (WARM_START, VARIANT)}
    return own if model is None else {**own, "model": str(model)}


def write_warm_start(folder: Path, job: QueuedRun) -> Path:
    """The settings of a run's warm start, as `ragen2-trl warm-start --config` takes them."""
    folder.mkdir(parents=True, exist_ok=True)
    settings = {**job.planned.fields[WARM_START], "output_dir": str(folder)}
    write_private(folder / CONFIG, yaml.safe_dump(settings, sort_keys=False, allow_unicode=True, width=120))
    return folder / CONFIG


def warm_start_command(config: Path) -> list[str]:
    """The line that makes a model."""
    return [*COMMAND_LINE, "warm-start", "--config", str(config)]


def write_config(folder: Path, job: QueuedRun) -> Path:
    """The settings of a run, as `ragen2-trl train --config` takes them."""
    folder.mkdir(parents=True, exist_ok=True)
    settings = {
        **training_fields(folder, job.planned),
        "seed": job.planned.seed,
        "output_dir": str(folder),
        "run_name": job.planned.key,
        "resume": True,
        "save_strategy": "steps",
        "save_steps": max(1, job.max_steps // SAVES) if job.max_steps > 0 else 100,
        "save_total_limit": 1,
        "report_to": "none",
        "log_completions": False,
        "episodes_every": 0,
        "figures": False,
    }
    text = f"# {job.name}\n" + yaml.safe_dump(settings, sort_keys=False, allow_unicode=True, width=120)
    write_private(folder / CONFIG, text)
    return folder / CONFIG


def command_of(config: Path, job: QueuedRun) -> list[str]:
    """The line that trains a run."""
    variant = job.planned.fields.get(VARIANT)
    module = ["-m", "ragen2_trl.cli"] if variant is None else ["-m", "research.variants", str(variant)]
    train = [*module, "train", "--config", str(config)]
    if job.launch is None:
        return ["python", *train]
    launch = ["--config_file", str(job.launch.launch), "--num_processes", str(job.launch.processes)]
    return ["accelerate", "launch", *launch, *train]


def runnable(command: Sequence[str]) -> list[str]:
    """The same with this Python, whatever the path finds."""
    if command[0] == COMMAND_LINE[0]:
        return [sys.executable, *command[1:]]
    return [sys.executable, "-m", "accelerate.commands.launch", *command[2:]]

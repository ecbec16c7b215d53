"""Diagnosis: whether a model's reasoning depends on its prompt (arXiv 2604.06268, Section 2).

    python scripts/diagnose.py --model tiny
    python scripts/diagnose.py --model runs/my_run --env_args size=5 --output_dir runs/my_diagnosis
    python scripts/diagnose.py --model runs/my_run --completions runs/my_run/completions
    python scripts/diagnose.py --model tiny --control

Samples held-out tasks, or takes the completions that TRL saved with `log_completions=True`. Those are text, so that
they have to be tokenised again, with the model's chat template and without tools; of several turns the first is taken.
What it samples itself it saves as it comes, with the sampled ids: `--completions runs/diagnosis/completions.parquet`
scores it again, also what there is of it after a kill. Several turns are scored as they were played.
Writes `diagnosis.json`, `matrix.png`, `quadrant.png` and what was sampled.

    python scripts/diagnose.py --model runs/my_run --gradients true       # by reward variance, signal and noise
    python scripts/diagnose.py --model runs/my_run --predict_filter true  # would SNR filtering help here?

These sample one batch as GRPO would and write `gradients_00000.json` and `gradients.png`, and `forecast.json`.
"""

import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import transformers
import trl
from rich.text import Text
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from trl import TrlParser

import ragen2_trl
from ragen2_trl.cli.arguments import DiagnoseArguments
from ragen2_trl.cli.console import ProgressLine, make_console
from ragen2_trl.cli.diagnosis import Diagnosis, metrics_table, show_examples, verdict
from ragen2_trl.cli.models import load_model
from ragen2_trl.cli.samples import (
    COMPLETIONS_FILE,
    CONTROL_FILE,
    Sample,
    find_files,
    has_ids,
    read_completions,
    read_sample,
    sample_control,
    sample_tasks,
)
from ragen2_trl.cli.typed import InputError, checked_input, parse
from ragen2_trl.envs import TaskMixture
from ragen2_trl.instrument.diagnosis import (
    Measurement,
    NotMeasurableError,
    Sampling,
    measure_first_turn,
    measure_trajectory,
)
from ragen2_trl.instrument.reasoning import Trajectories, Turn
from ragen2_trl.instrument.scoring import ContextLengthError, count_tokens
from ragen2_trl.instrument.verdict import Evidence, in_numbers, judge
from ragen2_trl.reporting import plot_matrix, plot_quadrant
from ragen2_trl.reporting.examples import printable
from ragen2_trl.reporting.files import write_json
from ragen2_trl.reporting.settings import public
from ragen2_trl.rollouts.sampling import check_sampling, held_out_rows


def main(args: list[str] | None = None) -> None:
    """Diagnoses a model, shows what was found and writes it to `--output_dir`."""
    console = make_console()
    (script_args,) = parse(TrlParser(DiagnoseArguments, prog="ragen2-trl diagnose"), args)
    if script_args.gradients or script_args.predict_filter:
        from ragen2_trl.cli.one_batch import look_at_one_batch  # trainers, which the rest does without

        what = (script_args.gradients, script_args.predict_filter, script_args.entropy_coef)
        look_at_one_batch(script_args, *what, Path(script_args.output_dir), console)
        return
    name = script_args.model.rstrip("/").split("/")[-1]
    folder = Path(script_args.output_dir)
    with ProgressLine(console) as line:
        line.begin(f"Loading {printable(name)}")
        if script_args.completions is None:
            diagnoses, control, tokenizer, title = _diagnose_sampled(script_args, name, folder, line)
            caption = f"{script_args.num_prompts} tasks, {script_args.num_samples} samples each"
        else:
            diagnoses, tokenizer, title, caption = _diagnose_saved(script_args, name, line)
            control = None

    last = diagnoses[-1]
    console.print(metrics_table(last, title, caption))
    console.print(Text(verdict(diagnoses)))
    if control is not None:
        console.print(Text(f"Control, the observation withheld: {in_numbers(control.finding)}"))
    show_examples(console, last, tokenizer)
    written = write(diagnoses, control, script_args, folder)
    console.print(Text(f"{', '.join(written)} are in {folder}"))


def _diagnose_sampled(
    arguments: DiagnoseArguments, name: str, folder: Path, line: ProgressLine
) -> tuple[list[Diagnosis], Diagnosis | None, PreTrainedTokenizerBase, str]:
    with checked_input():
        env = arguments.make_env()
        check_sampling(
            env, arguments.num_samples, arguments.temperature, arguments.max_new_tokens, arguments.batch_size
        )
        if arguments.control and isinstance(env, TaskMixture):
            raise ValueError(f"control must be False for several tasks ({env.name}), whose rules differ, got True")
        for setting, least in (("num_prompts", 2), ("num_samples", 1)):
            if getattr(arguments, setting) < least:
                raise ValueError(
                    f"{setting} must be at least {least}, got {getattr(arguments, setting)!r}"
                    + ": reasoning is compared between prompts." * (setting == "num_prompts")
                )
        held_out_rows(env, arguments.num_prompts, arguments.num_samples, arguments.seed, arguments.data)
    model, tokenizer = load_model(arguments.model, arguments.dtype)
    count = arguments.num_prompts * arguments.num_samples
    sampling = Sampling(max(2, count), arguments.num_prompts, arguments.temperature)
    line.begin(f"Sampling: 0 of {count} completions")
    started = time.perf_counter()
    sample = sample_tasks(model, tokenizer, env, arguments, folder, line.say)
    seconds = time.perf_counter() - started
    (diagnosis,) = diagnose_all(model, tokenizer, [sample], sampling, arguments.seed, line, seconds)
    control = None
    if arguments.control:
        line.begin(f"Control: 0 of {count} completions")
        started = time.perf_counter()
        blank = sample_control(model, tokenizer, env, sample, arguments, folder, line.say)
        seconds = time.perf_counter() - started
        (control,) = diagnose_all(model, tokenizer, [blank], sampling, arguments.seed, line, seconds)
    return [diagnosis], control, tokenizer, f"{name} on held-out {env.name}"


def _diagnose_saved(
    arguments: DiagnoseArguments, name: str, line: ProgressLine
) -> tuple[list[Diagnosis], PreTrainedTokenizerBase, str, str]:
    with checked_input():
        files = find_files(Path(arguments.completions or ""), arguments.max_files)
        tables = [read_completions(file) for file in files]
    model, tokenizer = load_model(arguments.model, arguments.dtype)
    samples = [read_sample(tokenizer, table, file.stem) for file, table in zip(files, tables, strict=True)]
    own = has_ids(tables[-1])
    whole = max(len(tables[-1]), 2) if own else Sampling().num_completions
    sampling = Sampling(whole, max(2, len({*samples[-1].groups})) if own else 64, arguments.temperature)
    said = "The ids as they were sampled" if own else "TRL stores text: prompts and completions were tokenised again"
    diagnoses = diagnose_all(model, tokenizer, samples, sampling, arguments.seed, line)
    return diagnoses, tokenizer, f"{files[-1].name} scored by {name}", said


def diagnose_all(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    samples: Sequence[Sample],
    sampling: Sampling,
    seed: int,
    line: ProgressLine,
    sampling_seconds: float = 0.0,
) -> list[Diagnosis]:
    """Scores the reasoning of samples under all of their prompts, and judges it in their order.

    Raises:
        InputError: For a sample with fewer than two distinct prompts, or without any reasoning, or of which prompt and
            reasoning do not fit the model's context together.
    """
    measured = []
    for sample in samples:
        try:
            measured.append(_measure(model, tokenizer, sample, sampling, seed, line))
        except (NotMeasurableError, ContextLengthError) as error:
            raise InputError(f"{printable(sample.label)} cannot be diagnosed: {error}.") from error
    evidence = [
        Evidence.of(
            metrics,
            step=sample.step,
            valid_thinking_rate=metrics["valid_thinking_rate"],
            success=sample.success,
            clipped_ratio=sample.clipped_ratio,
        )
        for sample, (_, _, metrics, _) in zip(samples, measured, strict=True)
    ]
    diagnoses = []
    for sample, finding, (measurement, turns, metrics, later) in zip(samples, judge(evidence), measured, strict=True):
        known = {"success": sample.success, "clipped_ratio": sample.clipped_ratio}
        metrics |= {name: value for name, value in known.items() if value is not None}
        metrics |= {"sampling_seconds": sampling_seconds, "seconds": sampling_seconds + metrics["scoring_seconds"]}
        diagnoses.append(Diagnosis(sample, finding, metrics, measurement, turns, later))
    return diagnoses


def _measure(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    sample: Sample,
    sampling: Sampling,
    seed: int,
    line: ProgressLine,
) -> tuple[Measurement, list[Turn | None], dict[str, float], dict[int, Measurement]]:
    started = time.perf_counter()
    trajectories = Trajectories(sample.prompt_ids, sample.completion_ids, tokenizer, sample.masks, sample.later)
    later: dict[int, Measurement] = {}
    line.begin(f"Scoring {printable(sample.label)}")
    with count_tokens(model) as tokens:
        telling = model.register_forward_pre_hook(
            lambda *_: line.say(f"Scoring {printable(sample.label)}: {sum(tokens):,} tokens forwarded")
        )
        try:
            measurement = measure_first_turn(
                model, trajectories, sample.groups, torch.Generator().manual_seed(seed), sampling
            )
            if any(trajectories.num_turns(number) > 1 for number in range(len(trajectories))):
                generator = torch.Generator().manual_seed(seed)
                try:
                    later = measure_trajectory(model, trajectories, sample.groups, generator, sampling)
                except NotMeasurableError as error:
                    line.note(f"Later turns of {printable(sample.label)} are not measured: {error}.")
        finally:
            telling.remove()
    every = [turn for number in range(len(trajectories)) for turn in trajectories[number]]
    metrics = measurement.metrics | {
        "valid_thinking_rate": sum(turn.valid for turn in every) / max(1, len(every)),
        "tokens_forwarded": float(sum(tokens)),
        "scoring_seconds": time.perf_counter() - started,
    }
    later.pop(0, None)  # first turns have been measured, all of them
    return measurement, [next(iter(trajectories[i]), None) for i in range(len(trajectories))], metrics, later


def write(
    diagnoses: Sequence[Diagnosis], control: Diagnosis | None, arguments: DiagnoseArguments, output_dir: Path
) -> list[str]:
    """Writes `diagnosis.json`, `matrix.png` (of the last) and `quadrant.png` (of all); gives all files' names."""
    last = diagnoses[-1]
    report = {
        "metrics": last.metrics,
        "regime": last.finding.regime,
        "verdict": verdict(diagnoses),
        "later_turns": {f"turn_{position + 1}": _told(later) for position, later in last.later.items()},
        "control": control and {"regime": control.finding.regime, "metrics": control.metrics},
        "path": [{"label": one.label, "regime": one.finding.regime, "metrics": one.metrics} for one in diagnoses],
        "settings": public(asdict(arguments)),
        "versions": {
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "trl": trl.__version__,
            "ragen2-trl": ragen2_trl.__version__,
        },
    }
    output_dir.mkdir(parents=True, exist_ok=True)
    write_json(output_dir / "diagnosis.json", report, indent=2)
    plot_matrix(last.measurement).savefig(output_dir / "matrix.png")
    points = [(one.metrics["conditional_entropy_token"], one.metrics["mi_seq"], one.label) for one in diagnoses]
    plot_quadrant(points, last.metrics["mi_upper_bound"]).savefig(output_dir / "quadrant.png")
    written = ["diagnosis.json", "matrix.png", "quadrant.png"]
    if arguments.completions is None:
        written.append(COMPLETIONS_FILE)
    return written if control is None else [*written, CONTROL_FILE]


def _told(measurement: Measurement) -> dict[str, Any]:
    without = measurement.without_own_words
    return {"metrics": measurement.metrics, "without_own_words": without and without.metrics}

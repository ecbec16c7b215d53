"""Diagnosis: whether a model's reasoning depends on its prompt (arXiv 2604.06268, Section 2).

    python scripts/diagnose.py --model tiny
    python scripts/diagnose.py --model runs/my_run --env frozen_lake --env_args size=5 --output_dir runs/my_diagnosis
    python scripts/diagnose.py --model runs/my_run --completions runs/my_run/completions

Samples held-out tasks, or takes the completions that TRL saved with `log_completions=True`. Those are text, so that
they have to be tokenised again, with the model's chat template and without tools; of several turns the first is taken.
Writes `diagnosis.json`, `matrix.png` and `quadrant.png`.
"""

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import torch
import transformers
import trl
from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from trl import TrlParser

import ragen2_trl
from ragen2_trl.cli.arguments import checked_input, parse
from ragen2_trl.cli.console import make_console
from ragen2_trl.cli.sampling import SamplingArguments, load_model, sample_trajectories
from ragen2_trl.envs import completion_text
from ragen2_trl.instrument.diagnosis import Measurement, NotMeasurableError, Sampling, measure_first_turn
from ragen2_trl.instrument.information import LOW_ENTROPY, RETRIEVAL_DEPTHS, Regime, chance_p_value, classify_regime
from ragen2_trl.instrument.reasoning import Trajectories, Turn
from ragen2_trl.instrument.scoring import count_tokens
from ragen2_trl.reporting import plot_matrix, plot_quadrant
from ragen2_trl.reporting.examples import printable
from ragen2_trl.reporting.report import REGIMES
from ragen2_trl.rollouts.play import Chat

COLUMNS = ("step", "prompt", "completion")  # what is read of TRL's table
NUM_EXAMPLES = 2
MAX_SHOWN_CHARS, MAX_SHOWN_LINES = 400, 10  # of each text of an example


@dataclass
class DiagnoseArguments(SamplingArguments):
    """Whose reasoning to look at, in which completions, and where to write what was found."""

    num_prompts: int = field(default=16, metadata={"help": "Number of held-out tasks."})
    num_samples: int = field(default=4, metadata={"help": "Completions per task."})
    temperature: float = field(
        default=1.0, metadata={"help": "Of the sampling, above 0; reasoning is scored at the same."}
    )
    completions: str | None = field(
        default=None,
        metadata={
            "help": "Instead of sampling: a parquet file that TRL saved with `log_completions=True`, or a folder of "
            "them, which become a path. Warning: `--model` scores all of them, and the numbers are those of the run "
            "only for the file of the step that its weights are of."
        },
    )
    max_files: int = field(
        default=8, metadata={"help": "Files of a folder to take, evenly spaced, the last included."}
    )
    output_dir: str = field(default="runs/diagnosis", metadata={"help": "Folder for the results."})

    def __post_init__(self) -> None:
        if self.temperature <= 0:
            raise ValueError(f"temperature must be above 0 (greedy reasoning never varies), got {self.temperature!r}")
        if self.max_files < 1:
            raise ValueError(f"max_files must be at least 1, got {self.max_files!r}")


@dataclass(frozen=True)
class Sample:
    """Completions of one policy.

    Args:
        label: Names them in the figure.
        prompt_ids: For each completion the token ids of its prompt.
        completion_ids: Their token ids.
        groups: For each completion the number of its group.
    """

    label: str
    prompt_ids: list[list[int]]
    completion_ids: list[list[int]]
    groups: list[int]


@dataclass(frozen=True)
class Diagnosis:
    """What a sample says about the dependence of reasoning on its prompt.

    Args:
        label: That of the sample.
        regime: From `classify_regime`, with the absolute bound for low entropy.
        metrics: From `information_metrics`, and `valid_thinking_rate` (fraction of completions), `tokens_forwarded`
            (padding included) and `seconds` of the scoring.
        measurement: The matrix.
        turns: First turn of each completion; `None` for an empty one.
    """

    label: str
    regime: Regime
    metrics: dict[str, float]
    measurement: Measurement
    turns: list[Turn | None]


def main(args: list[str] | None = None) -> None:
    """Diagnoses a model, shows what was found and writes it to `--output_dir`."""
    console = make_console()
    (script_args,) = parse(TrlParser(DiagnoseArguments), args)
    name = script_args.model.rstrip("/").split("/")[-1]
    if script_args.completions is None:
        with checked_input():
            env = script_args.make_env()
        title = f"{name} on held-out {env.name}"
        caption = f"{script_args.num_prompts} tasks, {script_args.num_samples} samples each"
        model, tokenizer = load_model(script_args.model, script_args.dtype)
        samples = [sample_tasks(model, tokenizer, script_args)]
        count = script_args.num_prompts * script_args.num_samples
        sampling = Sampling(count, script_args.num_prompts, script_args.temperature)
    else:
        with checked_input():
            files = find_files(Path(script_args.completions), script_args.max_files)
            tables = [read_completions(file) for file in files]
        title = f"{files[-1].name} scored by {name}"
        caption = "TRL stores text: prompts and completions were tokenised again"
        model, tokenizer = load_model(script_args.model, script_args.dtype)
        samples = [tokenize_completions(tokenizer, table) for table in tables]
        sampling = Sampling(temperature=script_args.temperature)
    diagnoses = [diagnose(model, tokenizer, sample, sampling, script_args.seed) for sample in samples]

    last = diagnoses[-1]
    console.print(metrics_table(last.metrics, title, caption))
    console.print(Text(verdict(last)))
    show_examples(console, last, tokenizer)
    output_dir = Path(script_args.output_dir)
    write(diagnoses, script_args, output_dir)
    console.print(Text(f"diagnosis.json, matrix.png and quadrant.png are in {output_dir}"))


def sample_tasks(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, arguments: DiagnoseArguments) -> Sample:
    """Completions of held-out tasks, as the very ids that were sampled; a group is a task."""
    env = arguments.make_env()
    _, trajectories = sample_trajectories(
        model,
        tokenizer,
        env,
        num_prompts=arguments.num_prompts,
        num_samples=arguments.num_samples,
        temperature=arguments.temperature,
        max_new_tokens=arguments.max_new_tokens,
        batch_size=arguments.batch_size,
        seed=arguments.seed,
        data=arguments.data,
        max_turn_tokens=arguments.max_turn_tokens,
        chat_template_kwargs=arguments.chat_template_kwargs,
    )
    groups = [number // arguments.num_samples for number in range(len(trajectories))]
    prompt_ids = [trajectory.prompt_ids for trajectory in trajectories]
    first_turns = [trajectory.completion_ids[: [*trajectory.env_mask, 0].index(0)] for trajectory in trajectories]
    return Sample(env.name, prompt_ids, first_turns, groups)


def find_files(path: Path, max_files: int) -> list[Path]:
    """The parquet file `path`, or up to `max_files` of those in the folder `path`, evenly spaced, the last included.

    Raises:
        ValueError: If there is none.
    """
    if path.is_file():
        return [path]
    # By length first: TRL pads steps to five digits, and a sixth would sort before them.
    files = sorted(path.glob("*.parquet"), key=lambda file: (len(file.name), file.name))
    if not files:
        what = "a folder without *.parquet" if path.is_dir() else "no such file or folder"
        raise ValueError(f"completions must be a parquet file or a folder of them, got {str(path)!r}: {what}")
    count = min(max_files, len(files))
    return [files[len(files) - 1 - i * (len(files) - 1) // max(1, count - 1)] for i in reversed(range(count))]


def read_completions(file: Path) -> list[dict[str, Any]]:
    """Rows of a table that TRL saved: `step` (int), `prompt` and `completion` (string or list of messages each).

    Raises:
        ValueError: If it is no parquet file, lacks a column, or has no row or a prompt of another kind.
    """
    parquet = pq.ParquetFile(file)  # read as one file: `read_table` would look for more columns in the path
    missing = [name for name in COLUMNS if name not in parquet.schema_arrow.names]
    if missing:
        raise ValueError(f"completions must have the columns {COLUMNS}, but {file.name} lacks {missing}")
    rows = parquet.read(columns=list(COLUMNS)).to_pylist()
    if not rows:
        raise ValueError(f"completions must hold at least one row, got none in {file.name}")
    for number, row in enumerate(rows):
        for name in ("prompt", "completion"):
            if not isinstance(row[name], (str, list)):
                raise ValueError(
                    f"{name} must be a string or a list of messages, got {type(row[name]).__name__} in row {number} "
                    f"of {file.name}"
                )
    return rows


def tokenize_completions(tokenizer: PreTrainedTokenizerBase, rows: Sequence[Mapping[str, Any]]) -> Sample:
    """Ids of TRL's text, as TRL makes them of prompts; identical prompts form a group."""
    prompt_ids, completion_ids = [], []
    for row in rows:
        if isinstance(row["prompt"], str):
            prompt_ids.append(tokenizer(row["prompt"])["input_ids"])
        else:
            # A column of messages has the keys of all of them, empty where a message has none.
            messages = [
                {key: value for key, value in message.items() if value is not None} for message in row["prompt"]
            ]
            prompt_ids.append(Chat(tokenizer).prompt_ids(messages))
        completion_ids.append(tokenizer(first_turn_text(row["completion"]), add_special_tokens=False)["input_ids"])
    numbers: dict[tuple[int, ...], int] = {}
    groups = [numbers.setdefault(tuple(ids), len(numbers)) for ids in prompt_ids]
    return Sample(f"step {rows[-1]['step']:.0f}", prompt_ids, completion_ids, groups)


def first_turn_text(completion: str | Sequence[Mapping[str, Any]]) -> str:
    """What the model wrote before anything answered it."""
    if isinstance(completion, str):
        return completion
    return completion_text([message for message in completion if message["role"] == "assistant"][:1])


def diagnose(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, sample: Sample, sampling: Sampling, seed: int
) -> Diagnosis:
    """Scores the first-turn reasoning of a sample under all of its prompts.

    Raises:
        NotMeasurableError: With fewer than two distinct prompts, or without any reasoning.
    """
    started = time.perf_counter()
    trajectories = Trajectories(sample.prompt_ids, sample.completion_ids, tokenizer)
    generator = torch.Generator().manual_seed(seed)
    with count_tokens(model) as tokens:
        try:
            measurement = measure_first_turn(model, trajectories, sample.groups, generator, sampling)
        except NotMeasurableError as error:
            raise NotMeasurableError(f"{sample.label} cannot be diagnosed: {error}") from error
    turns = [turns[0] if turns else None for turns in trajectories]
    metrics = measurement.metrics | {
        "valid_thinking_rate": sum(turn is not None and turn.valid for turn in turns) / len(turns),
        "tokens_forwarded": float(sum(tokens)),
        "seconds": time.perf_counter() - started,
    }
    regime = classify_regime(metrics, low_entropy=LOW_ENTROPY)
    return Diagnosis(sample.label, regime, metrics, measurement, turns)


def metrics_table(metrics: Mapping[str, float], title: str, caption: str) -> Table:
    """The metrics of a diagnosis; p is the probability of so high a retrieval accuracy by chance."""
    table = Table(title=Text(beginning(title)), caption=Text(caption))  # file names can be hostile too
    for name in ("", "value", "by chance", "p"):
        table.add_column(name, justify="left" if name == "" else "right")
    for depth in (1, *RETRIEVAL_DEPTHS):
        key = "" if depth == 1 else f"@{depth}"
        accuracy, chance = metrics[f"retrieval_accuracy{key}"], metrics[f"retrieval_chance{key}"]
        of_depth = {**metrics, "retrieval_accuracy": accuracy, "retrieval_chance": chance}
        # With no more prompts than places there is nothing to test.
        p_value = f"{chance_p_value(of_depth):.2g}" if chance < 1 else "-"
        table.add_row(f"retrieval accuracy{key}", f"{accuracy:.1%}", f"{chance:.1%}", p_value)
    table.add_section()
    for label, key in (
        ("I(X;Z), nats per token", "mi_token"),
        ("I(X;Z), nats per token, tempered", "mi_token_tempered"),
        ("H(Z|X), nats per token", "conditional_entropy_token"),
        ("H(Z), nats per token", "marginal_entropy_token"),
    ):
        table.add_row(label, f"{metrics[key]:.3f}")
    bound = metrics["mi_upper_bound"]
    table.add_row(f"I(X;Z), nats (at most log N = {bound:.2f})", f"{metrics['mi_seq']:.2f}")
    table.add_section()
    table.add_row("valid thinking", f"{metrics['valid_thinking_rate']:.1%}")
    table.add_row("reasonings / distinct prompts", f"{metrics['num_completions']:.0f} / {metrics['num_prompts']:.0f}")
    table.add_row("tokens forwarded", f"{metrics['tokens_forwarded']:,.0f}")
    table.add_row("seconds", f"{metrics['seconds']:.1f}")
    return table


def verdict(diagnosis: Diagnosis) -> str:
    """The regime in a sentence, and by what it was judged."""
    low = diagnosis.metrics["conditional_entropy_token"] < LOW_ENTROPY
    return (
        f"{REGIMES[diagnosis.regime]} (retrieval p = {chance_p_value(diagnosis.metrics):.2g}; H(Z|X) is "
        f"{'below' if low else 'not below'} {LOW_ENTROPY} nats per token, an absolute bound, as there is no start of "
        "a run to compare with)."
    )


def show_examples(console: Console, diagnosis: Diagnosis, tokenizer: PreTrainedTokenizerBase) -> None:
    """The reasonings that the prompt of another task explains best, each with the two prompts where they differ."""
    for gain, trajectory, foreign in foreign_examples(diagnosis):
        turn, other = diagnosis.turns[trajectory], diagnosis.turns[foreign]
        contexts = [tokenizer.decode(ids, skip_special_tokens=True) for ids in (turn.context, other.context)]
        differ = next((i for i, chars in enumerate(zip(*contexts, strict=False)) if chars[0] != chars[1]), 0)
        start = contexts[0].rfind("\n", 0, differ) + 1
        body = Text(beginning(tokenizer.decode(turn.reasoning)))
        for heading, context in zip(("own prompt", "other prompt"), contexts, strict=True):
            body.append(f"\n{heading}, from where they differ:\n", style="bold").append(beginning(context[start:]))
        console.print(Panel(body, title=Text(f"{gain:.1f} nats likelier under another prompt")))


def foreign_examples(diagnosis: Diagnosis) -> list[tuple[float, int, int]]:
    """(nats gained, completion, completion of the other prompt) of the reasonings another prompt explains best."""
    measurement = diagnosis.measurement
    contexts = [diagnosis.turns[trajectory].context for trajectory in measurement.columns]
    examples = []
    for logps, own, trajectory in zip(
        measurement.cross_logps.tolist(), measurement.prompt_index.tolist(), measurement.trajectories, strict=True
    ):
        others = [column for column, context in enumerate(contexts) if context != contexts[own]]
        best = max(others, key=lambda column: logps[column])
        if logps[best] > logps[own]:
            examples.append((logps[best] - logps[own], trajectory, measurement.columns[best]))
    return sorted(examples, reverse=True)[:NUM_EXAMPLES]


def beginning(text: str) -> str:
    """The beginning of a model's text, without what could steer a terminal.

    >>> beginning("go" + chr(27) + "[31m right")
    'go�[31m right'
    """
    lines = text.expandtabs(4).strip()[:MAX_SHOWN_CHARS].splitlines()[:MAX_SHOWN_LINES]
    return printable("\n".join(lines))


def write(diagnoses: Sequence[Diagnosis], arguments: DiagnoseArguments, output_dir: Path) -> None:
    """Writes `diagnosis.json`, `matrix.png` (of the last) and `quadrant.png` (of all)."""
    last = diagnoses[-1]
    report = {
        "metrics": last.metrics,
        "regime": last.regime,
        "path": [{"label": one.label, "regime": one.regime, "metrics": one.metrics} for one in diagnoses],
        "settings": asdict(arguments),
        "versions": {
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "trl": trl.__version__,
            "ragen2-trl": ragen2_trl.__version__,
        },
    }
    output_dir.mkdir(parents=True, exist_ok=True)
    (output_dir / "diagnosis.json").write_text(json.dumps(report, indent=2) + "\n")
    plot_matrix(last.measurement).savefig(output_dir / "matrix.png")
    points = [(one.metrics["conditional_entropy_token"], one.metrics["mi_seq"], one.label) for one in diagnoses]
    plot_quadrant(points, last.metrics["mi_upper_bound"]).savefig(output_dir / "quadrant.png")

"""Diagnose whether a model's reasoning depends on its prompt (arXiv 2604.06268, Section 2).

    ragen2-trl diagnose --model tiny
    ragen2-trl diagnose --model runs/my_run --env_args size=5 --output_dir runs/my_diagnosis
    ragen2-trl diagnose --model runs/my_run --completions runs/my_run/completions
    ragen2-trl diagnose --model tiny --control
    ragen2-trl diagnose --model tiny --answer    # whether answers use their prompt and their reasoning

Samples held-out tasks, or takes the completions that TRL saved with `log_completions=True`. Those are text, so that
they have to be tokenised again, with the model's chat template and without tools; of several turns the first is taken.
What it samples itself it saves as it comes, with the sampled ids: `--completions runs/diagnosis/completions.parquet`
scores it again, also what there is of it after a kill. Several turns are scored as they were played.
Writes `diagnosis.json`, `matrix.png`, `quadrant.png` and what was sampled.
"""

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
import trl
from rich.console import Console
from rich.panel import Panel
from rich.text import Text
from transformers import PreTrainedModel, PreTrainedTokenizerBase

import ragen2_trl
from ragen2_trl.cli.arguments import DiagnoseArguments
from ragen2_trl.cli.console import ProgressLine, make_console
from ragen2_trl.cli.models import load_model
from ragen2_trl.cli.samples import (
    COMPLETIONS_FILE,
    CONTROL_FILE,
    Completions,
    has_ids,
    read_generations,
    read_sample,
    sample_control,
    sample_tasks,
)
from ragen2_trl.cli.typed import InputError, checked_input, parse, parser_of
from ragen2_trl.envs import DatasetEnvironment, TaskMixture
from ragen2_trl.instrument.answers import AnswerEvidence, measure_answers
from ragen2_trl.instrument.diagnosis import (
    Measurement,
    NotMeasurableError,
    Sampling,
    measure_first_turn,
    measure_trajectory,
)
from ragen2_trl.instrument.findings import Finding, answer_findings, reasoning_finding, training_finding
from ragen2_trl.instrument.health import COUNT, health
from ragen2_trl.instrument.reasoning import Trajectories, Turn
from ragen2_trl.instrument.scoring import ContextLengthError, count_tokens
from ragen2_trl.instrument.verdict import Evidence, Judgement, judge
from ragen2_trl.messages import counted, printable
from ragen2_trl.record.facts import Fact, Value, facts
from ragen2_trl.record.files import DIAGNOSIS_FILE, write_json
from ragen2_trl.record.run import read_run
from ragen2_trl.record.saved_measurement import SavedMeasurement
from ragen2_trl.record.settings import public
from ragen2_trl.report import plot_matrix, plot_quadrant
from ragen2_trl.report.tables import facts_table, print_findings
from ragen2_trl.rollouts.sampling import check_sampling, held_out_rows
from ragen2_trl.saved_state import replace_whole

NUM_EXAMPLES = 2  # of each kind
MAX_SHOWN_CHARS, MAX_SHOWN_LINES = 400, 10  # of each text of an example
WITHOUT_OWN_WORDS = "the model's earlier words left out"


@dataclass(frozen=True)
class Diagnosis:
    """What a sample says about the dependence of reasoning on its prompt.

    Args:
        sample: The completions.
        judgement: What `judge` makes of them, with those of earlier files.
        metrics: From `information_metrics`, and `valid_thinking_rate` (fraction of turns), `tokens_forwarded` (padding
            included), `sampling_seconds`, `scoring_seconds` and their sum `seconds`; `success` and `clipped_ratio`
            where they are known.
        measurement: The matrix of first turns.
        turns: First turn of each completion by its number, empty ones left out.
        later: By turn position from 1, the measurements of later turns.
        answers: From `measure_answers`, where it was asked for; empty where there was nothing to measure.
    """

    sample: Completions
    judgement: Judgement
    metrics: dict[str, float]
    measurement: Measurement
    turns: dict[int, Turn]
    later: dict[int, Measurement]
    answers: dict[str, float] | None = None

    @property
    def label(self) -> str:
        return self.sample.label


def main(args: list[str] | None = None) -> None:
    """Diagnoses a model, shows what was found and writes it to `--output_dir`."""
    console = make_console()
    (script_args,) = parse(parser_of("diagnose", DiagnoseArguments), args)
    folder = Path(script_args.output_dir)
    if folder.is_file():
        raise InputError(f"output_dir={script_args.output_dir!r} is a file; allowed: a folder.")
    name = script_args.model.rstrip("/").split("/")[-1]
    with ProgressLine(console) as line:
        line.begin(f"Loading {printable(name)}")
        if script_args.completions is None:
            diagnoses, control, tokenizer, title = _diagnose_sampled(script_args, name, folder, line)
            caption = f"{script_args.num_prompts} tasks, {counted(script_args.num_samples, 'sample')} each"
        else:
            diagnoses, tokenizer, title, caption = _diagnose_saved(script_args, name, line)
            control = None

    last = diagnoses[-1]
    written = write(diagnoses, control, script_args, folder, tokenizer)
    console.print(facts_table([*facts(read_run(folder)), *facts_beside(last)], beginning(title), caption))
    print_findings(console, find(diagnoses))
    if control is not None:
        said = reasoning_finding([control.judgement])
        console.print(Text(f"Control, the observation withheld: {said.sentence} ({said.figures})"))
    show_examples(console, last, tokenizer)
    console.print(Text(f"{', '.join(written)} are in {folder}; ragen2-trl report {folder} shows them"))


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
        if arguments.control and isinstance(env, DatasetEnvironment):
            raise ValueError(f"control must be False for a dataset ({env.name}), which has no rules, got True")
        for setting, least in (("num_prompts", 2), ("num_samples", 1)):
            if getattr(arguments, setting) < least:
                raise ValueError(
                    f"{setting} must be at least {least}, got {getattr(arguments, setting)!r}"
                    + ": reasoning is compared between prompts." * (setting == "num_prompts")
                )
        held_out_rows(env, arguments.num_prompts, arguments.num_samples, arguments.seed, arguments.data)
    model, tokenizer = load_model(arguments.model)
    count = arguments.num_prompts * arguments.num_samples
    sampling = Sampling(max(2, count), arguments.num_prompts, arguments.temperature)
    line.begin(f"Sampling: 0 of {count} completions")
    started = time.perf_counter()
    sample = sample_tasks(model, tokenizer, env, arguments, folder, line.say)
    seconds = time.perf_counter() - started
    (diagnosis,) = diagnose_all(
        model, tokenizer, [sample], sampling, arguments.seed, line, seconds, answers=arguments.answer
    )
    control = None
    if arguments.control and not isinstance(env, TaskMixture):  # which is refused above
        line.begin(f"Control: 0 of {count} completions")
        started = time.perf_counter()
        blank = sample_control(model, tokenizer, env, sample, arguments, folder, line.say)
        seconds = time.perf_counter() - started
        (control,) = diagnose_all(model, tokenizer, [blank], sampling, arguments.seed, line, seconds)
    return [diagnosis], control, tokenizer, f"{name} on held-out {env.name}"


def _diagnose_saved(
    arguments: DiagnoseArguments, name: str, line: ProgressLine
) -> tuple[list[Diagnosis], PreTrainedTokenizerBase, str, str]:
    notes: list[str] = []
    with checked_input():
        files, tables = read_generations(Path(arguments.completions or ""), notes)
    for note in notes:
        line.note(printable(note))
    model, tokenizer = load_model(arguments.model)
    samples = [read_sample(tokenizer, table, file.stem) for file, table in zip(files, tables, strict=True)]
    own = has_ids(tables[-1])
    whole = max(len(tables[-1]), 2) if own else Sampling().num_completions
    sampling = Sampling(whole, max(2, len({*samples[-1].groups})) if own else 64, arguments.temperature)
    said = "The ids as they were sampled" if own else "TRL stores text: prompts and completions were tokenised again"
    diagnoses = diagnose_all(model, tokenizer, samples, sampling, arguments.seed, line, answers=arguments.answer)
    return diagnoses, tokenizer, f"{files[-1].name} scored by {name}", said


def diagnose_all(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    samples: Sequence[Completions],
    sampling: Sampling,
    seed: int,
    line: ProgressLine,
    sampling_seconds: float = 0.0,
    answers: bool = False,
) -> list[Diagnosis]:
    """Scores the reasoning of samples under all of their prompts, and judges it in their order; their answers, too.

    Raises:
        InputError: For a sample with fewer than two distinct prompts, or without any reasoning, or of which prompt and
            reasoning do not fit the model's context together.
    """
    measured = []
    for sample in samples:
        try:
            measured.append(_measure(model, tokenizer, sample, sampling, seed, line, answers))
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
        for sample, (_, _, metrics, _, _) in zip(samples, measured, strict=True)
    ]
    diagnoses = []
    for sample, judgement, found in zip(samples, judge(evidence), measured, strict=True):
        measurement, turns, metrics, later, of_answers = found
        known = {"success": sample.success, "clipped_ratio": sample.clipped_ratio}
        metrics |= {name: value for name, value in known.items() if value is not None}
        metrics |= {"sampling_seconds": sampling_seconds, "seconds": sampling_seconds + metrics["scoring_seconds"]}
        diagnoses.append(Diagnosis(sample, judgement, metrics, measurement, turns, later, of_answers))
    return diagnoses


def _measure(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    sample: Completions,
    sampling: Sampling,
    seed: int,
    line: ProgressLine,
    answers: bool,
) -> tuple[Measurement, dict[int, Turn], dict[str, float], dict[int, Measurement], dict[str, float] | None]:
    started = time.perf_counter()
    trajectories = Trajectories(sample.prompt_ids, sample.completion_ids, tokenizer, sample.masks, sample.turn_samples)
    later: dict[int, Measurement] = {}
    of_answers: dict[str, float] | None = {} if answers else None
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
            if answers:
                generator = torch.Generator().manual_seed(seed)
                try:
                    of_answers = measure_answers(model, trajectories, sample.groups, generator, sampling)
                except NotMeasurableError as error:
                    line.note(f"Answers of {printable(sample.label)} are not measured: {error}.")
        finally:
            telling.remove()
    every = [turn for number in range(len(trajectories)) for turn in trajectories[number]]
    metrics = measurement.metrics | {
        "valid_thinking_rate": sum(turn.valid for turn in every) / max(1, len(every)),
        "tokens_forwarded": float(sum(tokens)),
        "scoring_seconds": time.perf_counter() - started,
    }
    later.pop(0, None)  # first turns have been measured, all of them
    turns = {i: trajectories[i][0] for i in range(len(trajectories)) if trajectories[i]}
    return measurement, turns, metrics, later, of_answers


def write(
    diagnoses: Sequence[Diagnosis],
    control: Diagnosis | None,
    arguments: DiagnoseArguments,
    output_dir: Path,
    tokenizer: PreTrainedTokenizerBase,
) -> list[str]:
    """Writes `diagnosis.json`, `matrix.png` (of the last), `quadrant.png` (of all) and what the report reads beside
    it, `measurement_<step>.json` of each; gives all files' names."""
    last = diagnoses[-1]
    report = {
        "metrics": last.metrics,
        "regime": last.judgement.regime,
        "findings": [finding.to_dict() for finding in find(diagnoses)],
        "later_turns": {f"turn_{position + 1}": _told(later) for position, later in last.later.items()},
        "control": control and {"regime": control.judgement.regime, "metrics": control.metrics},
        "path": [
            {"label": one.label, "step": one.sample.step, "regime": one.judgement.regime, "metrics": one.metrics}
            | ({} if one.answers is None else {"answers": one.answers})
            for one in diagnoses
        ],
        "settings": public(asdict(arguments)),
        "versions": {
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "trl": trl.__version__,
            "ragen2-trl": ragen2_trl.__version__,
        },
    }
    output_dir.mkdir(parents=True, exist_ok=True)
    for former in output_dir.glob("measurement_*.json"):
        former.unlink()
    for number, one in enumerate(diagnoses):
        found = one.measurement
        SavedMeasurement.of(
            number if one.sample.step is None else one.sample.step,
            found,
            [one.turns[i].context for i in found.columns],
            [one.turns[i].reasoning for i in found.trajectories],
            tokenizer.decode,
            one.judgement.regime,
            rewards=torch.empty(0, 1),
        ).save(output_dir)
    write_json(output_dir / DIAGNOSIS_FILE, report, indent=2)
    replace_whole(output_dir / "matrix.png", plot_matrix(last.measurement).savefig)
    points = [(one.metrics["conditional_entropy_token"], one.metrics["mi_seq"], one.label) for one in diagnoses]
    replace_whole(output_dir / "quadrant.png", plot_quadrant(points, last.metrics["mi_upper_bound"]).savefig)
    written = [DIAGNOSIS_FILE, "matrix.png", "quadrant.png", "measurement_*.json"]
    if arguments.completions is None:
        written.append(COMPLETIONS_FILE)
    return written if control is None else [*written, CONTROL_FILE]


def _told(measurement: Measurement) -> dict[str, Any]:
    without = measurement.without_own_words
    return {"metrics": measurement.metrics, "without_own_words": without and without.metrics}


def facts_beside(diagnosis: Diagnosis) -> list[Fact]:
    """What `diagnosis.json` holds of the last sample beside the facts of a run: later turns, and what it took."""
    found = []
    for position, later in diagnosis.later.items():
        name, without = f"turn {position + 1}: retrieval accuracy", later.without_own_words
        note = f"{without.metrics['retrieval_accuracy']:.1%} with {WITHOUT_OWN_WORDS}" if without else ""
        value = Value(later.metrics["retrieval_accuracy"], None, f"chance {later.metrics['retrieval_chance']:.1%}")
        found.append(Fact(f"turn_{position + 1}", name, "fraction", value, note=note))
    metrics = diagnosis.metrics
    sampling = f"{metrics['sampling_seconds']:,.0f} of them sampling" if metrics["sampling_seconds"] else ""
    return [
        *found,
        Fact("num_prompts", "distinct prompts", "count", Value(metrics["num_prompts"])),
        Fact("tokens_forwarded", "tokens forwarded", "count", Value(metrics["tokens_forwarded"])),
        Fact("seconds", "seconds", "count", Value(metrics["seconds"]), note=sampling),
    ]


def find(diagnoses: Sequence[Diagnosis]) -> list[Finding]:
    """What was found: the state of training, if the files have enough steps to tell it, then answers and reasoning."""
    keys = {"valid_thinking_rate": "mi/valid_thinking_rate", "success": "eval/env/saved/success"}
    state = health(
        {"step": number if one.sample.step is None else one.sample.step, COUNT: len(one.sample.groups)}
        | {key: one.metrics[name] for name, key in keys.items() if name in one.metrics}
        for number, one in enumerate(diagnoses)
    ).state
    answers = [AnswerEvidence.of(one.answers, one.sample.step) for one in diagnoses if one.answers]
    return [
        *([] if state.name == "too_early" else [training_finding(state)]),
        *answer_findings(answers),
        reasoning_finding(
            [one.judgement for one in diagnoses], answers_lost=bool(answers) and not answers[-1].uses_prompt
        ),
    ]


def show_examples(console: Console, diagnosis: Diagnosis, tokenizer: PreTrainedTokenizerBase) -> None:
    """Show reasoning that its own prompt explains best by far, and such that the prompt of another task does."""
    for gain, trajectory, foreign in examples(diagnosis):
        turn, other = diagnosis.turns[trajectory], diagnosis.turns[foreign]
        contexts = [
            str(tokenizer.decode(list(ids), skip_special_tokens=True)) for ids in (turn.context, other.context)
        ]
        differ = next((i for i, chars in enumerate(zip(*contexts, strict=False)) if chars[0] != chars[1]), 0)
        start = contexts[0].rfind("\n", 0, differ) + 1
        body = Text(beginning(str(tokenizer.decode(list(turn.reasoning)))))
        for heading, context in zip(("own prompt", "best other prompt"), contexts, strict=True):
            body.append(f"\n{heading}, from where they differ:\n", style="bold").append(beginning(context[start:]))
        hit = "Hit: {:.1f} nats likelier under its own prompt than under any other"
        said = hit if gain < 0 else "Miss: {:.1f} nats likelier under another prompt"
        console.print(Panel(body, title=Text(said.format(abs(gain)))))


def examples(diagnosis: Diagnosis) -> list[tuple[float, int, int]]:
    """(nats gained by another prompt, completion, completion of that prompt): the clearest hits, the worst misses."""
    measurement = diagnosis.measurement
    contexts = [diagnosis.turns[trajectory].context for trajectory in measurement.columns]
    found = []
    for logps, own, trajectory in zip(
        measurement.cross_logps.tolist(), measurement.prompt_index.tolist(), measurement.trajectories, strict=True
    ):
        others = [column for column, context in enumerate(contexts) if context != contexts[own]]
        best = max(others, key=lambda column: logps[column])
        found.append((logps[best] - logps[own], trajectory, measurement.columns[best]))
    hits = sorted(one for one in found if one[0] < 0)[:NUM_EXAMPLES]
    misses = sorted((one for one in found if one[0] > 0), reverse=True)[:NUM_EXAMPLES]
    return [*hits, *misses]


def beginning(text: str) -> str:
    """The beginning of a model's text, without what could steer a terminal.

    >>> beginning("go" + chr(27) + "[31m right")
    'go�[31m right'
    """
    lines = text.expandtabs(4).strip()[:MAX_SHOWN_CHARS].splitlines()[:MAX_SHOWN_LINES]
    return printable("\n".join(lines))

"""The model card of a run has a verdict on its reasoning, a section with numbers and figures, and a model index."""

import html
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from huggingface_hub import EvalResult, ModelCard

from ragen2_trl.messages import counted, printable
from ragen2_trl.metrics import (
    ACCURACY,
    ANSWER_PROMPT,
    ANSWER_THOUGHT,
    BOUND,
    CHANCE,
    CONDITIONAL_ENTROPY,
    ENTROPY,
    INFORMATION,
    KEPT,
    MARGINAL_ENTROPY,
    REWARD,
    Metric,
    label,
    metric,
)
from ragen2_trl.record.files import DIAGNOSTICS, EVALUATIONS, STATE_FILE
from ragen2_trl.record.held_out import HeldOutPoint
from ragen2_trl.record.run import MEAN_OVER, Run, running_means
from ragen2_trl.record.settings import has_effect

HEADING = "## Training diagnostics"
TAGS = ("ragen2", "trl")
MAX_CHARS = 500  # of a text of others
MAX_STATES = 10  # the latest

UNNAMED = "a model that is not on the Hub"
_HUB_ID = re.compile(r"([\w-][\w.-]*/)?[\w-][\w.-]*", re.ASCII)

FIGURES = {  # of the run's folder, in the order of the card
    "held_out": "Success on held-out tasks over the steps, with 95 % intervals",
    "training": "Reward, success, retrieval accuracy, entropy and what the filter kept, as far as they were logged",
    "quadrant": "The path of the run between the four regimes of arXiv 2604.06268",
    "proxies": "Six proxies of how much reasoning says about its prompt; dotted: chance, or the bound",
    "cross_scores": "How well each prompt explains each reasoning trace, {when}",
    "reward_variance": "{score} of the groups {when}, and which of them the filter kept",
}
# Figures about details, signal and cost come last, with the settings.
FOLDED = (
    "proxies",
    "reward_variance",
)


def add_diagnostics(
    card: ModelCard,
    run: Run,
    repo_id: str | None = None,
    revision: str = "main",
    prompt: Sequence[Mapping[str, str]] | None = None,
) -> None:
    """Add a run's diagnostics to a card: a verdict at its head, a section before its citations, tags, the model index.

    Every number comes from `diagnostics/trainer_state.json`, which is uploaded beside the card, and from held-out
    evaluations where there are any.

    Args:
        card: As TRL made it; changed in place.
        run: What is known of the run by now.
        repo_id: Where the model is going on the Hub, for the source of the index's entries.
        revision: The branch there.
        prompt: Messages that may be shown to anyone, for the quick start in place of TRL's question.
    """
    metadata: Any = card.data  # whose fields `huggingface_hub` does not declare
    metadata.tags = list(dict.fromkeys([*(metadata.tags or []), *TAGS]))
    metadata.model_name = metadata.model_name or run.name
    metadata.eval_results = eval_results(run, repo_id, metadata.datasets, revision) or None
    text, base = card.text, metadata.base_model
    if isinstance(base, str) and not _HUB_ID.fullmatch(base):  # the path of a folder, which says nothing to others
        metadata.base_model, text = None, text.replace(f"[{base}](https://huggingface.co/{base})", UNNAMED)
    text = text.replace("[None](https://huggingface.co/None)", UNNAMED)
    text = text.replace('model="None"', 'model="path/to/this/folder"')
    if prompt is not None:
        messages = json.dumps([dict(message) for message in prompt], indent=4, ensure_ascii=False)
        text = re.sub(r"^question = .*$", lambda _: f"messages = {messages}", text, count=1, flags=re.MULTILINE)
        text = text.replace('generator([{"role": "user", "content": question}], ', "generator(messages, ")
    text = text.replace("## Quick start", f"{headline(run)}\n\n## Quick start", 1)
    before, citations, after = text.partition("## Citations")
    card.text = f"{before.rstrip()}\n\n{diagnostics_section(run)}\n\n{citations}{after}"


def headline(run: Run) -> str:
    """One paragraph of Markdown for the head of a card: outcome, cost, health, verdict on reasoning, state."""
    sentences = _sentences(run)
    if run.evidence:
        last = run.evidence[-1]
        sentences.append(
            f"Retrieval accuracy at step {last.step}: {last.retrieval_accuracy:.1%} of the reasoning traces are most "
            f"likely under their own prompt; chance is {last.retrieval_chance:.1%}."
        )
    return f"> {' '.join(sentences)} See [Training diagnostics](#training-diagnostics)."


def diagnostics_section(run: Run) -> str:
    """Markdown: outcome, cost, verdict and state of the run, its numbers, its figures, and how it was made."""
    lines = [HEADING, "", " ".join(_sentences(run)), ""]
    if run.state is not None:
        lines += [*(f"- {inline(one.sentence)}" for one in run.health.history[1:][-MAX_STATES:]), ""]
    rows = _table(run)
    if rows:
        lines += ["| | first | last | best |", "|---|---|---|---|"]
        lines += [f"| {' | '.join(row)} |" for row in rows]
        lines += ["", *_legend(run), ""]
    drawn = [name for name in FIGURES if run.drawn and (run.folder / DIAGNOSTICS / f"{name}.png").exists()]
    lines += _age_of_figures(run)
    for name in drawn:
        if name not in FOLDED:
            lines += _figure(name, run)
    lines += ["<details><summary>How this run was made</summary>", "", *_how(run), ""]
    for name in drawn:
        if name in FOLDED:
            lines += _figure(name, run)
    return "\n".join([*lines, "</details>"])


def caption(name: str, run: Run, step: int | None = None) -> str:
    """What a figure shows, in plain text, at a step where it is of one measurement."""
    score = str(run.settings.get("snr_score", "reward_variance")).replace("_", " ")
    when = "in the last measurement" if step is None else f"at step {step}"
    return FIGURES[name].format(score=score.capitalize(), when=when)


def eval_results(
    run: Run, repo_id: str | None, datasets: str | list[str] | None = None, revision: str = "main"
) -> list[EvalResult]:
    """The last numbers of a run as entries of a model index, none of them verified by anyone else.

    Args:
        run: The run.
        repo_id: Where its files go on the Hub, as the source of the numbers; `None` for a run that stays local.
        datasets: What the card names. A single one is what the entries are about, otherwise the run's task.
    """
    named = [datasets] if isinstance(datasets, str) else datasets or []
    task = named[0] if len(named) == 1 else run.environment or "training prompts"
    held_out = run.evaluations.get("after", {})
    results = []
    if held_out:
        url = file_url(repo_id, f"{DIAGNOSTICS}/{STATE_FILE}" if run.held_out else EVALUATIONS["after"], revision)
        results.append(eval_result(task, "test", "success_rate", HELD_OUT_SUCCESS, held_out["success"], url))
    url = file_url(repo_id, f"{DIAGNOSTICS}/{STATE_FILE}", revision)
    for key, kind, name in (
        (run.success_metric, "success_rate", "Success rate in training"),
        (REWARD, "mean_reward", "Mean reward in training"),
    ):
        means = key and running_means(run.points(key))
        if means:
            results.append(eval_result(task, "train", kind, name, means[-1][1], url))
    for key, kind, name in (
        (ACCURACY, "retrieval_accuracy", "Retrieval accuracy of reasoning under its own prompt"),
        (CHANCE, "retrieval_chance", "Retrieval accuracy by chance"),
        (INFORMATION, "mutual_information", "Mutual information of prompt and reasoning (nats)"),
    ):
        points = run.points(key)
        if points:
            results.append(eval_result(task, "train", kind, name, points[-1][1], url))
    return results


HELD_OUT_SUCCESS = "Held-out success rate"


def eval_result(task: str, split: str, metric: str, name: str, value: float, source_url: str | None) -> EvalResult:
    """An entry of a model index, about one split of a task."""
    return EvalResult(
        task_type="reinforcement-learning",
        dataset_type=_dataset_type(task),
        dataset_name=printable(task),
        dataset_split=split,
        metric_type=metric,
        metric_name=name,
        metric_value=round(value, 6),
        verified=False,
        source_name=source_url and "ragen2-trl",
        source_url=source_url,
    )


def _dataset_type(task: str) -> str:
    """A name that the Hub accepts: it refuses cards with data sets that are not written like an id."""
    if re.fullmatch(r"([\w-]+/)?[\w.-]+", task, re.ASCII):
        return task
    return re.sub(r"[^\w-]+", "-", task, flags=re.ASCII).strip("-") or "task"


def file_url(repo_id: str | None, path: str, revision: str = "main") -> str | None:
    """Where a file of a model is on the Hub, if it is there."""
    return repo_id and f"https://huggingface.co/{repo_id}/blob/{revision}/{path}"


def _sentences(run: Run) -> list[str]:
    """Outcome, cost against plain TRL, health, dependence of reasoning on its prompt, state of the run."""
    outcome = [f"**{inline(run.outcome)}**"] if run.outcome else []
    cost = [f"Cost: {'; '.join(filter(None, [run.cost.sampling, run.cost.updates]))}."] if run.cost else []
    return [*outcome, *cost, *_health(run), *run.answers_said, _verdict(run), *_beside(run), _state(run)]


def _verdict(run: Run) -> str:
    if not run.regimes:
        return "Whether reasoning depends on its prompt was not measured."
    (finding,) = (one for one in run.findings if one.kind == "reasoning")
    return " ".join([f"**{finding.sentence}**", *finding.advice])


def _health(run: Run) -> list[str]:
    """The state of training, in bold where it calls for action."""
    if run.state is None:
        return []
    mark = "" if run.state.name == "learning" else "**"
    return [f"{mark}{inline(run.state.sentence)}{mark}"]


def _beside(run: Run) -> list[str]:
    """The sentence that qualifies the verdict, if there is anything to say."""
    return [f"At step {run.evidence[-1].step}: {run.beside}."] if run.beside else []


def _state(run: Run) -> str:
    sentences = [
        f"Training {run.status}." if run.ended else f"Training is {run.status}; these are its numbers so far."
    ]
    if run.has_learnt_nothing:
        sentences.append("No step had a group to train on: the weights are those that it began with.")
    if run.resumed_at:
        steps = ", ".join(map(str, run.resumed_at))
        sentences.append(f"It was resumed from a checkpoint at step {steps}; the numbers span all of it.")
    return " ".join(sentences)


def _table(run: Run) -> list[list[str]]:
    """Label, first, last and best of each number that was logged."""

    rows = []
    if run.evaluations:
        rows.append(["held-out success (95 % interval)", _held_out(run, "before"), _held_out(run, "after"), ""])
    if run.held_out:
        rows = _curves(run)
    for name, points, is_fraction in run.outcomes:
        first, last, best = (
            f"{value:.1%}" if is_fraction else f"{value:.3f}"
            for value in (points[0][1], points[-1][1], max(value for _, value in points))
        )
        step = max(points, key=lambda point: point[1])[0]
        once = len(points) == 1
        rows.append([inline(name), "" if once else first, last, "measured once" if once else f"{best} (step {step})"])
    if run.cost is not None:
        rows.append(["completions sampled, against plain TRL", "", f"{run.cost.sampling_ratio:.2f}", ""])
        if run.cost.update_ratio is not None:
            rows.append(["update positions, against plain TRL", "", f"{run.cost.update_ratio:.2f}", ""])
    rows += _rows([ANSWER_PROMPT, ANSWER_THOUGHT], run.points)
    rows += _measured(run, ACCURACY, CHANCE) + _measured(run, INFORMATION, BOUND)
    rows += _rows([CONDITIONAL_ENTROPY, MARGINAL_ENTROPY], run.points)
    if run.regimes:
        names = [regime.replace("_", " ") for _, regime in (run.regimes[0], run.regimes[-1])]
        rows.append(["regime", *(names if len(run.regimes) > 1 else ["", names[-1]]), ""])
    return rows + _rows([ENTROPY, KEPT], lambda key: running_means(run.points(key)))


def _measured(run: Run, key: str, limit: str) -> list[list[str]]:
    """A row of a measured quantity, each value with the chance or the bound of its own measurement: another may have
    had another number of prompts."""
    points, at, one = run.points(key), dict(run.points(limit)), metric(key)
    if not points or one is None:
        return []

    def told(point: tuple[int, float]) -> str:
        return one.text(point[1]) + (f" ({label(limit)} {one.text(at[point[0]])})" if point[0] in at else "")

    if len(points) == 1:
        return [[_label(one), "", told(points[0]), "measured once"]]
    best = max(points, key=lambda point: point[1])
    return [[_label(one), told(points[0]), told(points[-1]), f"{told(best)} (step {best[0]})"]]


def _rows(keys: Sequence[str], points_of: Callable[[str], list[tuple[int, float]]]) -> list[list[str]]:
    """A row for each key that has points."""
    rows = []
    for key in keys:
        points, one = points_of(key), metric(key)
        if points and one is not None:
            first = one.text(points[0][1]) if len(points) > 1 else ""
            rows.append([_label(one), first, one.text(points[-1][1]), ""])
    return rows


def _label(one: Metric) -> str:
    """The label as a cell of a table, with the unit where values do not show it."""
    unit = f" ({one.unit})" if one.unit.startswith("nats") else ""
    return one.label.replace("|", "\\|") + unit


def _held_out(run: Run, when: str) -> str:
    metrics = run.evaluations.get(when)
    if metrics is None:
        return ""
    return f"{metrics['success']:.1%} ({metrics['success_ci_low']:.1%} to {metrics['success_ci_high']:.1%})"


def _curves(run: Run) -> list[list[str]]:
    """Two rows for each task that has a curve."""

    def shown(point: HeldOutPoint) -> str:
        return f"{point.success:.1%} ({point.low:.1%} to {point.high:.1%})"

    rows = []
    for task, curve in run.held_out.items():
        of_task = f" on {code(task)}" if len(run.held_out) > 1 else ""
        best = f"{curve.peak.success:.1%} (step {curve.peak.step})"
        rows.append([f"held-out success{of_task} (95 % interval)", shown(curve.first), shown(curve.last), best])
        rows.append([f"held-out success{of_task}, area under the curve", "", f"{curve.area:.3f}", ""])
    return rows


def _legend(run: Run) -> list[str]:
    """What the rows of the table are, and where they come from."""
    state = f"[`{DIAGNOSTICS}/{STATE_FILE}`]({DIAGNOSTICS}/{STATE_FILE})"
    lines = []
    if run.regimes:
        lines = [
            "*Retrieval accuracy* is the share of reasoning traces Z that their own prompt X explains better than the "
            "other prompts of the batch do: near chance, the model writes the same whatever it is asked. *I(X;Z)* is "
            "their mutual information; entropies are of the reasoning, given its prompt and over all prompts. Each is "
            "a single measurement.",
            "",
        ]
    means = (
        f"Success in training, reward, policy entropy and what the filter did are means over up to {MEAN_OVER} logged "
        "steps."
    )
    files = {} if run.held_out else EVALUATIONS
    held_out = [f"[`{file}`]({file})" for when, file in files.items() if when in run.evaluations]
    if run.held_out:
        means += " The area under the curve of held-out success is divided by the steps: a mean over the run."
    sources = f"All of it follows from {' and '.join([state, *held_out])}."
    return [*lines, f"{means} {sources}"]


def _age_of_figures(run: Run) -> list[str]:
    """What is said where they show less than the numbers do."""
    if run.drawn >= len(run.rows):
        return []
    until = f"show it up to step {run.rows[run.drawn - 1].get('step', 0)}" if run.drawn else "are not drawn yet"
    return [f"Its figures {until}; `ragen2-trl report` on its folder draws them with all of these numbers.", ""]


def _figure(name: str, run: Run) -> list[str]:
    text = inline(caption(name, run))
    return [f"![{text}]({DIAGNOSTICS}/{name}.png)", "", f"*{text}.*", ""]


def _how(run: Run) -> list[str]:
    """Environment, settings and versions, as they are needed to do it again."""
    settings = dict(run.settings)
    environment = settings.pop("environment", None)
    lines = []
    if environment:
        options = "".join(f", {name}={value}" for name, value in environment["options"].items())
        lines.append(
            f"- Environment: {code(environment['name'] + options)}, {counted(environment['max_turns'], 'turn')} of up "
            f"to {counted(environment['max_actions'], 'action')}"
        )
    shown = [code(f"{name}={value}") for name, value in settings.items() if has_effect(name, value)]
    if shown:
        lines.append(f"- Settings: {', '.join(shown)}")
    if run.versions:
        lines.append("- Versions: " + ", ".join(inline(f"{name} {number}") for name, number in run.versions.items()))
    return lines


def code(text: str) -> str:
    """Text of others as Markdown code in one line: nothing in it is markup, or ends a cell of a table."""
    return f"`{' '.join(re.sub('[`|]', ' ', printable(text[:MAX_CHARS])).split())}`"


def inline(text: str) -> str:
    """Text of others as Markdown text in one line, none of it markup.

    >>> inline("<b>1.0</b>[x](y)")
    '&lt;b&gt;1.0&lt;/b&gt;\\\\[x\\\\]\\\\(y\\\\)'
    """
    return re.sub(
        r"([\\`*_\[\]()#|!~$])", r"\\\1", html.escape(" ".join(printable(text[:MAX_CHARS]).split()), quote=False)
    )

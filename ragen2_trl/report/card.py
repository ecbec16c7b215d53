"""The model card of a run has its outcome and findings, a section with facts and figures, and a model index."""

import html
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from huggingface_hub import EvalResult, ModelCard

from ragen2_trl.messages import counted, printable
from ragen2_trl.metrics import ACCURACY, CHANCE, INFORMATION, REWARD
from ragen2_trl.record.facts import Fact, facts, outcome
from ragen2_trl.record.files import DIAGNOSTICS, EVALUATIONS, STATE_FILE
from ragen2_trl.record.run import MEAN_OVER, Run, running_means
from ragen2_trl.record.settings import has_effect

HEADING = "## Training diagnostics"
TAGS = ("ragen2", "trl")
MAX_CHARS = 500  # of a text of others

UNNAMED = "a model that is not on the Hub"
_HUB_ID = re.compile(r"([\w-][\w.-]*/)?[\w-][\w.-]*", re.ASCII)

FIGURES = {  # of the run's folder, in the order of the card
    "held_out": "Success on held-out tasks over the steps, with 95 % intervals",
    "training": "Reward, success, retrieval accuracy, entropy and what the filter kept, as far as they were logged",
    "quadrant": "The path of the run between the four regimes of arXiv 2604.06268",
    "cross_scores": "How well each prompt explains each reasoning trace, {when}",
    "reward_variance": "{score} of the groups {when}, and which of them the filter kept",
}


def add_diagnostics(
    card: ModelCard,
    run: Run,
    repo_id: str | None = None,
    revision: str = "main",
    prompt: Sequence[Mapping[str, str]] | None = None,
) -> None:
    """Add a run's diagnostics to a card: a paragraph at its head, a section before its citations, tags, a model index.

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
    """One paragraph of Markdown for the head of a card: outcome, findings, state of the run."""
    return f"> {' '.join(_sentences(run))} See [Training diagnostics](#training-diagnostics)."


def diagnostics_section(run: Run) -> str:
    """Markdown: outcome, findings and state of the run, its facts, its figures, and how it was made."""
    lines = [HEADING, "", " ".join(_sentences(run)), "", *_table(facts(run))]
    drawn = [name for name in FIGURES if run.drawn and (run.folder / DIAGNOSTICS / f"{name}.png").exists()]
    lines += _age_of_figures(run)
    for name in drawn:
        text = inline(caption(name, run))
        lines += [f"![{text}]({DIAGNOSTICS}/{name}.png)", "", f"*{text}.*", ""]
    return "\n".join([*lines, "<details><summary>How this run was made</summary>", "", *_how(run), "", "</details>"])


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
    """Outcome, findings (but those of missing data; in bold where they call for action), and state of the run."""
    said = [f"**{inline(outcome(run))}**"] if outcome(run) else []
    for finding in run.findings:
        if finding.kind != "data" and finding.name != "too_early":
            mark = "**" if finding.severity in ("warning", "failure") else ""
            said.append(f"{mark}{inline(finding.sentence)}{mark}")
            said += map(inline, finding.advice)
    said.append(f"Training {run.status}." if run.ended else f"Training is {run.status}; these are its numbers so far.")
    if run.resumed_at:
        steps = ", ".join(map(str, run.resumed_at))
        said.append(f"It was resumed from a checkpoint at step {steps}; the numbers span all of it.")
    return said


def _table(found: Sequence[Fact]) -> list[str]:
    """The facts as a table, and where they come from."""
    if not found:
        return []
    rows = [
        (fact.title, fact.text(fact.first), fact.text(fact.last), fact.text(fact.best, with_step=True), fact.note)
        for fact in found
    ]
    lines = [f"| {' | '.join(map(inline, row))} |" for row in rows]
    means = (
        f"Numbers of training are means over up to {MEAN_OVER} logged steps, measurements of reasoning single ones. "
        f"They come from [`{DIAGNOSTICS}/{STATE_FILE}`]({DIAGNOSTICS}/{STATE_FILE}) and, without a curve, from the "
        "held-out evaluations beside it."
    )
    return ["| | first | last | best | |", "|---|---|---|---|---|", *lines, "", means, ""]


def _age_of_figures(run: Run) -> list[str]:
    """What is said where they show less than the numbers do."""
    if run.drawn >= len(run.rows):
        return []
    until = f"show it up to step {run.rows[run.drawn - 1].get('step', 0)}" if run.drawn else "are not drawn yet"
    return [f"Its figures {until}; `ragen2-trl report` on its folder draws them with all of these numbers.", ""]


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
    '&lt;b&gt;1.0&lt;/b&gt;\\\\[x\\\\](y)'
    """
    return re.sub(
        r"([\\`*_\[\]#|!~$])", r"\\\1", html.escape(" ".join(printable(text[:MAX_CHARS]).split()), quote=False)
    )

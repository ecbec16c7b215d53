"""What a diagnosis found, as the terminal shows it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text
from transformers import PreTrainedTokenizerBase

from ragen2_trl.cli.samples import Sample
from ragen2_trl.instrument.diagnosis import Measurement
from ragen2_trl.instrument.information import RETRIEVAL_DEPTHS
from ragen2_trl.instrument.reasoning import Turn
from ragen2_trl.instrument.verdict import LOW_ENTROPY, Finding, chance_p_value, headline, in_numbers
from ragen2_trl.reporting.examples import printable

NUM_EXAMPLES = 2  # of each kind
MAX_SHOWN_CHARS, MAX_SHOWN_LINES = 400, 10  # of each text of an example
WITHOUT_OWN_WORDS = "without own words"


@dataclass(frozen=True)
class Diagnosis:
    """What a sample says about the dependence of reasoning on its prompt.

    Args:
        sample: The completions.
        finding: What `judge` makes of them, with those of earlier files.
        metrics: From `information_metrics`, and `valid_thinking_rate` (fraction of turns), `tokens_forwarded` (padding
            included), `sampling_seconds`, `scoring_seconds` and their sum `seconds`; `success` and `clipped_ratio`
            where they are known.
        measurement: The matrix of first turns.
        turns: First turn of each completion; `None` for an empty one.
        later: By turn position from 1, the measurements of later turns.
    """

    sample: Sample
    finding: Finding
    metrics: dict[str, float]
    measurement: Measurement
    turns: list[Turn | None]
    later: dict[int, Measurement]

    @property
    def label(self) -> str:
        return self.sample.label


def metrics_table(diagnosis: Diagnosis, title: str, caption: str) -> Table:
    """The metrics of a diagnosis; p is the probability of so high a retrieval accuracy by chance."""
    metrics = diagnosis.metrics
    table = Table(title=Text(beginning(title)), caption=Text(caption))  # file names can be hostile too
    for name in ("", "value", "by chance", "p"):
        table.add_column(name, justify="left" if name == "" else "right")

    def add_retrieval(label: str, found: Mapping[str, float], key: str = "") -> None:
        accuracy, chance = found[f"retrieval_accuracy{key}"], found[f"retrieval_chance{key}"]
        of_depth = {**found, "retrieval_accuracy": accuracy, "retrieval_chance": chance}
        # With no more prompts than places there is nothing to test.
        p_value = f"{chance_p_value(of_depth):.2g}" if chance < 1 else "-"
        table.add_row(label, f"{accuracy:.1%}", f"{chance:.1%}", p_value)

    for depth in (1, *RETRIEVAL_DEPTHS):
        key = "" if depth == 1 else f"@{depth}"
        add_retrieval(f"retrieval accuracy{key}", metrics, key)
    for position, later in diagnosis.later.items():
        add_retrieval(f"turn {position + 1}: retrieval accuracy", later.metrics)
        if later.without_own_words:
            add_retrieval(f"turn {position + 1}, {WITHOUT_OWN_WORDS}", later.without_own_words.metrics)
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
    for label, key in (
        ("valid thinking", "valid_thinking_rate"),
        ("success", "success"),
        ("cut at the length limit", "clipped_ratio"),
    ):
        if key in metrics:
            table.add_row(label, f"{metrics[key]:.1%}")
    table.add_row("reasonings / distinct prompts", f"{metrics['num_completions']:.0f} / {metrics['num_prompts']:.0f}")
    table.add_row("tokens forwarded", f"{metrics['tokens_forwarded']:,.0f}")
    parts = f" ({metrics['sampling_seconds']:.1f} of them sampling)" if metrics["sampling_seconds"] else ""
    table.add_row(f"seconds{parts}", f"{metrics['seconds']:.1f}")
    return table


def verdict(diagnoses: Sequence[Diagnosis]) -> str:
    """What was found in a sentence, by which numbers, and how low entropy was told."""
    finding = diagnoses[-1].finding
    low = "" if finding.entropy_is_low else "not "
    bound = (
        f"H(Z|X) is {low}below {LOW_ENTROPY} nats per token, an absolute bound, as there is no start of a run to "
        "compare with."
        if finding.evidence.step is None
        else f"H(Z|X) is {low}below half of that in the first file."
    )
    return f"{headline([one.finding for one in diagnoses])}. {in_numbers(finding)} {bound}"


def show_examples(console: Console, diagnosis: Diagnosis, tokenizer: PreTrainedTokenizerBase) -> None:
    """Reasonings that their own prompt explains best by far, and others that the prompt of another task does."""
    for gain, trajectory, foreign in examples(diagnosis):
        turn, other = diagnosis.turns[trajectory], diagnosis.turns[foreign]
        contexts = [tokenizer.decode(ids, skip_special_tokens=True) for ids in (turn.context, other.context)]
        differ = next((i for i, chars in enumerate(zip(*contexts, strict=False)) if chars[0] != chars[1]), 0)
        start = contexts[0].rfind("\n", 0, differ) + 1
        body = Text(beginning(tokenizer.decode(turn.reasoning)))
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

"""How often verdicts are wrong: collapses that are said where nothing changed, and collapses that are missed.

    python -m research.benchmarks.missed_collapses    # half a minute on one CPU core

Traces are retrieved at random with a given probability, independently, which is the best case: prompts of a real
task differ, so that the traces of a few prompts tell less. Nothing is trained; the decision is the package's own.
Writes `research/benchmarks/results/missed_collapses.md`, and the same into `docs/diagnosing.md`.
"""

from pathlib import Path

import numpy as np

from ragen2_trl.instrument.verdict import follow_dependence

PROMPTS = TRACES = (2, 4, 8, 16, 32, 64)
RUNS = 1000
LENGTH = 20  # measurements of a run in which nothing changes
BEFORE = 5  # measurements before a collapse
AFTER = (2, 5, 10)  # measurements after it by which it has to be said
RESULTS = Path(__file__).parent / "results" / "missed_collapses.md"
GUIDE = Path(__file__).parents[2] / "docs" / "diagnosing.md"


def false_collapses(prompts: int, traces: int, retrieval: float, runs: int = RUNS) -> float:
    """Share of runs with a collapse in their history, where retrieval is the same all along.

    Args:
        prompts: Distinct ones in each measurement.
        traces: Those that are scored in each.
        retrieval: Probability that a reasoning is retrieved, at least that of guessing.
        runs: Seeds.
    """
    chance = 1 / prompts
    generator = np.random.default_rng([prompts, traces, round(1000 * retrieval)])
    hits = generator.binomial(traces, max(retrieval, chance), size=(runs, LENGTH))
    return float(follow_dependence(hits, traces, chance).collapsed.any(axis=1).mean())


def missed_collapses(prompts: int, traces: int, retrieval: float, runs: int = RUNS) -> list[float]:
    """Shares of runs without a word of collapse by each of `AFTER`, where retrieval has fallen to chance."""
    chance = 1 / prompts
    generator = np.random.default_rng([prompts, traces, round(1000 * retrieval), 1])
    before = generator.binomial(traces, max(retrieval, chance), size=(runs, BEFORE))
    after = generator.binomial(traces, chance, size=(runs, max(AFTER)))
    collapsed = follow_dependence(np.concatenate([before, after], axis=1), traces, chance).collapsed[:, BEFORE:]
    return [float(1 - collapsed[:, :count].any(axis=1).mean()) for count in AFTER]


def table(retrieval: float) -> str:
    """Missed collapses from a retrieval accuracy to chance, as Markdown."""
    lines = [
        "| prompts | " + " | ".join(f"{traces} traces" for traces in TRACES) + " |",
        "|---" * (len(TRACES) + 1) + "|",
    ]
    for prompts in PROMPTS:
        cells = []
        for traces in TRACES:
            missed = missed_collapses(prompts, traces, retrieval)
            cells.append(" / ".join(f"{100 * share:.0f}" for share in missed))
        lines.append(f"| {prompts} | {' | '.join(cells)} |")
    return "\n".join(lines)


def fill(name: str, text: str) -> None:
    """Puts text into the guide, between `<!-- name -->` and the next `<!-- end -->`."""
    before, mark, rest = GUIDE.read_text().partition(f"<!-- {name} -->\n")
    _, end, after = rest.partition("<!-- end -->")
    if not (mark and end):
        raise SystemExit(f"{GUIDE} has no place for {name!r}")
    GUIDE.write_text(f"{before}{mark}{text}\n{end}{after}")


def main() -> None:
    said = [
        false_collapses(prompts, traces, retrieval)
        for prompts in PROMPTS
        for traces in TRACES
        for retrieval in (1.0, 0.5, 0.0)
    ]
    parts = [
        f"Runs of {LENGTH} measurements in which nothing changes, at retrieval 1.0, 0.5 and chance: a collapse is "
        f"said of at most {max(said):.1%} of {RUNS} runs in any cell, of {sum(said) / len(said):.2%} on average.",
        f"Missed collapses, in % of {RUNS} runs: {BEFORE} measurements at the retrieval named, then chance. Each "
        f"cell: after {', '.join(map(str, AFTER[:-1]))} and {AFTER[-1]} measurements at chance.",
    ]
    for retrieval in (1.0, 0.5):
        parts += [f"From retrieval {retrieval}:", table(retrieval)]
    text = "\n\n".join(parts)
    RESULTS.write_text(text + "\n")
    fill("missed collapses", text)


if __name__ == "__main__":
    main()

"""What warned of failure in 25 training runs of other people: our alarms, the paper's signals and simple ones.

    git clone https://github.com/Cai-Zichun-Jason/RL-Result
    python -m research.real_runs RL-Result    # a minute

Reads the `train.log`s of a clone that its user makes; no file of it is copied here. The runs are Sokoban with the
paper's code, Qwen2.5-0.5B to 3B and Qwen3-4B, with PPO, GRPO and Dr. GRPO, filter on and off, 128 episodes a step and
at most 200 steps, 512 held-out episodes every 10 steps, one seed each. Constants of `health`, and thresholds of the
other signals, were fixed on the 12 runs of Qwen2.5-0.5B and 3B; the 13 others were read afterwards.

Writes `results/real_runs.md` and `results/real_runs.png`, and the table into `docs/health.md`.
"""

import argparse
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from ragen2_trl.instrument.health import Alarm, health
from ragen2_trl.instrument.verdict import Evidence, judge
from ragen2_trl.record.logs import read_log
from ragen2_trl.report.style import BLUE, GREEN, GREY, ORANGE, drawn_in_style
from research.statistics import correlation_interval

RESULTS = Path(__file__).parent / "results"
GUIDE = Path(__file__).parents[1] / "docs" / "health.md"
DEVELOPED_ON = ("Qwen2.5-0.5B", "Qwen2.5-3B")
EPISODES, HELD_OUT = 128, 512
# Two standard errors of a difference of held-out success: more than that above all before is a new best.
NEW_BEST = 2 * math.sqrt(2 * 0.2 * 0.8 / HELD_OUT)

TASK = "CoordSokoban"
VALID, THINKING = f"train/{TASK}/action_is_valid", "collapse/valid_thinking_rate"
SUCCESS, HELD_OUT_SUCCESS = f"train/{TASK}/success", f"val-env/{TASK}/success"
FIRST, EVERY = "collapse_first_turn_sample", "collapse_trajectory_sample"


@dataclass(frozen=True)
class Rule:
    """An alarm when the mean of some rows has fallen to a share of its best, or risen to a multiple of its lowest."""

    name: str
    key: str
    rows: int
    rises: bool = False

    @property
    def thresholds(self) -> list[float]:
        return [1.1, 1.2, 1.35, 1.5, 1.75, 2, 2.5, 3, 4, 6, 10] if self.rises else [x / 20 for x in range(19, 0, -1)]

    def best_threshold(self, runs: Sequence["RealRun"]) -> float:
        return max(self.thresholds, key=lambda threshold: Score.of(runs, partial(self.first, threshold)).order)

    def first(self, threshold: float, run: "RealRun") -> int | None:
        points = run.points(self.key)
        best: float | None = None
        for end in range(self.rows, len(points) + 1):
            level = float(np.mean([value for _, value in points[end - self.rows : end]]))
            best = level if best is None else min(best, level) if self.rises else max(best, level)
            if best > 0 and (level >= threshold * best if self.rises else level <= threshold * best):
                return points[end - 1][0]
        return None


# The paper's first, then simple ones. Some are logged in every step, others in every fifth or tenth.
RULES = (
    Rule("MI z-score falls", f"{EVERY}/mi_zscore_ema", 2),
    Rule("MI (first turns) falls", f"{FIRST}/mi_seq_estimate", 2),
    Rule("retrieval accuracy falls", f"{EVERY}/retrieval_accuracy", 2),
    Rule("retrieval accuracy (first turns) falls", f"{FIRST}/retrieval_accuracy", 2),
    Rule("policy entropy falls", "actor/entropy", 5),
    Rule("policy entropy rises", "actor/entropy", 5, rises=True),
    Rule("valid actions fall", VALID, 5),
    Rule("closed reasoning falls", THINKING, 2),
    Rule("length rises", "response_length/mean", 5, rises=True),
    Rule("gradient norm rises", "actor/grad_norm", 5, rises=True),
    Rule("success in training falls", SUCCESS, 10),
    Rule("held-out success falls", HELD_OUT_SUCCESS, 2),
)


@dataclass(frozen=True)
class RealRun:
    """A run by its log rows."""

    name: str
    rows: list[dict[str, Any]]

    def points(self, key: str) -> list[tuple[int, float]]:
        return [(row["step"], row[key]) for row in self.rows if math.isfinite(row.get(key, math.nan))]

    @property
    def is_of_development(self) -> bool:
        return self.name.startswith(tuple(f"{model}-" for model in DEVELOPED_ON))

    @cached_property
    def held_out(self) -> list[tuple[int, float]]:
        return self.points(HELD_OUT_SUCCESS)

    @cached_property
    def halved(self) -> int | None:
        """The first evaluation from which held-out success is at most half of its best, for good."""
        half = max(value for _, value in self.held_out) / 2
        halved = None
        for step, value in reversed(self.held_out):
            if value > half:
                break
            halved = step
        return halved

    @cached_property
    def alarms(self) -> list[Alarm]:
        return health(self.rows, completions=EPISODES)

    @cached_property
    def failing(self) -> int | None:
        return min((alarm.step for alarm in self.alarms if alarm.failing), default=None)

    @cached_property
    def template(self) -> int | None:
        """When `judge` says that reasoning of first turns has become a template."""
        evidence = [
            Evidence(
                step=row["step"],
                retrieval_accuracy=row[f"{FIRST}/retrieval_accuracy"],
                retrieval_chance=row[f"{FIRST}/retrieval_chance_level"],
                num_completions=row["collapse/first_turn_num_valid"],
                mi_seq=row[f"{FIRST}/mi_seq_estimate"],
                mi_upper_bound=row[f"{FIRST}/mi_upper_bound"],
                conditional_entropy_token=row[f"{FIRST}/conditional_entropy_est"],
                updates=row["step"] - 1,
            )
            for row in self.rows
            if f"{FIRST}/retrieval_accuracy" in row and row.get("collapse/first_turn_num_valid", 0) >= 1
        ]
        return next((one.evidence.step for one in judge(evidence) if one.is_collapsed), None)

    def is_premature(self, step: int) -> bool:
        """Whether held-out success was still to reach a new best, so that whoever had stopped would have lost it."""
        before = max((value for at, value in self.held_out if at <= step), default=0.0)
        return max((value for at, value in self.held_out if at > step), default=0.0) > before + NEW_BEST


@dataclass(frozen=True)
class Score:
    """How an alarm did on some runs: failures that it warned of in time, and healthy runs that it accused."""

    caught: int
    failures: int
    leads: list[int]
    late: int
    premature: int
    accused: int
    healthy: int

    @classmethod
    def of(cls, runs: Sequence[RealRun], first: Callable[[RealRun], int | None]) -> "Score":
        leads, late, premature, accused = [], 0, 0, 0
        for run in runs:
            step = first(run)
            if step is None:
                continue
            if run.halved is None:
                accused += 1
            elif run.is_premature(step):
                premature += 1
            else:
                leads.append(run.halved - step)
                late += step >= run.halved
        failures = sum(run.halved is not None for run in runs)
        return cls(len(leads) - late, failures, leads, late, premature, accused, len(runs) - failures)

    @property
    def order(self) -> tuple[float, float]:
        return self.caught - self.premature - self.accused, float(np.median(self.leads)) if self.leads else -1e9

    @property
    def cells(self) -> str:
        lead = f" ({np.median(self.leads):+.0f})" if self.leads else ""
        found = f"{self.caught} of {self.failures}{lead}"
        return f"{found} | {self.late} | {self.premature} | {self.accused} of {self.healthy}"


def read_runs(clone: Path) -> list[RealRun]:
    """The runs of a clone, by the names of their folders.

    Raises:
        SystemExit: If there are none.
    """
    runs = []
    for path in sorted(clone.glob("*/train.log")):
        rows, _ = read_log(path)
        last: dict[int, dict[str, Any]] = {}
        for row in rows:  # an evaluation after the last step is a row of its own
            last[row["step"]] = {**last.get(row["step"], {}), **row}
        runs.append(RealRun(path.parent.name.replace("sokoban-", ""), [last[step] for step in sorted(last)]))
    if not runs:
        raise SystemExit(f"{clone} holds no */train.log: git clone https://github.com/Cai-Zichun-Jason/RL-Result")
    return runs


def table(runs: Sequence[RealRun]) -> str:
    """How each alarm did, as Markdown: on the runs that thresholds were chosen on, and on the others."""
    parts = [run for run in runs if run.is_of_development], [run for run in runs if not run.is_of_development]
    columns = "caught (lead) | late | too early | accused"
    lines = [f"| alarm | threshold | 12 runs: {columns} | 13 runs: {columns} |", "|---" * 10 + "|"]

    def row(name: str, threshold: str, first: Callable[[RealRun], int | None]) -> str:
        return f"| {name} | {threshold} | {' | '.join(Score.of(part, first).cells for part in parts)} |"

    lines.append(row("**`health`: failing**", "fixed", lambda run: run.failing))
    lines.append(row("`judge`: reasoning has become a template", "fixed", lambda run: run.template))
    for rule in RULES:
        best = rule.best_threshold(parts[0])
        shown = f"{best:g} of its {'lowest' if rule.rises else 'best'}"
        lines.append(row(rule.name, shown, partial(rule.first, best)))
    return "\n".join(lines)


def run_table(runs: Sequence[RealRun]) -> str:
    """Each run: success, when it halved, and when either alarm was given."""
    lines = [
        "| run | held-out success: first, best (step), last | halved for good | failing | lead | template |",
        "|---|---|---|---|---|---|",
    ]
    for run in runs:
        step, best = max(run.held_out, key=lambda point: point[1])
        lead = "" if run.halved is None or run.failing is None else str(run.halved - run.failing)
        shown = ("" if step is None else str(step) for step in (run.halved, run.failing))
        lines.append(
            f"| {run.name} | {run.held_out[0][1]:.1%}, {best:.1%} ({step}), {run.held_out[-1][1]:.1%} | "
            f"{' | '.join(shown)} | {lead} | {'' if run.template is None else run.template} |"
        )
    return "\n".join(lines)


def correlations(runs: Sequence[RealRun]) -> str:
    """Spearman's correlation over runs with success in the last fifth, with a bootstrap over runs."""
    final, names = [_mean(run, HELD_OUT_SUCCESS, 0.8) for run in runs], [run.name for run in runs]
    lines = ["| signal | its mean over the run | its mean over the last fifth |", "|---|---|---|"]
    for name, key in (
        ("z-score of mutual information, all turns", f"{EVERY}/mi_zscore"),
        ("z-score of mutual information, first turns", f"{FIRST}/mi_zscore"),
        ("retrieval accuracy, all turns", f"{EVERY}/retrieval_accuracy"),
        ("retrieval accuracy, first turns", f"{FIRST}/retrieval_accuracy"),
        ("entropy of the reasoning given its prompt", f"{EVERY}/conditional_entropy_est"),
        ("policy entropy", "actor/entropy"),
        ("closed reasoning", THINKING),
        ("valid actions", VALID),
    ):
        cells = []
        for share in (0.0, 0.8):
            found = correlation_interval([_mean(run, key, share) for run in runs], final, names)
            cells.append(f"{found.value:+.2f} ({found.low:+.2f} to {found.high:+.2f})")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _mean(run: RealRun, key: str, share: float) -> float:
    """Over the steps after a share of the run, or the last value where there is none."""
    points = run.points(key)
    late = [value for step, value in points if step >= share * run.rows[-1]["step"]]
    return float(np.mean(late or [points[-1][1]]))


@drawn_in_style
def draw(runs: Sequence[RealRun]) -> Figure:
    """A small chart for each run."""
    columns = 5
    figure = Figure(figsize=(15, 2.5 * math.ceil(len(runs) / columns) + 0.6), layout="constrained")
    axes = figure.subplots(math.ceil(len(runs) / columns), columns, sharey=True, squeeze=False)
    for axis in axes.flat[len(runs) :]:
        axis.set_axis_off()
    for axis, run in zip(axes.flat, runs, strict=False):
        for key, label, look in (
            (
                HELD_OUT_SUCCESS,
                "held-out success, of its best",
                {"color": "#000000", "marker": "o", "markersize": 2.5},
            ),
            (VALID, "valid actions", {"color": BLUE, "linewidth": 1.2}),
            (f"{FIRST}/retrieval_accuracy", "retrieval accuracy, first turns", {"color": GREEN, "linestyle": "--"}),
        ):
            points = run.points(key)
            most = max(value for _, value in points) if key == HELD_OUT_SUCCESS else 1.0
            axis.plot([step for step, _ in points], [value / most for _, value in points], label=label, **look)
        for step, label, look in (
            (run.halved, "success has halved for good", {"color": GREY, "linestyle": ":", "linewidth": 2.5}),
            (run.failing, "health: failing", {"color": ORANGE, "linewidth": 2.2}),
            (run.template, "judge: a template", {"color": GREEN, "linestyle": "-.", "linewidth": 1.4}),
        ):
            if step is not None:
                axis.axvline(step, label=label, **look)
        axis.set_title(run.name + ("" if run.is_of_development else " (kept)"), fontsize=9)
        axis.set_ylim(0, 1.05)
        axis.set_xlim(left=0)
    handles: dict[str, Any] = {}
    for axis in axes.flat:
        handles |= {label: handle for handle, label in zip(*axis.get_legend_handles_labels(), strict=True)}
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=6)
    return figure


def fill(page: Path, parts: Mapping[str, str]) -> None:
    """Puts texts into a page, each between `<!-- name -->` and the next `<!-- end -->`."""
    text = page.read_text()
    for name, part in parts.items():
        before, mark, rest = text.partition(f"<!-- {name} -->\n")
        _, end, after = rest.partition("<!-- end -->")
        if not (mark and end):
            raise SystemExit(f"{page} has no place for {name!r}")
        text = f"{before}{mark}{part}\n{end}{after}"
    page.write_text(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("clone", type=Path, help="Folder of a clone of github.com/Cai-Zichun-Jason/RL-Result.")
    runs = read_runs(parser.parse_args().clone)
    parts = {"real runs": table(runs), "real correlations": correlations(runs), "each real run": run_table(runs)}
    fill(RESULTS / "real_runs.md", parts)
    fill(GUIDE, {"real runs": parts["real runs"]})
    draw(runs).savefig(RESULTS / "real_runs.png", dpi=110)


if __name__ == "__main__":
    main()

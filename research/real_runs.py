"""What warned of failure in 25 training runs of other people: `health`, other monitors, the paper's signals.

    git clone https://github.com/Cai-Zichun-Jason/RL-Result
    pip install rldoctor==0.2.0 rlwatch==0.5.1 rlprobe==0.1.0    # optional; without them their rows are left out
    python -m research.real_runs RL-Result    # minutes

Reads the `train.log`s of a clone that its user makes; no file of it is copied here. The runs are Sokoban with the
paper's code, Qwen2.5-0.5B to 3B and Qwen3-4B, with PPO, GRPO and Dr. GRPO, filter on and off, 128 episodes a step and
at most 200 steps, 512 held-out episodes every 10 steps, one seed each. The limits of `health` were chosen with all 25
runs in sight, and so is each threshold of the single signals here.

Writes `results/real_runs.md` and `results/real_runs.png`.
"""

import argparse
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from importlib.metadata import PackageNotFoundError, version
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from ragen2_trl.instrument.health import KEYS, SIGNALS, Health, Watch, health
from ragen2_trl.instrument.verdict import Evidence, judge
from ragen2_trl.record.logs import read_log
from ragen2_trl.report.style import BLUE, GREEN, GREY, ORANGE, drawn_in_style
from research.statistics import correlation_interval

RESULTS = Path(__file__).parent / "results"
PAGE = RESULTS / "real_runs.md"
EPISODES = 128
MAX_LEAD = 60  # steps; a longer one is no warning of this failure
LIMITS = [x / 100 for x in range(30, 75, 5)]  # that families of runs are left out over

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


First = Callable[["RealRun"], int | None]  # the step of a run's first alarm


@dataclass(frozen=True)
class RealRun:
    """A run by its log rows."""

    name: str
    rows: list[dict[str, Any]]

    def points(self, key: str) -> list[tuple[int, float]]:
        return [(row["step"], row[key]) for row in self.rows if math.isfinite(row.get(key, math.nan))]

    @property
    def family(self) -> str:
        """Model and algorithm: runs with the filter on and off are alike."""
        return self.name.rpartition("-filter")[0]

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

    @property
    def kind(self) -> str:
        """`healthy`, `failed`, or `never learned`: at its best before training."""
        if self.halved is None:
            return "healthy"
        best = max(self.held_out, key=lambda point: point[1])
        return "never learned" if best[0] == 0 else "failed"

    def first(self, *states: str, keys: Sequence[str] = ()) -> int | None:
        """When `health` first tells one of some states, of all log keys or of some."""
        rows = [{key: row[key] for key in ("step", *keys) if key in row} for row in self.rows] if keys else self.rows
        return next((one.since for one in health(rows, completions=EPISODES).history if one.name in states), None)

    @cached_property
    def health(self) -> Health:
        return health(self.rows, completions=EPISODES)

    @cached_property
    def failing(self) -> int | None:
        return self.first("failing")

    def beyond(self, limits: Mapping[str, float]) -> int | None:
        """When validity is first beyond its limits, by the rule of `health` with other limits."""
        steps = []
        for key, limit in limits.items():
            watch, signal = Watch(), replace(SIGNALS[KEYS[key.replace(TASK, "*")]], limit=limit)
            for step, value in self.points(key):
                watch.take(signal, value, step, step, EPISODES, 0.0)
                if watch.beyond_since is not None:
                    steps.append(step)
                    break
        return min(steps, default=None)

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


@dataclass(frozen=True)
class Score:
    """How an alarm did on some runs. No run is exempt."""

    leads: list[int] = field(default_factory=list)  # steps from alarm to halving, where they are 1 to MAX_LEAD
    early: int = 0
    late: int = 0
    failed: int = 0
    accused: int = 0
    healthy: int = 0

    @classmethod
    def of(cls, runs: Sequence[RealRun], first: First) -> "Score":
        failed, healthy = ([run for run in runs if run.kind == kind] for kind in ("failed", "healthy"))
        leads = [(run.halved or 0) - step for run in failed if (step := first(run)) is not None]
        return cls(
            leads=[lead for lead in leads if 0 < lead <= MAX_LEAD],
            early=sum(lead > MAX_LEAD for lead in leads),
            late=sum(lead <= 0 for lead in leads),
            failed=len(failed),
            accused=sum(first(run) is not None for run in healthy),
            healthy=len(healthy),
        )

    @property
    def order(self) -> tuple[float, float]:
        return len(self.leads) - self.early - self.accused, float(np.median(self.leads)) if self.leads else -1e9

    @property
    def cells(self) -> str:
        lead = f"{np.median(self.leads):g}" if self.leads else ""
        missed = self.failed - len(self.leads) - self.early - self.late
        found = f"{len(self.leads)} of {self.failed} | {lead} | {self.early} | {self.late} | {missed}"
        return f"{found} | {self.accused} of {self.healthy}"


def with_dead_rows(state: str, keys: Sequence[str] = ()) -> First:
    """The alarm where every fifth row is a dead step: no gradient and nothing clipped, as TRL logs it."""
    dead = {"actor/grad_norm": 0.0, "actor/pg_clipfrac": 0.0}

    def first(run: RealRun) -> int | None:
        rows = [row | dead if number % 5 == 4 else row for number, row in enumerate(run.rows)]
        return replace(run, rows=rows).first(state, keys=keys)

    return first


def left_out(runs: Sequence[RealRun]) -> First:
    """The rule with limits that are chosen, for each family of runs, on all other families."""
    choices = [{VALID: valid, THINKING: thinking} for valid, thinking in product(LIMITS, LIMITS)]
    told = [{run.name: run.beyond(limits) for run in runs} for limits in choices]
    firsts: dict[str, int | None] = {}
    for family in {run.family for run in runs}:
        others = [run for run in runs if run.family != family]
        best = max(told, key=lambda steps: Score.of(others, by_name(steps)).order)
        firsts |= {run.name: best[run.name] for run in runs if run.family == family}
    return by_name(firsts)


# Other monitors, with their own settings. Each is asked after every fifth row, as its live form reads a growing log.
PEERS = {"rldoctor": ("warning", "critical"), "rlwatch": ("warning", "critical"), "rlprobe": ("warn", "critical")}
PEER_KEYS = {  # of rlwatch and rlprobe; rldoctor maps verl's keys itself
    "entropy": "actor/entropy",
    "kl": "actor/ppo_kl",
    "reward": "critic/score/mean",
    "loss": "actor/pg_loss",
    "grad_norm": "actor/grad_norm",
    "clip_fraction": "actor/pg_clipfrac",
    "length": "response_length/mean",
    "truncated": "response_length/clip_ratio",
}


def alerts(peer: str, run: RealRun) -> Iterator[tuple[int, str]]:
    """(step, severity) of each alert that another monitor gives of a run."""
    rows = [{key: row.get(name) for key, name in PEER_KEYS.items()} | {"step": row["step"]} for row in run.rows]
    if peer == "rldoctor":
        from rl_doctor.live import LiveMonitor

        monitor = LiveMonitor(check_every=5, on_finding=lambda finding: None)
        for row in run.rows:
            yield from ((row["step"], one.severity.name.lower()) for one in monitor.log(row, step=row["step"]))
    elif peer == "rlwatch":
        from rlwatch.config import RLWatchConfig
        from rlwatch.detectors import DetectorSuite

        suite = DetectorSuite(RLWatchConfig())
        names = {"entropy": "entropy", "kl": "kl_divergence", "reward": "reward_mean", "loss": "loss"}
        for row in rows:
            values = {name: row[key] for key, name in {**names, "grad_norm": "grad_norm"}.items()}
            yield from ((row["step"], one.severity) for one in suite.check_step(row["step"], **values))
    else:
        from rlprobe.doctor.engine import diagnose_view
        from rlprobe.doctor.runview import RunView
        from rlprobe.schemas import RunManifest, StepRecord

        names = {"entropy": "entropy_mean", "kl": "kl_mean", "reward": "reward_mean", "length": "completion_len_mean"}
        names |= {"truncated": "truncation_rate"} | {key: key for key in ("loss", "grad_norm", "clip_fraction")}
        algorithm = "ppo" if "-PPO-" in run.name else "grpo"
        manifest = RunManifest(run_id=run.name, created_at="2026-01-01T00:00:00", algorithm=algorithm)
        records = [StepRecord(step=row["step"], **{name: row[key] for key, name in names.items()}) for row in rows]
        for end in range(30, len(records) + 1, 5):  # its live form begins after 30 rows
            findings = diagnose_view(RunView(manifest, records[:end]))
            yield from ((records[end - 1].step, one.severity) for one in findings)


def of_peers(runs: Sequence[RealRun]) -> Iterator[tuple[str, First]]:
    """The monitors that are installed, each by its warnings and by its critical alerts alone."""
    for peer, severities in PEERS.items():
        try:
            name = f"`{peer}` {version(peer)}"
        except PackageNotFoundError:
            continue
        given = {run.name: list(alerts(peer, run)) for run in runs}
        for severity, counted in zip(severities, (severities, severities[1:]), strict=True):
            firsts = {
                run: min((step for step, one in told if one in counted), default=None) for run, told in given.items()
            }
            yield f"{name}: {severity}", by_name(firsts)


def by_name(firsts: Mapping[str, int | None]) -> First:
    return lambda run: firsts[run.name]


def read_runs(clone: Path) -> list[RealRun]:
    """The runs of a clone, by the names of their folders.

    Raises:
        SystemExit: If there are none.
    """
    runs = []
    for path in sorted(clone.glob("*/train.log")):
        rows = read_log(path).rows
        last: dict[int, dict[str, Any]] = {}
        for row in rows:  # an evaluation after the last step is a row of its own
            last[row["step"]] = {**last.get(row["step"], {}), **row}
        runs.append(RealRun(path.parent.name.replace("sokoban-", ""), [last[step] for step in sorted(last)]))
    if not runs:
        raise SystemExit(f"{clone} holds no */train.log: git clone https://github.com/Cai-Zichun-Jason/RL-Result")
    return runs


def table(runs: Sequence[RealRun]) -> str:
    """How each alarm did, as Markdown."""
    plain = [key for key, name in KEYS.items() if key[:5] != "train" and name not in ("valid", "valid_thinking")]
    firsts: list[tuple[str, First]] = [
        ("**`health`: failing**", lambda run: run.failing),
        ("the same rule, limits chosen on the other families", left_out(runs)),
        ("`health`: failing, a fifth of the rows dead", with_dead_rows("failing")),
        ("`health`: drifting, from plain TRL's columns", lambda run: run.first("drifting", keys=plain)),
        ("`health`: drifting, a fifth of the rows dead", with_dead_rows("drifting", plain)),
        ("`health`: failing, without validity", lambda run: run.first("failing", keys=[*plain, SUCCESS])),
        ("`judge`: reasoning has become a template", lambda run: run.template),
        *of_peers(runs),
        ("an alarm at step 50, whatever happens", lambda run: 50),
    ]
    for rule in RULES:
        best = rule.best_threshold(runs)
        shown = f"{rule.name} to {best:g} of its {'lowest' if rule.rises else 'best'}"
        firsts.append((shown, partial(rule.first, best)))
    head = "| alarm | in time | median lead | too early | late | missed | accused |"
    lines = [f"| {name} | {Score.of(runs, first).cells} |" for name, first in firsts]
    return "\n".join([head, "|---" * 7 + "|", *lines])


def run_table(runs: Sequence[RealRun]) -> str:
    """Each run: success, when it halved, when either alarm was given, and its states."""
    lines = [
        "| run | held-out success: first, best (step), last | halved for good | failing | lead | template | states |",
        "|---|---|---|---|---|---|---|",
    ]
    for run in runs:
        step, best = max(run.held_out, key=lambda point: point[1])
        lead = "" if run.halved is None or run.failing is None else str(run.halved - run.failing)
        shown = ("" if step is None else str(step) for step in (run.halved, run.failing))
        lines.append(
            f"| {run.name} | {run.held_out[0][1]:.1%}, {best:.1%} ({step}), {run.held_out[-1][1]:.1%} | "
            f"{' | '.join(shown)} | {lead} | {'' if run.template is None else run.template} | "
            f"{', '.join(f'{one.title} {one.since}' for one in run.health.history[1:])} |"
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
        axis.set_title(run.name, fontsize=9)
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
    fill(PAGE, parts)
    draw(runs).savefig(RESULTS / "real_runs.png", dpi=110)


if __name__ == "__main__":
    main()

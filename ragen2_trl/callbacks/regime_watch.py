"""The measurements of a run, as far as verdicts need them, kept over checkpoints."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import fmean
from typing import Any

from ragen2_trl.instrument.verdict import COLLAPSES, DEPENDENT, Evidence, Finding, judge, warnings
from ragen2_trl.trainers.stock import StockTrainer


@dataclass
class RegimeWatch:
    """Follows a run, and says what begins with a measurement: once an episode, in plain words with the numbers.

    Args:
        measurements: Of the run so far, in their order.
    """

    measurements: list[Evidence] = field(default_factory=list)

    @classmethod
    def restored(cls, state: Mapping[str, Any]) -> "RegimeWatch":
        """From what `state` gave."""
        return cls([Evidence(**measurement) for measurement in state["measurements"]])

    @property
    def state(self) -> dict[str, Any]:
        """Numbers and lists, for a checkpoint."""
        return asdict(self)

    def update(self, evidence: Evidence) -> tuple[Finding, dict[str, str]]:
        """Takes in a measurement; gives what it says, and what to warn of by regime."""
        self.measurements.append(evidence)
        findings = judge(self.measurements)
        return findings[-1], warnings(findings)


def logged_beside(trainer: StockTrainer) -> dict[str, float]:
    """What a trainer has logged of the completions that it has just sampled, and a verdict needs to know of them."""
    latest = {key: values[-1] for key, values in trainer._metrics["train"].items() if values}
    success = next((latest[key] for key in latest if key.startswith("env/") and key.endswith("/success")), None)
    beside = {"success": success, "clipped_ratio": latest.get("completions/clipped_ratio")}
    return {name: value for name, value in beside.items() if value is not None}


def evidence_of(
    trainer: StockTrainer,
    step: int,
    metrics: Mapping[str, float],
    valid_rate: float,
    beside: Sequence[Mapping[str, float]],
) -> Evidence:
    """A measurement, with what the trainer has logged of the completions that were measured.

    Args:
        trainer: During the optimizer step `step`.
        metrics: From `information_metrics`.
        valid_rate: Share of turns whose reasoning is closed by a tag.
        beside: Of each generation that was measured, `logged_beside`; they have as many completions each.
    """
    empty = getattr(trainer, "_empty_steps", None)  # of our trainer, where not every step has an update
    known = {name: [one[name] for one in beside if name in one] for name in ("success", "clipped_ratio")}
    return Evidence.of(
        metrics,
        step=step,
        updates=trainer.state.global_step - (empty.empty_steps if empty else 0),
        valid_thinking_rate=valid_rate,
        **{name: fmean(values) for name, values in known.items() if values},
    )


def regime_flags(finding: Finding) -> dict[str, float]:
    """What a measurement says, for the logs: 1 or 0 each, and nothing of what it cannot tell."""
    conclusive = finding.regime in (*DEPENDENT, *COLLAPSES, "independent")
    flags = {"conclusive": conclusive, "collapsed": finding.regime in COLLAPSES, "low_entropy": finding.entropy_is_low}
    if conclusive:
        flags["depends_on_prompt"] = finding.regime in DEPENDENT
    return {f"mi/regime/{name}": float(value) for name, value in flags.items()}

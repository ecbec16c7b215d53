"""The measurements of a run, as far as verdicts need them, kept over checkpoints."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from ragen2_trl.instrument.verdict import Evidence, Finding, judge
from ragen2_trl.instrument.wording import warnings


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

"""When reasoning drifts into collapse: one warning an episode, in plain words with the numbers."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from ragen2_trl.instrument.information import ALPHA, FORMAT_RATIO, PATIENCE, chance_p_value, classify_regime


@dataclass
class RegimeWatch:
    """Follows the regimes of a run and says when one of them is a collapse.

    *Template collapse*: reasoning depends on its prompt no longer, or less than half as much as at the start, while
    its entropy stays up (see `classify_regime`). *Format collapse*: the share of turns with closed reasoning falls
    below half of what it was.

    Args:
        start: First measurement of the run, with its step and valid-thinking rate: what later ones are compared to.
        regimes: (step, regime) of each measurement.
        collapsed: Consecutive measurements, up to now, in either collapse.
    """

    start: dict[str, float] = field(default_factory=dict)
    regimes: list[tuple[int, str]] = field(default_factory=list)
    collapsed: dict[str, int] = field(default_factory=lambda: {"template_collapse": 0, "format_collapse": 0})

    def update(self, step: int, metrics: Mapping[str, float], valid_rate: float) -> dict[str, str]:
        """Takes in a measurement of `information_metrics`; gives a warning for each collapse that begins with it."""
        if not self.start:
            self.start = {**metrics, "valid_thinking_rate": valid_rate, "step": step}
        regime = classify_regime(metrics, self.start)
        self.regimes.append((step, regime))
        warnings = {
            "template_collapse": self._template_warning(step, metrics),
            "format_collapse": f"Step {step}: format collapse. {valid_rate:.0%} of turns hold reasoning that a tag "
            f"closes, {self._was('valid_thinking_rate', '.0%')}.",
        }
        now = {
            "template_collapse": regime == "template_collapse",
            "format_collapse": valid_rate < FORMAT_RATIO * self.start["valid_thinking_rate"],
        }
        for name, is_now in now.items():
            self.collapsed[name] = self.collapsed[name] + 1 if is_now else 0
        return {name: text for name, text in warnings.items() if self.collapsed[name] == PATIENCE}

    @property
    def has_depended(self) -> bool:
        """Whether reasoning depended on its prompt at any time of the run."""
        return any(regime in ("diverse", "compressed") for _, regime in self.regimes)

    def _template_warning(self, step: int, metrics: Mapping[str, float]) -> str:
        if chance_p_value(metrics) <= ALPHA:
            depends = "depends much less on its prompt than it did"
        else:
            depends = f"{'no longer depends' if self.has_depended else 'does not depend'} on its prompt"
        return (
            f"Step {step}: template collapse. Reasoning {depends}: the own prompt explains it best in "
            f"{metrics['retrieval_accuracy']:.1%} of cases, where guessing gives {metrics['retrieval_chance']:.1%} "
            f"({self._was('retrieval_accuracy', '.1%')}). Mutual information is {metrics['mi_seq']:.2f} of at most "
            f"{metrics['mi_upper_bound']:.2f} nats, while entropy is {metrics['conditional_entropy_token']:.2f} nats "
            f"per token ({self._was('conditional_entropy_token', '.2f')})."
        )

    def _was(self, key: str, form: str) -> str:
        return f"{self.start[key]:{form}} at step {self.start['step']:.0f}"

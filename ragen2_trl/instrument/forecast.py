"""What SNR filtering would do to a policy, from the rewards of one batch of rollouts (arXiv 2604.06268, Table 8)."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from ragen2_trl.filtering import group_score, select_groups, selection_metrics, zero_variance

VALUES = (0.5, 0.8, 0.9, 0.95, 1.0)
# Std/mean of groups' reward standard deviations in Table 8: with the first two the filter gained, with the last not.
GAINED, LOST = (1.29, 1.16), 0.33
# Our own test of that relation over 125 pairs of runs: research/results, tab8.
OURS = "rank correlation 0.14, 95 % interval -0.13 to 0.37"
DEFAULT = 0.9


@dataclass(frozen=True)
class Forecast:
    """What a filter would find in one batch. Fractions are of the groups.

    Args:
        num_groups, group_size: N and G.
        reward_std_spread: Standard deviation over mean of the groups' reward standard deviations, as in Table 8.
        reward_variance_spread: The same of their variances, which the filter ranks by.
        zero_variance: Groups whose rewards do not vary.
        too_easy, too_hard: Those of them with the best, or the worst, reward of the batch.
        kept: By `snr_value`, the groups that the default strategy keeps.
        update_share: Of a training step's time, what its update takes; `None` where it was not measured.
    """

    num_groups: int
    group_size: int
    reward_std_spread: float
    reward_variance_spread: float
    zero_variance: float
    too_easy: float
    too_hard: float
    kept: dict[float, float]
    update_share: float | None = None

    def update_saved(self, value: float) -> float:
        """The share of the update's time that is not computed, with completions alike in length."""
        return 1 - self.kept[value]

    def step_saved(self, value: float) -> float | None:
        """The share of a step's time, sampling included."""
        return None if self.update_share is None else self.update_saved(value) * self.update_share


def forecast_filter(rewards: Tensor, values: Sequence[float] = VALUES, update_share: float | None = None) -> Forecast:
    """What the default strategy, `top_p`, would do with one batch.

    Args:
        rewards: (N, G) weighted reward sums; those that are not finite are left out.
        values: of `snr_value`.
        update_share: see `Forecast`.

    >>> import torch
    >>> forecast = forecast_filter(torch.tensor([[1.0, 0.0], [1.0, 1.0], [0.0, 0.0], [0.0, 0.0]]), (0.9,))
    >>> forecast.kept, forecast.too_easy, forecast.too_hard
    ({0.9: 0.25}, 0.25, 0.5)
    """
    scores, is_zero = group_score(rewards), zero_variance(rewards)
    kept = {value: select_groups(scores, value=value, is_zero=is_zero) for value in values}
    metrics = selection_metrics(rewards, scores, ~is_zero)
    return Forecast(
        num_groups=rewards.shape[0],
        group_size=rewards.shape[1],
        reward_std_spread=metrics["reward_std_spread"],
        reward_variance_spread=metrics["reward_variance_spread"],
        zero_variance=metrics["zero_variance_fraction"],
        too_easy=metrics["dropped_all_best"],
        too_hard=metrics["dropped_all_worst"],
        kept={value: float(mask.double().mean()) for value, mask in kept.items()},
        update_share=update_share,
    )


def advice(forecast: Forecast) -> str:
    """What a filter would save, and that Table 8's predictor of a gain was inconclusive when it was tested here."""
    if forecast.zero_variance == 1:
        return (
            "No group has reward variance: there is nothing to learn from here, with a filter or without. "
            + _difficulty(forecast)
        )
    verdict = (
        f"Std/mean of the groups' reward standard deviations is {forecast.reward_std_spread:.2f}. In the paper's "
        f"Table 8 the filter gained at {GAINED[1]} and {GAINED[0]} and lost at {LOST}; tested here, whether gains go "
        f"with it is inconclusive ({OURS}). Two short runs would tell."
    )
    if DEFAULT in forecast.kept:
        saved = forecast.step_saved(DEFAULT)
        time = "" if saved is None else f" and {saved:.0%} of a step's time"
        verdict += f" snr_value={DEFAULT} would save {forecast.update_saved(DEFAULT):.0%} of the update{time}."
    if forecast.zero_variance >= 0.5:
        verdict += f" {forecast.zero_variance:.0%} of the groups teach nothing. {_difficulty(forecast)}"
    return verdict


def _difficulty(forecast: Forecast) -> str:
    if forecast.too_hard > 2 * forecast.too_easy:
        return "Most of those are too hard: easier prompts, a warm start or more completions a prompt."
    if forecast.too_easy > 2 * forecast.too_hard:
        return "Most of those are too easy: harder prompts."
    return "Look at their rewards: they are neither mostly too easy nor mostly too hard."

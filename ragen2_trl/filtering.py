"""SNR-aware filtering of prompt groups (arXiv 2604.06268, Section 3.3): from rewards to the groups worth training on.

Pure functions. `group_score` says how much signal each prompt carries, `select_groups` keeps the prompts that carry
most of it. The paper ranks groups by the sample variance of their rewards and keeps the smallest set that holds
a fraction rho of the summed variance ("top-p over variance mass"); that is the default here.

    >>> rewards = torch.tensor([[1.0, 0.0, 1.0, 0.0], [1.0, 1.0, 1.0, 1.0], [1.0, 1.0, 1.0, 0.0]])
    >>> scores = group_score(rewards)
    >>> [round(score, 3) for score in scores.tolist()]
    [0.333, 0.0, 0.25]
    >>> select_groups(scores).tolist()
    [True, False, True]
"""

from typing import TypeVar

import torch
from torch import Tensor

T = TypeVar("T")

STRATEGIES = ("all", "nonzero", "top_p", "top_k", "min_p")
SCORES = (
    "reward_variance",
    "reward_std",
    "reward_mean",
    "reward_sum",
    "entropy",
    "entropy_variance",
    "length",
    "random",
)
KEEP = ("largest", "smallest")

ZERO_STD = 1e-6
"""A group whose reward standard deviation is at most this carries no signal: float noise is no variance."""

ZERO_SCORE = 1e-10
"""Scores at most this far from 0 count as zero when `select_groups` is not told which groups are zero."""

ROUNDING = 1e-9  # 0.29 of 100 groups are 29, although 0.29 * 100 is 28.999999999999996


def check_choice(field: str, value: object, allowed: tuple[str, ...]) -> None:
    """Raise a `ValueError` that names the field, the value and the allowed set unless `value` is in `allowed`."""
    if value not in allowed:
        raise ValueError(f"{field}={value!r} is not supported; allowed values: {', '.join(allowed)}.")


def check_selection_value(field: str, strategy: str, value: float) -> None:
    """Raise a `ValueError` unless `value` is in the range that `strategy` gives a meaning to."""
    if strategy in ("top_p", "top_k") and not 0 < value <= 1:
        raise ValueError(f"{field}={value!r} is out of range for {strategy!r}; allowed: 0 < value <= 1.")
    if strategy == "min_p" and not 0 <= value <= 1:
        raise ValueError(f"{field}={value!r} is out of range for 'min_p'; allowed: 0 <= value <= 1.")


def zero_variance(rewards: Tensor) -> Tensor:
    """Groups without signal: a reward standard deviation of at most 1e-6, or fewer than two finite rewards.

    Args:
        rewards: (N, G) rewards. Rewards that are not finite are left out.

    Returns:
        (N,) bool.

    >>> zero_variance(torch.tensor([[0.3, 0.30000004], [1.0, 0.0], [1.0, float("nan")]])).tolist()
    [True, False, True]
    """
    return _nan_variance(_finite(rewards), ddof=1).sqrt() <= ZERO_STD


def group_score(
    rewards: Tensor,
    kind: str = "reward_variance",
    ddof: int = 1,
    *,
    entropies: Tensor | None = None,
    lengths: Tensor | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Score each group of completions by the signal it carries.

    Args:
        rewards: (N, G) raw weighted reward sums, before any normalisation. Sums that are not finite are left out.
        kind: `reward_variance` (the paper's RV, Section 3.3 and Appendix G), `reward_std` (the reference code ranks by
            it and calls it variance), `reward_mean`, `reward_sum`, `entropy` and `entropy_variance` (mean and standard
            deviation over the group of the completions' mean token entropy; the reference's names), `length` (mean
            completion length), or `random` (uniform, the control).
        ddof: 1 divides by G - 1 as the paper does, 0 by G.
        entropies: (N, G) mean token entropy of each completion in nats; for the two entropy scores.
        lengths: (N, G) completion lengths in tokens; for `length`.
        generator: source of the `random` scores, which must not touch the global random state.

    Returns:
        (N,) float64 on the CPU. A group with fewer than two valid rewards, or whose reward standard deviation is at
        most 1e-6, has a reward variance and standard deviation of exactly 0.

    Raises:
        ValueError: for an unknown kind, or when the input that a kind needs is missing.
    """
    check_choice("kind", kind, SCORES)
    rewards = _finite(rewards)
    if kind in ("reward_variance", "reward_std"):
        variance = _nan_variance(rewards, ddof).masked_fill(zero_variance(rewards), 0.0)
        return variance if kind == "reward_variance" else variance.sqrt()
    if kind in ("reward_mean", "reward_sum"):
        score = rewards.nanmean(dim=1) if kind == "reward_mean" else rewards.nansum(dim=1)
        return score.masked_fill((~rewards.isnan()).sum(dim=1) < 2, 0.0)
    if kind == "random":
        return torch.rand(len(rewards), generator=_required("generator", generator, kind), dtype=torch.float64)
    if kind == "length":
        return _required("lengths", lengths, kind).cpu().double().mean(dim=1)
    if kind in ("entropy", "entropy_variance"):
        per_completion = _required("entropies", entropies, kind).cpu().double()
        return per_completion.mean(dim=1) if kind == "entropy" else per_completion.std(dim=1, correction=ddof)
    known = ", ".join(one for one in SCORES if one != kind)
    raise ValueError(f"kind={kind!r} is in SCORES without a branch in group_score: add one; allowed now: {known}.")


def select_groups(
    scores: Tensor,
    strategy: str = "top_p",
    value: float = 0.9,
    *,
    include_zero: bool = False,
    selection_eps: float = 0.01,
    keep: str = "largest",
    is_zero: Tensor | None = None,
    at_least_one: bool = False,
) -> Tensor:
    """Choose the groups to train on. Sorting is stable: of equal scores the earlier group comes first.

    | strategy | keeps |
    |---|---|
    | `all` | every group |
    | `nonzero` | every group with signal |
    | `top_p` | the fewest top-ranked groups that sum to `value` x total - `selection_eps` (Section 3.3) |
    | `top_k` | the first `value` x N groups, rounded down, at least one |
    | `min_p` | groups that score at least `value` x the largest score |

    Args:
        scores: (N,) from `group_score`.
        strategy: one of the above.
        value: a fraction in (0, 1]. `top_p` at 1.0 keeps every candidate.
        include_zero: whether groups without signal are candidates, too.
        selection_eps: slack of `top_p`, in the unit of the scores. A batch whose mass is not above
            `selection_eps / value` counts as noise and keeps nothing.
        keep: `largest` ranks downwards, `smallest` upwards (the paper's reverse ablation; for `min_p` it keeps the
            groups that score at most `value` x the largest score).
        is_zero: (N,) bool, the groups without signal; by default groups with |score| <= 1e-10.
        at_least_one: keep the first candidate of the ranking where the slack of `top_p` would leave nothing.

    Returns:
        (N,) bool on the CPU, True = kept.

    Raises:
        ValueError: for an unknown strategy or direction, or a value out of range.

    >>> select_groups(torch.tensor([4.0, 3.0, 2.0, 1.0]), "top_p", 0.7, selection_eps=0.0).tolist()
    [True, True, False, False]
    >>> select_groups(torch.tensor([4.0, 0.0, 2.0, 1.0]), "top_k", 0.5).tolist()
    [True, False, True, False]
    >>> select_groups(torch.zeros(3)).tolist()
    [False, False, False]
    """
    check_choice("strategy", strategy, STRATEGIES)
    check_choice("keep", keep, KEEP)
    check_selection_value("value", strategy, value)

    scores = scores.detach().cpu().double()
    kept = torch.zeros(len(scores), dtype=torch.bool)
    if include_zero or strategy == "all":
        candidates = torch.arange(len(scores))
    else:
        is_zero = scores.abs() <= ZERO_SCORE if is_zero is None else is_zero.cpu()
        candidates = (~is_zero).nonzero().squeeze(1)
    if len(candidates) == 0:
        return kept
    ranked, order = scores[candidates].sort(descending=keep == "largest", stable=True)
    # Every strategy keeps a prefix of the ranking.
    if strategy in ("all", "nonzero") or (strategy == "top_p" and value >= 1):
        length = len(ranked)
    elif strategy == "top_p":
        target = value * ranked.sum() - selection_eps
        length = max(shortest_prefix(ranked, target) if target > 0 else 0, int(at_least_one))
    elif strategy == "top_k":  # a fraction of all groups, with and without signal: floor(rho x N), as in the paper
        length = max(1, int(value * len(scores) + ROUNDING))
    else:
        threshold = value * ranked.max()
        length = int((ranked >= threshold if keep == "largest" else ranked <= threshold).sum())
    kept[candidates[order[:length]]] = True
    return kept


def selection_metrics(
    rewards: Tensor,
    scores: Tensor,
    kept: Tensor,
    *,
    lengths: Tensor | None = None,
    reward_range: tuple[float, float] | None = None,
    variances: Tensor | None = None,
) -> dict[str, float]:
    """Metrics of a selection, for the logs.

    Args:
        rewards: (N, G) raw weighted reward sums, NaN for a completion without a score.
        scores: (N,) from `group_score`.
        kept: (N, G) bool, True = the completion is trained on.
        lengths: (N, G) tokens of each completion.
        reward_range: lowest and highest reward that count as worst and best, by default those of this batch.
        variances: (n,) reward variances of all groups in the ranking, by default of these N groups.

    Returns:
        `kept_groups` (number of groups with a kept completion), `kept_fraction` (of completions) and, with lengths,
        `kept_tokens_fraction`; `score_mean` and `score_max` over groups; `in_group_max` and `in_group_mean`, best and
        mean reward of a group, as means over groups with a reward; `reward_std_spread` and `reward_variance_spread`,
        standard deviation over mean of the groups' reward standard deviations (Table 8's predictor of the filter's
        gain) and of their variances, 0 when the mean is 0; `zero_variance_fraction`; `dropped_all_best` and
        `dropped_all_worst`, fractions of groups that were dropped because every completion had the best reward (too
        easy) or the worst (too hard); and `dropped_all_same`, the fraction dropped for any other equal rewards.

    >>> rewards = torch.tensor([[1.0, 0.0], [1.0, 1.0], [0.0, 0.0], [0.0, 0.0]])
    >>> kept = torch.tensor([[True, True], [False, False], [False, False], [False, False]])
    >>> metrics = selection_metrics(rewards, group_score(rewards), kept)
    >>> metrics["kept_fraction"], metrics["dropped_all_best"], metrics["dropped_all_worst"]
    (0.25, 0.25, 0.5)
    """
    rewards = _finite(rewards)
    valid = rewards[~rewards.isnan()]
    low, high = reward_range or ((valid.min().item(), valid.max().item()) if valid.numel() else (0.0, 0.0))
    uniform, kept_groups = zero_variance(rewards), kept.any(dim=1)
    dropped_uniform = ~kept_groups & uniform
    means = rewards.nanmean(dim=1)  # NaN, so neither best nor worst, in a group without any score
    tells_best_from_worst = high - low > ZERO_STD
    variances = group_score(rewards, "reward_variance") if variances is None else variances
    all_best = dropped_uniform & (means >= high - ZERO_STD) & tells_best_from_worst
    all_worst = dropped_uniform & (means <= low + ZERO_STD) & tells_best_from_worst
    metrics = {
        "kept_groups": float(kept_groups.sum()),
        "kept_fraction": _fraction(kept),
        "score_mean": scores.mean().item(),
        "score_max": scores.max().item(),
        "in_group_max": _mean(rewards.nan_to_num(-torch.inf).amax(dim=1)),
        "in_group_mean": _mean(means),
        "reward_std_spread": _spread(variances.sqrt()),
        "reward_variance_spread": _spread(variances),
        "zero_variance_fraction": _fraction(uniform),
        "dropped_all_best": _fraction(all_best),
        "dropped_all_worst": _fraction(all_worst),
        "dropped_all_same": _fraction(dropped_uniform & ~all_best & ~all_worst),
    }
    if lengths is not None:
        metrics["kept_tokens_fraction"] = (lengths[kept].sum() / lengths.sum().clamp(min=1)).item()
    return metrics


def _spread(values: Tensor) -> float:
    """Standard deviation over mean; 0 where the mean is 0, or there is one value only. (N,)."""
    mean = values.mean().item()
    return values.std().item() / mean if mean != 0 and len(values) > 1 else 0.0


def _mean(values: Tensor) -> float:
    """Mean of the finite values; 0 without any. (N,)."""
    return values[values.isfinite()].mean().nan_to_num().item()


def _fraction(mask: Tensor) -> float:
    return float(mask.double().mean())


def shortest_prefix(ranked: Tensor, target: Tensor) -> int:
    """Length of the shortest prefix with a sum of at least `target`, up to rounding; 0 when no prefix reaches it."""
    reached = (ranked.cumsum(dim=0) >= target - 1e-12 * ranked.abs().sum()).nonzero()
    return int(reached[0]) + 1 if len(reached) else 0


def _finite(rewards: Tensor) -> Tensor:
    """Rewards in float64, NaN where they are not finite: one infinite reward must not spoil the whole batch.

    On the CPU, as not every device has float64.
    """
    rewards = rewards.detach().cpu().double()
    return rewards.where(rewards.isfinite(), torch.nan)


def _nan_variance(values: Tensor, ddof: int) -> Tensor:
    """Variance along dim 1 that leaves NaN out; 0 with fewer than two valid values. (N, G) -> (N,)."""
    valid = ~values.isnan()
    count = valid.sum(dim=1)
    deviations = torch.where(valid, values - values.nanmean(dim=1, keepdim=True), 0.0)
    variance = deviations.square().sum(dim=1) / (count - ddof).clamp(min=1)
    return variance.masked_fill(count < 2, 0.0)


def _required(name: str, value: T | None, kind: str) -> T:
    if value is None:
        raise ValueError(f"{name}=None; the score {kind!r} needs {name}.")
    return value

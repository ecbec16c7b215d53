"""What came of many episodes: means and pass@k, each with a 95 % confidence interval that takes tasks as the unit."""

import math
from collections.abc import Sequence
from statistics import NormalDist, fmean, stdev

from ragen2_trl.envs import Play

Z_95 = NormalDist().inv_cdf(0.975)


def outcomes_of(plays: Sequence[Play]) -> dict[str, list[float]]:
    """Columns for `summarize`, one value an episode."""
    outcomes = [play.outcome for play in plays]
    return {
        "success": [float(outcome.success) for outcome in outcomes],
        "valid_rate": [outcome.valid_turns / outcome.turns for outcome in outcomes],
        "return": [outcome.episode_return for outcome in outcomes],
        "turns": [float(outcome.turns) for outcome in outcomes],
        **{name: [outcome.measures[name] for outcome in outcomes] for name in outcomes[0].measures},
    }


def summarize(num_samples: int, **values: Sequence[float]) -> dict[str, float]:
    """Means and 95 % confidence intervals of N·G values a metric, group by group; see `evaluate_model`.

    All but `return`, `turns` and `completion_length` are fractions, and `success` gives `pass@k` too.
    """
    groups = {
        name: [list(flat[i : i + num_samples]) for i in range(0, len(flat), num_samples)]
        for name, flat in values.items()
    }
    metrics: dict[str, float] = {}
    for name, rows in groups.items():
        means = [fmean(row) for row in rows]
        if name in ("return", "turns", "completion_length"):
            _add(metrics, name, fmean(means), mean_interval(means))
            continue
        _add(metrics, name, fmean(means), fraction_interval(means, num_samples))
    solved = [round(sum(row)) for row in groups["success"]]
    k = 1
    while k <= num_samples:
        estimates = [pass_at_k(num_samples, count, k) for count in solved]
        _add(metrics, f"pass@{k}", fmean(estimates), fraction_interval(estimates, num_samples))
        k *= 2
    return metrics | {"num_prompts": float(len(solved)), "num_samples": float(num_samples)}


def pass_at_k(n: int, c: int, k: int) -> float:
    """Unbiased estimate of the chance that one of k samples is right when c of n were (arXiv 2107.03374).

    >>> pass_at_k(4, 1, 2)
    0.5
    """
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)


def fraction_interval(means: Sequence[float], num_samples: int) -> tuple[float, float]:
    """Wilson's 95 % interval for the mean of N per-prompt fractions, with the effective sample size of the prompts.

    N·G completions in groups count for n = p(1 - p) / Var(mean) independent ones, where the variance of the mean comes
    from the spread of the N prompts. n is kept between N (members of a group all alike) and N·G (independent).

    >>> tuple(round(bound, 3) for bound in fraction_interval([0.0, 1.0, 0.0, 1.0], num_samples=8))
    (0.15, 0.85)
    """
    p, prompts = fmean(means), len(means)
    variance, spread = stdev(means) ** 2 / prompts, p * (1 - p)
    # Where every completion agrees nothing is known of their correlation: take members of a group as all alike.
    n: float = prompts if spread == 0 else prompts * num_samples
    if variance > 0:
        n = min(max(spread / variance, prompts), n)
    center = (p + Z_95**2 / (2 * n)) / (1 + Z_95**2 / n)
    half = Z_95 / (1 + Z_95**2 / n) * math.sqrt(p * (1 - p) / n + Z_95**2 / (4 * n**2))
    # Rounding must not push a bound past the estimate or out of the unit interval.
    return max(0.0, min(p, center - half)), min(1.0, max(p, center + half))


def mean_interval(means: Sequence[float]) -> tuple[float, float]:
    """Normal 95 % interval for the mean of N per-prompt means."""
    half = Z_95 * stdev(means) / math.sqrt(len(means))
    return fmean(means) - half, fmean(means) + half


def _add(metrics: dict[str, float], name: str, value: float, interval: tuple[float, float]) -> None:
    metrics[name] = value
    metrics[f"{name}_ci_low"], metrics[f"{name}_ci_high"] = interval

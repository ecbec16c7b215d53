"""What came of many episodes: means and pass@k, each with a 95 % confidence interval that takes tasks as the unit.

The metrics are modules of Hugging Face's `evaluate`, which `summarize` combines. They load nothing from the Hub.
"""

import math
from collections.abc import Sequence
from statistics import NormalDist, fmean, stdev

import evaluate
from datasets import Features, Value
from datasets import Sequence as SequenceFeature

from ragen2_trl.envs import Play
from ragen2_trl.envs.outcomes import pass_at_k
from ragen2_trl.envs.play import check_failures

Z_95 = NormalDist().inv_cdf(0.975)
NO_FRACTIONS = ("return", "turns", "completion_length")


def outcomes_of(plays: Sequence[Play]) -> dict[str, list[float]]:
    """Columns for `summarize`, one value an episode; NaN for one that has failed.

    Raises:
        ConnectionError: If too many have failed.
    """
    check_failures(plays)
    outcomes = [play.outcome for play in plays]
    measures = next((outcome.measures for outcome in outcomes if not outcome.failure), {})
    columns = {
        "success": [float(outcome.success) for outcome in outcomes],
        "valid_rate": [outcome.valid_turns / max(1, outcome.turns) for outcome in outcomes],
        "return": [outcome.episode_return for outcome in outcomes],
        "turns": [float(outcome.turns) for outcome in outcomes],
        **{name: [outcome.measures.get(name, math.nan) for outcome in outcomes] for name in measures},
    }
    return {
        name: [math.nan if outcome.failure else value for outcome, value in zip(outcomes, values, strict=True)]
        for name, values in columns.items()
    }


def summarize(num_samples: int, **values: Sequence[float]) -> dict[str, float]:
    """Means and 95 % confidence intervals of N·G values a metric, group by group; see `evaluate_model`.

    All but `return`, `turns` and `completion_length` are fractions, and `success` gives `pass@k` too. Episodes whose
    success is NaN have failed: they are left out, and `failed` is their share.
    """
    played = [not math.isnan(success) for success in values["success"]]
    failed = {} if all(played) else {"failed": 1 - fmean(played)}
    starts = [i for i in range(0, len(played), num_samples) if any(played[i : i + num_samples])]
    groups = {
        name: [[flat[n] for n in range(i, i + num_samples) if played[n]] for i in starts]
        for name, flat in values.items()
    }
    modules = [MeanOutcome(config_name=name, keep_in_memory=True) for name in groups]
    combined = evaluate.combine([*modules, PassAtK(keep_in_memory=True)])
    combined.add_batch(**groups)
    metrics: dict[str, float] = combined.compute()
    return metrics | failed | {"num_prompts": float(len(starts)), "num_samples": float(num_samples)}


class MeanOutcome(evaluate.Metric):
    """Mean of one outcome over tasks, as a metric of `evaluate`: `config_name` is the outcome, and the input's name.

    The input has a row for each task, with the values of its G episodes. The interval is normal for `return`, `turns`
    and `completion_length`, and Wilson's for all others, which are fractions.

    >>> MeanOutcome("return", keep_in_memory=True).compute(**{"return": [[1.0, 2.0], [3.0, 4.0]]})["return"]
    2.5
    """

    def _info(self) -> evaluate.MetricInfo:
        return _info(f"Mean {self.config_name} of episodes, with a 95 % interval over tasks.", self.config_name)

    def _compute(self, **outcome: Sequence[Sequence[float]]) -> dict[str, float]:
        ((name, rows),) = outcome.items()
        means = [fmean(row) for row in rows]
        largest = max(map(len, rows))  # others have lost episodes
        interval = normal_interval(means) if name in NO_FRACTIONS else fraction_interval(means, largest)
        return _with_interval(name, fmean(means), interval)


class PassAtK(evaluate.Metric):
    """pass@k for k = 1, 2, 4, … up to G, as a metric of `evaluate`; `success` has a row of G zeros and ones a task.

    >>> PassAtK(keep_in_memory=True).compute(success=[[1.0, 0.0], [0.0, 0.0]])["pass@2"]
    0.5
    """

    def _info(self) -> evaluate.MetricInfo:
        return _info("Chance that one of k samples solves a task (arXiv 2107.03374).", "success")

    def _compute(self, success: Sequence[Sequence[float]]) -> dict[str, float]:
        num_samples = max(map(len, success))
        metrics: dict[str, float] = {}
        for k in (2**power for power in range(num_samples.bit_length())):
            # Of a task that has lost episodes, all that are left may be fewer than k.
            estimates = [pass_at_k(len(row), round(sum(row)), min(k, len(row))) for row in success]
            metrics |= _with_interval(f"pass@{k}", fmean(estimates), fraction_interval(estimates, num_samples))
        return metrics


def _info(description: str, column: str) -> evaluate.MetricInfo:
    return evaluate.MetricInfo(
        description=description,
        citation="",
        inputs_description=f"{column}: for each task a row of G values, one for each episode.",
        features=Features({column: SequenceFeature(Value("float64"))}),
    )


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


def normal_interval(means: Sequence[float]) -> tuple[float, float]:
    """Normal 95 % interval for the mean of N per-prompt means."""
    half = Z_95 * stdev(means) / math.sqrt(len(means))
    return fmean(means) - half, fmean(means) + half


def _with_interval(name: str, value: float, interval: tuple[float, float]) -> dict[str, float]:
    return {name: value, f"{name}_ci_low": interval[0], f"{name}_ci_high": interval[1]}

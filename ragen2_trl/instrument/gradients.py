"""How much of a gradient is signal, by the reward variance of groups (arXiv 2604.06268, Figure 3, Appendix H and K).

The norm of a mean gradient over n samples holds its noise, too: E||g||^2 = ||E g||^2 + tr(Cov) / n. The inner product
of the gradients of two halves, whose noise is independent, has no such term: its expectation is ||E g||^2. It can be
negative, and is where there is nothing but noise as often as not.

    >>> noise = torch.Generator().manual_seed(0)
    >>> first, second = (torch.randn(10_000, generator=noise) for _ in range(2))  # no signal at all
    >>> statistics_of(inner_products([first], [second], [first + second], ["mlp"]), (4, 4))["model"].norm > 70
    True
    >>> abs(statistics_of(inner_products([first], [second], [first + second], ["mlp"]), (4, 4))["model"].half_cosine) < 0.03
    True
"""  # noqa: E501 -- doctest

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

WHOLE = "model"
ROUNDING = 1e-6
"""A gradient this small beside the batch's is rounding, which has no direction: that of KL at the reference policy."""
PARAMETER_GROUPS = ("attention", "mlp", "embeddings", "norms", "other")
# In this order: `post_attention_layernorm` and `self_attn.q_norm` are norms, whatever module they belong to.
_NAMES = (
    ("norms", re.compile(r"norm|(^|\.)ln_?\d*(_f)?\.")),
    ("embeddings", re.compile(r"embed|lm_head|(^|\.)w[tp]e\.")),
    ("attention", re.compile(r"attn|attention|mixer")),
    ("mlp", re.compile(r"mlp|feed_?forward|ffn|expert|moe")),
)


@dataclass(frozen=True)
class GradientStatistics:
    """What a gradient of n samples and those of its halves say. Each is a mean over its samples.

    Args:
        norm: Of the mean gradient, noise included.
        squared_norm_debiased: Inner product of the two halves: the squared norm without its noise, negative by chance.
        cosine: With the gradient of the whole batch; NaN where one of the two is 0 up to rounding.
        half_cosine: Between the two halves, the direct signal-to-noise ratio: 1 is all signal, 0 all noise.
    """

    norm: float
    squared_norm_debiased: float
    cosine: float
    half_cosine: float


@dataclass(frozen=True)
class BucketGradients:
    """Gradients of the samples of some groups.

    Args:
        num_groups, num_samples: How many.
        reward_std: Lowest, mean and highest reward standard deviation (ddof = 1) of the groups.
        parts: For each part of the loss (`task`, `kl`, `entropy`), for `model` and each of `PARAMETER_GROUPS` that the
            model has.
    """

    num_groups: int
    num_samples: int
    reward_std: tuple[float, float, float]
    parts: dict[str, dict[str, GradientStatistics]]


@dataclass(frozen=True)
class GradientMeasurement:
    """The gradients of one generation batch.

    Args:
        step: Optimizer step.
        coefficients: Of the regularisers that were measured; their gradients have it in them.
        batch_norm: Norm of the gradient of the whole batch, its own regularisers included.
        whole: Of all samples.
        buckets: From the lowest reward variance up, with as many samples each.
    """

    step: int
    coefficients: dict[str, float]
    batch_norm: float
    whole: BucketGradients
    buckets: list[BucketGradients]

    def metrics(self) -> dict[str, float]:
        """`<bucket>/<part>/<statistic>` of the whole model; what is not defined is left out."""
        named = {"all": self.whole, **{f"bucket_{i}": bucket for i, bucket in enumerate(self.buckets, start=1)}}
        metrics = {"batch_norm": self.batch_norm}
        for name, bucket in named.items():
            metrics[f"{name}/min_reward_std"], metrics[f"{name}/reward_std"], _ = bucket.reward_std
            for part, statistics in bucket.parts.items():
                metrics |= {f"{name}/{part}/{key}": value for key, value in vars(statistics[WHOLE]).items()}
            if len(bucket.parts) > 1:
                metrics[f"{name}/regulariser_share"] = regulariser_share(bucket, self.batch_norm)
        return {key: value for key, value in metrics.items() if not math.isnan(value)}


def regulariser_share(bucket: BucketGradients, batch_norm: float) -> float:
    """||g_reg|| / (||g_task|| + ||g_reg||) with the sum of the regularisers' norms for ||g_reg|| (Appendix K).

    NaN where all of them are rounding beside `batch_norm`, the norm of the batch's gradient.
    """
    norms = {part: statistics[WHOLE].norm for part, statistics in bucket.parts.items()}
    total = sum(norms.values())
    return 1 - norms["task"] / total if total > ROUNDING * batch_norm else math.nan


def parameter_group(name: str) -> str:
    """The one of `PARAMETER_GROUPS` that a parameter belongs to, by its name; an output head counts as embeddings.

    >>> [parameter_group(f"model.layers.0.{name}.weight") for name in ("self_attn.q_proj.lora_A", "self_attn.q_norm")]
    ['attention', 'norms']
    >>> [parameter_group(name) for name in ("transformer.wte.weight", "transformer.h.0.ln_1.weight", "mlp.up_proj.bias")]
    ['embeddings', 'norms', 'mlp']
    """  # noqa: E501 -- doctest
    return next((group for group, pattern in _NAMES if pattern.search(name.lower())), "other")


def quantile_buckets(scores: Tensor, num_buckets: int) -> tuple[list[list[int]], list[int]]:
    """Groups of equal score quantiles, from the lowest up, with as many groups each.

    Args:
        scores: (N,) what groups are ranked by; of equal ones the earlier comes first.
        num_buckets: how many; with fewer groups, each is a bucket of its own.

    Returns:
        The groups of each bucket, and the fewer than `num_buckets` that are left over: one from each of the quantiles
        that have one more than the others, its highest.

    >>> quantile_buckets(torch.tensor([0.3, 0.0, 0.2, 0.5, 0.1, 0.4, 0.6]), 3)
    ([[1, 4], [0, 5], [3, 6]], [2])
    """
    order = scores.argsort(stable=True)
    quantiles = [part.tolist() for part in order.tensor_split(min(num_buckets, len(order)))]
    size = min(map(len, quantiles))
    return [part[:size] for part in quantiles], [group for part in quantiles for group in part[size:]]


def split_in_halves(groups: Sequence[int], group_size: int, generator: torch.Generator) -> tuple[list[int], list[int]]:
    """Rows of some groups in two halves, each with half of the completions of each group, drawn at random.

    Both halves see the same prompts: what they have in common is the gradient of these prompts, and what they have not
    is the noise of sampling.

    Args:
        groups: numbers of groups, whose rows lie one after the other.
        group_size: G, at least 2.
        generator: of the draw.

    Returns:
        Two lists of rows whose lengths differ by at most one.
    """
    rows = [
        group * group_size + i for group in groups for i in torch.randperm(group_size, generator=generator).tolist()
    ]
    return rows[0::2], rows[1::2]


def inner_products(
    first: Sequence[Tensor], second: Sequence[Tensor], batch: Sequence[Tensor], groups: Sequence[str]
) -> Tensor:
    """Inner products of the gradients of two halves, with each other and with that of the batch.

    Additive over parts of the parameters: those that processes hold of a gradient may be summed.

    Args:
        first, second, batch: gradients of the same parameters, in the same order.
        groups: of each parameter, from `parameter_group`.

    Returns:
        (5, 6) float64 on the CPU, for each of `PARAMETER_GROUPS`: first·first, second·second, first·second,
        first·batch, second·batch, batch·batch.
    """
    products = torch.zeros(len(PARAMETER_GROUPS), 6, dtype=torch.float64)
    for a, b, whole, group in zip(first, second, batch, groups, strict=True):
        pairs = ((a, a), (b, b), (a, b), (a, whole), (b, whole), (whole, whole))
        dots = torch.stack([torch.dot(x.flatten(), y.flatten()) for x, y in pairs])
        products[PARAMETER_GROUPS.index(group)] += dots.double().cpu()
    return products


def statistics_of(products: Tensor, sizes: tuple[int, int]) -> dict[str, GradientStatistics]:
    """What the inner products say, for the whole model and for each group of parameters that has a gradient.

    Args:
        products: (5, 6) from `inner_products`, over all processes.
        sizes: samples of the first and of the second half, whose gradients are means over them.
    """
    rows = {WHOLE: products.sum(dim=0)}
    rows |= {group: row for group, row in zip(PARAMETER_GROUPS, products, strict=True) if row.abs().sum() > 0}
    return {name: _statistics(row.tolist(), sizes) for name, row in rows.items()}


def _statistics(row: Sequence[float], sizes: tuple[int, int]) -> GradientStatistics:
    aa, bb, ab, a_batch, b_batch, batch = row
    share_a, share_b = (size / sum(sizes) for size in sizes)
    squared = share_a**2 * aa + share_b**2 * bb + 2 * share_a * share_b * ab
    least = ROUNDING**2 * batch
    return GradientStatistics(
        norm=math.sqrt(max(0.0, squared)),
        squared_norm_debiased=ab,
        cosine=_cosine(share_a * a_batch + share_b * b_batch, squared, batch, least),
        half_cosine=_cosine(ab, aa, bb, least),
    )


def _cosine(product: float, squared: float, other: float, least: float) -> float:
    return product / math.sqrt(squared * other) if min(squared, other) > least else math.nan

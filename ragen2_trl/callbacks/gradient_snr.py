"""Where a policy's gradient comes from: signal and noise by reward variance (arXiv 2604.06268, Figure 3).

The norm of a mean gradient over n samples holds its noise, too: E||g||^2 = ||E g||^2 + tr(Cov) / n. The inner product
of the gradients of two halves, whose noise is independent, has no such term: its expectation is ||E g||^2. It can be
negative, and is where there is nothing but noise as often as not.

    >>> noise = torch.Generator().manual_seed(0)
    >>> first, second = (torch.randn(10_000, generator=noise) for _ in range(2))  # no signal at all
    >>> found = statistics_of(inner_products([first], [second], [first + second]), (4, 4))
    >>> found.norm > 70, abs(found.half_cosine) < 0.03
    (True, True)
"""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any, cast

import numpy as np
import torch
from accelerate.utils import gather_object
from torch import Tensor
from transformers import Trainer, TrainerCallback

from ragen2_trl.callbacks.attached import check_own_trainer, is_newest
from ragen2_trl.callbacks.gradient_probe import Gradient, Probe, check_can_probe, probe_of
from ragen2_trl.filtering import group_score
from ragen2_trl.instrument.scoring import count_tokens
from ragen2_trl.rollout_events import Listener, LocalRollout, listen, log_row, refuse_asynchronous
from ragen2_trl.trainers.stock import StockTrainer

ROUNDING = 1e-6
"""A gradient this small beside the batch's is rounding, which has no direction: that of KL at the reference policy."""


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
        parts: For each part of the loss (`task`, `kl`, `entropy`).
    """

    num_groups: int
    num_samples: int
    reward_std: tuple[float, float, float]
    parts: dict[str, GradientStatistics]


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
        """`<bucket>/<part>/<statistic>`; what is not defined is left out."""
        named = {"all": self.whole, **{f"bucket_{i}": bucket for i, bucket in enumerate(self.buckets, start=1)}}
        metrics = {"batch_norm": self.batch_norm}
        for name, bucket in named.items():
            metrics[f"{name}/min_reward_std"], metrics[f"{name}/reward_std"], _ = bucket.reward_std
            for part, statistics in bucket.parts.items():
                metrics |= {f"{name}/{part}/{key}": value for key, value in vars(statistics).items()}
            if len(bucket.parts) > 1:
                metrics[f"{name}/regulariser_share"] = regulariser_share(bucket, self.batch_norm)
        return {key: value for key, value in metrics.items() if not math.isnan(value)}


def regulariser_share(bucket: BucketGradients, batch_norm: float) -> float:
    """||g_reg|| / (||g_task|| + ||g_reg||) with the sum of the regularisers' norms for ||g_reg|| (Appendix K).

    NaN where all of them are rounding beside `batch_norm`, the norm of the batch's gradient.
    """
    norms = {part: statistics.norm for part, statistics in bucket.parts.items()}
    total = sum(norms.values())
    return 1 - norms["task"] / total if total > ROUNDING * batch_norm else math.nan


class GradientSNRCallback(TrainerCallback):
    """
    Logs how large the gradients of the task and of the regularisers are for groups of low and of high reward variance,
    and how much of them is signal.

    The groups of a generation batch, before any is dropped, are sorted into buckets of reward variance with as many
    samples each. For each bucket, each term of the trainer's own loss (`task`; `kl` and `entropy` where the loss has
    them) is differentiated by itself, in two halves that have half of each group's completions. In the row of TRL's
    metrics, under `grad/bucket_<b>/<part>/`, with bucket 1 of the lowest variance, and `grad/all/<part>/`: `norm` of
    the mean gradient of a sample; `squared_norm_debiased`, from which the noise of few samples is taken out; `cosine`
    with the gradient of the whole batch; `half_cosine`, that between the halves.

    Training is left bit-identical. One measurement computes the batch forward and backward twice for each term, which
    `grad/seconds` and `grad/tokens` tell, and keeps up to three copies of the gradient and two more for each term
    (float32; of all but one, each process keeps its share). A load-balancing loss is not measured. What RLOO, or PPO
    with `kl_in="reward"`, takes off the reward belongs to the task. Whatever else a subclass adds to the loss counts
    as task. Of several on one trainer the one that was added last measures.

    Args:
        trainer ([`~trl.GRPOTrainer`] or [`~trl.RLOOTrainer`], or a subclass):
            The trainer that the callback is then added to. One process, DDP, or ZeRO-1, 2 or 3, whose parameters are
            gathered for it.
        every (`int`, *optional*, defaults to `50`):
            Measure at the first optimizer step and at multiples of it.
        num_buckets (`int`, *optional*, defaults to `6`):
            Buckets of equal size. With a number of groups that it does not divide, some groups are in none of them.
        entropy_coef (`float`, *optional*):
            Measure the entropy bonus as if the run had this coefficient, for instance where it has none. Norms have
            the coefficient in them; the gradient of the batch has the run's own.

    Raises:
        ValueError: for a setting outside its range; at the start of training, where gradients cannot be taken.
        TypeError: at the start of training, for a trainer that does not sample completions.

    Example:

    ```python
    >>> from ragen2_trl import GradientSNRCallback

    >>> trainer.add_callback(GradientSNRCallback(trainer, every=20))  # doctest: +SKIP
    ```
    """

    def __init__(self, trainer: Trainer, every: int = 50, num_buckets: int = 6, entropy_coef: float | None = None):
        refuse_asynchronous(trainer, "GradientSNRCallback")
        for name, value in (("every", every), ("num_buckets", num_buckets)):
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value!r}")
        if entropy_coef is not None and entropy_coef <= 0:
            raise ValueError(f"entropy_coef must be above 0, or None for the run's own, got {entropy_coef!r}")
        self.trainer = cast(StockTrainer, trainer)  # `check_can_probe` refuses others
        self.every = every
        self.num_buckets = num_buckets
        self.entropy_coef = entropy_coef
        self.latest: GradientMeasurement | None = None
        self._listener: Listener | None = None
        self._last_step = 0

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        check_own_trainer(self, self.trainer, state)
        check_can_probe(self.trainer)
        self.latest, self._last_step = None, state.global_step
        self._listener = self._listener or listen(
            self.trainer, on_rollout=self._on_rollout, all_rows=lambda: self._due_step() is not None
        )

    def _on_rollout(self, local: LocalRollout) -> None:
        step = self._due_step()
        if step is None:
            return
        self._last_step = step
        measurement, cost = self.measure(local, self.trainer.state.global_step + 1)
        log_row(self.trainer, {f"grad/{key}": value for key, value in {**measurement.metrics(), **cost}.items()})

    def measure(self, local: LocalRollout, step: int) -> tuple[GradientMeasurement, dict[str, float]]:
        """The gradients of a generation batch, and what they cost: `seconds`, and `tokens` forward, padding included.

        A call for all processes together.
        """
        started = time.perf_counter()
        # The same halves on every process, and after a resume; no global generator moves.
        seed = np.random.SeedSequence([self.trainer.args.seed, step]).generate_state(1)[0]
        generator = torch.Generator().manual_seed(int(seed))
        with count_tokens(self.trainer.model) as tokens:
            measurement = measure_gradients(self.trainer, local, step, self.num_buckets, self.entropy_coef, generator)
        total = sum(gather_object([sum(tokens)]))
        self.latest = measurement
        return measurement, {"seconds": time.perf_counter() - started, "tokens": float(total)}

    def _due_step(self) -> int | None:
        """The optimizer step that asks for the gradients of the current completions, if one does."""
        if not is_newest(self, self.trainer):
            return None
        args, done = self.trainer.args, self.trainer.state.global_step
        per_generation = args.steps_per_generation * self.trainer.num_iterations / args.gradient_accumulation_steps
        served = range(max(done, self._last_step) + 1, done + ceil(per_generation) + 1)
        return next((step for step in served if step == 1 or step % self.every == 0), None)


def measure_gradients(
    trainer: StockTrainer,
    local: LocalRollout,
    step: int,
    num_buckets: int,
    entropy_coef: float | None,
    generator: torch.Generator,
) -> GradientMeasurement:
    """The gradients of a generation batch by reward variance. A call for all processes together.

    Args:
        trainer: TRL's or ours, in training mode.
        local: what it has just sampled.
        step: optimizer step to name.
        num_buckets: of reward variance.
        entropy_coef: as if the run's were this one; `None` for the run's own.
        generator: of the halves, the same on every process.
    """
    if any(local.turn_samples):
        raise ValueError(
            "GradientSNRCallback takes gradients of one training sample an episode; allowed: TextRollout(env) with "
            "context='full' and drop_oldest_turns=False."
        )
    stds = group_score(local.rewards, "reward_std")
    buckets, left_over = quantile_buckets(stds, num_buckets)
    size = local.rewards.shape[1]
    halves = [split_in_halves(groups, size, generator) for groups in [*buckets, left_over]]
    with probe_of(trainer, local, entropy_coef) as probe:
        dealt = probe.deal([half for pair in halves for half in pair])
        pairs = list(zip(dealt[0::2], dealt[1::2], strict=True))

        def measure(groups: list[int], gradients: dict[str, tuple[Gradient, Gradient]], rows: tuple[int, int]) -> Any:
            of_groups = stds[groups].tolist()
            spread = (min(of_groups), sum(of_groups) / len(of_groups), max(of_groups))
            parts = {name: statistics(probe, both, batch, rows) for name, both in gradients.items()}
            return BucketGradients(len(groups), sum(rows), spread, parts)

        whole = [[step for pair in pairs for step in pair[half]] for half in (0, 1)]
        rows = (sum(len(pair[0]) for pair in halves), sum(len(pair[1]) for pair in halves))
        of_whole = probe.gradients(whole)
        batch = _mean([(part.of_run, of_whole[name]) for name, part in probe.parts.items()], rows)
        measured = measure(list(range(len(stds))), of_whole, rows)
        del of_whole
        of_buckets = [
            measure(groups, probe.gradients(pair), (len(both[0]), len(both[1])))
            for groups, pair, both in zip(buckets, pairs, halves, strict=False)
        ]
        norm = probe.summed(torch.stack([share.square().sum() for share in batch]).sum()).sqrt().item()
    coefficients = {name: value for name, value in probe.coefficients.items() if name in probe.parts}
    return GradientMeasurement(step, coefficients, norm, measured, of_buckets)


def statistics(
    probe: Probe, halves: tuple[Gradient, Gradient], batch: Gradient, sizes: tuple[int, int]
) -> GradientStatistics:
    """What the gradients of two halves say, of which each process holds a part."""
    products = inner_products(*halves, batch).to(probe.accelerator.device, torch.float32)
    return statistics_of(probe.summed(products).double().cpu(), sizes)


def _mean(weighted: list[tuple[float, tuple[Gradient, Gradient]]], sizes: tuple[int, int]) -> Gradient:
    """Of all samples and all terms, each by its weight, from the means of the two halves."""
    first, second = (size / sum(sizes) for size in sizes)
    terms = [(weight, pair) for weight, pair in weighted if weight]
    number = range(len(terms[0][1][0]))
    means: list[Any] = [
        sum(weight * (first * pair[0][i] + second * pair[1][i]) for weight, pair in terms) for i in number
    ]
    return means


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


def inner_products(first: Sequence[Tensor], second: Sequence[Tensor], batch: Sequence[Tensor]) -> Tensor:
    """Inner products of the gradients of two halves, with each other and with that of the batch.

    Additive over parts of the parameters: those that processes hold of a gradient may be summed.

    Args:
        first, second, batch: gradients of the same parameters, in the same order.

    Returns:
        (6,) float64 on the CPU: first·first, second·second, first·second, first·batch, second·batch, batch·batch.
    """
    products = torch.zeros(6, dtype=torch.float64)
    for a, b, whole in zip(first, second, batch, strict=True):
        pairs = ((a, a), (b, b), (a, b), (a, whole), (b, whole), (whole, whole))
        products += torch.stack([torch.dot(x.flatten(), y.flatten()) for x, y in pairs]).double().cpu()
    return products


def statistics_of(products: Tensor, sizes: tuple[int, int]) -> GradientStatistics:
    """What the inner products say.

    Args:
        products: (6,) from `inner_products`, over all processes.
        sizes: samples of the first and of the second half, whose gradients are means over them.
    """
    aa, bb, ab, a_batch, b_batch, batch = products.tolist()
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

"""The paper's ablations of the filter: selectors that settings name, and trainers that do something else with a loss.

A selector is named in a configuration or an experiment's file, as `snr_selector: research.ablations:first_quarter`. A
trainer is made by mixing one of the classes in before a filtered one:

    class ScaledTrainer(AdvantagesByKeptFraction, SNRFilteredGRPOTrainer): ...
"""

import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock
from torch import Tensor
from transformers import AutoModelForCausalLM

from ragen2_trl.envs.frozen_lake import distances_to_goal, find
from ragen2_trl.filtering import ROUNDING, group_score, shortest_prefix, zero_variance
from ragen2_trl.instrument.information import information_metrics
from ragen2_trl.record.files import MEASUREMENTS
from ragen2_trl.record.saved_measurement import SavedMeasurement, read_measurement
from ragen2_trl.trainers.selection import Groups, ScoreSelector, Selector

QUARTERS = (1, 2, 3, 4)

# Pure functions


def select_quarter(scores: Tensor, quarter: int) -> Tensor:
    """One quarter of the groups, by the rank of their score: 1 has the highest (Table 6).

    All groups are ranked, those without signal too; of equal scores the earlier group comes first. Where 4 does not
    divide N, the first N mod 4 quarters, those of higher scores, have one group more than the others.

    Args:
        scores: (N,) from `group_score`.
        quarter: 1, 2, 3 or 4.

    Returns:
        (N,) bool on the CPU, True = in that quarter.

    Raises:
        ValueError: For another quarter.

    >>> select_quarter(torch.tensor([4.0, 0.0, 2.0, 1.0, 3.0]), 1).tolist()
    [True, False, False, False, True]
    """
    if quarter not in QUARTERS:
        raise ValueError(f"quarter={quarter!r} is out of range; allowed: {', '.join(map(str, QUARTERS))}.")
    order = scores.detach().cpu().double().argsort(descending=True, stable=True)
    kept = torch.zeros(len(scores), dtype=torch.bool)
    kept[order.tensor_split(len(QUARTERS))[quarter - 1]] = True
    return kept


def select_completions(rewards: Tensor, fraction: float = 0.5) -> Tensor:
    """Inside each group the completions with the highest and the lowest rewards ("trajectory-level", Table 7).

    Of each group `fraction` x G completions are kept, rounded down and at least two: half of them from the top of the
    ranking, one more where that is odd, and the others from its bottom. Of equal rewards the earlier completion ranks
    higher. One without a finite reward ranks as the mean of its group.

    Args:
        rewards: (N, G) weighted reward sums.
        fraction: In (0, 1]; 1 keeps every completion.

    Returns:
        (N, G) bool on the CPU, True = kept, in groups without signal, too.

    Raises:
        ValueError: For a fraction out of range.

    >>> select_completions(torch.tensor([[0.2, 1.0, 0.0, 0.7], [1.0, 0.0, 0.0, 1.0]])).tolist()
    [[False, True, True, False], [True, False, True, False]]
    """
    if not 0 < fraction <= 1:
        raise ValueError(f"fraction={fraction!r} is out of range; allowed: 0 < value <= 1.")
    rewards = rewards.detach().cpu().double()
    rewards = rewards.where(rewards.isfinite(), torch.nan)
    rewards = rewards.where(~rewards.isnan(), rewards.nanmean(dim=1, keepdim=True).nan_to_num())
    size = rewards.size(1)
    number = min(size, max(2, int(fraction * size + ROUNDING)))
    order = rewards.argsort(dim=1, descending=True, stable=True)
    ends = torch.cat([order[:, : number - number // 2], order[:, size - number // 2 :]], dim=1)
    return torch.zeros(rewards.shape, dtype=torch.bool).scatter_(1, ends, True)


def draw_as_many(kept: Tensor, generator: torch.Generator) -> Tensor:
    """A control of a selection: as many as it keeps, drawn without replacement from all there are, kept or not.

    Args:
        kept: Bool of any shape, as (N,) for groups or (N, G) for completions.
        generator: Of the draw, which must not touch the global random state.

    Returns:
        Bool of that shape, on the CPU.
    """
    drawn = torch.zeros(kept.numel(), dtype=torch.bool)
    drawn[torch.randperm(kept.numel(), generator=generator)[: int(kept.sum())]] = True
    return drawn.view(kept.shape)


def select_by_softmax(scores: Tensor, value: float = 0.9, is_zero: Tensor | None = None) -> Tensor:
    """The reference's other top-p: the shortest prefix of the ranking whose softmax probabilities sum to `value`.

    The softmax runs over the candidates. Of equal scores the earlier group ranks higher.

    Args:
        scores: (N,) from `group_score`.
        value: in (0, 1]; 1 keeps every candidate.
        is_zero: (N,) bool, groups that are no candidates; by default every group is one.

    Returns:
        (N,) bool on the CPU, True = kept: at least one group, if there is a candidate.

    Raises:
        ValueError: for a value out of range.

    >>> select_by_softmax(torch.tensor([0.0, 3.0, 1.0]), 0.9).tolist()
    [False, True, True]
    """
    if not 0 < value <= 1:
        raise ValueError(f"value={value!r} is out of range; allowed: 0 < value <= 1.")
    candidates, ranked = _ranking(scores, is_zero)
    length = max(1, shortest_prefix(ranked.softmax(dim=0), torch.tensor(value)))
    return _mask(len(scores), candidates[: len(ranked) if value == 1 else length])


def select_count(scores: Tensor, count: int, is_zero: Tensor | None = None) -> Tensor:
    """A fixed number of groups: the `count` candidates with the highest scores, or all of them if there are fewer.

    Of equal scores the earlier group ranks higher.

    Args:
        scores: (N,) from `group_score`.
        count: a whole number, at least 1.
        is_zero: (N,) bool, groups that are no candidates; by default every group is one.

    Returns:
        (N,) bool on the CPU, True = kept.

    Raises:
        ValueError: for a count out of range.

    >>> select_count(torch.tensor([0.2, 0.3, 0.3, 0.3]), 2).tolist()
    [False, True, True, False]
    """
    if count < 1 or int(count) != count:
        raise ValueError(f"count={count!r} is out of range; allowed: a whole number >= 1.")
    return _mask(len(scores), _ranking(scores, is_zero)[0][: int(count)])


def _ranking(scores: Tensor, is_zero: Tensor | None) -> tuple[Tensor, Tensor]:
    """Indices of the candidates and their scores, from the highest score down."""
    scores = scores.detach().cpu().double()
    candidates = torch.arange(len(scores)) if is_zero is None else (~is_zero.cpu()).nonzero().squeeze(1)
    ranked, order = scores[candidates].sort(descending=True, stable=True)
    return candidates[order], ranked


def _mask(size: int, indices: Tensor) -> Tensor:
    return torch.zeros(size, dtype=torch.bool).index_fill_(0, indices, True)


# Selectors


def quarter_of(groups: Groups, quarter: int, include_zero: bool = False) -> Tensor:
    """(N,) the groups of a quarter by reward variance (Table 6).

    Of a quarter without any group with variance nothing is kept, as there is nothing to be learnt from it alone,
    unless `include_zero` says so.
    """
    kept = select_quarter(group_score(groups.rewards), quarter)
    return kept & (include_zero | (kept & ~zero_variance(groups.rewards)).any())


first_quarter: Selector = partial(quarter_of, quarter=1)
second_quarter: Selector = partial(quarter_of, quarter=2)
third_quarter: Selector = partial(quarter_of, quarter=3)
fourth_quarter: Selector = partial(quarter_of, quarter=4)


def best_and_worst(groups: Groups, fraction: float = 0.5, include_zero: bool = True) -> Tensor:
    """(N, G) of each group the completions with the highest and the lowest rewards, with the advantages of the whole
    group (Table 7); of groups without variance, too, unless `include_zero` is off."""
    return select_completions(groups.rewards, fraction) & (include_zero | ~zero_variance(groups.rewards)).unsqueeze(1)


def as_many_at_random(groups: Groups, selector: Selector = ScoreSelector()) -> Tensor:  # noqa: B008 -- has no state
    """As many groups, or completions, as a selector keeps, by default the filter with its defaults, drawn from all."""
    return draw_as_many(selector(groups), groups.generator)


as_many_as_vary: Selector = partial(as_many_at_random, selector=ScoreSelector("nonzero"))
"""As many groups at random as have reward variance."""


def top_p_softmax(groups: Groups, value: float = 0.9) -> Tensor:
    """(N,) the shortest prefix of the groups with reward variance whose softmax probabilities sum to `value`."""
    return select_by_softmax(group_score(groups.rewards), value, zero_variance(groups.rewards))


def top_count(groups: Groups, count: int) -> Tensor:
    """(N,) the `count` groups with the highest reward variance, or all groups that have any if these are fewer."""
    return select_count(group_score(groups.rewards), count, zero_variance(groups.rewards))


_half = partial(ScoreSelector, "top_k", 0.5, include_zero=True)
"""Half of all groups, with and without reward variance (Table 9)."""

largest_half: Selector = _half()
smallest_half: Selector = _half(keep="smallest")
half_by_reward_sum: Selector = _half("reward_sum")
half_by_entropy: Selector = _half("entropy")
half_by_entropy_variance: Selector = _half("entropy_variance")
half_by_length: Selector = _half("length")
half_at_random: Selector = _half("random")


# Trainers


class AdvantagesByKeptFraction:
    """Multiplies advantages by the fraction of completions that the filter keeps, as RAGEN's code can. KL, entropy and
    value terms stay as they are, except for a KL penalty in the reward, which is a part of the advantages."""

    exponent = 1.0  # linear; 0.5 for the square root

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        batch = super()._generate_and_score_completions(inputs)  # type: ignore[misc]
        if self.model.training:  # type: ignore[attr-defined]
            kept = float(self.latest_selection.kept.double().mean())  # type: ignore[attr-defined]
            batch["advantages"] = batch["advantages"] * (kept**self.exponent or 1.0)
        return batch


class AdvantagesBySqrtOfKeptFraction(AdvantagesByKeptFraction):
    """The same by the square root of the fraction."""

    exponent = 0.5


class PulledToTemplates:
    """FrozenLake with the KL penalty toward `research.templates` in place of the initial model.

    Logs the retrieval accuracy of first turns for impossible and for possible maps apart, among the same prompts, as
    `retrieval/impossible` and `retrieval/possible`.
    """

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._is_impossible: dict[str, bool] = {}  # by the map as its prompt shows it
        folder = Path(self.args.output_dir).parent / "models" / "templates"  # type: ignore[attr-defined]
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{folder}.lock"):  # runs start together, and one of them makes it
            if not folder.exists():  # by another process, since it draws random numbers
                subprocess.run([sys.executable, "-m", "research.templates", str(folder)], check=True)
        if self.beta != 0.0:  # type: ignore[attr-defined]
            self.ref_model.load_state_dict(AutoModelForCausalLM.from_pretrained(folder).state_dict())  # type: ignore[attr-defined]

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        for row in inputs:
            grid = tuple(row["grid"].split("\n"))
            shown = row["prompt"][-1]["content"]
            self._is_impossible[shown] = find(grid, "S")[0] not in distances_to_goal(grid)
        return super()._generate_and_score_completions(inputs)  # type: ignore[misc]

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        step = self.state.global_step  # type: ignore[attr-defined]
        path = Path(self.args.output_dir) / MEASUREMENTS / f"measurement_{step:05d}.json"  # type: ignore[attr-defined]
        if path.is_file():
            logs |= self._by_kind(read_measurement(path))
        super().log(logs, *args, **kwargs)  # type: ignore[misc]

    def _by_kind(self, measured: SavedMeasurement) -> dict[str, float]:
        kinds = [
            next(kind for shown, kind in self._is_impossible.items() if shown in prompt) for prompt in measured.prompts
        ]
        impossible = torch.tensor(kinds)[measured.prompt_index]
        found = {}
        for name, rows in (("impossible", impossible), ("possible", ~impossible)):
            if rows.any():
                metrics = information_metrics(
                    measured.cross_logps[rows], measured.lengths[rows], measured.prompt_index[rows]
                )
                found[f"retrieval/{name}"] = metrics["retrieval_accuracy"]
        return found


class SkipsZeroGradients:
    """Takes no optimizer step whose gradients are all zero, in which Adam's momentum alone would move the weights."""

    def create_optimizer(self, *args: Any, **kwargs: Any) -> torch.optim.Optimizer:
        optimizer: torch.optim.Optimizer = super().create_optimizer(*args, **kwargs)  # type: ignore[misc]
        step = optimizer.step

        def step_with_gradients(*args: Any, **kwargs: Any) -> Any:
            weights = [weight for group in optimizer.param_groups for weight in group["params"]]
            if any(weight.grad is not None and bool(weight.grad.any()) for weight in weights):
                return step(*args, **kwargs)
            return None

        optimizer.step = step_with_gradients  # type: ignore[method-assign]
        return optimizer

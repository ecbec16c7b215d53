"""The mathematics of gradients by reward variance, against plain loops and simulations."""

import math
from itertools import chain

import pytest
import torch

from ragen2_trl.callbacks.gradient_snr import (
    GradientStatistics,
    inner_products,
    quantile_buckets,
    split_in_halves,
    statistics_of,
)


def whole(first, second, batch=None, sizes=(1, 1)) -> GradientStatistics:
    products = inner_products([first], [second], [first if batch is None else batch])
    return statistics_of(products, sizes)


def test_buckets_have_as_many_groups_each_sorted_by_score():
    scores = torch.rand(16, generator=torch.Generator().manual_seed(0))
    buckets, left_over = quantile_buckets(scores, 6)
    assert [len(bucket) for bucket in buckets] == [2] * 6
    assert sorted([*chain(*buckets), *left_over]) == list(range(16))
    flat = [scores[group] for bucket in buckets for group in bucket]
    assert flat == sorted(flat)


def test_fewer_groups_than_buckets_are_a_bucket_each():
    assert quantile_buckets(torch.tensor([0.2, 0.1]), 6) == ([[1], [0]], [])


@pytest.mark.parametrize("size", [2, 5, 8])
def test_each_half_has_half_of_each_group(size):
    first, second = split_in_halves([3, 0, 4], size, torch.Generator().manual_seed(0))
    assert sorted(first + second) == sorted(group * size + i for group in (0, 3, 4) for i in range(size))
    for half in (first, second):
        counts = [sum(row // size == group for row in half) for group in (0, 3, 4)]
        assert all(size // 2 <= count <= (size + 1) // 2 for count in counts)
    assert abs(len(first) - len(second)) <= 1


def test_statistics_are_those_of_the_gradients_themselves():
    generator = torch.Generator().manual_seed(1)
    first, second, batch = ([torch.randn(7, generator=generator) for _ in range(4)] for _ in range(3))
    statistics = statistics_of(inner_products(first, second, batch), (3, 2))
    a, b, g = map(torch.cat, (first, second, batch))
    mean = 0.6 * a + 0.4 * b
    assert statistics.norm == pytest.approx(mean.norm().item(), rel=1e-5)
    assert statistics.squared_norm_debiased == pytest.approx(torch.dot(a, b).item(), rel=1e-4, abs=1e-5)
    for value, x, y in ((statistics.cosine, mean, g), (statistics.half_cosine, a, b)):
        assert value == pytest.approx(torch.cosine_similarity(x, y, dim=0).item(), rel=1e-4, abs=1e-5)


def test_a_gradient_of_nothing_has_no_direction():
    statistics = whole(torch.zeros(3), torch.zeros(3), torch.ones(3))
    assert (statistics.norm, statistics.squared_norm_debiased) == (0.0, 0.0)
    assert math.isnan(statistics.cosine) and math.isnan(statistics.half_cosine)


@pytest.mark.parametrize("signal", [0.0, 0.5])
def test_the_split_half_estimate_is_unbiased_where_the_naive_one_holds_the_noise(signal):
    """Means of 4 + 4 noisy gradients in 20 dimensions, 1,000 times."""
    generator = torch.Generator().manual_seed(2)
    mean, trials, half, dimensions = torch.full((20,), signal), 1000, 4, 20
    samples = mean + torch.randn(trials, 2, half, dimensions, generator=generator)
    naive, debiased = [], []
    for first, second in samples.mean(dim=2):
        statistics = whole(first, second)
        naive.append(statistics.norm**2)
        debiased.append(statistics.squared_norm_debiased)
    truth, debiased, naive = mean.square().sum(), torch.tensor(debiased), torch.tensor(naive)
    standard_error = debiased.std() / math.sqrt(trials)
    assert abs(debiased.mean() - truth) < 3 * standard_error
    assert naive.mean() - truth == pytest.approx(dimensions / (2 * half), rel=0.1)  # tr(Cov) / n


@pytest.mark.parametrize("spread", [0.0, 1.0])
def test_advantages_of_a_group_that_sum_to_zero_add_no_floor(spread):
    """A policy over five actions, groups of eight with the group's mean for baseline, halves within the group.

    E g = (1 - 1/G) mu. Its halves share the baseline, so that the estimate is larger by 1 + 1 / (G - 1)^2, and 0 where
    there is no signal.
    """
    generator = torch.Generator().manual_seed(3)
    logits, rewards = torch.tensor([0.5, 0.0, -0.5, 0.2, 0.1]), torch.tensor([1.0, 0.0, 0.3, 0.6, 0.2]) * spread
    policy, size, trials = logits.softmax(dim=0), 8, 60_000
    actions = torch.multinomial(policy, size * trials, replacement=True, generator=generator).view(trials, size)
    noise = torch.randn(trials, size, generator=generator)  # of rewards, which has nothing to do with the action
    given = rewards[actions] + noise
    advantages = given - given.mean(dim=1, keepdim=True)
    scores = torch.nn.functional.one_hot(actions, 5) - policy  # gradient of the log-probability
    halves = (advantages.unsqueeze(2) * scores).view(trials, 2, size // 2, 5).mean(dim=2)
    debiased = (halves[:, 0] * halves[:, 1]).sum(dim=1)
    mu = (policy * rewards) @ (torch.eye(5) - policy)
    truth = ((1 - 1 / size) * mu).square().sum() * (1 + 1 / (size - 1) ** 2)
    assert abs(debiased.mean() - truth) < 3 * debiased.std() / math.sqrt(trials)
    naive = halves.mean(dim=1).square().sum(dim=1).mean()
    assert naive - truth > 20 * debiased.std() / math.sqrt(trials)

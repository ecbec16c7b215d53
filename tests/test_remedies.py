"""Estimates of remedies against plain loops, exact values and the rules of the trainers."""

import math
import re
from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ragen2_trl.estimates import MOST_VALUES, Bootstrap, Estimate, Sameness, live_with, log_beta_binomial, seeded_draws
from ragen2_trl.filtering import group_score, select_groups, zero_variance
from ragen2_trl.record.completions import CompletionLog
from ragen2_trl.remedies import (
    EPOCHS,
    PILOTS,
    REFILLED,
    SHUFFLES,
    TWICE,
    Replays,
    _positions,
    chosen_again,
    find_faults,
    group_variances,
    kept_rows,
    live_groups,
    refill_rounds,
    repeated,
    sampled_in_full,
    update_positions,
    what_if,
)
from ragen2_trl.sampling.policy import AUDIT, Pilots, Policy, PromptSelection, round_size


def make_log(rewards, prompts=None, groups=8, **more):
    """A log of groups in generations of `groups`."""
    rewards = np.array(rewards, dtype=np.float64)
    count = len(rewards)
    prompts = np.arange(count) if prompts is None else np.array(prompts)
    return CompletionLog(
        "made", np.arange(count) // groups + 1, prompts, rewards, groups_per_generation=groups, **more
    )


def drawn(alpha, beta, count, size, seed=0):
    """(count, size) rewards of prompts whose success is Beta distributed."""
    rng = np.random.default_rng(seed)
    return (rng.random((count, size)) < rng.beta(alpha, beta, (count, 1))).astype(float)


def remedy(found, name):
    (row,) = [one for one in found.remedies if one.name == name]
    return row


# Groups of another size

small_groups = st.integers(2, 5).flatmap(
    lambda size: st.lists(
        st.lists(st.sampled_from([0.0, 0.3, 1.0]), min_size=size, max_size=size), min_size=1, max_size=4
    )
)


@given(small_groups, st.integers(2, 5))
def test_live_with_is_the_share_of_subsets_that_vary(rewards, size):
    size = min(size, len(rewards[0]))
    loop = [sum(len(set(part)) > 1 for part in combinations(row, size)) / math.comb(len(row), size) for row in rewards]
    np.testing.assert_allclose(live_with(np.array(rewards), size), loop, atol=1e-12)


def test_a_reward_that_is_missing_is_in_no_subset():
    assert live_with(np.array([[1.0, 0.0, np.nan], [1.0, np.nan, np.nan]]), 2).tolist() == [1.0, 0.0]


def live_of_beta(alpha, beta, size):
    """Share of groups with both of two rewards."""
    logs = log_beta_binomial(np.array([alpha, beta]), size)
    return float(1 - np.exp(logs[[0, -1]]).sum())


@pytest.mark.parametrize(
    ("alpha", "beta", "size", "live"), [(1.0, 1.0, 4, 1 - 2 / 5), (2.0, 3.0, 2, 0.4), (1.0, 2.0, 3, 1 - 0.1 - 0.4)]
)
def test_live_share_of_a_beta_distribution_is_exact(alpha, beta, size, live):
    assert live_of_beta(alpha, beta, size) == pytest.approx(live)


def test_a_uniform_chance_makes_every_number_of_successes_alike():
    np.testing.assert_allclose(np.exp(log_beta_binomial(np.ones((1, 2)), 6)), np.full((1, 7), 1 / 7))


@pytest.mark.parametrize(("alpha", "beta"), [(0.4, 0.8), (3.0, 1.5)])
def test_the_fit_tells_how_many_larger_groups_are_live(alpha, beta):
    rewards = drawn(alpha, beta, 4000, 8)
    fitted = Sameness.fit(rewards, Bootstrap(np.arange(4000), 0))
    exact = live_of_beta(alpha, beta, 16)
    found = Estimate.of(fitted.live(16))
    assert found.value == pytest.approx(exact, abs=0.02)
    assert found.low <= found.value <= found.high and found.high - found.low < 0.1


@pytest.mark.parametrize("scale", [1.0, -2.5])
def test_larger_groups_of_rewards_with_many_values_are_foretold(scale):
    """Dead prompts that fail or form badly, prompts with partial credit, and prompts whose rewards never agree."""
    rng = np.random.default_rng(3)
    chances = rng.dirichlet([0.3, 0.1, 0.15, 0.2], 8000)
    kinds = (rng.random((8000, 16, 1)) > chances.cumsum(axis=1)[:, None]).sum(axis=2)
    rewards = scale * np.where(kinds == 3, rng.random(kinds.shape), np.array([0.0, 0.1, 1.0, 0.0])[kinds])
    found = Sameness.fit(rewards[:4000, :8], Bootstrap(np.arange(4000), 0))
    for size in (8, 16):
        assert found.live(size)[0] == pytest.approx(live_groups(make_log(rewards[4000:, :size])).mean(), abs=0.02)


def test_groups_with_missing_rewards_do_not_change_the_fit():
    rewards = drawn(0.5, 0.5, 200, 4)
    holed = np.where(np.arange(4) == 1, np.nan, rewards[:50])
    alone = Sameness.fit(rewards, Bootstrap(np.arange(200), 0)).live(8)
    beside = Sameness.fit(np.concatenate([rewards, holed]), Bootstrap(np.arange(250), 0)).live(8)
    assert alone[0] == beside[0]
    assert Sameness.fit(holed, Bootstrap(np.arange(50), 0)) is None


def test_larger_groups_stay_unknown_where_equal_rewards_have_too_many_values():
    rewards = np.repeat(np.arange(MOST_VALUES + 1.0), 4).reshape(-1, 4)
    assert Sameness.fit(rewards, Bootstrap(np.arange(len(rewards)), 0)) is None
    assert Sameness.fit(rewards[1:], Bootstrap(np.arange(MOST_VALUES), 0)) is not None


def test_groups_that_always_vary_stay_so():
    rewards = np.arange(40.0).reshape(10, 4)
    found = Sameness.fit(rewards, Bootstrap(np.arange(10), 0))
    assert found.live(8).tolist() == [1.0]  # and no draws: no certainty of ten groups
    numbers = remedy(what_if(make_log(rewards)), "groups of 8").numbers
    assert (numbers["live"].value, numbers["live_groups"].value) == (1, 0.5) and math.isnan(numbers["live"].low)


def test_draws_without_a_live_group_do_not_take_the_interval_with_them():
    rewards = np.repeat([[0.0], [0.5], [1.0]], [120, 60, 20], axis=0).repeat(4, axis=1)
    rewards[0, 0] = 1.0
    found = remedy(what_if(make_log(rewards)), "groups of 8").numbers["live_groups"]
    assert found.low <= found.value <= found.high


# Larger groups of prompts that came again


def prompts_again(chance, size, times, count=400, seed=0):
    """A log in which each of `count` prompts has `times` groups; `chance` gives (count, 1) chances at each time."""
    rng = np.random.default_rng(seed)
    rewards = [(rng.random((count, size)) < chance(time)).astype(float) for time in range(times)]
    return make_log(np.concatenate(rewards), np.tile(np.arange(count), times))


def live_of(chances, size):
    return float((1 - chances**size - (1 - chances) ** size).mean())


MIXED = np.random.default_rng(8).choice([0.0, 0.05, 0.18, 0.6], (400, 1))


@pytest.mark.parametrize("chances", [np.full((400, 1), 0.18), MIXED])
def test_completions_of_a_prompt_in_several_groups_tell_of_larger_ones(chances):
    found = what_if(prompts_again(lambda time: chances, 2, 4))
    for size in (4, 8):
        numbers = remedy(found, f"groups of {size}").numbers
        assert numbers["live"].low < live_of(chances, size) < numbers["live"].high
        assert numbers["live"].value == pytest.approx(live_of(chances, size), abs=0.04)
        ratio = live_of(chances, size) / live_of(chances, 2) * 2 / size
        assert numbers["live_groups"].value == pytest.approx(ratio, rel=0.1)
    assert not [one for one in found.remedies if one.name == "groups of 16"]  # no prompt has as many


@given(st.lists(st.lists(st.sampled_from([0.0, 0.5, 1.0, math.nan]), min_size=2, max_size=2), min_size=1, max_size=4))
def test_groups_of_one_unit_are_as_one_group(rewards):
    rewards = np.array(rewards)
    for size in (2, 3, 5):
        (together,) = live_with(rewards, size, np.zeros(len(rewards), dtype=np.int64))
        assert together == pytest.approx(live_with(rewards.reshape(1, -1), size)[0])


def test_a_policy_that_learned_between_the_groups_of_a_prompt_is_not_taken_for_larger_groups():
    log = prompts_again(lambda time: np.full((400, 1), 0.02 + 0.9 * time), 2, 2)
    assert not remedy(what_if(log), "groups of 4").is_known
    four = prompts_again(lambda time: np.full((400, 1), 0.02 + 0.9 * time), 4, 2)
    within = np.array([0.02, 0.92])
    assert remedy(what_if(four), "groups of 8").numbers["live"].value == pytest.approx(live_of(within, 8), abs=0.1)


@pytest.mark.parametrize("solved", [False, True])
@pytest.mark.parametrize(
    ("chances", "size", "times", "cure"),
    [
        (np.full((400, 1), 0.18), 2, 4, 8),
        (np.full((400, 1), 0.18), 2, 1, "either"),
        (np.full((400, 1), 0.1), 4, 1, 16),
        (np.full((400, 1), 0.1), 4, 4, 16),
        (np.full((400, 1), 0.0005), 2, 4, "prompts"),
        (np.full((400, 1), 0.002), 8, 1, "prompts"),
        (np.repeat([[0.0], [0.3]], [300, 100], axis=0), 4, 1, "prompts"),
    ],
)
def test_other_prompts_are_advised_only_where_larger_groups_would_not_help(chances, size, times, cure, solved):
    log = prompts_again(lambda time: 1 - chances if solved else chances, size, times)
    with np.errstate(invalid="ignore"):  # without a live group
        (fault,) = find_faults(log, Replays(log, 0, 0.5).other_sizes())
    assert fault.name == ("all_solved" if solved else "all_failed")
    (advice,) = fault.advice
    assert ("num_generations" in advice) == (cure != "prompts")
    assert (("harder" if solved else "easier") + " prompts" in advice) == (cure in ("prompts", "either"))
    if isinstance(cure, int):
        size, share = map(int, re.search(r"groups of (\d+) would be live in (\d+)%", advice).groups())
        assert size == cure and share == pytest.approx(100 * live_of(chances, size), abs=4)


# Intervals


def test_intervals_cover_what_they_estimate():
    covered = 0
    for seed in range(60):
        live = live_groups(make_log(drawn(0.5, 0.5, 80, 4, seed)))
        found = Bootstrap(np.arange(80), seed).share(live)
        exact = live_of_beta(0.5, 0.5, 4)
        covered += found.low <= exact <= found.high
    assert 52 <= covered <= 60


def test_groups_of_one_prompt_are_drawn_together():
    live = np.arange(20) % 3 == 0
    once = Bootstrap(np.arange(20), 5).share(live)
    four_times = Bootstrap(np.repeat(np.arange(20), 4), 5).share(np.repeat(live, 4))
    assert (once.low, once.high) == pytest.approx((four_times.low, four_times.high))
    apart = Bootstrap(np.arange(80), 5).share(np.repeat(live, 4))
    assert apart.high - apart.low < 0.7 * (once.high - once.low)


@pytest.mark.parametrize("every", [True, False])
def test_all_or_none_of_few_prompts_are_no_certainty(every):
    found = Bootstrap(np.arange(10), 0).share(np.full(10, every))
    bound = 1 - 0.025**0.1  # that of Clopper and Pearson
    assert (found.low, found.high) == pytest.approx((1 - bound, 1.0) if every else (0.0, bound))


def test_one_prompt_has_no_interval():
    total, groups = Bootstrap(np.zeros(5, dtype=np.int64), 0).sums(np.arange(5.0), 1)
    found = Estimate.of(total / groups)
    assert found.value == 2.0 and math.isnan(found.low) and found.number() == "2.00"


# The update


def with_lengths(rewards, prompts, lengths, micro=None, groups=8):
    return make_log(
        rewards,
        groups=groups,
        lengths=np.array(lengths, dtype=float),
        prompt_lengths=np.array(prompts, dtype=float),
        unit="tokens",
        micro_batch=micro,
    )


def test_positions_of_two_groups_are_those_counted_by_hand():
    log = with_lengths([[0, 1], [1, 0]], [4, 6], [[1, 3], [2, 2]])
    # 4 rows of 6 + 3; shared: prompts less a token each, with their completions: 7 and 9.
    assert update_positions(log, kept_rows(log, 0, "lossless")).tolist() == [[36, 36, 36, 16]]
    one = with_lengths([[0, 1], [1, 1]], [4, 6], [[1, 3], [2, 2]])
    assert update_positions(one, kept_rows(one, 0, "lossless")).tolist() == [[36, 18, 18, 7]]


def test_padding_of_completions_is_left_out_by_micro_batch():
    log = with_lengths([[0, 1], [1, 0]], [5, 5], [[1, 9], [1, 9]], micro=2)
    # Short and long rows apart: 2 x (5 + 1) and 2 x (5 + 9) in place of 4 x (5 + 9).
    assert update_positions(log, kept_rows(log, 0, "lossless"))[0, :3].tolist() == [56, 56, 40]


def test_an_update_without_any_advantage_computes_one_row():
    log = with_lengths([[1, 1], [0, 1]], [3, 3], [[2, 2], [2, 2]], groups=1)
    assert update_positions(log, kept_rows(log, 0, "lossless"))[0].tolist() == [10, 5, 5, 4]


def test_the_row_of_an_update_without_any_advantage_is_the_first():
    log = with_lengths([[1, 1], [1, 1]], [3, 7], [[2, 2], [5, 5]])
    assert update_positions(log, kept_rows(log, 0, "lossless"))[0].tolist() == [48, 12, 9, 4]


def test_a_group_with_one_row_shares_no_prompt_and_still_has_no_padding():
    log = with_lengths([[0, 1, 0, 1], [0, 1, 0, 1]], [10, 10], [[9] * 4, [9] * 4])
    rows = np.array([[True] * 4, [True, False, False, False]])
    # Prompts less a token: 9 + 4 x 9 and 9 + 9.
    assert update_positions(log, rows).tolist() == [[152, 95, 95, 63]]


def test_a_completion_of_mean_reward_needs_no_update_and_rounding_counts_as_none():
    log = make_log([[0, 1, 0.5], [0.1, 0.1, 0.1]])
    assert kept_rows(log, 0, "lossless").tolist() == [[True, True, False], [False] * 3]
    noisy = replace(log, advantages=np.array([[-1, 1, 0.0], [7e-5, 7e-5, 7e-5]]))
    assert kept_rows(noisy, 0, "lossless").tolist() == [[True, True, False], [False] * 3]


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_the_gain_of_a_smaller_update_is_one_over_the_cost(share):
    found = what_if(make_log([[0, 1], [1, 1], [1, 0], [0, 0]]), sampling_share=share)
    for name in ("nonzero", "lossless"):
        assert remedy(found, name).gain.value == pytest.approx(1 / (share + (1 - share) * 0.5))


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_findings_are_ratios_of_plain_sums(share):
    log = make_log(drawn(0.5, 0.5, 60, 4, 2), np.tile(np.arange(20), 3))
    found = what_if(log, sampling_share=share, seed=3)
    live, variances = live_groups(log), group_variances(log)
    kept, in_full = kept_rows(log, 3, "top_p").any(axis=1), sampled_in_full(log, 2, 3)
    earlier, later = repeated(log.prompts)
    chosen = chosen_again(log, earlier, 3)
    full_live, sampled = (in_full * live).sum(), (2 + in_full * 2).sum()
    then = (chosen * live[later]).sum() / chosen.sum()
    more = (chosen * variances[later]).sum() / chosen.sum() / variances[later].mean()
    of_kept, of_full = ((mask * variances).sum() / variances.sum() for mask in (kept, in_full))
    expected = {
        "top_p 0.9": (
            of_kept,
            1,
            kept.mean(),
            {"kept": kept.mean(), "kept_variance": of_kept, "gradient": 1 / kept.mean()},
        ),
        "dynamic sampling": (1, 1, live.mean(), {"completions": 4 / live.mean()}),
        "pilots, G0 = 2": (
            of_full,
            sampled / 240,
            full_live / 60,
            {"completions": sampled / full_live, "missed": 1 - full_live / live.sum()},
        ),
        "prompt selection": (more, 1, then, {"live": then, "live_before": live[later].mean(), "variance": more}),
    }
    for name, (bought, completions, update, numbers) in expected.items():
        row = remedy(found, name)
        assert row.gain.value == pytest.approx(bought / (share * completions + (1 - share) * update)), name
        for number, value in numbers.items():
            assert row.numbers[number].value == pytest.approx(value), (name, number)


# Which groups are kept


def test_nonzero_keeps_live_groups_and_all_variance():
    found = remedy(what_if(make_log([[0, 1], [1, 1], [1, 0], [0, 0], [1, 1]])), "nonzero")
    assert found.numbers["kept"].value == pytest.approx(0.4)
    assert found.numbers["gradient"].value == pytest.approx(2.5)


def test_top_p_keeps_what_the_filter_keeps_of_each_generation():
    rng = np.random.default_rng(4)
    rewards = rng.random((40, 4)) * rng.random((40, 1)) ** 3
    rewards[::3] = 0.5
    kept, low, high, loop = kept_rows(make_log(rewards), 0, "top_p").all(axis=1), math.inf, -math.inf, []
    for start in range(0, 40, 8):
        batch = torch.tensor(rewards[start : start + 8])
        low, high = min(low, batch.min().item()), max(high, batch.max().item())
        slack = 0.01 * min(1.0, high - low) ** 2
        zero = zero_variance(batch)
        loop += select_groups(
            group_score(batch), "top_p", 0.9, selection_eps=slack, is_zero=zero, at_least_one=True
        ).tolist()
    assert kept.tolist() == loop and 0 < kept.sum() < live_groups(make_log(rewards)).sum()


# Sampling


def test_dynamic_sampling_pays_for_dead_groups():
    found = remedy(what_if(make_log([[0, 1, 0, 0], [1, 1, 1, 1]] * 20)), "dynamic sampling")
    assert found.numbers["completions"].value == pytest.approx(8.0)


def test_a_batch_of_live_groups_needs_no_round_and_few_need_many():
    assert refill_rounds(1.0, 8, 0).tolist() == [0] * 200
    means = [refill_rounds(share, 8, 0).mean() for share in (0.9, 0.5, 0.2, 0.05)]
    assert means == sorted(means) and means[1] > 0.5 and means[-1] > 5


def test_surplus_groups_fill_the_next_batch():
    """Batches of one group: a round finds one live prompt in two, and what the first prompt finds is never carried."""
    alone, eight = refill_rounds(0.5, 1, 0), refill_rounds(0.5, 8, 0)
    assert alone.mean() == pytest.approx(1.0, abs=0.3)  # failures before a success
    assert (eight == 0).any()  # eight first prompts never fill a batch by themselves, but with surplus groups they do


def test_pilots_go_on_with_groups_that_vary_and_with_few_others():
    log = make_log([[0, 1] * 4, [0] * 8, [1] * 8, [0] * 8] * 60)
    in_full = sampled_in_full(log, 4, 0)
    assert in_full[::4].mean() > 0.85  # 4 of 8 members are alike in one of 35 drawings
    dead = np.delete(in_full, np.arange(0, 240, 4))
    assert dead.mean() < 0.1 and dead.min() == pytest.approx(AUDIT)
    found = remedy(what_if(log), "pilots, G0 = 4")
    completions = 4 * 240 + 4 * in_full.sum()
    assert found.numbers["completions"].value == pytest.approx(completions / in_full[::4].sum())
    assert found.numbers["missed"].value == pytest.approx(1 - in_full[::4].mean())


@pytest.mark.parametrize("groups", [8, 3])
def test_the_replay_of_pilots_samples_the_prompts_that_the_trainer_does(groups):
    """On the same rewards, audits apart; of three groups a generation, three generations are a round."""
    log, size = make_log(drawn(0.3, 0.4, 160, 8), groups=groups), groups * -(-8 // groups)
    rng, counts = seeded_draws(7, 2), np.zeros(160)
    for run in range(SHUFFLES):
        rewards = rng.permuted(log.rewards, axis=1)
        policy = Policy(None, Pilots(3, 8, size, seed=7))
        for step, start in enumerate(range(0, 160, size)):
            of_step = rewards[start : start + size]
            policy.begin_step(size)
            choice = policy.choose(of_step[:, :3], run, step)
            policy.learn(np.where(choice.in_full[:, None] | (np.arange(8) < 3), of_step, np.nan))
            counts[start : start + size] += np.where(choice.committed, 1.0, AUDIT)
    assert sampled_in_full(log, 3, 7).tolist() == (counts / SHUFFLES).tolist()


@pytest.mark.parametrize("share", [0.1, 0.45, 0.9])
def test_the_replay_of_dynamic_sampling_fills_batches_as_the_trainer_does(share):
    """On the same groups: rounds until a batch is full, then up to a batch of surplus groups for the next one."""
    rng, waiting, loop = seeded_draws(5, 1), 0, []
    for _ in range(REFILLED):
        kept, sampled, rounds = rng.binomial(8, share), 8, 0
        pool = waiting + kept
        while pool < 8:
            size = round_size(8 - pool, kept, sampled, 8, 1, 1)
            found = rng.binomial(size, share)
            pool, kept, sampled, rounds = pool + found, kept + found, sampled + size, rounds + 1
        loop.append(rounds)
        waiting = min(pool - 8, 8)
    assert refill_rounds(share, 8, 5).tolist() == loop


@pytest.mark.parametrize("times", [2, 3])
def test_the_replay_of_prompt_selection_samples_the_prompts_that_the_trainer_does(times):
    """Of prompts that were sampled an epoch ago; as many of them compete for a place however often each came."""
    log = prompts_again(lambda time: MIXED[:72], 4, times, count=72)
    (earlier, _), count = repeated(log.prompts), 72 * (times - 1)
    order = PromptSelection(count, lambda epoch: seeded_draws(7, 3, epoch + 1).permutation(count).tolist(), 7)
    policy, counts = Policy(order, None), np.zeros(count)
    assert sorted(policy.begin_step(count)) == [*range(count)]
    policy.learn(log.rewards[earlier][order.rows])
    order.posterior.clock += count
    while order.drawn < (1 + EPOCHS) * count:
        np.add.at(counts, policy.begin_step(8 * (times - 1)), 1)
    assert chosen_again(log, earlier, 7).tolist() == counts.tolist()


def test_prompt_selection_then_finds_as_many_live_groups_as_were_predicted():
    """Two epochs in the dataset's order are logged; then prompts are selected, on what each step has found."""
    rng = np.random.default_rng(4)
    chances = np.where(rng.random(320) < 0.5, 0.0, rng.beta(1.2, 1.2, 320))
    log = prompts_again(lambda time: chances[:, None], 8, 2, count=320)
    order = PromptSelection(320, lambda epoch: np.random.default_rng(epoch).permutation(320).tolist(), 0)
    policy, live = Policy(order, None), []
    for _ in range(200):
        rows = policy.begin_step(8)
        rewards = (rng.random((8, 8)) < chances[rows][:, None]).astype(float)
        policy.learn(rewards)
        live.append((rewards.std(axis=1) > 0).mean())
    numbers = remedy(what_if(log), "prompt selection").numbers
    assert numbers["live_before"].value == pytest.approx(np.mean(live[:40]), abs=0.05)
    assert numbers["live"].value == pytest.approx(np.mean(live[40:]), abs=0.05)


def test_pilots_have_fewer_completions_than_a_group():
    names = [one.name for one in what_if(make_log([[0, 1, 1]] * 9)).remedies]
    assert [name for name in names if "G0" in name] == ["pilots, G0 = 2"] and 2 in PILOTS
    assert not remedy(what_if(make_log([[0, 1]] * 9)), "pilots").is_known


@given(st.lists(st.integers(0, 4), max_size=12))
def test_each_group_is_paired_with_the_next_of_its_prompt(prompts):
    loop = [
        (first, next(later for later in range(first + 1, len(prompts)) if prompts[later] == prompts[first]))
        for first in range(len(prompts))
        if prompts[first] in prompts[first + 1 :]
    ]
    assert sorted(zip(*map(list, repeated(np.array(prompts, dtype=np.int64))), strict=True)) == loop


def test_prompt_selection_finds_the_prompts_that_stay_live():
    hard = [[0.0] * 8] * 3 + [[0.0, 1.0] * 4]
    log = make_log(hard * 32, prompts=[*range(64)] * 2)
    found = remedy(what_if(log), "prompt selection")
    assert found.numbers["live_before"].value == pytest.approx(0.25)
    assert found.numbers["live"].value > 0.6 and found.gain.low > 1


def test_prompt_selection_gains_nothing_where_the_past_says_nothing():
    rng = np.random.default_rng(2)
    log = make_log((rng.random((400, 4)) < 0.3).astype(float), prompts=[*range(200)] * 2)
    found = remedy(what_if(log, sampling_share=1.0), "prompt selection")
    assert found.gain.low < 1 < found.gain.high


def test_prompts_seen_once_tell_nothing_of_prompt_selection():
    rewards = [[0, 1]] * (TWICE + 14)
    few = remedy(what_if(make_log(rewards, prompts=[*range(15), *range(15)])), "prompt selection")
    assert not few.is_known and few.gain is None and "15" in few.finding
    unknown = remedy(what_if(make_log(rewards, knows_prompts=False)), "prompt selection")
    assert not unknown.is_known and "same prompt" in unknown.finding


def test_smaller_groups_are_more_and_fewer_of_them_live():
    log = make_log([[0, 0, 0, 1], [1, 1, 1, 1]] * 10)
    found = remedy(what_if(log), "groups of 2")
    assert found.numbers["live"].value == pytest.approx(0.25)  # of 6 pairs 3 vary, in half of the groups
    assert found.numbers["live_groups"].value == pytest.approx(0.25 * 2 / 0.5)


# Rewards


def test_groups_alive_through_one_reward_alone_are_told_with_an_example():
    parts = {"solved": np.array([[0, 0], [0, 1], [1, 1.0]]), "form": np.array([[0, 1], [0, 0], [1, 1.0]])}
    log = make_log(sum(parts.values()), by_function=parts, beginnings=["first prompt", "second", "third"])
    found = remedy(what_if(log), "score by one reward")
    assert found.numbers["solved"].value == found.numbers["form"].value == 0.5
    assert "first prompt" in found.finding and "second" in found.finding and "third" not in found.finding
    assert not remedy(what_if(make_log([[0, 1]])), "score by one reward").is_known


@pytest.mark.parametrize(
    ("rewards", "more", "name"),
    [
        ([[1, 1], [1, 1], [0, 1]], {}, "all_solved"),
        ([[0, 0], [0, 0], [0, 1]], {}, "all_failed"),
        ([[0.1, 0.1], [0.1, 0.1]], {}, "one_reward"),
        ([[0, 1], [0, 1]], {"history": [{"completions/clipped_ratio": 0.95}]}, "cut"),
        (
            [[0, 1], [0, 1]],
            {"by_function": {"solved": np.zeros((2, 2)), "form": np.array([[0, 1.0], [0, 1]])}},
            "constant_reward",
        ),
        ([[0.3, 0.30000004], [0, 1]], {}, "rounding"),
        ([[0.7, 0.7], [0, 1]], {"advantages": np.array([[6e-4, 6e-4], [-1, 1]])}, "noisy_advantages"),
        ([[np.nan, 1], [0, 1], [0, 1]], {}, "missing_rewards"),
        ([[np.nan, np.nan]], {}, "no_reward"),
    ],
)
def test_what_is_wrong_is_found_and_nothing_else(rewards, more, name):
    (fault,) = find_faults(make_log(rewards, **more))
    assert (fault.kind, fault.name, fault.severity) == ("data", name, "warning")


def test_a_function_that_gives_one_reward_is_told_from_those_that_vary():
    functions = {"solved": np.zeros((2, 2)), "form": np.array([[0, 1.0], [0, 1]])}
    (fault,) = find_faults(make_log([[0, 1], [0, 1]], by_function=functions))
    assert fault.sentence.startswith("Only form varies; solved is the same")


def test_an_update_without_any_row_is_predicted_to_compute_the_first():
    lengths, prompts, rows = np.array([[3, 9], [5, 2]]), np.array([4, 6]), np.zeros((2, 2), dtype=bool)
    first = rows | [[True, False], [False, False]]
    assert _positions(lengths, prompts, rows, None) == _positions(lengths, prompts, first, None)


@pytest.mark.parametrize(("live", "part"), [(1, "rests on 1 live group:"), (4, "rests on 4 live groups:"), (5, None)])
def test_a_note_says_on_how_few_live_groups_gains_rest(live, part):
    first, second = what_if(make_log([[0, 1]] * live + [[0, 0]])).notes[:2]
    assert part in first if part else "12 completions: 6 groups of 2 from 6 prompts, step 1" in first
    assert part is None or f"{2 * live + 2} completions" in second


def test_a_sound_log_has_no_fault():
    assert find_faults(make_log(drawn(1, 1, 50, 4))) == []


def test_without_a_live_group_no_remedy_is_offered():
    found = what_if(make_log([[1, 1]] * 4))
    assert found.remedies == [] and "no remedy" in found.advice and found.live.value == 0


# The whole


def test_rows_are_sorted_by_gain_and_the_unknown_come_last():
    found = what_if(make_log(drawn(0.3, 0.3, 64, 8)))
    known = [one for one in found.remedies if one.is_known]
    assert found.remedies[: len(known)] == known and len(known) < len(found.remedies)
    gains = [one.gain.value for one in known if one.gain is not None]
    assert gains == sorted(gains, reverse=True) and len(gains) >= 6
    assert known[0].name in found.advice and known[0].setting in found.advice


def test_where_everything_varies_plain_trl_is_advised():
    found = what_if(make_log([[0, 1] * 4] * 30))
    assert "stay with TRL" in found.advice


def test_the_same_seed_gives_the_same_numbers_and_leaves_the_global_state_alone():
    log = make_log(drawn(0.4, 0.4, 40, 6), prompts=[*range(20)] * 2)
    states = np.random.get_state()[1].copy(), torch.get_rng_state()
    first, second = what_if(log, seed=3).to_dict(), what_if(log, seed=3).to_dict()
    assert first == second != what_if(log, seed=4).to_dict()
    assert (np.random.get_state()[1] == states[0]).all() and torch.equal(torch.get_rng_state(), states[1])


def test_a_share_that_is_none_is_refused():
    with pytest.raises(ValueError, match=r"sampling_share .* 1\.5"):
        what_if(make_log([[0, 1]]), sampling_share=1.5)
    with pytest.raises(ValueError, match=r"micro_batch .* 0"):
        what_if(make_log([[0, 1]]), micro_batch=0)

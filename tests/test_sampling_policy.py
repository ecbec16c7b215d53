"""What is expected of prompts, against plain loops and simulated rewards; and which of them are drawn."""

import itertools
import math
from itertools import islice
from statistics import fmean, variance
from types import SimpleNamespace

import numpy as np
import pytest
from trl.trainer.utils import RepeatSampler

from ragen2_trl.sampling import policy as pilots
from ragen2_trl.sampling.policy import PromptOrder, PromptSelection, rank_correlation
from ragen2_trl.sampling.posterior import RewardPosterior, evidence_of
from ragen2_trl.sampling.sampler import permutations_of_trl

GROUP = 8


def selection(num_rows=64, seed=5):
    return PromptSelection(num_rows, permutations_of_trl(num_rows, seed, True), seed)


def step_of(chosen, count):
    chosen.begin_step()
    return chosen.draw(count)


def stream_of(num_rows, seed, shuffle):
    return PromptOrder(num_rows, permutations_of_trl(num_rows, seed, shuffle))


def play(chosen, chances, steps, count, rng):
    """Draw, sample and learn, as a training run does; gives the rows of each step."""
    drawn = []
    for _ in range(steps):
        drawn.append(step_of(chosen, count))
        rewards = rng.random((count, GROUP)) < chances[drawn[-1]][:, None]
        chosen.learn(rewards.astype(float), 0)
    return drawn


def mixed(num_rows=1024, dead=0.7, seed=0):
    """Chances of prompts of which 70 % are never solved."""
    rng = np.random.default_rng(seed)
    return np.where(rng.random(num_rows) < dead, 0.0, rng.uniform(0.2, 0.8, num_rows)), rng


def zero_variance(chances, drawn, rng):
    rewards = rng.random((len(drawn), GROUP)) < chances[drawn][:, None]
    return (rewards.std(axis=1) == 0).mean()


def test_evidence_is_that_of_a_plain_loop():
    rng = np.random.default_rng(1)
    rewards = np.where(rng.random((20, 5)) < 0.3, np.nan, rng.normal(size=(20, 5)))
    evidence, variances = evidence_of(rewards)
    for row, (count, total, freedom, squares), found in zip(rewards, evidence, variances, strict=True):
        valid = [one for one in row if not math.isnan(one)]
        assert (count, freedom) == (len(valid), max(0, len(valid) - 1))
        assert total == pytest.approx(sum(valid))
        assert squares == pytest.approx(sum((one - fmean(valid)) ** 2 for one in valid) if valid else 0, abs=1e-12)
        assert found == pytest.approx(variance(valid) if len(valid) > 1 else 0)


@pytest.mark.parametrize("levels", [(0.0, 1.0), (-2.0, 3.0), (0.0, 0.1, 1.0)], ids=["binary", "shifted", "three"])
def test_samples_have_the_mean_that_is_predicted(levels):
    """Of two values, a Beta; of more, an inverse chi-squared, whose draws are cut at the largest variance there is."""
    posterior, rng = RewardPosterior(3, half_life=1e9), np.random.default_rng(2)
    for weights in ((1, 0, 0), (1, 1, 1), (1, 3, 1)):
        shares = np.array(weights[: len(levels)]) / sum(weights[: len(levels)])
        rewards = rng.choice(levels, p=shares, size=(3, GROUP))
        posterior.observe(np.arange(3), rewards, np.ones(3, dtype=bool))
    drawn = posterior.sample(np.repeat(np.arange(3), 100_000), rng).reshape(3, -1)
    assert drawn.mean(axis=1) == pytest.approx(posterior.mean(np.arange(3)), rel=0.1)


def test_the_beta_counts_faded_rewards():
    """After half a half-life twice, the first group counts half, and the prior is that of all groups seen."""
    posterior, low, high = RewardPosterior(4, half_life=2.0), -1.0, 1.0
    first = np.array([[low] * 6 + [high] * 2])
    posterior.observe(np.array([0]), first, np.array([True]))
    for row in (1, 2):
        posterior.observe(np.array([row]), np.array([[low] * GROUP]), np.array([True]))
    a, b = posterior._beta(posterior.known(np.array([0, 3])))
    assert (a[0] - a[1], b[0] - b[1]) == pytest.approx((2 * 0.5, 6 * 0.5))
    groups, keep = [(-0.5, variance(first[0])), (low, 0.0), (low, 0.0)], 1 - 1 / 256
    weights = [keep**2, keep, 1.0]
    mean = (sum(w * g[0] for w, g in zip(weights, groups, strict=True)) + 4 * 0.0) / (sum(weights) + 4)
    spread = (sum(w * g[1] for w, g in zip(weights, groups, strict=True)) + 4 * 4 / 6) / (sum(weights) + 4)
    chance = (mean - low) / 2
    assert a[1] / (a[1] + b[1]) == pytest.approx(chance)
    assert posterior.mean(np.array([3]))[0] == pytest.approx(spread)


def test_evidence_of_a_prompt_that_is_sampled_again_and_again_fades_all_the_same():
    posterior, half_life, groups = RewardPosterior(4, half_life=3.0), 3.0, []
    for step in range(12):
        rewards = np.random.default_rng(step).integers(0, 2, (2, GROUP)).astype(float)
        posterior.observe(np.array([0, 1 + step % 3]), rewards, np.ones(2, dtype=bool))
        groups.append((2 * (step + 1), rewards[0]))  # the clock after the prompts of the step
    wins = sum(2 ** ((when - posterior.clock) / half_life) * rewards.sum() for when, rewards in groups)
    losses = sum(2 ** ((when - posterior.clock) / half_life) * (1 - rewards).sum() for when, rewards in groups)
    a, b = posterior._beta(posterior.known(np.array([0])))
    posterior.evidence[0] = 0.0
    prior_a, prior_b = posterior._beta(posterior.known(np.array([0])))
    assert (a - prior_a, b - prior_b) == (pytest.approx(wins), pytest.approx(losses))


def test_what_is_predicted_comes_true_and_flat_groups_become_few():
    """1,024 prompts, 70 % of them dead: after three epochs, most of the groups that are sampled have variance."""
    chances, rng = mixed()
    chosen = selection(len(chances))
    play(chosen, chances, 192, 16, rng)
    predicted, realised, flat = [], [], []
    for _ in range(100):
        (drawn,) = play(chosen, chances, 1, 16, rng)
        predicted.append(chosen.predicted.mean())
        realised.append(chosen.realised.mean())
        flat.append(zero_variance(chances, drawn, rng))
    assert fmean(flat) < 0.35 < zero_variance(chances, list(range(1024)), rng)
    assert fmean(predicted) == pytest.approx(fmean(realised), rel=0.15)
    assert chosen.metrics()["prediction_rank_correlation"] > 0.3


def test_prompts_that_begin_to_teach_are_found_again():
    chances, rng = mixed(256)
    chosen = selection(256)
    play(chosen, chances, 48, 16, rng)
    asleep = np.flatnonzero(chances == 0)[:64]
    chances[asleep] = 0.5
    before = np.isin(np.concatenate(play(chosen, chances, 8, 16, rng)), asleep).mean()
    play(chosen, chances, 80, 16, rng)
    after = np.isin(np.concatenate(play(chosen, chances, 16, 16, rng)), asleep).mean()
    assert after > max(0.3, 2 * before)


def test_no_prompt_starves(monkeypatch):
    """The one not sampled for longest has a place whenever it comes up, which is once an epoch."""
    monkeypatch.setattr("ragen2_trl.sampling.policy.EXPLORE", 0.125)  # one of eight in every step
    chances = np.where(np.arange(128) < 32, 0.5, 0.0)
    chosen, rng = selection(128), np.random.default_rng(3)
    drawn = play(chosen, chances, 128, 8, rng)
    assert set(np.concatenate(drawn[16:])) == set(range(128))
    for _ in range(40):
        assert chosen.drawn % 128 == 0
        oldest = np.flatnonzero(chosen.posterior.seen == chosen.posterior.seen.min())
        epoch = play(chosen, chances, 4, 8, rng)  # of 4 x 8 candidates each
        assert set(oldest) & set(np.concatenate(epoch))


def test_where_an_epoch_ends_during_a_step_each_prompt_is_drawn_once():
    """Three fresh prompts are left, and the two other places compete for more candidates than there are prompts."""
    for seed in range(20):
        chosen = selection(8, seed=seed)
        for _ in range(6):
            assert len(set(step_of(chosen, 5))) == len(chosen.rows) == 5
            chosen.learn(np.array([[0.0, 1.0] * 4] * 5), 0)


@pytest.mark.parametrize("count", [2, 3, 5])
def test_a_step_that_draws_further_prompts_draws_others_while_there_are_some(count):
    """Also where an epoch ends during it; five and twice five of twelve leave two, which must be among the next."""
    for seed in range(20):
        chosen = selection(12, seed=seed)
        for _ in range(6):
            drawn = step_of(chosen, count)
            chosen.learn(np.array([[0.0, 1.0] * 4] * count), 0)
            while len(drawn) < 12:
                further = chosen.draw(count)
                chosen.learn(np.array([[0.0, 1.0] * 4] * count), 0)
                assert len(further) == count
                assert len({*drawn, *further}) == min(12, len(drawn) + count)
                drawn += further


@pytest.mark.parametrize("shuffle", [True, False])
def test_the_stream_is_that_of_trls_sampler(shuffle):
    stream, sampler = stream_of(12, 7, shuffle), RepeatSampler(range(12), 1, shuffle=shuffle, seed=7)
    assert stream.draw(36) == [row for _ in range(3) for row in islice(sampler, 12)]


def test_fresh_prompts_pass_and_candidates_are_distinct():
    chosen, stream = selection(20), stream_of(20, 5, True)
    rewards = np.array([[0.0, 1.0] * 4] * 6)
    for _ in range(3):
        assert step_of(chosen, 6) == stream.draw(6)
        chosen.learn(rewards, 0)
    tail = stream.draw(2)
    drawn = step_of(chosen, 6)  # two are left of the epoch, for four more places there are sixteen candidates
    assert drawn[:2] == tail and len(set(drawn)) == 6
    assert chosen.skipped == 12
    chosen.learn(rewards, 0)
    for _ in range(20):
        assert len(set(step_of(chosen, 6))) == 6
        chosen.learn(rewards, 0)


def test_a_state_carries_everything():
    chances, rng = mixed(64)
    chosen = selection()
    play(chosen, chances, 9, 8, rng)
    copy = selection()
    copy.load(chosen.state())
    rewards = (rng.random((8, GROUP)) < 0.5).astype(float)
    for _ in range(6):
        assert step_of(copy, 8) == step_of(chosen, 8)
        copy.learn(rewards, 0)
        chosen.learn(rewards, 0)
        assert copy.metrics() == chosen.metrics()
    with pytest.raises(ValueError, match="train_dataset has 32 rows"):
        selection(32).load(chosen.state())


def naive_ranks(values):
    return [sum(b < a for b in values) + (sum(b == a for b in values) - 1) / 2 for a in values]


def test_rank_correlation_is_that_of_mean_ranks():
    rng = np.random.default_rng(6)
    first, second = rng.integers(0, 5, 40).astype(float), rng.normal(size=40)
    expected = np.corrcoef(naive_ranks(first), naive_ranks(second))[0, 1]
    assert rank_correlation(first, second) == pytest.approx(expected)
    assert math.isnan(rank_correlation(first, np.ones(40)))


# Which prompts are worth it


def test_the_prompts_gone_on_with_are_those_that_yield_most_variance_for_a_completion():
    rng = np.random.default_rng(0)
    for _ in range(50):
        expected = rng.gamma(0.3, size=6)
        first, size = 3, int(rng.integers(4, 20))
        threshold = pilots.least_worth(expected, first, size)

        def rate(chosen, expected=expected, first=first, size=size):
            return expected[list(chosen)].sum() / (6 * first + len(chosen) * (size - first))

        choices = [one for count in range(1, 7) for one in itertools.combinations(range(6), count)]
        best = max(choices, key=rate)
        assert rate(np.flatnonzero(expected >= threshold)) == pytest.approx(rate(best))


@pytest.mark.parametrize("processes", [1, 3])
def test_each_process_goes_on_with_as_many_of_its_own_prompts_first_the_audited_and_then_the_best(
    processes, monkeypatch
):
    rng, prompts, room = np.random.default_rng(0), 4, 3  # of each process; whole groups that fit on it
    for _ in range(60):
        expected = rng.gamma(0.3, size=processes * prompts).round(1)
        draws = rng.random(len(expected)) * 4 * pilots.AUDIT
        own = pilots.Pilots(2, 8, processes * room, seed=0, processes=processes)
        monkeypatch.setattr(own, "_expected", lambda rewards, *known, expected=expected: expected)
        monkeypatch.setattr(np.random, "default_rng", lambda key, d=draws: SimpleNamespace(random=lambda size: d))
        choice = own.choose(np.zeros((len(expected), 2)), key=(0,))
        monkeypatch.undo()

        worth = expected >= pilots.least_worth(expected, 2, 8)
        audited = ~worth & (draws < pilots.AUDIT)
        number = min(max(1, math.ceil((worth.sum() + audited.sum()) / processes)), room)
        whole = []
        for process in range(processes):
            mine = range(process * prompts, (process + 1) * prompts)
            best = sorted(mine, key=lambda prompt: (not audited[prompt], -expected[prompt]))[:number]
            whole += sorted(best)
        assert np.flatnonzero(choice.in_full).tolist() == whole
        assert np.flatnonzero(choice.audited).tolist() == [one for one in whole if audited[one]]
        assert np.flatnonzero(choice.committed).tolist() == [one for one in whole if not audited[one]]


def posterior_of(rewards):
    posterior = RewardPosterior(0, 1.0)
    posterior.see(rewards)
    posterior.learn_prior(rewards)
    return posterior


def test_equal_pilots_are_worth_what_is_known_of_their_prompts():
    order = selection(8)
    for _ in range(20):
        order.posterior.observe(np.arange(2), np.array([[0.0] * GROUP, [0.0, 1.0] * (GROUP // 2)]), np.ones(2, bool))
    order.rows = np.arange(2)
    choice = pilots.Policy(order, pilots.Pilots(2, GROUP, 8, seed=0)).choose(np.zeros((2, 2)), 0)
    assert choice.committed.tolist() == [False, True]


def log_beta(a, b):
    return math.lgamma(a) + math.lgamma(b) - math.lgamma(a + b)


def test_expected_variance_of_two_values_is_the_sum_over_all_outcomes():
    low, high, further = -1.0, 2.0, 5
    drawn = np.random.default_rng(1).random((40, 3)) < 0.3
    posterior = posterior_of(np.where(drawn, high, low))
    rewards = np.array([[low, high, low], [low, low, np.nan], [high, high, high]])
    known = np.array([[8.0, 8 * low + 2 * 3.0, 7.0, 1.0], [0, 0, 0, 0], [2.0, 2 * low, 1.0, 0.0]])
    for pilot, before, found in zip(rewards, known, posterior.group_variance(rewards, further, known), strict=True):
        have = pilot[~np.isnan(pilot)]
        (a,), (b,) = posterior._beta(before[None])
        a, b = a + (have == high).sum(), b + (have == low).sum()
        expected = 0.0
        for wins in range(further + 1):
            chance = math.comb(further, wins) * math.exp(log_beta(a + wins, b + further - wins) - log_beta(a, b))
            group = [*have, *[high] * wins, *[low] * (further - wins)]
            expected += chance * np.var(group, ddof=1)
        assert found == pytest.approx(expected)


def test_expected_variance_of_more_values_is_that_of_groups_drawn_with_the_expected_one():
    rng = np.random.default_rng(2)
    posterior = posterior_of(rng.normal(size=(60, 3)))
    pilot, further, draws = np.array([[0.2, 1.0, -0.3]]), 6, 200_000
    (freedom,), (squares,) = posterior._inverse_chi_squared(np.array([[0.0, 0.0, 2.0, pilot.var() * 3]]))
    variance = squares / (freedom - 2)
    means = pilot.mean() + rng.normal(size=(draws, 1)) * (variance / 3) ** 0.5  # known from the pilot alone
    others = means + rng.normal(size=(draws, further)) * variance**0.5
    groups = np.concatenate([np.broadcast_to(pilot, (draws, 3)), others], axis=1)
    assert posterior.group_variance(pilot, further)[0] == pytest.approx(groups.var(axis=1, ddof=1).mean(), rel=0.01)


def test_the_prior_is_learned_from_pilots_alone():
    """Groups that were gone on with had pilots that vary: with all of their rewards the prior would be of these."""
    rng = np.random.default_rng(3)
    chances = rng.beta(1.2, 1.2, 4000)
    rewards = (rng.random((4000, 16)) < chances[:, None]).astype(float)
    flat = rewards[:, :3].std(axis=1) == 0
    rewards[flat, 3:] = np.nan
    posterior = RewardPosterior(4000, 1e9)
    posterior.observe(np.arange(4000), rewards, np.ones(4000, dtype=bool), first=3)
    variance = posterior._prior()[1]
    assert variance == pytest.approx(1.2**2 / (2.4 * 3.4), rel=0.1)
    biased = RewardPosterior(4000, 1e9)
    biased.observe(np.arange(4000), rewards, np.ones(4000, dtype=bool))
    assert biased._prior()[1] < variance


def test_the_oldest_prompt_is_as_old_as_the_last_draw_of_it_or_the_run():
    chosen = selection(num_rows=16)
    for step in range(1, 4):
        rows = step_of(chosen, 4)
        chosen.learn(np.zeros((4, GROUP)), 0)
        assert len(rows) == 4 and chosen.metrics()["oldest_unseen"] == 4 * step


def test_missed_variance_fades_with_memory():
    chosen, rng = pilots.Pilots(count=2, size=4, groups=8, seed=0), np.random.default_rng(0)
    held = np.zeros(3)
    for _ in range(4):
        rewards = (rng.random((8, 4)) < 0.5).astype(float)
        in_full = rng.random(8) < 0.8
        choice = pilots.Choice(in_full, in_full & (rng.random(8) < 0.4))
        variances = rewards.var(axis=1, ddof=1)
        latest = choice.audited.sum(), variances[choice.audited].sum() / pilots.AUDIT
        held = held * (pilots.MEMORY - 1) / pilots.MEMORY + [*latest, variances[choice.committed].sum()]
        chosen.learn(rewards, choice)
        _, missed, found = held
        assert chosen.metrics()["missed_variance"] == pytest.approx(missed / (missed + found))

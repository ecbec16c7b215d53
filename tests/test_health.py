"""What a training is doing: each state is told from its rows, plain cases rightly, and logs may be anybody's."""

import json
import math
import re

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ragen2_trl.instrument import Health, health
from ragen2_trl.instrument.health import LEVEL, MAX_HISTORY, MIN_FLAT, MIN_ROWS, RUNNING, SIGNALS, SPAN, TITLES

MANY = 100_000  # completions of a row, whose number then sets no limit


def rows_of(key, *values, **others):
    return [{"step": step, key: value, **others} for step, value in enumerate(values)]


def states(rows, **settings):
    """(state, since) of a run, without the first."""
    return [(one.name, one.since) for one in health(rows, **settings).history[1:]]


def noisy(seed, steps, before, after=None):
    """Rows of a reward with white noise that goes from one mean to another."""
    draw = np.random.default_rng(seed)
    for step in range(steps):
        mean = before if after is None else before + (after - before) * step / steps
        yield {"step": step, "reward": float(draw.normal(mean, 0.05)), "reward_std": 0.4, "frac_reward_zero_std": 0.3}


def healthy(seed, completions, steps=200):
    """Rows of a run that goes up and down with a memory: validity and success follow one AR(1) process.

    Its deviation is 0.07 on the arcsine scale: 7 points at a rate of 50 %. A limit of five standard errors of
    independent rows accuses up to two fifths of such runs.
    """
    draw = np.random.default_rng([seed, completions])
    memory, rate, deviation = draw.uniform(0.8, 0.95), draw.uniform(0.79, 0.97), draw.normal()
    for step in range(steps):
        deviation = memory * deviation + math.sqrt(1 - memory**2) * draw.normal()
        valid, success = (
            draw.binomial(completions, math.sin(np.clip(math.asin(math.sqrt(mean)) + 0.07 * deviation, 0, 1.57)) ** 2)
            / completions
            for mean in (rate, rate / 2)
        )
        yield {
            "step": step,
            "health/completions": completions,
            "env/a/valid_rate": valid,
            "env/a/success": success,
            "reward": success,
            "reward_std": math.sqrt(success * (1 - success)),
            "frac_reward_zero_std": 0.2,
        }


# Plain cases


@pytest.mark.parametrize("wobble", [0.0, 1e-9])
@pytest.mark.parametrize("reward", [0.0, 0.5, 1.0, -3.0])
def test_a_constant_reward_is_flat_and_never_failing(reward, wobble):
    values = [reward + wobble * (step % 3) for step in range(200)]
    assert states(rows_of("reward", *values)) == [("no_rise", MIN_FLAT - 1)]
    told = health(rows_of("reward", *values, reward_std=wobble, frac_reward_zero_std=1.0, **{"env/a/success": 0.0}))
    assert [one.name for one in told.history] == ["too_early", "nothing_to_learn"]


SOLVED, UNSOLVED, CUT = {"env/a/success": 1.0}, {"env/a/success": 0.0}, {"completions/clipped_ratio": 1.0}
NO_SIGNAL = {
    "cut": ({"reward": 0.0, "frac_reward_zero_std": 1.0, **UNSOLVED, **CUT}, "cut at the length limit"),
    "solved": ({"reward": 1.0, "frac_reward_zero_std": 1.0, **SOLVED}, "solve their tasks"),
    "unsolved": ({"reward": 0.0, "frac_reward_zero_std": 0.96, **UNSOLVED}, "No completion solves"),
    "one reward": ({"reward": 0.25, "reward_std": 0.0}, "same reward, 0.25"),
    "ours": ({"reward": 0.25, "snr/zero_variance_fraction": 1.0}, "same reward, 0.25"),
    "empty steps": ({"reward": 0.25, "reward_std": 0.3, "snr/kept_fraction": 0.0}, "keeps no group"),
}


def test_why_a_run_is_flat_is_told_of_its_latest_rows():
    rows = [{"step": step, "reward": float(step > 0), "frac_reward_zero_std": 1.0} for step in range(6)]
    assert health(rows[:5]).state.why.startswith("All completions of a group")
    assert health(rows).state.why.startswith("Every group got the same reward, 1")


@pytest.mark.parametrize("case", NO_SIGNAL)
def test_five_rows_that_teach_nothing_are_flat_and_why_is_said(case):
    row, why = NO_SIGNAL[case]
    rows = [{"step": step, **row} for step in range(5)]
    assert states(rows[:4]) == []
    state = health(rows).state
    assert (state.name, state.since) == ("nothing_to_learn", 4) and why in state.why and why in state.sentence
    assert (
        states([*rows, {"step": 5, "reward": 0.5, "reward_std": 0.5, "snr/kept_fraction": 0.5}])[-1][0] == "too_early"
    )


def test_groups_of_different_rewards_that_do_not_vary_within_are_told_apart_from_one_reward():
    rows = rows_of("reward", 0.1, 0.6, 0.2, 0.5, 0.4, frac_reward_zero_std=1.0, reward_std=0.4)
    assert "of a group" in health(rows).state.why


def test_rewards_that_vary_in_one_row_of_five_are_no_lack_of_signal():
    rows = [{"step": step, "reward": 0.5, "frac_reward_zero_std": float(step % 5 > 0)} for step in range(40)]
    assert states(rows) == []


@pytest.mark.parametrize("seed", range(3))
def test_a_reward_that_is_flat_for_200_steps_is_told_with_the_rise_that_would_have_shown(seed):
    told = health(noisy(seed, 200, 0.4))
    assert [one.name for one in told.history] == ["too_early", "no_rise"]
    assert told.state.since == MIN_FLAT - 1 and "200 generations" in told.state.why
    assert re.search(r"a rise of 0\.0[4-6]", told.state.why)  # 3 sqrt(2) standard errors of a mean of 20 rows


@pytest.mark.parametrize("seed", range(3))
def test_a_reward_that_rises_is_learning_until_the_rise_is_undone(seed):
    rising = list(noisy(seed, 120, 0.2, 0.5))
    told = health(rising)
    assert told.state.name == "learning" and 2 * SPAN <= told.state.since + 1 < 100
    falls = [{**row, "step": 120 + row["step"]} for row in noisy(seed, 40, 0.25)]
    undone = health([*rising, *falls]).state
    assert undone.name == "no_rise" and "undone" in undone.why


def test_success_stands_in_where_no_reward_is_logged():
    rows = [{"step": row["step"], "env/a/success": row["reward"]} for row in noisy(0, 120, 0.2, 0.6)]
    assert health(rows).state.name == "learning" and "success" in health(rows).state.why


def test_states_have_their_precedence():
    """Each row adds what tells a state of higher precedence."""
    base = [
        {"step": step, "reward": 0.2 + 0.005 * step + 0.01 * (step % 2), "reward_std": 0.4, "env/a/valid_rate": 0.98}
        for step in range(160)
    ]
    changes = {
        80: {"completions/mean_length": 900.0},
        100: {"frac_reward_zero_std": 1.0},
        120: {"env/a/valid_rate": 0.1},
    }
    for row in base:
        row["completions/mean_length"] = 100.0
        for begin, change in changes.items():
            row |= change if row["step"] >= begin else {}
    assert [name for name, _ in states(base, completions=MANY)] == [
        "learning",
        "drifting",
        "nothing_to_learn",
        "failing",
    ]
    assert list(TITLES) == ["failing", "nothing_to_learn", "drifting", "learning", "no_rise", "too_early"]


# Limits

SHARES = {  # key: a level, and what is just within and just beyond its limit of 0.46 or 0.45 on the arcsine scale
    "env/a/valid_rate": (0.95, 0.62, 0.58),
    "mi/valid_thinking_rate": (0.95, 0.63, 0.59),
    "env/a/success": (0.8, 0.39, 0.34),
    "eval/env/a/success": (0.8, 0.39, 0.34),
}


@pytest.mark.parametrize("key", SHARES)
def test_a_share_beyond_its_limit_in_three_rows_running_is_failing(key):
    level, within, beyond = SHARES[key]
    for values in ([*[level] * 50, *[within] * 50], [*[level] * 50, *[beyond] * (RUNNING - 1), *[level] * 20]):
        assert "failing" not in dict(states(rows_of(key, *values), completions=MANY))
    told = health(rows_of(key, *[level] * 50, *[beyond] * 20), completions=MANY)
    assert [(one.name, one.since) for one in told.history[1:]] == [("failing", 50 + RUNNING - 1)]
    for part in (SIGNALS[told.name_of(key)].what.capitalize(), key, f"{beyond:.0%}", f"{level:.0%}", "step 4"):
        assert part in told.state.sentence


RISES = {  # key: a level, the factor of its limit, its floor
    "completions/mean_length": (50.0, math.exp(1.1), 16.0),
    "entropy": (0.4, math.exp(1.5), 0.1),
    "grad_norm": (1.0, math.exp(2.65), 1e-3),
}


@pytest.mark.parametrize("key", RISES)
def test_a_rise_beyond_its_factor_is_drifting_and_never_failing(key):
    level, factor, floor = RISES[key]
    for low, base in ((level, level), (floor / 100, floor)):
        assert states(rows_of(key, *[low] * 50, *[0.95 * factor * base] * 30)) == []
        assert states(rows_of(key, *[low] * 50, *[1.05 * factor * base] * 30)) == [("drifting", 52)]


def test_the_clip_ratio_drifts_once_it_is_beyond_its_limit_and_at_zero_says_nothing():
    assert states(rows_of("clip_ratio/region_mean", *[0.0] * 80)) == []
    assert states(rows_of("clip_ratio/region_mean", *[0.0] * 50, *[0.03] * 30)) == []
    assert states(rows_of("clip_ratio/region_mean", *[0.0] * 50, *[0.04] * 30)) == [("drifting", 52)]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_in_three_rows_is_drifting(bad):
    assert states(rows_of("grad_norm", *[1.0] * 20, bad, *[1.0] * 20)) == []
    told = health(rows_of("grad_norm", *[bad] * RUNNING))
    assert (told.state.name, told.state.since) == ("drifting", 2) and "not finite" in told.state.why
    assert health(rows_of("grad_norm", *[bad] * RUNNING, *[1.0] * 9)).state.name == "too_early"


@pytest.mark.parametrize(("completions", "within", "beyond"), [(4, 0.25, 0.15), (16, 0.46, 0.41), (MANY, 0.62, 0.58)])
def test_the_fewer_completions_the_further_validity_has_to_fall(completions, within, beyond):
    for low, is_told in ((within, False), (beyond, True)):
        rows = rows_of("env/a/valid_rate", *[0.95] * 50, *[low] * 100)
        assert bool(states(rows, completions=completions)) == is_told
        counted = [{**row, "health/completions": completions} for row in rows]
        assert bool(states(counted, completions=MANY)) == is_told


def test_a_failure_in_the_first_rows_takes_ten_to_be_told():
    assert states(rows_of("env/a/valid_rate", *[0.95] * 5, *[0.1] * 4), completions=MANY) == []
    assert states(rows_of("env/a/valid_rate", *[0.95] * 5, *[0.1] * 5), completions=MANY) == [
        ("failing", MIN_ROWS - 1)
    ]


@pytest.mark.parametrize("key", ["reward", "env/a/success"])
def test_without_validity_a_loss_of_reward_or_success_is_failing(key):
    """Beyond the noise of its rows, where rewards vary at all."""
    draw = np.random.default_rng(0)
    values = [*(0.6 + draw.normal(0, 0.04, 60)), *(0.02 + abs(draw.normal(0, 0.01, 30)))]
    assert [name for name, _ in states(rows_of(key, *map(float, values), reward_std=0.45))][-1] == "failing"
    assert "failing" not in dict(states(rows_of("reward", *map(float, values), reward_std=0.0)))
    noise = np.clip(0.5 + draw.normal(0, 0.2, 200), 0, 1)
    assert "failing" not in dict(states(rows_of(key, *map(float, noise), reward_std=0.5)))


def test_a_state_ends_halfway_back_so_that_a_run_at_its_limit_does_not_flicker():
    def told(*levels):
        values = [0.95] * 50 + [level for level in levels for _ in range(20)]
        return [name for name, _ in states(rows_of("env/a/valid_rate", *values), completions=MANY)]

    assert told(0.5, 0.7) == told(0.5, 0.7, 0.5, 0.7) == ["failing"]
    assert told(0.5, 0.9) == ["failing", "too_early"] and told(0.5, 0.9, 0.5)[-1] == "failing"


@pytest.mark.parametrize("completions", [16, 64, 512])
@pytest.mark.parametrize("runs", [60, pytest.param(1000, marks=pytest.mark.full)])
def test_hardly_any_healthy_run_with_a_memory_is_said_to_fail(completions, runs):
    accused = sum(
        any(one.name == "failing" for one in health(healthy(seed, completions)).history) for seed in range(runs)
    )
    assert accused <= max(1, 0.015 * runs)


# Generations


def lost_format(steps=130):
    return [
        {**row, "env/a/valid_rate": max(0.0, 0.95 - 0.03 * max(0, row["step"] - 80))}
        for row in noisy(0, steps, 0.2, 0.6)
    ]


SAMPLED = ("reward", "reward_std", "frac_reward_zero_std", "env/a/valid_rate")  # logged at steps that sample


def reused(rows, times, numbered):
    """Each row as a generation of several steps: with its number and all repeated, or as TRL logs it."""
    for number, row in enumerate(rows):
        again = {key: value for key, value in row.items() if key not in SAMPLED}
        for use in range(times):
            one = {**row, "snr/generation": float(number)} if numbered else again if use else row
            yield {**one, "step": times * row["step"] + use}


@pytest.mark.parametrize("numbered", [False, True])
def test_rows_that_reuse_a_generation_count_once(numbered):
    filtered = {"snr/zero_variance_fraction": 0.3, "snr/kept_fraction": 0.5}
    lost = [{**row, **filtered, "entropy": 1.0, "grad_norm": 1.0} for row in lost_format()]
    for row in lost[40:60]:
        row |= {"entropy": 9.0}
    flat = [{"step": step, "reward": 0.0, "snr/zero_variance_fraction": 1.0} for step in range(7)]
    for rows in (lost, flat, list(noisy(0, 200, 0.4))):
        once = states(rows)
        assert once and states(reused(rows, 8, numbered)) == [(name, 8 * since) for name, since in once]


@pytest.mark.parametrize(("each", "weight"), [(None, 10), (0.25, 10), (2, 5), (20, 1)])
def test_a_row_that_averages_steps_counts_as_their_generations(each, weight):
    rows = [{"step": 10 * number, "reward": 0.5} for number in range(1, 30)]
    assert health(rows, steps_per_generation=each).weight == weight
    numbered = [{**row, "snr/generation": 3 * number} for number, row in enumerate(rows)]
    assert health(numbered, steps_per_generation=each).weight == 3


def test_one_row_alone_is_no_plateau_however_many_generations_it_averages():
    rows = [
        {"step": 20 * n, "reward": 0.5, "reward_std": float(n < 3), "frac_reward_zero_std": n // 3}
        for n in range(1, 5)
    ]
    assert states(rows[:3]) == [] and states(rows) == [("nothing_to_learn", 80)]


def test_a_row_that_counts_no_completions_is_judged_by_the_number_of_the_run():
    rows = [{"step": step, "reward": 0.5, "env/a/valid_rate": 0.9 - 0.7 * (step > 29)} for step in range(60)]
    counted = [{**row, "health/completions": 0} for row in rows]
    assert states(counted, completions=32) == states(rows, completions=32) == [("failing", 32)]


def test_a_number_of_the_update_is_the_mean_over_a_generation_and_one_that_is_not_finite_is_not_missed():
    def told(*last):
        uses = [[0.0, 0.01, 0.02, 0.03]] * 20 + [last] * RUNNING
        pairs = ((number, one) for number, use in enumerate(uses) for one in use)
        return states(
            {"step": step, "snr/generation": number, "clip_ratio/region_mean": one}
            for step, (number, one) in enumerate(pairs)
        )

    assert told(0.0, 0.05, 0.05, 0.05) == [] and told(0.0, 0.2, 0.2, 0.2) == [("drifting", 90)]
    rows = [{"step": step, "reward": 0.5, "grad_norm": 1.0} for step in range(20)]
    rows += [{"step": step, "grad_norm": math.nan} for step in range(20, 20 + RUNNING)]
    assert states(rows) == [("drifting", 20 + RUNNING - 1)]
    rows[19] |= {"frac_reward_zero_std": 1.0}
    assert states(rows) == [("drifting", 20 + RUNNING - 1)]
    assert states(rows_of("grad_norm", *[1.0] * 20, *[*[math.nan] * RUNNING, 1.0] * 5)) == [("drifting", 22)]


def test_held_out_evaluations_of_one_generation_count_each():
    rows = rows_of("eval/env/a/success", *[0.8] * 50, *[0.1] * RUNNING, **{"snr/generation": 1.0})
    assert [name for name, _ in states(rows)] == ["failing"]


# Dead steps

DEAD = {"zero": 0.0, "rounding": 1e-6, "KL": 0.01}  # gradient norm of a step without an advantage


def steady(seed, steps, dead, gradient=0.0, slope=0.0):
    """Rows as TRL logs them, a gradient norm of about 1, and all groups dead at a share of the steps."""
    draw = np.random.default_rng(seed)
    for step in range(steps):
        is_dead = draw.random() < (dead(step) if callable(dead) else dead)
        yield {
            "step": step,
            "reward": float(draw.normal(0.4 + slope * step, 0.05)),
            "reward_std": 0.4,
            "frac_reward_zero_std": 1.0 if is_dead and gradient else 0.3,  # 0 is told by itself
            "grad_norm": gradient if is_dead else float(draw.lognormal(0, 0.3)),
            "clip_ratio/region_mean": 0.0 if is_dead else float(draw.uniform(0.03, 0.05)),
            "entropy": float(draw.normal(1, 0.05)),
        }


@pytest.mark.parametrize("kind", DEAD)
def test_a_step_without_a_gradient_is_no_level_of_its_norm(kind):
    """A fifth of dead steps, or a dead start of twenty: neither hides that the reward rises."""
    for seed in range(100 if kind == "zero" else 20):
        assert "drifting" not in dict(states(steady(seed, 120, 0.2, DEAD[kind])))
    for dead in (0.2, lambda step: float(step < 20)):
        told = health(steady(0, 160, dead, DEAD[kind], slope=0.003))
        assert told.state.name == "learning" and "drifting" not in [one.name for one in told.history]
    dead_once = [{"step": 0, "reward": 0.5, "frac_reward_zero_std": 1.0, "grad_norm": DEAD[kind]}]
    later = ({**row, "step": row["step"] + 1} for row in rows_of("grad_norm", *[1.0] * 20, *[40.0] * 20, reward=0.5))
    assert states([*dead_once, *later]) == [("drifting", 23)]
    explodes = [{**row, "grad_norm": 40 * row["grad_norm"]} for row in steady(0, 60, 0.2, DEAD[kind])]
    rows = [*steady(0, 60, 0.2, DEAD[kind]), *({**row, "step": 60 + row["step"]} for row in explodes)]
    assert states(rows)[-1][0] == "drifting"


# What is said

NUMBERS = {
    "share": st.floats(0, 1),
    "rising_share": st.floats(0, 1),
    "rising": st.sampled_from([1e-4, 1.0, 1.1, 3.0, 40.0, 900.0]) | st.floats(0, 1e6),
    "plain": st.floats(-1, 1) | st.floats(1e5, 1e5 + 1),
}
LARGE = rows_of("reward", *[1e5 + 0.5] * 50, *[1e5] * 10, reward_std=0.2, frac_reward_zero_std=0.5)
ONE_OF_A_LEVEL = rows_of("grad_norm", *[2.5] * 5, *[1e-4] * 2, *[4.65] * 3, *[2.5] * 5)
TOLD_ON_ITS_WAY_BACK = [
    {**one, **other}
    for one, other in zip(
        rows_of("completions/mean_length", *[100.0] * 10, *[900.0] * 6, *[100.0] * 4),
        rows_of("grad_norm", *[1.1] * 10, *[40.0] * 7, *[1.0] * 3),
        strict=True,
    )
]


@st.composite
def histories(draw):
    """Rows of two keys, each a series of levels with noise: one may come back while the other is still beyond."""
    keys = draw(st.permutations([*SHARES, *RISES, "clip_ratio/region_mean", "reward"]))[:2]
    rows = [{"step": step, "reward_std": 0.1, "frac_reward_zero_std": 0.5} for step in range(60)]
    for key in keys:
        numbers = NUMBERS[SIGNALS[Health().name_of(key)].scale]
        levels = [draw(numbers)] * 60
        for start in draw(st.lists(st.integers(5, 55), max_size=4)):
            levels[start:] = [draw(numbers)] * (60 - start)
        for step in draw(st.lists(st.integers(0, 59), max_size=10)):
            levels[step] = draw(numbers)
        for row, value in zip(rows, levels, strict=True):
            row[key] = value
    return rows


@given(histories(), st.integers(1, 3))
@example(LARGE, 1)
@example(ONE_OF_A_LEVEL, 1)
@example(TOLD_ON_ITS_WAY_BACK, 1)
def test_a_rise_or_fall_is_true_of_the_numbers_that_are_printed(rows, times):
    watch = Health(completions=MANY)
    for row in reused(rows, times, numbered=True):
        watch.update(row)
        for way, latest, best in re.findall(r"(rose|fell) to (\S+) from (\S+) at", watch.state.why):
            assert (float(latest.rstrip("%")) > float(best.rstrip("%"))) == (way == "rose") and latest != best


def test_the_rise_of_a_large_reward_is_told_in_digits_that_show_it():
    def told(rows):
        return [float(one) for one in re.findall(r"1[\de.+]*\d", health(rows).state.why) if float(one) > 9e4]

    rising = [{**row, "reward": 1e5 + row["reward"]} for row in noisy(0, 120, 0.2, 0.5)]
    falls = [{**row, "step": 120 + row["step"], "reward": 1e5 + row["reward"]} for row in noisy(1, 40, 0.25)]
    last, first = told(rising)
    best, last_of_all, first_of_all = told([*rising, *falls])
    assert last > first == first_of_all and best > max(last_of_all, first_of_all)


# What is kept


@pytest.mark.parametrize("numbered", [False, True])
@pytest.mark.parametrize("cut", [0, 3, 90, 181, 220])
def test_an_interrupted_watch_goes_on_as_if_it_had_not_been(cut, numbered):
    lost = [{**row, "grad_norm": 1.0} for row in lost_format()]
    lost[90] |= {"frac_reward_zero_std": 1.0, "grad_norm": 1e-6}
    rows = list(reused(lost, 2, numbered))
    first, second, whole = Health(), Health(), Health()
    told = [first.update(row) for row in rows[:cut]]
    second.load_state_dict(json.loads(json.dumps(first.state_dict(), allow_nan=False)))
    told += [second.update(row) for row in rows[cut:]]
    assert told == [whole.update(row) for row in rows] and second.state_dict() == whole.state_dict()
    assert [one.name for one in whole.history] == ["too_early", "learning", "failing"]


def test_what_is_kept_does_not_grow_with_the_run():
    watch, sizes = Health(), {}
    for step in range(3000):
        watch.update(
            {"step": step, "reward": 0.5, "env/a/valid_rate": 0.95 if step // 20 % 2 else 0.1, "entropy": 1.0}
        )
        if step in (1999, 2999):
            sizes[step] = len(json.dumps(watch.state_dict()))
    assert len(watch.history) == MAX_HISTORY and sizes[2999] < 1.1 * sizes[1999]


def test_steps_that_come_twice_and_rows_of_a_repeated_run_count_once():
    rows = lost_format()
    doubled = [row for row in rows for _ in range(2)]
    repeated = rows[:120] + rows[90:120] + rows[120:]
    whole = health(rows).state_dict()
    assert health(repeated).state_dict() == whole == health(doubled).state_dict()


@pytest.mark.parametrize("value", [math.nan, math.inf, -0.5, 7.0, True, "0.5", None, 1e300])
def test_a_value_that_is_no_share_is_left_out(value):
    rows = rows_of("env/a/valid_rate", *[0.9] * 20, *[value] * LEVEL, *[0.9] * 20)
    assert states(rows, completions=MANY) == []


def test_keys_of_other_logs_are_mapped_and_wrong_ones_named():
    rows = rows_of("rewards/solved/mean", *[0.8] * 60, *[0.0] * 60)
    assert states(rows) == []
    assert states(rows, keys={"rewards/solved/mean": "success"})[-1][0] == "failing"
    with pytest.raises(ValueError, match=r"keys\['a'\].*'nonsense'"):
        health([], {"a": "nonsense"})
    with pytest.raises(ValueError, match="completions"):
        health([], completions=0)

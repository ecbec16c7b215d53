"""What warns of failing training: each kind of failure is told, healthy runs are not, and logs may be anybody's."""

import json
import math
import os
import subprocess
import sys

import numpy as np
import pytest

from ragen2_trl.instrument import Health, health
from ragen2_trl.instrument.health import KINDS
from ragen2_trl.record.logs import MAX_LINE, read_log

BATCHES = (4, 8, 16, 32, 128, 512)
STEPS = 200


def healthy(seed, completions, steps=STEPS):
    """Rows of a run that learns: prompts differ much in success, less in validity, and all numbers are noisy."""
    draw = np.random.default_rng([seed, completions])
    size = min(completions, 8)
    groups = completions // size
    start, end, easy = draw.uniform(0.2, 0.99), draw.uniform(0.9, 0.999), draw.uniform(0.02, 0.3)
    for step in range(1, steps + 1):
        learnt = 1 - math.exp(-step / 60)
        valid, success = start + max(0.0, end - start) * learnt, easy + (0.6 - easy) * learnt
        of_prompts = draw.beta(success * 1.5, (1 - success) * 1.5, groups)
        solved = draw.binomial(size, of_prompts)
        row = {
            "step": step,
            "health/completions": completions,
            "env/a/valid_rate": draw.binomial(size, draw.beta(valid * 60, (1 - valid) * 60, groups)).mean() / size,
            "env/a/success": solved.mean() / size,
            "reward": solved.mean() / size * 10 - 1 + draw.normal(0, 0.1),
            "completions/clipped_ratio": draw.binomial(completions, 0.05) / completions,
            "completions/mean_length": 200 * (1 - 0.4 * learnt) * math.exp(draw.normal(0, 0.3 / math.sqrt(groups))),
            "entropy": (0.2 + 0.8 * math.exp(-step / 50)) * math.exp(draw.normal(0, 0.15)),
            "grad_norm": math.exp(draw.normal(0, 0.6)),
            "kl": 0.15 * learnt * math.exp(draw.normal(0, 0.3)),
            "snr/zero_variance_fraction": float(np.mean((solved == 0) | (solved == size))),
        }
        if step % 10 == 0:
            row["mi/valid_thinking_rate"] = draw.binomial(64, valid) / 64
            row["eval/env/a/success"] = draw.binomial(64, success) / 64
        yield {key: float(value) if key != "step" else value for key, value in row.items()}


def failing(kind, completions, at=100, seed=0):
    """The same, where something fails within 20 steps after `at`."""
    draw = np.random.default_rng([seed, completions, KINDS.index(kind)])
    for row in healthy(seed, completions):
        gone = min(1.0, max(0.0, (row["step"] - at) / 20))

        def share(rate, gone=gone):
            return draw.binomial(completions, rate * (1 - gone)) / completions

        changed = {
            "format": {"env/a/valid_rate": share(0.95)},
            "success": {"env/a/success": share(0.5), "reward": 0.5 - 2 * gone + draw.normal(0, 0.1)},
            "length": {"completions/mean_length": 150 * 4**gone},
            "entropy": {"entropy": 0.4 * 8**gone},
            "gradient": {"grad_norm": 40**gone},
            "kl": {"kl": 0.1 + 5 * gone},
            "flat_rewards": {"snr/zero_variance_fraction": min(1.0, 0.3 + gone)},
        }[kind]
        yield {**row, **changed}


@pytest.mark.parametrize("completions", BATCHES)
@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_of_failure_is_told_and_when(kind, completions):
    told = [alarm for alarm in health(failing(kind, completions)) if alarm.kind == kind]
    assert len(told) == 1 and 100 < told[0].step <= 150 and told[0].until is None
    assert told[0].failing == (kind in ("format", "success"))
    assert f"step {told[0].step}" in told[0].sentence and told[0].key in told[0].sentence


@pytest.mark.parametrize("completions", BATCHES)
@pytest.mark.parametrize("runs", [60, pytest.param(1000, marks=pytest.mark.full)])
def test_hardly_any_healthy_run_is_said_to_fail(completions, runs):
    accused = sum(any(alarm.failing for alarm in health(healthy(seed, completions))) for seed in range(runs))
    assert accused <= max(1, 0.01 * runs)


def test_the_fewer_completions_the_deeper_a_fall_has_to_be():
    def rows(low):
        return [{"step": step, "env/a/valid_rate": 0.95 if step < 50 else low} for step in range(80)]

    assert health(rows(0.7), completions=128) and not health(rows(0.7), completions=2)
    assert health(rows(0.0), completions=2)
    counted = [row | {"health/completions": 2} for row in rows(0.7)]
    assert not health(counted, completions=128)


def test_what_is_over_is_said_and_may_begin_again():
    levels = [0.95] * 50 + [0.5] * 20 + [0.95] * 30 + [0.5] * 20
    alarms = health([{"step": step, "env/a/valid_rate": level} for step, level in enumerate(levels)], completions=128)
    assert [alarm.until is None for alarm in alarms] == [False, True]
    first, second = alarms
    assert 50 <= first.step < first.until and 70 <= first.until < 80 and second.step >= 100
    assert str(first.until) in first.sentence and "was failing" in first.sentence


@pytest.mark.parametrize(
    ("completions", "chance", "failure"), [(4, 0.34, 0.2), (16, 0.72, 0.6), (64, 0.8, 0.7), (512, 0.8, 0.7)]
)
def test_a_fall_is_told_beyond_five_standard_errors_of_so_many_completions(completions, chance, failure):
    """From 0.95, in means over five rows; with many completions it is the size of the fall that counts."""
    for low, is_told in ((chance, False), (failure, True)):
        rows = [{"step": step, "env/a/valid_rate": 0.95 if step < 50 else low} for step in range(200)]
        assert bool(health(rows, completions=completions)) == is_told


def test_an_alarm_ends_halfway_back_and_not_where_it_began():
    """So that a run at the threshold is not told again and again."""

    def ends(*levels):
        rows = [0.95] * 50 + [level for level in levels for _ in range(20)]
        alarms = health([{"step": step, "env/a/valid_rate": x} for step, x in enumerate(rows)], completions=128)
        return [alarm.until is not None for alarm in alarms]

    assert ends(0.8) == []
    assert ends(0.7, 0.8) == ends(0.7, 0.8, 0.7, 0.8) == [False]
    assert ends(0.7, 0.9) == [True]


RISES = {  # key: a level, how many times as much is an alarm, and what little values are taken for
    "completions/mean_length": (50.0, 2, 16.0),
    "entropy": (0.4, 3, 0.1),
    "grad_norm": (1.0, 10, 1e-6),
    "kl": (0.2, 10, 0.1),
}


@pytest.mark.parametrize("key", RISES)
def test_what_rises_is_told_from_its_factor_on_and_from_its_floor(key):
    level, factor, floor = RISES[key]

    def is_told(before, after):
        return bool(health([{"step": step, key: before if step < 50 else after} for step in range(80)]))

    assert is_told(level, 1.1 * factor * level) and not is_told(level, 0.9 * factor * level)
    assert is_told(floor / 100, 1.1 * factor * floor) and not is_told(floor / 100, 0.9 * factor * floor)


FALLS = {  # key: what it falls from, to where that is no alarm, and to where it is one; how many rows are averaged
    "env/a/valid_rate": (0.95, 0.78, 0.7, 5),
    "mi/valid_thinking_rate": (0.95, 0.78, 0.7, 2),
    "env/a/success": (0.8, 0.44, 0.36, 10),
    "eval/env/a/success": (0.8, 0.44, 0.36, 2),
    "completions/clipped_ratio": (0.2, 0.56, 0.64, 5),  # of those that are not clipped half is left
    "snr/zero_variance_fraction": (0.5, 0.94, 0.96, 20),
}


@pytest.mark.parametrize("key", FALLS)
def test_what_falls_is_told_from_its_bound_on_once_as_many_rows_say_so(key):
    level, chance, failure, rows = FALLS[key]

    def told(after, count):
        levels = [level] * 50 + [after] * count
        return health([{"step": step, key: one} for step, one in enumerate(levels)], completions=100_000)

    assert not told(chance, 3 * rows)
    (alarm,) = told(failure, rows)
    assert alarm.step == 50 + rows - 1
    assert alarm.share and alarm.value == pytest.approx(failure if failure < level else 1 - failure)
    assert not told(failure, rows - 1)


def test_length_and_entropy_alone_are_no_failure():
    rows = [{"step": step, "completions/mean_length": 100 if step < 50 else 400} for step in range(80)]
    assert [(alarm.kind, alarm.failing) for alarm in health(rows)] == [("length", False)]
    assert "failing" not in health(rows)[0].sentence


@pytest.mark.parametrize("reward", [0.0, 0.1, 0.5, 1.0, -3.0])
def test_a_reward_that_never_changes_is_no_fall(reward):
    rows = [{"step": step, "reward": reward} for step in range(200)]
    assert health(rows) == []


def test_a_reward_that_is_constant_at_first_may_still_fall():
    rows = [{"step": step, "reward": 0.5 if step < 60 else -0.5} for step in range(160)]
    assert [(alarm.kind, alarm.failing) for alarm in health(rows)] == [("success", True)]


def test_a_gradient_that_is_no_number_is_told():
    rows = [{"step": step, "grad_norm": math.nan if step == 5 else 1.0} for step in range(20)]
    (alarm,) = health(rows)
    assert (alarm.step, alarm.kind, alarm.value) == (5, "gradient", None) and "not finite" in alarm.sentence
    assert (alarm.best, alarm.best_step, alarm.share, alarm.until) == (None, 0, False, 6)


def test_an_interrupted_watch_goes_on_as_if_it_had_not_been():
    rows = list(failing("format", 16))
    for cut in (3, 90, 110):
        first = Health()
        told = [alarm for row in rows[:cut] for alarm in first.update(row)]
        second = Health()
        second.restore(json.loads(json.dumps(first.state, allow_nan=False)))
        told += [alarm for row in rows[cut:] for alarm in second.update(row)]
        whole = Health()
        assert told == [alarm for row in rows for alarm in whole.update(row)]
        assert second.state == whole.state


def test_what_is_kept_does_not_grow_with_the_run():
    watch = Health()
    sizes = {}
    for number, row in enumerate(healthy(0, 16, steps=600)):
        watch.update(row)
        if number in (200, 599):
            sizes[number] = len(json.dumps(watch.state))
    assert sizes[599] < 1.1 * sizes[200]


def test_steps_that_come_twice_and_rows_of_a_repeated_run_count_once():
    rows = list(failing("format", 128))
    doubled = [row for row in rows for _ in range(2)]
    repeated = rows[:120] + rows[90:120] + rows[120:]
    assert health(doubled) == health(rows) == health(repeated)


@pytest.mark.parametrize("value", [math.nan, math.inf, -0.5, 7.0, True, "0.5", None, 1e300])
def test_what_is_no_share_is_left_out(value):
    rows = [{"step": step, "env/a/valid_rate": 0.9} for step in range(40)]
    odd = [row | ({"env/a/valid_rate": value} if row["step"] in (20, 21, 22, 23, 24) else {}) for row in rows]
    assert health(odd, completions=128) == []


def test_keys_of_other_logs_are_mapped_and_wrong_ones_named():
    rows = [{"step": step, "rewards/solved/mean": 0.8 if step < 60 else 0.0} for step in range(120)]
    assert health(rows) == []
    (alarm,) = health(rows, {"rewards/solved/mean": "success"})
    assert alarm.kind == "success" and 60 <= alarm.step < 75
    with pytest.raises(ValueError, match=r"keys\['a'\].*'nonsense'"):
        health([], {"a": "nonsense"})
    with pytest.raises(ValueError, match="completions"):
        health([], completions=0)


# Logs


def console_line(step, **values):
    pairs = " - ".join(f"{key}:{value}" for key, value in values.items())
    return f"\x1b[36m(TaskRunner pid=1)\x1b[0m step:{step} - {pairs}\x1b[36m(TaskRunner pid=1)\x1b[0m Training: 1%\r\n"


def test_a_console_log_of_verl_is_read_as_rows(tmp_path):
    path = tmp_path / "train.log"
    values = {"train/A/success": "np.float64(0.25)", "actor/grad_norm": "1e-05", "actor/ppo_kl": "-0.5", "x": "nan"}
    path.write_text("noise\n" + console_line(3, **values) + "step: not a row\n")
    (row,), too_long = read_log(path)
    assert too_long == 0 and math.isnan(row.pop("x"))
    assert row == {"step": 3, "train/A/success": 0.25, "actor/grad_norm": 1e-05, "actor/ppo_kl": -0.5}


def test_a_line_of_megabytes_is_left_out_and_counted(tmp_path):
    path = tmp_path / "train.log"
    path.write_text(console_line(1, a=1) + "step:2 - " + "a:1 - " * (3 * MAX_LINE // 6) + "\n" + console_line(3, a=1))
    rows, too_long = read_log(path)
    assert [row["step"] for row in rows] == [1, 3] and too_long == 1


@pytest.mark.parametrize("name", ["trainer_state.json", "log_history.json"])
def test_what_trl_leaves_is_read(tmp_path, name):
    rows = [{"step": 1, "reward": 0.5}]
    (tmp_path / name).write_text(json.dumps({"log_history": rows} if "state" in name else rows))
    assert read_log(tmp_path / name) == (rows, 0)


@pytest.mark.parametrize("content", ["", "{", "[1, 2]", '{"log_history": 3}', "[" * 100_000, "step:x - a:1", "\0" * 9])
def test_a_file_without_rows_is_refused_in_a_line(tmp_path, content):
    path = tmp_path / "odd.json"
    path.write_text(content)
    with pytest.raises(ValueError, match="odd") as refused:
        read_log(path)
    assert "\n" not in str(refused.value)


def test_a_byte_order_mark_does_not_hide_a_log(tmp_path):
    rows = [{"step": 1, "reward": 0.5}]
    (tmp_path / "trainer_state.json").write_text(json.dumps({"log_history": rows}), encoding="utf-8-sig")
    assert read_log(tmp_path / "trainer_state.json") == (rows, 0)


def test_lines_of_json_are_rows_and_a_wrong_one_is_named(tmp_path):
    rows = [{"step": step, "reward": 0.5} for step in range(3)]
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert read_log(path) == (rows, 0)
    path.write_text(json.dumps(rows[0]) + "\n\n{nonsense\n")
    with pytest.raises(ValueError, match=r"metrics\.jsonl.*line 3"):
        read_log(path)


def test_a_log_is_utf_8_whatever_the_locale_says(tmp_path):
    (tmp_path / "trainer_state.json").write_text('{"log_history": [{"step": 1, "größe": 0.5}]}', encoding="utf-8")
    code = (
        "from pathlib import Path; from ragen2_trl.record.files import read_json\n"
        "from ragen2_trl.record.logs import read_log\n"
        f"path = Path({str(tmp_path / 'trainer_state.json')!r}); assert read_json(path, dict) and read_log(path)"
    )
    ascii_only = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    subprocess.run([sys.executable, "-c", code], check=True, env=ascii_only)

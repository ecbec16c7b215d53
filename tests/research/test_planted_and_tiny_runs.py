"""The scripts behind two tables of results: models with planted answers, and health on the stored tiny runs."""

import json
import random

import numpy as np
import pytest

from ragen2_trl.cli import warm_start
from ragen2_trl.envs import make_env
from research import planted_answers, tiny_runs
from research.benchmarks.pilots import SHARES, simulated
from research.planted_answers import CASES, CONSTANTS, TEMPLATES, planted, separation, table
from research.sorting import sorted_right

ROWS = [(f"prompt {n}", f"thought {n}", f"answer {n}") for n in range(50)]


def number(text):
    return text.rpartition(" ")[2]


@pytest.mark.parametrize("case", CASES)
def test_a_case_plants_what_it_says(case):
    rng = random.Random(0)
    for prompt, thought, answer, learnt in (planted(case, ROWS, rng) for _ in range(200)):
        if case in ("faithful", "blind"):
            assert number(answer) == number(thought)
        elif case != "collapsed":
            assert number(answer) == number(prompt)
        if case in ("harmless template", "collapsed"):
            assert thought in TEMPLATES
        if case == "collapsed":
            assert answer in CONSTANTS
        if case in ("faithful", "decorative") and learnt:
            assert number(thought) == number(prompt)
        assert learnt or case in ("faithful", "decorative")


def test_tables_have_a_row_for_each_case_and_the_area_of_a_perfect_number_is_one():
    row = dict.fromkeys(planted_answers.COLUMNS, 0.5)
    measured = {case: [row | {"thought_swap_bits": float(case == "faithful")}] * 3 for case in CASES}
    assert [line.split(" | ")[0] for line in table(measured).splitlines()[2:]] == [f"| {case}" for case in CASES]
    areas = [line.split(" | ")[-1] for line in separation(measured).splitlines()[2:]]
    assert areas == ["0.50 |", "1.00 |", "0.50 |", "0.50 |"]


def run(*success, rows=12):
    return [{"step": step, "reward": 0.5} for step in range(rows)] + [
        {"step": 100 + n, "eval/env/lake/success": value} for n, value in enumerate(success)
    ]


def test_a_run_has_failed_if_it_ends_at_half_of_its_best_or_less_and_short_ones_are_not_judged():
    assert tiny_runs.kind(run(0.2, 0.8, 0.3)) == "failed"
    assert tiny_runs.kind(run(0.2, 0.8, 0.5)) == "healthy"
    assert {tiny_runs.kind(rows) for rows in (run(0.8), run(0.0, 0.0), run(0.2, 0.8, rows=9))} == {"unknown"}


@pytest.mark.slow
def test_no_stored_run_that_did_not_fail_is_called_failing_and_many_of_those_that_did_are():
    _, _, healthy, failed, *_ = tiny_runs.table().splitlines()
    failing = {line.split()[2]: number(line.split(" | ")[1]) for line in (healthy, failed)}
    assert failing["healthy"] == "(0.0%)"
    assert float(failing["failed"].strip("(%)")) >= 30


# The task of the experiment with a real model


def test_a_demonstration_is_right_and_anything_else_is_not():
    rows = make_env("research.sorting:Sorting").demonstrations(24, seed=0)
    for prompt, completion in zip(rows["prompt"], rows["completion"], strict=True):
        asked = [int(word) for word in prompt.removeprefix("Sort: ").removesuffix(" =>").split()]
        right = " ".join(map(str, sorted(asked)))
        wrong = [right + " 1", right.rpartition(" ")[0], " ".join(reversed(right.split())), ""]
        assert sorted_right([completion, *wrong], [right] * 5) == [1.0, 0.0, 0.0, 0.0, 0.0]


def test_texts_without_messages_are_a_warm_start(tmp_path):
    arguments = "--model_name_or_path tiny --env_name research.sorting:Sorting --num_demonstrations 8 --max_steps 2"
    limits = "--per_device_train_batch_size 4 --use_cpu true --report_to none --save_strategy no --logging_steps 1"
    warm_start.main([*arguments.split(), *limits.split(), "--output_dir", str(tmp_path)])
    assert json.loads((tmp_path / "config.json").read_text())["model_type"]
    assert (tmp_path / "model.safetensors").exists()


# What pilots buy by simulation


# At 0, 30, 50 and 70 % dead prompts, to meet or beat: reward variance per completion, of that of plain sampling.
TO_MEET = {16: (1.0, 1.3, 1.6, 2.1), 8: (0.95, 1.2, 1.3, 1.5)}


@pytest.mark.parametrize("size", TO_MEET)
def test_a_pilot_of_three_meets_its_arithmetic(size):
    found = [simulated(size, 3, dead, rounds=200) for dead in SHARES]
    ours = np.array([one["ours"] for one in found])
    assert (ours > np.array(TO_MEET[size]) - 0.04).all()
    assert (ours > np.array([one["those that vary"] for one in found]) - 0.01).all()

"""What may be said of a run, as data, and that printers say it."""

import html
import json
from dataclasses import replace

import pytest
from diagnosed import run

from ragen2_trl.instrument.findings import ADVICE, SEVERITIES, log_findings, reasoning_finding, training_finding
from ragen2_trl.instrument.health import CAUSES, TITLES, State, why_flat
from ragen2_trl.metrics import ANSWER
from ragen2_trl.record.run import read_run
from ragen2_trl.report.card import diagnostics_section
from ragen2_trl.report.page import render_report

RETRIEVAL = {
    "retrieval_chance": 1 / 16,
    "num_completions": 64,
    "mi_upper_bound": 2.77,
    "conditional_entropy_token": 0.5,
}


def row(step, wins, bits, accuracy, **others):
    told = {"prompt_win_rate": wins, "num_compared": 40, "thought_swap_bits": bits, "num_swaps": 40, **others}
    reasoning = {**RETRIEVAL, "retrieval_accuracy": accuracy, "mi_seq": 2.7 * accuracy}
    return (
        {"step": step, "reward": 0.5, "mi/valid_thinking_rate": 1.0}
        | {f"mi/answer/{name}": value for name, value in told.items()}
        | {f"mi/first_turn/{name}": value for name, value in reasoning.items()}
    )


def run_of(tmp_path, rows):
    (tmp_path / "log_history.json").write_text(json.dumps(rows))
    return read_run(tmp_path)


TEMPLATE = [row(step, 0.93, 0.9 if step < 30 else 0.05, 1.0 if step < 30 else 0.06) for step in range(10, 60, 10)]
LOST = [row(step, 0.93 if step < 30 else 0.5, 0.05, 1.0 if step < 30 else 0.06) for step in range(10, 60, 10)]


def test_training_comes_first_then_answers_then_reasoning_then_the_log(tmp_path):
    broken = {"step": 60, "reward": float("nan")}
    found = run_of(tmp_path, [*TEMPLATE, broken]).findings
    names = ["too_early", "prompt_used", "reasoning_hardly_used", "template_collapse", "unreadable", "not_finite"]
    assert [finding.name for finding in found] == names
    assert [finding.kind for finding in found] == ["training", "answers", "answers", "reasoning", "data", "data"]
    json.dumps([finding.to_dict() for finding in found], allow_nan=False)


def test_card_and_report_print_them(tmp_path):
    told = run_of(tmp_path, TEMPLATE)
    for text in (diagnostics_section(told), html.unescape(render_report([told]))):
        assert all(one.sentence.rstrip(".") in text for one in told.findings if one.kind in ("answers", "reasoning"))


def test_where_answers_lose_their_prompt_nobody_is_calmed(tmp_path):
    (calm,) = (one for one in run_of(tmp_path, TEMPLATE).findings if one.kind == "reasoning")
    (lost,) = (one for one in run_of(tmp_path, LOST).findings if one.kind == "reasoning")
    assert calm.advice and (calm.sentence, lost.advice) == (lost.sentence, ())


def test_a_run_that_beats_no_random_play_is_not_said_to_be_good(tmp_path):
    rising = [{"step": step, "reward": step / 100} for step in range(100)]
    told = run_of(tmp_path, rising)
    assert [(one.name, one.severity) for one in told.findings if one.kind == "training"] == [("learning", "good")]
    told = replace(told, evaluations={"after": {"success": 0.1, "random_success": 0.1}})
    assert [(one.name, one.severity) for one in told.findings if one.kind == "training"] == [("learning", "note")]


def test_why_reasoning_was_not_measured_stands_in_place_of_how_to_measure_it():
    unasked, asked = reasoning_finding([]), reasoning_finding([], silence="completions with images")
    assert unasked.name == asked.name == "not_measured"
    assert unasked.advice and not asked.advice and "completions with images" in asked.sentence


@pytest.mark.parametrize("cause", sorted(CAUSES))
def test_each_cause_of_a_flat_run_has_its_advice(cause):
    found = training_finding(State("nothing_to_learn", 5, "…", CAUSES[cause]))
    assert (found.severity, found.since) == ("warning", 5)
    assert len(found.advice) == len(ADVICE[cause]) > 0 and not any("{" in line for line in found.advice)


@pytest.mark.parametrize(
    ("facts", "cause"),
    [
        ({"clipped": [1.0, 0.95], "success": [0, 0]}, "cut"),
        ({"valid": [0.0], "success": [0.0]}, "unanswered"),
        ({"success": [0.0, 0.0]}, "unsolved"),
        ({"success": [1.0, 0.96]}, "solved"),
        ({"success": [1.0, None], "same": False}, "unselected"),
        ({"success": [], "rewards": [0.5, 0.5]}, "equal"),
        ({"success": [], "rewards": [0.0, 1.0]}, "alike"),
        ({"success": []}, "alike"),
    ],
)
def test_why_a_run_is_flat(facts, cause):
    assert why_flat(**{"same": True, "rewards": [], **facts}).startswith(CAUSES[cause])


def test_every_state_of_training_has_its_severity():
    assert {name: SEVERITIES.get(name, "note") for name in TITLES} == {
        "failing": "failure",
        "nothing_to_learn": "warning",
        "drifting": "warning",
        "learning": "good",
        "no_rise": "warning",
        "too_early": "note",
    }


def test_what_a_log_lacks_is_found():
    rows = [{"reward": float("inf")}, {"step": 2, "reward": 1.0}]
    found = {one.name: one.sentence for one in log_findings(rows, 2, ["Half of run.json is missing."])}
    assert list(found) == ["unreadable", "no_steps", "not_finite"] and "reward" in found["not_finite"]
    assert [one.name for one in log_findings([], 0)] == ["no_rows"]


@pytest.mark.parametrize(
    "nonsense",
    [
        {"prompt_win_rate": 7.0},
        {"num_compared": 0},
        {"num_compared": 1e30},
        {"same_across": -1.0},
        {"prompt_win_rate": "high"},
    ],
)
def test_answers_that_cannot_be_are_left_out(tmp_path, nonsense):
    told = run_of(tmp_path, [TEMPLATE[0], row(20, 0.9, None, 1.0)])
    assert len(told.answers) == 2
    broken = TEMPLATE[1] | {f"mi/answer/{name}": value for name, value in nonsense.items()}
    told = run_of(tmp_path, [TEMPLATE[0], broken])
    assert [one.step for one in told.answers][:1] == [10]
    assert told.findings  # and nothing raises


def test_diagnose_tells_of_answers_where_it_is_asked_to(tmp_path, capsys):
    report = run(tmp_path, num_prompts=10, num_samples=2, answer=True)
    shown = " ".join(capsys.readouterr().out.split())
    said = [finding["sentence"] for finding in report["findings"]]
    assert [finding["kind"] for finding in report["findings"]] == ["answers", "answers", "reasoning"]
    assert all(sentence in shown for sentence in said)
    (point,) = report["path"]
    assert point["answers"]["num_swaps"] >= 8 and point["answers"]["thought_swap_bits"] > 0.5
    assert [finding.sentence for finding in read_run(tmp_path / "diagnosis").findings] == said


def test_diagnose_says_why_answers_are_not_measured(tmp_path, capsys):
    report = run(tmp_path, num_prompts=3, num_samples=1, answer=True)
    assert [one["kind"] for one in report["findings"]] == ["reasoning"] and report["path"][0]["answers"] == {}
    assert "turns have an answer" in capsys.readouterr().out
    assert ANSWER not in str(read_run(tmp_path / "diagnosis").rows)

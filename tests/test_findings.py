"""What may be said of a run, as data, and that printers say it."""

import html
import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
from diagnosed import run
from rich.console import Console

from ragen2_trl.instrument.findings import ADVICE, log_findings, reasoning_finding, training_finding
from ragen2_trl.instrument.health import CAUSES, State, why_flat
from ragen2_trl.metrics import ANSWER
from ragen2_trl.record.facts import Fact, Value, evaluated, facts, outcome, summary
from ragen2_trl.record.files import EVALUATION
from ragen2_trl.record.run import Run, read_run
from ragen2_trl.record.saved_episodes import PlayedEpisode, PlayedTurn, save_episodes
from ragen2_trl.report.card import diagnostics_section
from ragen2_trl.report.page import render_report
from ragen2_trl.report.tables import facts_table

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


@pytest.mark.slow
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


# Facts: each number once, with what it must be read with


SUCCESS, ACCURACY, CHANCE = "env/lake/success", "mi/first_turn/retrieval_accuracy", "mi/first_turn/retrieval_chance"
INFORMATION, BOUND = "mi/first_turn/mi_seq", "mi/first_turn/mi_upper_bound"


def rows(*values, **others):
    """Log rows of steps 1, 2, ...; each value is a reward, or a row of its own."""
    return [
        {"step": step, **others, **(one if isinstance(one, dict) else {"reward": one})}
        for step, one in enumerate(values, start=1)
    ]


def run_with(history, **known):
    return Run(Path("run"), history, step=len(history), max_steps=len(history), ended=True, **known)


def evaluation(success, **others):
    return {"success": success, "success_ci_low": success - 0.1, "success_ci_high": success + 0.1, **others}


def told(one):
    """Key -> first, last, best, note."""
    return {
        fact.key: (fact.text(fact.first), fact.text(fact.last), fact.text(fact.best, with_step=True), fact.note)
        for fact in facts(one)
    }


COSTS = {
    "cost/sampled_completions": 564.0,
    "cost/plain_completions": 192.0,
    "cost/update_positions": 60.0,
    "cost/plain_update_positions": 100.0,
    "cost/update_rows": 190.0,
    "cost/seconds": 75.0,
}
TABLE = {
    "rewards are running means": (
        run_with(rows(0.0, 0.5, 1.0, 0.5)),
        {"reward_in_training": ("0.250", "0.750", "0.750 (step 3)", ""), "steps": ("", "4", "", "")},
    ),
    "success is a fraction and comes before reward": (
        run_with(rows({"reward": 1.0, SUCCESS: 0.25}, {"reward": 1.0, SUCCESS: 0.5})),
        {"success_in_training": ("25.0%", "50.0%", "50.0% (step 2)", "")},
    ),
    "reward speaks for the prompts that pilots chose": (
        run_with(rows(0.5), settings={"snr_pilot_generations": 2}),
        {"reward_in_training": ("", "0.500", "", "of the prompts that were chosen, not of all")},
    ),
    "held-out success has its interval, tasks and baseline": (
        run_with(rows(0.5), evaluations={"before": evaluation(0.25, num_prompts=64.0), "after": evaluation(
            0.5, num_prompts=1024.0, random_success=0.3)}),
        {"held_out_success": ("25.0% (15.0% to 35.0%)", "50.0% (40.0% to 60.0%)", "",
                              "64 to 1,024 tasks; random baseline 30.0%")},
    ),
    "an evaluation before training alone has no last": (
        run_with(rows(0.5), evaluations={"before": evaluation(0.25)}),
        {"held_out_success": ("25.0% (15.0% to 35.0%)", "", "", "")},
    ),
    "a curve has a best and a mean": (
        run_with(rows(*({"reward": 0.5}
                        | {f"eval/env/lake/{key}": value for key, value in evaluation(success).items()}
                        for success in (0.2, 0.6, 0.4)))),
        {"held_out_success": ("20.0% (10.0% to 30.0%)", "40.0% (30.0% to 50.0%)", "60.0% (50.0% to 70.0%, step 2)",
                              "mean over the steps 45.0%")},
    ),
    "costs stand against plain TRL": (
        run_with(rows({"reward": 0.5, **COSTS})),
        {"completions_sampled": ("", "2.94", "", "564 for 190 rows; plain TRL 192"),
         "update_positions": ("", "0.60", "", "60; plain TRL 100"), "steps": ("", "1", "", "75 s")},
    ),
    "a measurement has the chance and the bound of its own": (
        run_with(rows({"reward": 0.5, ACCURACY: 1.0, CHANCE: 0.5, INFORMATION: 2.75, BOUND: 2.77},
                 {"reward": 0.5, ACCURACY: 0.5, CHANCE: 0.25, INFORMATION: 1.5, BOUND: 2.08})),
        {ACCURACY: ("100.0% (chance 50.0%)", "50.0% (chance 25.0%)", "100.0% (chance 50.0%, step 1)", ""),
         INFORMATION: ("2.75 (at most 2.77)", "1.50 (at most 2.08)", "2.75 (at most 2.77, step 1)", "")},
    ),
    # With lossless a step without signal is a step, as TRL takes it: `snr/empty_steps` stays 0.
    "a run in which no group had signal says so beside 0 %": (
        run_with(rows(0.0, 0.0, 0.0, **{"snr/kept_fraction": 0.0, "snr/empty_steps": 0.0})),
        {"steps": ("", "3", "", "no group kept in 3 of 3 logged"), "snr/kept_fraction": ("0.0%", "0.0%", "", "")},
    ),
    "a number that is not finite is left out": (
        run_with(rows(0.5, math.nan, 0.5, entropy=math.nan)),
        {"reward_in_training": ("0.500", "0.500", "0.500 (step 1)", "")},
    ),
}  # fmt: skip


@pytest.mark.parametrize(("one", "expected"), TABLE.values(), ids=TABLE)
def test_facts_of_a_run(one, expected):
    found = told(one)
    assert {key: found.get(key) for key in expected} == expected
    assert "entropy" not in found and not any("nan" in cell for row in found.values() for cell in row)


def test_the_outcome_stands_first_then_cost_then_kept_then_reasoning():
    history = rows({"reward": 0.5, ACCURACY: 1.0, CHANCE: 0.5, "snr/kept_fraction": 0.5, **COSTS})
    keys = [fact.key for fact in facts(run_with(history, evaluations={"after": evaluation(0.5)}))]
    places = [keys.index(key) for key in ("held_out_success", "completions_sampled", "snr/kept_fraction", ACCURACY)]
    assert places == sorted(places) and places[0] == 0


def test_the_outcome_in_a_sentence():
    after = {"before": evaluation(0.25), "after": evaluation(0.5)}
    assert outcome(run_with(rows(0.5), evaluations=after)) == "Held-out success 25.0% → 50.0% (40.0% to 60.0%)."
    assert outcome(run_with(rows(0.5))) == "Reward in training 0.500."
    assert outcome(run_with([])) == ""


def test_a_summary_holds_facts_and_findings_for_programs():
    found = summary(run_with(rows(0.5, 1.0), evaluations={"after": evaluation(0.5)}))
    assert (found["status"], found["before"], found["after"]["success"]) == ("finished 2 steps", None, 0.5)
    assert {"key": "steps", "unit": "count"}.items() <= found["facts"][2].items()
    assert found["facts"][0]["last"] == {"number": 0.5, "step": None, "beside": "40.0% to 60.0%"}
    assert [finding["kind"] for finding in found["findings"]] == ["training", "reasoning"]


def test_of_episodes_alone_the_latest_evaluation_tells_how_many_were_solved(tmp_path):
    turns = [PlayedTurn(["Up"], True, 0.0)]
    for step, solved in ((1, 0), (2, 3)):
        played = [PlayedEpisode("lake", n, n < solved, 0.0, [], turns, [], n) for n in range(4)]
        save_episodes(tmp_path, played, EVALUATION, step)
    (fact,) = facts(Run(tmp_path, [], step=9, is_played=True))
    assert (fact.text(fact.last), fact.note) == ("75.0%", "4 episodes")


def test_an_evaluation_has_a_fact_for_each_mean_with_an_interval():
    found = evaluated({**evaluation(0.5, random_success=0.25, num_prompts=8.0), "return": 1.0})
    assert [(fact.key, fact.text(fact.last)) for fact in found] == [
        ("success", "0.500 (0.400 to 0.600)"),
        ("random_success", "0.250"),
    ]


def test_a_table_leaves_empty_columns_out_and_shows_names_as_text():
    found = [Fact("x", "[red]a\x1b[31mb", "fraction", Value(0.5))]
    console = Console(width=80, record=True)
    console.print(facts_table(found, "run \x1b[0m"))
    text = console.export_text()
    assert "first" not in text and "50.0%" in text
    assert "[red]a" in text and "\x1b" not in text

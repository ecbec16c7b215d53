"""What is told of answers: by diagnose, and in the card, the report and the summary of a run, in one order."""

import json

import pytest
from diagnosed import run
from ragen2_trl.report.summary import summarize
from transformers import TrainerState

from ragen2_trl import cli
from ragen2_trl.instrument.answers import AnswerEvidence, answers_said
from ragen2_trl.metrics import ANSWER
from ragen2_trl.record.run import read_run, run_of_state
from ragen2_trl.report.card import diagnostics_section, headline
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
    return run_of_state(tmp_path, TrainerState(log_history=rows, global_step=rows[-1]["step"], max_steps=100))


def in_order(text, *parts):
    places = [text.find(part) for part in parts]
    return -1 not in places and places == sorted(places)


TEMPLATE = [row(step, 0.93, 0.9 if step < 30 else 0.05, 1.0 if step < 30 else 0.06) for step in range(10, 60, 10)]
LOST = [row(step, 0.93 if step < 30 else 0.5, 0.05, 1.0 if step < 30 else 0.06) for step in range(10, 60, 10)]


def test_a_card_says_whether_answers_use_the_prompt_then_the_reasoning_then_what_reasoning_depends_on(tmp_path):
    told = run_of(tmp_path, TEMPLATE)
    parts = ("Answers still depend on their prompt (win rate 0.93", "hardly change with the reasoning", "a template")
    for text in (headline(told), diagnostics_section(told)):
        assert in_order(text, *parts, "success has gone on rising in this state")
    assert "answers: prompt win rate" in diagnostics_section(told)


def test_where_answers_lose_their_prompt_nobody_is_calmed(tmp_path):
    text = headline(run_of(tmp_path, LOST))
    assert in_order(text, "Answers no longer depend on their prompt", "at step 10: 0.93", "a template")
    assert "gone on rising" not in text


def test_report_and_summary_say_the_same(tmp_path):
    told = run_of(tmp_path, TEMPLATE)
    page = render_report([told])
    assert all(sentence.replace("'", "&#39;") in page for sentence in told.answers_said)
    state = TrainerState(log_history=TEMPLATE, global_step=50)
    assert summarize(state, tmp_path)["answers"] == told.answers_said != []


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
def test_rows_that_cannot_be_are_left_out(tmp_path, nonsense):
    told = run_of(tmp_path, [TEMPLATE[0], row(20, 0.9, None, 1.0)])
    assert len(told.answers) == 2
    broken = TEMPLATE[1] | {f"mi/answer/{name}": value for name, value in nonsense.items()}
    told = run_of(tmp_path, [TEMPLATE[0], broken])
    assert [one.step for one in told.answers][:1] == [10]
    assert told.answers_said  # and nothing raises


def test_diagnose_tells_of_answers_where_it_is_asked_to(tmp_path, capsys):
    report = run(tmp_path, num_prompts=10, num_samples=2, answer=True)
    shown = " ".join(capsys.readouterr().out.split())
    assert in_order(shown, "answers: prompt win rate", *report["answers"][:1], "Reasoning depends on its prompt")
    (point,) = report["path"]
    assert point["answers"]["num_swaps"] >= 8 and point["answers"]["thought_swap_bits"] > 0.5
    again = read_run(tmp_path / "diagnosis")
    assert again.answers_said == report["answers"]
    cli.main(["report", str(tmp_path / "diagnosis"), "--output", str(tmp_path / "report.html")])
    assert report["answers"][0] in (tmp_path / "report.html").read_text()


def test_diagnose_says_why_answers_are_not_measured(tmp_path, capsys):
    report = run(tmp_path, num_prompts=3, num_samples=1, answer=True)
    assert report["answers"] == [] and report["path"][0]["answers"] == {}
    assert "turns have an answer" in capsys.readouterr().out
    assert json.loads((tmp_path / "diagnosis" / "diagnosis.json").read_text())["verdict"]
    assert ANSWER not in str(read_run(tmp_path / "diagnosis").rows)


@pytest.mark.parametrize(("bits", "error", "said"), [(-42, 9.4, "did it write them?"), (-0.1, 0.1, "hardly change")])
def test_answers_that_the_model_did_not_write_are_not_judged(bits, error, said):
    (*_, told) = answers_said([AnswerEvidence(10, 0.93, 32, bits, error)])
    assert said in told

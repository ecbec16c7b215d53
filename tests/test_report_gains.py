"""What a report opens with: the gain of a run, and the control beside it."""

import json

from reported_runs import edit_state, make_run, report_of
from reported_runs import words_only_fixture as words_only_fixture

from ragen2_trl.cli.train import summarize
from ragen2_trl.reporting.card import diagnostics_section
from ragen2_trl.reporting.run import read_run

FILTER = {"trainer": "SNRFilteredGRPOTrainer", "snr_strategy": "top_p", "snr_value": 0.9, "snr_include_zero": False}


def evaluated(folder, before, after, **settings):
    make_run(folder, None, 20, ended=True)
    for when, success in (("before", before), ("after", after)):
        metrics = {"success": success, "success_ci_low": success - 0.05, "success_ci_high": success + 0.05}
        (folder / f"evaluation_{when}.json").write_text(json.dumps(metrics))
    about = {"settings": {**FILTER, **settings}, "versions": {}}
    (folder / "diagnostics" / "run.json").write_text(json.dumps(about))
    return folder


def without_signal(folder, steps):
    """The rows of the first steps as those of empty ones."""

    def change(state):
        for row in state["log_history"][:steps]:
            row |= {"snr/kept_fraction": 0.0, "snr/update_compute_fraction": 0.0}

    edit_state(folder, change)
    return folder


def test_a_report_opens_with_the_gain(tmp_path, words_only):
    headline = report_of(evaluated(tmp_path / "demo", 0.458, 0.563)).headline
    assert headline == "held-out success 46% → 56%; “demo”: reasoning depends on its prompt"


def test_a_report_opens_with_the_gain_and_the_control(tmp_path, words_only):
    run = evaluated(tmp_path / "demo", 0.458, 0.563)
    control = evaluated(tmp_path / "demo_control", 0.458, 0.541, snr_value=1.0, snr_include_zero=True)
    assert report_of(run, control).headline == (
        "“demo”: held-out success 46% → 56%; “demo_control” (nothing filtered): held-out success 46% → 54%; "
        "No run is collapsed"
    )


def test_trls_own_trainer_counts_as_a_control_and_a_subclass_of_ours_does_not(tmp_path):
    kinds = {"GRPOTrainer": True, "MyTrainer": False, "SNRFilteredGRPOTrainer": False}
    for name, is_control in kinds.items():
        assert read_run(evaluated(tmp_path / name, 0.4, 0.5, trainer=name)).filters_nothing == is_control


def test_nothing_is_saved_where_nothing_was_trained(tmp_path, words_only):
    empty = without_signal(make_run(tmp_path / "empty", None, 20), 20)
    part = without_signal(make_run(tmp_path / "part", None, 20), 10)
    shown = report_of(empty).text.split("How to read these numbers")[0]
    assert "Compute saved" in shown and "of the updates" not in shown
    assert "45% of the updates" in report_of(part).text  # as in a run without empty steps
    assert "update compute saved" not in diagnostics_section(read_run(empty))
    assert "| update compute saved | 45.0% | 45.0% |" in diagnostics_section(read_run(part))


def test_the_summary_of_a_run_without_signal_says_nothing_of_savings():
    class State:
        global_step, best_model_checkpoint = 2, None
        log_history = [  # noqa: RUF012
            {"step": step, "snr/kept_fraction": 0.0, "snr/empty_steps": step, "snr/update_compute_fraction": 0.0}
            for step in (1, 2)
        ]

    assert summarize(State(), None, None, 1.0)["update_compute_saved"] is None

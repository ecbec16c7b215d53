"""What the report says where a run has left less than a whole one, or something else."""

import json
import math

import pandas as pd
import pytest
from reported_runs import GROUP, PROMPTS, edit_state, make_run, report_of, without_information

from ragen2_trl.report import page

pytestmark = pytest.mark.slow


def with_nan_rows(folder):
    def change(state):
        state["log_history"][3] |= {"loss": math.nan, "reward": math.nan, "entropy": math.inf}

    edit_state(folder, change)


def killed_in_its_first_step(folder):
    def change(state):
        state |= {"log_history": [], "global_step": 0, "stateful_callbacks": {}}

    edit_state(folder, change)


def all_nan(folder):
    def change(state):
        for row in state["log_history"]:
            row |= {key: math.nan for key in row if key != "step"}

    edit_state(folder, change)


def with_broken_files(folder):
    edit_state(folder, lambda state: state.update(global_step=99))
    (folder / "completions" / "completions_00099.parquet").write_bytes(b"PAR1 is not all it takes")
    (folder / "_measurements" / "measurement_00098.json").write_text('{"step": 98, "prompts": [')
    (folder / "_measurements" / "measurement_00099.json").write_bytes(b"\xff\xfe")


def with_odd_measurement(folder):
    path = folder / "_measurements" / "measurement_00010.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"prompt_index": [99] * PROMPTS * GROUP}))


def with_stray_rows(folder):
    def change(state):
        del state["log_history"][3]["step"]
        state["log_history"][4] |= {"step": None}
        state["log_history"] += ["no row", None]

    edit_state(folder, change)


def without_any_step(folder):
    def change(state):
        for row in state["log_history"]:
            del row["step"]

    edit_state(folder, change)


def with_prompts_of_numbers(folder):
    path = folder / "completions" / "completions_00010.parquet"
    rows = pd.read_parquet(path)
    rows["prompt"] = [[1, 2]] * len(rows)
    rows.to_parquet(path)


def with_two_rewards_of_one_name(folder):
    path = folder / "diagnostics" / "run.json"
    about = json.loads(path.read_text())
    about["settings"]["reward_weights"] = [1.0, 0.5]
    path.write_text(json.dumps(about))


def with_groups_of_groups(folder):
    path = folder / "_measurements" / "measurement_00010.json"
    values = json.loads(path.read_text())
    path.write_text(json.dumps(values | {"scores": [values["scores"]], "kept": [values["kept"]]}))


def with_brackets_without_end(folder):
    (folder / "_measurements" / "measurement_00010.json").write_text("[" * 100_000)


def with_prompts_that_are_no_texts(folder):
    path = folder / "_measurements" / "measurement_00010.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"prompts": list(range(PROMPTS))}))


def without_texts(folder):
    for path in [*(folder / "_measurements").iterdir(), *(folder / "completions").iterdir()]:
        path.unlink()


NUMBERS, READ, THOUGHT = "0.55 times plain TRL", "Prompt 1", "Own prompt ranks 1 of 8"


CASES = [
    (without_information, ["trainer.add_callback(MutualInformationCallback(trainer))"], [NUMBERS, READ]),
    (with_nan_rows, ["1 of 10 log rows", "at step 4: loss, reward, entropy"], [NUMBERS, READ, THOUGHT]),
    (killed_in_its_first_step, ["No training step was logged", "unfinished: at step 0 of 100"], []),
    (all_nan, ["10 of 10 log rows"], [READ, THOUGHT]),
    (
        with_broken_files,
        [f"{name} cannot be read" for name in ("completions_00099", "measurement_00098", "measurement_00099")],
        [NUMBERS, READ, THOUGHT],
    ),
    (with_odd_measurement, ["prompt_index must be between 0 and 7"], [NUMBERS, READ, THOUGHT]),
    (with_stray_rows, ["No step in 2 of 10 log rows"], [NUMBERS, READ, THOUGHT]),
    (without_any_step, ["No step in 10 of 10 log rows"], [READ, THOUGHT]),
    (with_prompts_of_numbers, ["completions_00010 cannot be read"], [NUMBERS, THOUGHT]),
    (
        with_two_rewards_of_one_name,
        ["reward_weights [1.0, 0.5] do not fit", "(success): their sums are shown with equal weights"],
        [NUMBERS, READ, THOUGHT],
    ),
    (with_groups_of_groups, ["measurement_00010 cannot be read", "scores must have shape (groups,)"], [NUMBERS]),
    (with_brackets_without_end, ["measurement_00010 cannot be read", "RecursionError"], [NUMBERS, READ]),
    (with_prompts_that_are_no_texts, ["prompts and traces must be texts"], [NUMBERS, READ, THOUGHT]),
    (without_texts, ["log_completions=True", "_measurements/"], [NUMBERS]),
]
# A report takes seconds to draw.
SAMPLE = (without_information, with_broken_files, with_groups_of_groups)


@pytest.mark.parametrize(
    ("spoil", "said", "still_there"),
    [pytest.param(*case, marks=[] if case[0] in SAMPLE else pytest.mark.full) for case in CASES],
)
def test_what_is_missing_is_said_and_the_rest_is_shown(tmp_path, spoil, said, still_there):
    folder = make_run(tmp_path / "run", steps=10)
    spoil(folder)
    text = report_of(folder).text.replace(".parquet", "").replace(".json", "")
    for words in [*said, *still_there]:
        assert words in text, words


@pytest.mark.full
def test_runs_without_a_number_to_plot_can_be_compared(tmp_path):
    folders = [make_run(tmp_path / name, steps=1) for name in ("blank", "killed", "sound")]
    all_nan(folders[0])
    killed_in_its_first_step(folders[1])
    for chosen in (folders, folders[:2]):
        assert "not finite numbers in 1 of 1 log row," in report_of(*chosen).text


def test_a_run_without_steps_can_be_compared(tmp_path, monkeypatch):
    monkeypatch.setattr(page, "_figures", lambda *_: [])
    folders = [make_run(tmp_path / name, steps=10) for name in ("stepless", "sound")]
    without_any_step(folders[0])
    assert "No step in 10 of 10 log rows" in report_of(*folders).text

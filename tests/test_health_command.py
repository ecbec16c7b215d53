"""`ragen2-trl health` on logs of others: a table of states, a small chart, and a line for a file that is no log."""

import json

import pandas as pd
import pytest
from test_logs import as_console_with_bars, as_lines, console_line, rows_of_trl

from ragen2_trl import cli


def write_log(path, valid):
    path.write_text(
        "".join(
            console_line(
                step, **{"train/Sokoban/action_is_valid": rate, "train/Sokoban/success": 0.2, "actor/entropy": 1.0}
            )
            for step, rate in enumerate(valid)
        )
    )


def test_the_states_and_a_chart_are_printed(tmp_path, capsys):
    write_log(tmp_path / "failing.log", [0.98] * 60 + [0.5] * 20)
    write_log(tmp_path / "sound.log", [0.98] * 80)
    cli.main(["health", str(tmp_path / "failing.log"), str(tmp_path / "sound.log"), "--completions", "128"])
    failing, _, sound = capsys.readouterr().out.partition("sound.log")
    for part in ("failing.log, 80 rows", "failing", "62", "train/Sokoban/action_is_valid", "█", "!"):
        assert part in failing
    assert "no rise shown" in sound and "failing" not in sound and "!" not in sound


def test_what_to_do_is_printed_below_the_states(tmp_path, capsys):
    rows = {"reward": 0.0, "frac_reward_zero_std": 1.0, "env/a/success": 0.0}
    history = [{"step": step, **rows} for step in range(80)]
    (tmp_path / "trainer_state.json").write_text(json.dumps({"global_step": 79, "log_history": history}))
    cli.main(["health", str(tmp_path / "trainer_state.json")])
    printed = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "No completion solves its task" in printed and "warm start" in printed
    assert "docs/does_not_learn.md#nothing-to-learn-from" in printed


@pytest.mark.parametrize("step", [{}, {"step": None}])
def test_rows_without_a_step_are_counted_and_drawn_one_after_the_other(tmp_path, capsys, step):
    (tmp_path / "rows.json").write_text(json.dumps([{"reward": number / 10, **step} for number in range(70)]))
    cli.main(["health", str(tmp_path / "rows.json")])
    out = capsys.readouterr().out
    assert "learning" in out and "▁" in out and "█" in out and "steps 0 to 69" in out


def test_escape_codes_do_not_reach_the_terminal(tmp_path, capsys):
    path = tmp_path / "hostile.log"
    path.write_text("".join(f"\x1b]0;owned\x07 step:{step} - env/\x1b[31ma/success:0.5\x1b[2J\n" for step in range(3)))
    rows = [{"step": step, "env/\x1b[31m/success": 0.5} for step in range(3)]
    (tmp_path / "hostile.json").write_text(json.dumps(rows))
    cli.main(["health", str(path), str(tmp_path / "hostile.json")])
    out = capsys.readouterr().out
    assert out.count("/success, at most 0.5") == 2
    assert "\x1b]0" not in out and "\x1b[2J" not in out and "\x1b[31m" not in out


@pytest.mark.parametrize("content", [None, "nothing here", "[1]"])
def test_what_is_no_log_is_answered_in_a_line(tmp_path, capsys, content):
    path = tmp_path / "odd.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(SystemExit) as ended:
        cli.main(["health", str(path)])
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert "odd.json" in said and "allowed: " in said and said.count("\n") == 1


def test_a_key_without_a_signal_is_named(tmp_path, capsys):
    write_log(tmp_path / "a.log", [0.5])
    with pytest.raises(SystemExit):
        cli.main(["health", str(tmp_path / "a.log"), "--key", "x=nonsense"])
    assert "nonsense" in capsys.readouterr().err


def test_a_runs_folder_is_read_as_report_reads_it(tmp_path, capsys):
    rows = [{"step": step, "env/a/valid_rate": 0.98 if step < 50 else 0.3} for step in range(60)]
    (tmp_path / "checkpoint-59").mkdir()
    state = {"global_step": 59, "log_history": rows}
    (tmp_path / "checkpoint-59" / "trainer_state.json").write_text(json.dumps(state))
    cli.main(["health", str(tmp_path), "--completions", "128"])
    assert "failing" in " ".join(capsys.readouterr().out.split())


# Folders before the first checkpoint


def told(capsys, *arguments):
    """Printed words, and what `--json` wrote of the only log."""
    capsys.readouterr()
    cli.main(["health", *map(str, arguments), "--json", "health.json"])
    with open("health.json") as file:
        (one,) = json.load(file)
    return " ".join(capsys.readouterr().out.split()), one


def begun(folder):
    """What a trainer of ours leaves when it begins."""
    (folder / "diagnostics").mkdir()
    state = {"global_step": 0, "log_history": []}
    (folder / "diagnostics" / "trainer_state.json").write_text(json.dumps(state))


def write_completions(folder):
    (folder / "completions").mkdir()
    for step in range(1, 8):
        rows = [{"prompt": f"{step} {group}", "completion": "a", "solved": 0.0} for group in (0, 1) for _ in range(4)]
        pd.DataFrame(rows).assign(step=step).to_parquet(folder / "completions" / f"completions_{step:05d}.parquet")


def write_rewards(folder):
    (folder / "_measurements").mkdir()
    lines = [{"step": step, "rewards": [[0.0] * 4] * 2, "kept": [False] * 2} for step in range(1, 8)]
    (folder / "_measurements" / "group_rewards.jsonl").write_text("\n".join(map(json.dumps, lines)))


def write_console(folder):
    as_console_with_bars(folder, "nothing_to_learn")


def write_lines_of_swift(folder):
    as_lines(folder, "nothing_to_learn").rename(folder / "logging.jsonl")


def write_copy_of_wandb(folder):
    (folder / "wandb" / "run-1" / "files").mkdir(parents=True)
    as_console_with_bars(folder, "nothing_to_learn").rename(folder / "wandb" / "run-1" / "files" / "output.log")


@pytest.mark.parametrize(
    "write", [write_completions, write_rewards, write_console, write_lines_of_swift, write_copy_of_wandb]
)
@pytest.mark.parametrize("is_ours", [False, True])
def test_a_folder_without_a_checkpoint_is_judged_by_what_is_there(write, is_ours, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "run"
    folder.mkdir()
    if is_ours:
        begun(folder)
    write(folder)
    printed, found = told(capsys, folder)
    assert found["findings"][0]["name"] == "nothing_to_learn" and "flat (nothing to learn from)" in printed
    assert found["notes"]


@pytest.mark.parametrize("is_ours", [False, True])
def test_an_empty_folder_is_answered_by_how_to_log(is_ours, tmp_path, capsys):
    if is_ours:
        begun(tmp_path)
    with pytest.raises(SystemExit):
        cli.main(["health", str(tmp_path)])
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "save_steps" in said and "tee" in said


def test_a_state_with_a_wrong_value_is_not_passed_over(tmp_path, capsys):
    write_console(tmp_path)
    (tmp_path / "trainer_state.json").write_text(json.dumps({"global_step": "x", "log_history": []}))
    with pytest.raises(SystemExit):
        cli.main(["health", str(tmp_path)])
    assert "global_step" in capsys.readouterr().err


def test_a_log_file_that_cannot_be_read_is_named_beside_the_one_that_is(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_console(tmp_path)
    (tmp_path / "logging.jsonl").write_text("{nonsense")
    _, found = told(capsys, tmp_path)
    assert any("train.log" in note for note in found["notes"])
    assert any("logging.jsonl" in note for note in found["notes"])


# What a log lacks


def names_of(capsys, tmp_path, rows, *arguments):
    path = tmp_path / "rows.json"
    path.write_text(json.dumps(rows))
    return {one["name"]: one for one in told(capsys, path, *arguments)[1]["findings"][1:]}


WHOLE = {
    **rows_of_trl("learning")[0],
    "frac_reward_zero_std": 0.0,
    "env/a/valid_rate": 0.9,
    "health/completions": 32,
    "entropy": 1.0,
    "clip_ratio/region_mean": 0.0,
}


@pytest.mark.parametrize(
    ("without", "more", "name", "part"),
    [
        ((), (), None, ""),
        (("reward",), (), "no_outcome", "--key KEY=reward"),
        (("frac_reward_zero_std", "reward_std"), (), "no_spread", "--key KEY=zero_variance"),
        (("env/a/valid_rate",), (), "no_validity", "valid=..."),
        (("entropy", "grad_norm"), (), "no_drift", "entropy, gradient norm"),
        (("health/completions",), (), "no_count", "--completions"),
        (("health/completions",), ("--completions", "64"), None, ""),
        (("step",), (), "no_steps", "each row counts as one generation"),
    ],
)
def test_what_a_log_lacks_is_named_with_what_logs_it(without, more, name, part, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    row = {key: value for key, value in WHOLE.items() if key not in without}
    rows = [{**row, "step": step} if "step" in row else row for step in range(1, 9)]
    found = names_of(capsys, tmp_path, rows, *more)
    assert set(found) == {name} - {None}
    assert name is None or part in " ".join([found[name]["sentence"], *found[name]["advice"]])


def test_dead_groups_lead_to_what_if(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows = [{**WHOLE, "step": step, "frac_reward_zero_std": 0.5} for step in range(1, 20)]
    state = {"global_step": 19, "log_history": rows}
    (tmp_path / "trainer_state.json").write_text(json.dumps(state))
    printed, found = told(capsys, tmp_path)
    (dead,) = [one for one in found["findings"] if one["name"] == "dead_groups"]
    assert "50%" in dead["sentence"] and "lossless" in dead["advice"][0] and "what-if" in dead["advice"][1]
    assert dead["page"].endswith("#which-setting-would-pay-off") and "lossless" in printed


@pytest.mark.parametrize("settings", [None, {"steps_per_generation": 8, "num_iterations": 1}])
def test_how_averaged_rows_are_counted_is_said(settings, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    begun(tmp_path)
    rows = [{**WHOLE, "step": 10 * number} for number in range(1, 31)]
    state = {"global_step": 300, "log_history": rows}
    (tmp_path / "diagnostics" / "trainer_state.json").write_text(json.dumps(state))
    about = {"settings": {**(settings or {}), "gradient_accumulation_steps": 4}, "versions": {}}
    (tmp_path / "diagnostics" / "run.json").write_text(json.dumps(about))
    _, found = told(capsys, tmp_path)
    (averaged,) = [one for one in found["findings"] if one["name"] == "averaged"]
    parts = ("10 generations", "one a step") if settings is None else ("5 generations", "one in 2 steps")
    assert all(part in averaged["sentence"] for part in parts) and "logging_steps=1" in averaged["advice"][0]
    assert found["states"][-1]["name"] == "no_rise"

"""`ragen2-trl health` on logs of others: a table of states, a small chart, and a line for a file that is no log."""

import json

import pytest
from test_logs import console_line

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
    assert "No completion solves its task" in printed and "warm start" in printed and "failing" not in printed


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

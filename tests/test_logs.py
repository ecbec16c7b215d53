"""`read_log` on logs of TRL, trackers and other trainers: the same run in each form gives the same state."""

import csv
import json
import math
import os
import sqlite3
import subprocess
import sys

import numpy as np
import pandas as pd
import pytest

from ragen2_trl import cli
from ragen2_trl.instrument.health import health
from ragen2_trl.record.logs import Log, read_log

STEPS = 80
REWARDS = {
    "learning": [0.2 + 0.005 * step + 0.01 * (step % 3) for step in range(STEPS)],
    "nothing_to_learn": [0.0] * STEPS,
}


def rows_of_trl(state):
    """Rows as TRL logs them, from step 1 on."""
    return [
        {
            "loss": 0.0,
            "grad_norm": 0.0 if state == "nothing_to_learn" else 0.4,
            "learning_rate": 1e-6,
            "completions/mean_length": 100.0 + step % 5,
            "reward": reward,
            "reward_std": 0.0 if state == "nothing_to_learn" else 0.3,
            "frac_reward_zero_std": 1.0 if state == "nothing_to_learn" else 0.25,
            "epoch": (step + 1) / 100,
            "step": step + 1,
        }
        for step, reward in enumerate(REWARDS[state])
    ]


def as_json(path, state):
    path = path / "trainer_state.json"
    path.write_text(json.dumps({"global_step": STEPS, "log_history": rows_of_trl(state)}))
    return path


def as_list(path, state):
    path = path / "log_history.json"
    path.write_text(json.dumps(rows_of_trl(state)))
    return path


def as_lines(path, state):
    path = path / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, rows_of_trl(state))))
    return path


def as_swift(path, state):
    rows = [{**row, "global_step/max_steps": f"{row.pop('step')}/{STEPS}"} for row in rows_of_trl(state)]
    path = path / "logging.jsonl"
    path.write_text("\n".join(map(json.dumps, [*rows, {"log_history": rows}])))
    return path


def printed(row, quoted=True):
    values = {key: f"{value:.4g}" if quoted else value for key, value in row.items() if key != "step"}
    return str(values)


def bar(step, total=STEPS):
    drawn = f"{step * 100 // total:3}%|{'█' * (step * 10 // total):10}|"
    return f"\r {drawn} {step}/{total} [00:{step % 60:02}<01:00,  1.2s/it]"


def as_console_with_bars(path, state):
    """Standard output and error of one process together: bars end in carriage returns, evaluations have their own."""
    path = path / "train.log"
    lines = [
        "Map: 100%|██████████| 640/640 [00:00<00:00, 9000.00 examples/s]\nLoading weights:  50%|█    | 1/2 [00:01]\n"
    ]
    for row in rows_of_trl(state):
        lines += [bar(row["step"]), f"\r{' ' * 60}\r\x1b[1m{printed(row)}\x1b[0m\n", bar(row["step"])]
        if row["step"] % 20 == 0:
            lines += [bar(one, 4) for one in range(1, 5)] + [
                f"\n{{'eval_reward': '0.5', 'epoch': '{row['epoch']}'}}\n"
            ]
    path.write_text("".join([*lines, "{'train_runtime': '100', 'train_loss': '0', 'epoch': '1'}\n"]))
    return path


def as_console_without_bars(path, state):
    path = path / "stdout.txt"
    path.write_text("\n".join(printed(row, quoted=False) for row in rows_of_trl(state)))
    return path


def as_console_of_nodes(path, state):
    """Two nodes write into one file, each line after its name."""
    path = path / "job.out"
    lines = [f"[node{node}]:{printed(row)}\n" for row in rows_of_trl(state) for node in range(2)]
    path.write_text("".join(lines))
    return path


def rows_of_verl(state):
    return [
        {
            "step": row["step"],
            "critic/score/mean": row["reward"],
            "actor/grad_norm": row["grad_norm"],
            "response_length/mean": row["completions/mean_length"],
            "response_length/clip_ratio": 0.0,
            "critic/score/max": 0.0,
        }
        for row in rows_of_trl(state)
    ]


def as_console_of_verl(path, state):
    path = path / "verl.log"
    lines = []
    for row in rows_of_verl(state):
        values = " - ".join(f"{key}:np.float64({value})" for key, value in row.items() if key != "step")
        lines.append(f"\x1b[36m(TaskRunner pid=7)\x1b[0m step:{row['step']} - {values}\n")
    path.write_text("".join(lines))
    return path


def as_file_of_verl(path, state):
    path = path / "metrics.jsonl"
    lines = [
        json.dumps(
            {"step": row["step"], "elapsed_seconds": 1.0, "data": {k: v for k, v in row.items() if k != "step"}}
        )
        for row in rows_of_verl(state)
    ]
    path.write_text("\n".join(lines))
    return path


def as_console_of_openrlhf(path, state):
    path = path / "openrlhf.log"
    lines = []
    for row in rows_of_trl(state):
        values = {"policy_loss": 0.01, "reward": row["reward"], "response_length": row["completions/mean_length"]}
        lines.append(f"(PPOTrainer pid=3) INFO trainer.py:1] ✨ Global step {row['step']}: {values}\n")
    path.write_text("".join(lines))
    return path


def write_csv(path, rows):
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    return path


def as_csv_of_wandb(path, state):
    """An export of one run's charts: a key has two more columns for its bounds."""
    rows = []
    for row in rows_of_trl(state):
        values = {"Step": row["step"] - 1, "qwen - train/global_step": row["step"]}
        for key in ("reward", "reward_std", "frac_reward_zero_std"):
            values |= {f"qwen - train/{key}{end}": row[key] for end in ("", "__MIN", "__MAX")}
        rows.append(values)
    return write_csv(path / "wandb_export.csv", rows)


def as_csv_of_prime_rl(path, state):
    rows = [
        {
            "_step": row["step"],
            "reward/mean": row["reward"],
            "batch/solve_none": row["frac_reward_zero_std"],
            "batch/solve_all": 0.0,
            "is_truncated/mean": 0.0,
            "entropy/mean": "",
        }
        for row in rows_of_trl(state)
    ]
    return write_csv(path / "history.csv", rows)


def as_trackio(path, state):
    path = path / "project.db"
    with sqlite3.connect(path) as database:
        database.execute("CREATE TABLE metrics (timestamp TEXT, run_name TEXT, step INTEGER, metrics TEXT)")
        for run, start in (("old", "2026-01-01"), ("new", "2026-01-02")):
            for row in rows_of_trl(state if run == "new" else "learning"):
                tracked = {"train/global_step": row["step"], "note": "text"}
                tracked |= {f"train/{key}": value for key, value in row.items() if key != "step"}
                database.execute(
                    "INSERT INTO metrics VALUES (?, ?, ?, ?)",
                    (f"{start}T{row['step']:02}", run, row["step"], json.dumps(tracked)),
                )
    database.close()
    return path


FORMS = [
    as_json,
    as_list,
    as_lines,
    as_swift,
    as_console_with_bars,
    as_console_without_bars,
    as_console_of_nodes,
    as_csv_of_wandb,
    as_csv_of_prime_rl,
    as_trackio,
    # These have no share of groups without variance, so that equal rewards show as a reward that does not rise.
    as_console_of_verl,
    as_file_of_verl,
    as_console_of_openrlhf,
]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("state", REWARDS)
def test_a_run_has_the_same_state_in_each_form_of_its_log(tmp_path, form, state):
    log = read_log(form(tmp_path, state))
    told = [row for row in log.rows if "reward" in row or "critic/score/mean" in row or "reward/mean" in row]
    assert [row.get("step", number + 1) for number, row in enumerate(told)] == list(range(1, STEPS + 1))
    expected = "no_rise" if state == "nothing_to_learn" and FORMS.index(form) >= 10 else state
    assert health(log.rows).state.name == expected


def test_files_of_tensorboard_are_read(tmp_path):
    pytest.importorskip("tensorboard")
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(tmp_path) as writer:
        for row in rows_of_trl("nothing_to_learn"):
            for key, value in row.items():
                writer.add_scalar(f"train/{key}", value, row["step"])
    [path] = tmp_path.iterdir()
    assert health(read_log(path).rows).state.name == "nothing_to_learn"


def test_assumptions_are_said(tmp_path):
    assert "new" in read_log(as_trackio(tmp_path, "learning")).notes[0]
    assert read_log(as_console_with_bars(tmp_path, "learning")).notes == ()


def test_lines_without_end_are_left_out_and_counted(tmp_path):
    path = as_console_without_bars(tmp_path, "learning")
    path.write_text("{'reward': 1, " + "x" * 2**21 + "\n" + path.read_text() + "\n{'reward" + "'" * 2**21)
    log = read_log(path)
    assert len(log.rows) == STEPS and log.notes[0].startswith("2 lines")


@pytest.mark.parametrize(
    ("name", "content", "named"),
    [
        ("a.csv", "reward\n0.5\n", "steps"),
        ("b.csv", "Step,one - train/reward,two - train/reward\n1,0,0\n", "'one', 'two'"),
        ("c.log", "Map: 100%|███| 6/6 [00:00]\n{'a': 1}\n", "no log rows"),
        ("d.db", "SQLite format 3\0 and nothing else", "Trackio"),
        ("e.json", '{"log_history": [{"step": "x"}]}', "step"),
        ("f.csv", "", "steps"),
        ("g.csv", "step,reward\nnan,0.5\n", "step"),
        ("h.csv", "step,reward\n1e300,0.5\n", "step"),
        ("i.json", "[" * 100_000, "i.json"),
        ("j.jsonl", '{"step": 1}\n\n{nonsense\n', "line 3"),
    ],
)
def test_a_file_that_holds_no_log_is_refused_by_name(tmp_path, name, content, named):
    path = tmp_path / name
    path.write_text(content)
    with pytest.raises(ValueError, match=name) as refused:
        read_log(path)
    assert named in str(refused.value) and "\n" not in str(refused.value)


# Single lines and files


def console_line(step, **values):
    pairs = " - ".join(f"{key}:{value}" for key, value in values.items())
    return f"\x1b[36m(TaskRunner pid=1)\x1b[0m step:{step} - {pairs}\x1b[36m(TaskRunner pid=1)\x1b[0m Training: 1%\r\n"


def test_a_console_log_of_verl_is_read_as_rows(tmp_path):
    path = tmp_path / "train.log"
    values = {"train/A/success": "np.float64(0.25)", "actor/grad_norm": "1e-05", "actor/ppo_kl": "-0.5", "x": "nan"}
    path.write_text("noise\n" + console_line(3, **values) + "step: not a row\n")
    (row,) = read_log(path).rows
    assert math.isnan(row.pop("x"))
    assert row == {"step": 3, "train/A/success": 0.25, "actor/grad_norm": 1e-05, "actor/ppo_kl": -0.5}


def test_a_byte_order_mark_does_not_hide_a_log(tmp_path):
    rows = [{"step": 1, "reward": 0.5}]
    (tmp_path / "trainer_state.json").write_text(json.dumps({"log_history": rows}), encoding="utf-8-sig")
    assert read_log(tmp_path / "trainer_state.json") == Log(rows)


def test_the_steps_of_a_log_of_ms_swift_are_read_and_its_summary_is_no_row(tmp_path):
    rows = [{"reward": 0.5, "epoch": 0.01 * step, "global_step/max_steps": f"{step}/400"} for step in (5, 10)]
    rows.append({"reward": 0.5, "iteration": "15/400"})  # Megatron-SWIFT
    summary = {"best_metric": None, "global_step": 15, "log_history": rows, "memory": {"0": 1.5}}
    path = tmp_path / "logging.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in [*rows, summary]))
    assert [(row["step"], row["reward"]) for row in read_log(path).rows] == [(5, 0.5), (10, 0.5), (15, 0.5)]


@pytest.mark.slow
def test_a_log_is_utf_8_whatever_the_locale_says(tmp_path):
    (tmp_path / "trainer_state.json").write_text('{"log_history": [{"step": 1, "größe": 0.5}]}', encoding="utf-8")
    code = (
        "from pathlib import Path; from ragen2_trl.record.files import read_json\n"
        "from ragen2_trl.record.logs import read_log\n"
        f"path = Path({str(tmp_path / 'trainer_state.json')!r}); assert read_json(path, dict) and read_log(path)"
    )
    ascii_only = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    subprocess.run([sys.executable, "-c", code], check=True, env=ascii_only)


# Rows that average several steps


def averaged(values, every):
    """Rows as `logging_steps` makes them."""
    starts = range(0, len(values) - every + 1, every)
    return [{"step": start + every, "reward": sum(values[start : start + every]) / every} for start in starts]


@pytest.mark.parametrize("every", [1, 5, 10])
def test_a_plateau_is_judged_by_its_steps_and_not_by_its_rows(every):
    rng = np.random.default_rng(0)
    flat, rising = rng.normal(0.5, 0.1, 300), np.linspace(0.2, 0.8, 300) + rng.normal(0, 0.1, 300)
    assert health(averaged(flat, every)).state.name == "no_rise"
    assert health(averaged(rising, every)).state.name == "learning"


def test_noise_in_averaged_rows_is_no_rise():
    rng = np.random.default_rng(1)
    states = [health(averaged(rng.normal(0.5, 0.1, 300), 10)).state.name for _ in range(200)]
    assert states.count("learning") <= 4


def test_five_averaged_generations_without_signal_are_flat():
    rows = [{"step": 10 * row, "reward": 0.0, "frac_reward_zero_std": 1.0} for row in range(1, 3)]
    assert health(rows).state.name == "nothing_to_learn"


# `ragen2-trl health`


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

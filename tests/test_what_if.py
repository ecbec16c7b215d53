"""`ragen2-trl what-if`: the logs that it reads, on real runs, and the one line for what cannot be read."""

import json
import os
import pickle
import shutil
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch
from conftest import PROMPTS, RUN
from datasets import Dataset
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from ragen2_trl import SNRFilteredGRPOConfig, SNRFilteredGRPOTrainer, cli, what_if
from ragen2_trl.metrics import COMPUTE
from ragen2_trl.record import completions
from ragen2_trl.record.completions import read_completion_log
from ragen2_trl.remedies import kept_rows, token_counter, update_positions


def length_reward(completions, **columns):
    return [float(len(completion) % 2) for completion in completions]


def form_reward(completions, **columns):
    return [0.5 * completion[:1].isalpha() for completion in completions]


@pytest.fixture(scope="module", name="run")
def run_fixture(policy_path, tmp_path_factory):
    """Three steps of plain TRL, each a generation of 2 groups of 4; 8 prompts, so that none comes twice."""
    folder = tmp_path_factory.mktemp("plain") / "run"
    settings = {
        **RUN,
        "log_completions": True,
        "save_strategy": "steps",
        "save_steps": 3,
        "num_completions_to_print": 0,
    }
    args = GRPOConfig(str(folder), **settings)
    rows = Dataset.from_dict({"prompt": PROMPTS})
    GRPOTrainer(policy_path, [length_reward, form_reward], args, rows).train()
    return folder


def shown(capsys, *arguments):
    capsys.readouterr()
    cli.main(["what-if", *map(str, arguments)])
    return capsys.readouterr().out


# A run of TRL


def test_groups_of_a_plain_run_are_read_as_trl_sampled_them(run):
    log = read_completion_log(run)
    assert (log.rewards.shape, log.groups_per_generation, log.micro_batch) == ((6, 4), 2, 8)
    assert log.steps.tolist() == [1, 1, 2, 2, 3, 3] and log.generations.tolist() == [0, 0, 1, 1, 2, 2]
    assert sorted(log.by_function) == ["form_reward", "length_reward"]
    for step in (1, 2, 3):
        table = pd.read_parquet(run / "completions" / f"completions_{step:05d}.parquet")
        sums = (table["length_reward"] + table["form_reward"]).to_numpy().reshape(2, 4)
        np.testing.assert_allclose(log.rewards[log.steps == step], sums)
        np.testing.assert_allclose(log.advantages[log.steps == step], table["advantage"].to_numpy().reshape(2, 4))
        assert [log.beginnings[one] for one in log.prompts[log.steps == step]] == table["prompt"][::4].tolist()


def test_estimated_tokens_have_the_mean_that_trl_logged(run):
    log = read_completion_log(run)
    rows = [row for row in log.history if "completions/mean_length" in row]
    assert log.unit == "estimated tokens"
    assert log.lengths.mean() == pytest.approx(np.mean([row["completions/mean_length"] for row in rows]))
    total = (log.lengths.sum(axis=1) + 4 * log.prompt_lengths).sum()
    assert total == pytest.approx(rows[-1]["num_tokens"])


def test_no_pickle_is_read(run, monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("a pickle was read")

    assert list(run.glob("checkpoint-*/training_args.bin"))
    for module, name in ((pickle, "load"), (pickle, "loads"), (torch, "load")):
        monkeypatch.setattr(module, name, refuse)
    what_if(run)


def test_the_command_prints_a_table_of_eighty_columns_and_an_advice(run, capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("COLUMNS", "80")
    out = shown(capsys, run, "--json", tmp_path / "numbers.json")
    assert max(map(len, out.splitlines())) <= 80
    numbers = json.loads((tmp_path / "numbers.json").read_text())
    names = [one["name"] for one in numbers["remedies"]]
    assert {"lossless", "nonzero", "top_p 0.9", "dynamic sampling", "pilots, G0 = 2", "prompt selection"} <= {*names}
    words = " ".join(out.split())
    assert [words.index(f" {name} ") for name in names] == sorted(words.index(f" {name} ") for name in names)
    assert "24 completions: 6 groups of 4" in words
    assert numbers["groups"] == 6 and numbers["num_generations"] == 4
    assert {one["known"] for one in numbers["remedies"]} == {True, False}


def test_a_tokenizer_counts_what_trl_trained_on(run, policy_path):
    exact, estimated = (what_if(run, tokenizer=one).log for one in (policy_path, None))
    assert exact.unit == "tokens" and (exact.lengths % 1 == 0).all()
    assert exact.lengths.max() == RUN["max_completion_length"]  # a completion that was cut has no end token
    assert exact.prompt_lengths.mean() == pytest.approx(estimated.prompt_lengths.mean(), rel=0.05)


@pytest.mark.parametrize(
    ("size", "rows_of_batch", "batches", "words"), [(8, 8, 4, 0), (4, 4, 8, 40), (2, 8, 2, 10)], ids=str
)
def test_lossless_then_computes_as_many_positions_as_were_predicted(
    size, rows_of_batch, batches, words, policy_path, tmp_path
):
    settings = {**RUN, "log_completions": True, "num_completions_to_print": 0, "num_generations": size}
    settings |= {"per_device_train_batch_size": rows_of_batch, "gradient_accumulation_steps": batches}
    args = SNRFilteredGRPOConfig(str(tmp_path), **settings, snr_strategy="lossless")
    rows = Dataset.from_dict({"prompt": [" ".join([*["left"] * words, prompt]) for prompt in PROMPTS]})
    trainer = SNRFilteredGRPOTrainer(policy_path, length_reward, args, rows)
    lengths = []

    class Lengths(TrainerCallback):  # random tokens do not come out of text as they went in
        def on_step_end(self, args, state, control, **kwargs):
            lengths.append(trainer.latest_selection.lengths)

    trainer.add_callback(Lengths())
    trainer.train()
    used = [row[COMPUTE] for row in trainer.state.log_history if COMPUTE in row]
    log = replace(what_if(tmp_path, tokenizer=policy_path).log, lengths=torch.cat(lengths).double().numpy())
    plain, *_, computed = update_positions(log, kept_rows(log, 0, "lossless")).T
    assert computed / plain == pytest.approx(used, rel=0.05)


# Other logs

ROWS = [
    {"prompt": prompt, "completion": "a" * (member + 1), "reward": float(member > 0)}
    for prompt in ("first", "second", "third")
    for member in range(4)
]


def write_lines(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_equal_prompts_of_a_step_are_a_group_wherever_they_stand(tmp_path):
    """As in files of several processes, or interleaved ones."""
    (tmp_path / "dump").mkdir()
    for process in (0, 1):
        rows = [{**row, "step": 3} for row in ROWS[process::2]]
        write_lines(tmp_path / "dump" / f"rank_{process}.jsonl", rows)
    log = read_completion_log(tmp_path / "dump")
    assert log.rewards.shape == (3, 4) and log.rewards.sum() == 9 and log.groups_per_generation == 3


def test_a_prompt_twice_in_a_step_is_two_groups(tmp_path):
    rows = [{**row, "step": 1} for row in [*ROWS, *ROWS[:4]]]
    log = read_completion_log(write_lines(tmp_path / "rows.jsonl", rows))
    assert log.rewards.shape == (4, 4) and log.prompts.tolist() == [0, 1, 2, 0]


def test_messages_are_one_prompt_in_any_order_of_keys(tmp_path):
    prompts = [[{"role": "user", "content": "go"}], [{"content": "go", "role": "user"}]]
    row = {"completion": [{"role": "assistant", "content": "ab"}], "reward": 1, "step": 1}
    rows = [{**row, "prompt": one} for one in (prompts[0], "another", prompts[1], "another")]
    log = read_completion_log(write_lines(tmp_path / "rows.jsonl", rows))
    assert log.rewards.shape == (2, 2) and log.prompts.tolist() == [0, 1] and log.lengths.tolist() == [[2, 2]] * 2


def test_incomplete_groups_are_left_out_and_counted(tmp_path):
    log = read_completion_log(write_lines(tmp_path / "rows.jsonl", ROWS[:-1]))
    assert log.rewards.shape == (2, 4) and any("Left out: 3 of 11 completions" in note for note in log.notes)
    pairs = read_completion_log(tmp_path / "rows.jsonl", num_generations=2)
    assert pairs.rewards.shape == (5, 2)


def test_half_a_file_is_left_out_of_a_folder_and_named(run, tmp_path):
    folder = tmp_path / "completions"
    folder.mkdir()
    for file in (run / "completions").iterdir():
        content = file.read_bytes()
        (folder / file.name).write_bytes(content[: len(content) // 2] if "00002" in file.name else content)
    log = read_completion_log(tmp_path)
    assert log.steps.tolist() == [1, 1, 3, 3] and any("completions_00002.parquet" in note for note in log.notes)


def test_a_log_beyond_the_limit_is_cut(tmp_path, monkeypatch):
    path = write_lines(tmp_path / "rows.jsonl", ROWS)
    monkeypatch.setattr(completions, "MAX_ROWS", 8)
    log = read_completion_log(path)
    assert log.rewards.shape == (2, 4) and any("first 8 completions" in note for note in log.notes)
    assert log.unit == "characters" and any("no step" in note for note in log.notes)


def test_steps_of_an_evaluation_are_left_out(run, tmp_path):
    (tmp_path / "completions").mkdir()
    for file in (run / "completions").iterdir():
        (tmp_path / "completions" / file.name).write_bytes(file.read_bytes())
    state = {"global_step": 3, "log_history": [{"step": 2, "eval_reward": 0.5}]}
    (tmp_path / "checkpoint-3").mkdir()
    (tmp_path / "checkpoint-3" / "trainer_state.json").write_text(json.dumps(state))
    log = read_completion_log(tmp_path)
    assert log.steps.tolist() == [1, 1, 3, 3] and any("evaluation" in note for note in log.notes)


def test_steps_without_completions_are_counted_only_where_there_are_any(run, tmp_path):
    whole = read_completion_log(run)
    shutil.copytree(run, tmp_path / "run")
    (tmp_path / "run" / "completions" / "completions_00002.parquet").unlink()
    said = "TRL saves completions at logging steps alone: here, 2 of 3 steps."
    assert said in read_completion_log(tmp_path / "run").notes
    assert not any("logging steps alone" in note for note in whole.notes)


def test_a_state_that_was_saved_without_a_checkpoint_is_read(run, tmp_path):
    shutil.copytree(run / "completions", tmp_path / "completions")
    state = json.loads((run / "checkpoint-3" / "trainer_state.json").read_text())
    (tmp_path / "trainer_state.json").write_text(json.dumps(state))
    saved, whole = read_completion_log(tmp_path), read_completion_log(run)
    assert saved.unit == "estimated tokens" and sorted(saved.by_function) == sorted(whole.by_function)
    np.testing.assert_allclose(saved.lengths, whole.lengths)


def test_a_state_that_cannot_be_read_is_named_beside_what_its_completions_say(run, tmp_path):
    shutil.copytree(run / "completions", tmp_path / "completions")
    (tmp_path / "trainer_state.json").write_text('{"log_history": [')
    log = read_completion_log(tmp_path)
    assert log.unit == "characters" and any("trainer_state.json" in note for note in log.notes)


def test_a_generation_has_the_commonest_number_of_groups(tmp_path):
    (tmp_path / "_measurements").mkdir()
    counts = [3, 3, 2, 3, 1]
    rows = [
        {"step": step, "rewards": [[0, 1]] * count, "kept": [True] * count} for step, count in enumerate(counts, 1)
    ]
    write_lines(tmp_path / "_measurements" / "group_rewards.jsonl", rows)
    assert read_completion_log(tmp_path).groups_per_generation == 3


def test_rewards_of_a_run_of_ours_are_read_without_completions(tmp_path):
    (tmp_path / "_measurements").mkdir()
    rows = [{"step": step, "rewards": [[0, 1], [1, 1], [1]], "kept": [True, False, False]} for step in (1, 2)]
    write_lines(tmp_path / "_measurements" / "group_rewards.jsonl", rows)
    found = what_if(tmp_path)
    assert found.log.rewards.tolist() == [[0, 1], [1, 1]] * 2 and not found.log.knows_prompts
    assert any("Left out: 2 of 10 completions" in note for note in found.notes)


def logged(path, shares):
    rows = [{"step": step, "reward": 0.5, "frac_reward_zero_std": share} for step, share in enumerate(shares, 1)]
    path.write_text(json.dumps({"global_step": len(rows), "log_history": rows}, indent=2))
    return path


@pytest.mark.parametrize("where", ["file", "folder"])
def test_without_completions_logged_shares_tell_what_dead_groups_cost(where, tmp_path, capsys):
    path = logged(tmp_path / "trainer_state.json", [0.5, 0.25, 0.75, 0.5] * 5)
    source = path if where == "file" else tmp_path
    out = shown(capsys, source, "--num_generations", "4", "--json", tmp_path / "numbers.json")
    found = json.loads((tmp_path / "numbers.json").read_text())
    assert found["live"]["value"] == pytest.approx(0.5) and found["completions"] is None
    by_name = {one["name"]: one for one in found["remedies"]}
    assert set(by_name) == {"lossless", "dynamic sampling"}
    assert by_name["lossless"]["numbers"]["rows"]["value"] == pytest.approx(0.5)
    assert by_name["lossless"]["gain"]["value"] == pytest.approx(
        1 / 0.75
    )  # half of the update, which is half of a step
    assert by_name["dynamic sampling"]["numbers"]["completions"]["value"] == pytest.approx(8)
    assert [fault["name"] for fault in found["faults"]] == ["dead_groups"]
    assert "log_completions=True" in out and "--groups" in out


@pytest.mark.parametrize("shares", [[], [1.0] * 5])
def test_a_log_that_tells_no_share_or_no_live_group_has_no_remedy(shares, tmp_path, capsys):
    logged(tmp_path / "trainer_state.json", shares)
    if shares:
        assert "no remedy" in shown(capsys, tmp_path)
        assert what_if(tmp_path).log.size == GRPOConfig(use_cpu=True, bf16=False).num_generations
        return
    with pytest.raises(SystemExit):
        shown(capsys, tmp_path)
    assert "holds no completions" in capsys.readouterr().err


def test_weights_make_the_sum(run):
    log = read_completion_log(run, rewards=["form_reward", "length_reward"], reward_weights=[2.0, 0.0])
    np.testing.assert_allclose(log.rewards, 2 * log.by_function["form_reward"])


# Generations


def plain_run(policy_path, folder, rewards=length_reward, trainer_class=GRPOTrainer, **settings):
    """A run of TRL, or of another trainer, that saved its state."""
    config = GRPOConfig if trainer_class is GRPOTrainer else SNRFilteredGRPOConfig
    args = config(str(folder), **{**RUN, "log_completions": True, "num_completions_to_print": 0, **settings})
    trainer = trainer_class(policy_path, rewards, args, Dataset.from_dict({"prompt": PROMPTS}))
    trainer.train()
    trainer.save_state()
    return read_completion_log(folder), [row["step"] for row in trainer.state.log_history if "reward" in row]


REUSED = {"num_iterations": 2}, {"per_device_train_batch_size": 4, "steps_per_generation": 2}


@pytest.mark.parametrize("trainer_class", [GRPOTrainer, SNRFilteredGRPOTrainer])
@pytest.mark.parametrize("settings", REUSED)
def test_a_generation_that_serves_several_steps_is_read_once(policy_path, tmp_path, settings, trainer_class):
    log, sampled = plain_run(policy_path, tmp_path, trainer_class=trainer_class, max_steps=6, **settings)
    assert len(list((tmp_path / "completions").iterdir())) == 6 and sampled == [1, 3, 5]
    assert log.steps.tolist() == [1, 1, 3, 3, 5, 5] and log.generations.tolist() == [0, 0, 1, 1, 2, 2]
    assert log.groups_per_generation == 2 and len(set(log.prompts.tolist())) == 6  # no prompt came again
    assert not any("generations are read" in note or "logging steps" in note for note in log.notes)


@pytest.mark.parametrize("trainer_class", [GRPOTrainer, SNRFilteredGRPOTrainer])
def test_generations_that_trl_did_not_save_are_counted(policy_path, tmp_path, trainer_class):
    """Two generations a step: TRL saves the second alone, and logs the mean of both."""
    settings = {"gradient_accumulation_steps": 2, "steps_per_generation": 1}
    log, _ = plain_run(policy_path, tmp_path, trainer_class=trainer_class, **settings)
    total = "at least 6" if trainer_class is GRPOTrainer else "6"
    assert len(log) == 6 and any(f"3 of {total} generations are read" in note for note in log.notes)
    exact = read_completion_log(tmp_path, count=token_counter(policy_path))
    assert log.prompt_lengths.mean() == pytest.approx(exact.prompt_lengths.mean(), rel=0.5)  # not of both generations


def test_recorded_rewards_of_a_step_with_several_generations_are_those_of_several(policy_path, tmp_path):
    settings = {"gradient_accumulation_steps": 2, "steps_per_generation": 1}
    plain_run(policy_path, tmp_path, trainer_class=SNRFilteredGRPOTrainer, **settings)
    shutil.rmtree(tmp_path / "completions")
    log = read_completion_log(tmp_path)
    assert log.groups_per_generation == 2 and log.generations.tolist() == np.repeat(range(6), 2).tolist()


def write_tables(folder, files, history=()):
    """Files of completions as TRL names them, by step, and a state with a log."""
    (folder / "completions").mkdir()
    for step, rows in files.items():
        table = pd.DataFrame([{"step": step, **row, "advantage": 0.0} for row in rows])
        table.to_parquet(folder / "completions" / f"completions_{step:05d}.parquet")
    state = {"global_step": max(files), "log_history": list(history)}
    (folder / "trainer_state.json").write_text(json.dumps(state))
    return folder


def generation(number, **more):
    return [{**row, "completion": f"{row['completion']}{number}", **more} for row in ROWS[:8]]


def test_the_number_of_a_generation_decides_what_is_read_again(tmp_path):
    """Also where rows are equal, and where a file holds the end of an earlier generation, as with pilots."""
    first, equal, third = (generation(0, generation=number) for number in (7, 8, 9))
    files = {1: first, 2: first, 3: equal, 4: equal[4:] + third}
    log = read_completion_log(write_tables(tmp_path, files))
    assert log.steps.tolist() == [1, 1, 3, 3, 4, 4] and log.generations.tolist() == [0, 0, 1, 1, 2, 2]
    assert [*log.by_function] == ["reward"]


def test_two_generations_of_a_file_do_not_share_groups(tmp_path):
    log = read_completion_log(
        write_tables(tmp_path, {2: generation(0, generation=3) + generation(1, generation=4)[:4]})
    )
    assert log.generations.tolist() == [0, 0, 1] and log.prompts.tolist() == [0, 1, 0]
    assert log.groups_per_generation == 2


def test_equal_rows_are_another_generation_where_the_log_says_that_one_was_sampled(tmp_path):
    rows = {step: generation(0) for step in (1, 2, 3)}
    history = [{"step": 1, "reward": 0.75}, {"step": 2}, {"step": 3, "reward": 0.75}]
    assert read_completion_log(write_tables(tmp_path, rows, history)).steps.tolist() == [1, 1, 3, 3]


def test_completions_of_an_evaluation_are_left_out_of_the_steps_that_save_them_again(tmp_path):
    evaluated, new = generation(1), generation(2)
    history = [{"step": 2, "eval_reward": 0.5}]
    files = {1: generation(0), 2: evaluated, 3: evaluated, 4: new}
    assert read_completion_log(write_tables(tmp_path, files, history)).steps.tolist() == [1, 1, 4, 4]


# Weights


def zest(completions, **columns):
    return [float(number % 4 == 0) for number in range(len(completions))]


def aroma(completions, **columns):
    return [float(number % 4 in (1, 2)) for number in range(len(completions))]


@pytest.mark.parametrize("trainer_class", [GRPOTrainer, SNRFilteredGRPOTrainer])
def test_weights_are_those_of_their_functions_whose_names_are_sorted_in_the_log(policy_path, tmp_path, trainer_class):
    settings = {"reward_weights": [1.0, 0.25], "save_strategy": "steps", "save_steps": 3}
    plain_run(policy_path, tmp_path / "run", [zest, aroma], trainer_class, **settings)
    given = settings["reward_weights"] if trainer_class is GRPOTrainer else []
    log = what_if(tmp_path / "run", reward_weights=given).log
    assert log.rewards.tolist() == [[1.0, 0.25, 0.25, 0.0]] * 6
    assert not any("--reward_weights" in note for note in log.notes)
    named = read_completion_log(tmp_path / "run", rewards=["aroma", "zest"], reward_weights=given[::-1])
    assert named.rewards.tolist() == log.rewards.tolist()
    wrong = what_if(tmp_path / "run", reward_weights=[0.25, 1.0])
    assert any("zest, aroma" in note for note in wrong.notes)


def test_weights_of_one_are_doubted_only_where_the_log_contradicts_them(policy_path, tmp_path):
    assert not any("--reward_weights" in note for note in plain_run(policy_path, tmp_path, [zest, aroma])[0].notes)


# What cannot be read

LINE = {"prompt": "a", "completion": "b", "reward": 1}


@pytest.mark.parametrize(
    ("rows", "parts"),
    [
        ([LINE, {**LINE, "reward": "much"}], ["row 1 of odd.jsonl", "reward", "number", "much"]),
        ([{"prompt": "a", "completion": "b"}], ["row 0 of odd.jsonl", "reward"]),
        ([LINE, {**LINE, "prompt": "c"}], ["no whole group", "2 rows", "num_generations"]),
        ([], ["no completions", "allowed"]),
    ],
)
def test_what_cannot_be_read_is_answered_in_a_line(tmp_path, capsys, rows, parts):
    path = write_lines(tmp_path / "odd.jsonl", rows)
    with pytest.raises(SystemExit) as ended:
        cli.main(["what-if", str(path)])
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and all(part in said for part in parts)


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["--num_generations", "1"], "num_generations must be at least 2"),
        (["--groups", "0"], "groups must be at least 1"),
        (["--rewards", "none"], "no column 'none'"),
        (["--reward_weights", "1", "2"], "reward_weights must be 1 numbers"),
        (["--sampling_share", "2"], "sampling_share must be from 0 to 1"),
    ],
)
def test_a_flag_out_of_range_is_named(tmp_path, capsys, arguments, part):
    path = write_lines(tmp_path / "rows.jsonl", ROWS)
    with pytest.raises(SystemExit) as ended:
        cli.main(["what-if", str(path), *arguments])
    assert ended.value.code == 2 and part in capsys.readouterr().err


def test_escape_codes_in_prompts_and_names_do_not_reach_the_terminal(tmp_path, capsys):
    rows = [
        {"prompt": "\x1b]0;owned\x07\x1b[2J", "completion": "x", "\x1b[31mform": float(member), "solved": 1.0}
        for member in (0, 1)
    ]
    out = shown(capsys, write_lines(tmp_path / "rows.jsonl", rows))
    assert "form" in out and "\x1b" not in out and "\x07" not in out


HOSTILE = {
    "step": {"step": 2**70, "rewards": [[0, 1]], "kept": [True]},
    "group": {"step": 1, "rewards": [[0, 1] * 600], "kept": [True]},
    "reward": {"step": 1, "rewards": [[0, 1e30]], "kept": [True]},
}


@pytest.mark.parametrize("what", HOSTILE)
def test_a_record_of_any_content_is_read_or_refused_in_a_line(what, run, tmp_path, capsys):
    (tmp_path / "run" / "_measurements").mkdir(parents=True)
    shutil.copytree(run / "checkpoint-3", tmp_path / "run" / "checkpoint-3")
    write_lines(tmp_path / "run" / "_measurements" / "group_rewards.jsonl", [HOSTILE[what]])
    if what != "group":
        part = "Read 2 completions" if what == "reward" else "No completions are logged"
        assert part in " ".join(shown(capsys, tmp_path / "run").split())
    else:
        with pytest.raises(SystemExit):
            shown(capsys, tmp_path / "run")


def test_groups_of_more_completions_than_are_compared_are_refused_by_name(tmp_path):
    rows = [{"prompt": "a", "completion": "b", "reward": number % 2} for number in range(1025)]
    with pytest.raises(ValueError, match="num_generations must be at most 1024, got 1025"):
        read_completion_log(write_lines(tmp_path / "rows.jsonl", rows))
    assert read_completion_log(write_lines(tmp_path / "rows.jsonl", rows[1:])).size == 1024


def test_weights_that_a_plain_run_does_not_save_are_named_where_they_matter(policy_path, tmp_path):
    def first(completions, **columns):
        return [float(number % 4 in (0, 3)) for number in range(len(completions))]

    def second(completions, **columns):
        return [float(number % 4 in (1, 2)) for number in range(len(completions))]

    settings = {**RUN, "log_completions": True, "num_completions_to_print": 0, "reward_weights": [1.0, 0.2]}
    rows = Dataset.from_dict({"prompt": PROMPTS})
    trainer = GRPOTrainer(policy_path, [first, second], GRPOConfig(str(tmp_path / "run"), **settings), rows)
    trainer.train()
    trainer.save_state()
    found, given = what_if(tmp_path / "run"), what_if(tmp_path / "run", reward_weights=[1.0, 0.2])
    faults = " ".join(one.text for one in found.faults)
    assert "other weights" in faults and "rounding" not in faults
    told, more = ([note for note in one.notes if "--reward_weights" in note] for one in (found, given))
    assert len(told) == 1 and "first, second" in told[0] and not more
    assert (found.live.value, given.live.value) == (0, 1)


def test_pipes_and_tables_beside_a_record_are_not_read(tmp_path):
    (tmp_path / "_measurements").mkdir()
    record = {"step": 1, "rewards": [[0, 1], [1, 1]], "kept": [True, False]}
    write_lines(tmp_path / "_measurements" / "group_rewards.jsonl", [record])
    write_lines(tmp_path / "eval_rows.jsonl", [{"question": "?"}])
    (tmp_path / "completions").mkdir()
    os.mkfifo(tmp_path / "completions" / "1.jsonl")
    assert read_completion_log(tmp_path).rewards.tolist() == [[0, 1], [1, 1]]


def test_completions_of_an_earlier_training_are_left_out_of_one_that_has_ended(policy_path, tmp_path):
    settings = {**RUN, "log_completions": True, "num_completions_to_print": 0, "output_dir": str(tmp_path / "run")}
    rows = Dataset.from_dict({"prompt": PROMPTS})
    SNRFilteredGRPOTrainer(policy_path, length_reward, SNRFilteredGRPOConfig(**settings), rows).train()
    folder = tmp_path / "run" / "completions"
    shutil.copy(folder / "completions_00003.parquet", folder / "completions_00050.parquet")
    log = read_completion_log(tmp_path / "run")
    assert log.steps.max() == 3 and "Left out: 1 file of another training, after the last step, 3." in log.notes


# The command


def test_the_command_begins_without_importing_trl():
    said = "import sys, ragen2_trl.cli.what_if; print(*(name for name in ('trl', 'datasets') if name in sys.modules))"
    result = subprocess.run([sys.executable, "-c", said], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == ""

"""The diagnose command: from a model, or from completions that TRL saved, to numbers, a verdict and pictures."""

import json

import pandas as pd
import pytest
import torch
from datasets import Dataset
from diagnosed import messages, run, save
from diagnosed import played_fixture as played_fixture
from trl import GRPOTrainer

from ragen2_trl import cli
from ragen2_trl.cli import diagnose, samples
from ragen2_trl.cli.arguments import DiagnoseArguments
from ragen2_trl.cli.diagnose import beginning
from ragen2_trl.cli.samples import first_turn_text, read_generations, read_saved
from ragen2_trl.cli.typed import InputError
from ragen2_trl.instrument import chance_p_value
from ragen2_trl.rollouts import sampling

# Sampling


def test_the_tiny_model_depends_on_its_prompt(tmp_path, capsys):
    report = run(tmp_path, num_prompts=8, num_samples=2)
    metrics = report["metrics"]
    assert metrics["retrieval_accuracy"] > 0.7 > 5 * metrics["retrieval_chance"]
    assert report["regime"] in ("diverse", "compressed")
    assert (metrics["num_completions"], metrics["num_prompts"]) == (16.0, 8.0)
    assert metrics["valid_thinking_rate"] > 0.8
    assert metrics["tokens_forwarded"] > 0
    assert report["settings"]["num_prompts"] == 8
    assert set(report["versions"]) == {"torch", "transformers", "trl", "ragen2-trl"}
    assert [point["label"] for point in report["path"]] == ["frozen_lake"]
    shown = " ".join(capsys.readouterr().out.split())
    for part in (
        "retrieval accuracy@4",
        "at most 2.08",
        "Reasoning depends on its prompt.",
        "distinct prompts 8",
        "of them sampling",
    ):
        assert part in shown


@pytest.mark.slow
def test_a_diagnosis_can_be_put_into_a_report(tmp_path, capsys):
    """With its verdict, its reasoning traces, what was sampled, and how."""
    written = run(tmp_path, num_prompts=8, num_samples=2)
    folder, page = tmp_path / "diagnosis", tmp_path / "report.html"
    cli.main(["report", str(folder), "--output", str(page)])
    shown = page.read_text()
    assert written["findings"][-1]["sentence"] in shown
    for part in ("diagnosed", "retrieval accuracy", "success", "num_prompts", "What the model wrote"):
        assert part in shown, part
    (folder / "diagnosis.json").write_text(json.dumps({"path": [{"metrics": {}}]}))
    with pytest.raises(SystemExit):
        cli.main(["report", str(folder), "--output", str(page)])
    assert "retrieval_accuracy" in capsys.readouterr().err


@pytest.mark.slow
def test_the_same_seed_gives_the_same_numbers_and_no_random_state_moves(tmp_path):
    state = torch.get_rng_state()
    settings = {"num_prompts": 4, "num_samples": 2}
    first, again = (run(tmp_path, **settings)["metrics"] for _ in range(2))
    assert torch.equal(torch.get_rng_state(), state)
    for metrics in (first, again):
        assert metrics["seconds"] == metrics.pop("sampling_seconds") + metrics.pop("scoring_seconds")
        assert metrics.pop("seconds") > 0
    assert first == again
    assert run(tmp_path, **settings, seed=1)["metrics"]["mi_seq"] != first["mi_seq"]


def test_retrieval_among_all_prompts_is_no_evidence_and_not_shown(tmp_path, capsys):
    metrics = run(tmp_path, num_prompts=4, num_samples=2)["metrics"]
    assert metrics["retrieval_chance@4"] == 1.0
    shown = capsys.readouterr().out
    assert "retrieval accuracy@2" in shown and "retrieval accuracy@4" not in shown


@pytest.mark.slow
def test_what_is_sampled_is_on_disk_as_it_comes_and_scores_to_the_same_numbers(tmp_path, monkeypatch, capsys):
    settings = {"num_prompts": 4, "num_samples": 2, "batch_size": 3}
    sizes, replace = [], samples.replace_whole
    monkeypatch.setattr(
        samples, "replace_whole", lambda path, write: (replace(path, write), sizes.append(len(pd.read_parquet(path))))
    )
    report = run(tmp_path, **settings)
    assert sizes == [3, 6, 8]
    saved = tmp_path / "diagnosis" / "completions.parquet"
    shown = capsys.readouterr().out
    assert shown.startswith("Loading tiny, 0 s\nSampling: 0 of 8 completions")
    monkeypatch.setattr(samples, "sample_trajectories", None)
    again = run(tmp_path / "again", **settings, completions=saved)
    timing = {"seconds", "sampling_seconds", "scoring_seconds"}
    assert {**report["metrics"]}.keys() == again["metrics"].keys()
    assert [value for name, value in report["metrics"].items() if name not in timing] == [
        value for name, value in again["metrics"].items() if name not in timing
    ]
    assert "The ids as they were sampled" in capsys.readouterr().out


@pytest.mark.slow
def test_a_kill_during_sampling_loses_nothing_that_was_played(tmp_path, monkeypatch):
    generate, calls = sampling.generator, []

    def killed(*args):
        inner = generate(*args)

        def next_batch(contexts, most):
            calls.append(len(contexts))
            if len(calls) == 3:
                raise KeyboardInterrupt
            return inner(contexts, most)

        return next_batch

    monkeypatch.setattr(sampling, "generator", killed)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, num_prompts=4, num_samples=2, batch_size=2)
    monkeypatch.undo()
    saved = tmp_path / "diagnosis" / "completions.parquet"
    assert run(tmp_path / "again", completions=saved)["metrics"]["num_completions"] == 4.0


@pytest.mark.slow
def test_reasoning_whose_observation_was_withheld_comes_out_at_chance(tmp_path, capsys):
    report = run(tmp_path, num_prompts=8, num_samples=8, control="true")
    control = report["control"]["metrics"]
    assert report["metrics"]["retrieval_accuracy"] > 0.9
    p_value = chance_p_value(control)
    assert p_value > 0.01 and control["retrieval_accuracy"] < 0.3
    assert report["control"]["regime"] in ("foreign", "independent", "inconclusive")
    assert "Control, the observation withheld: " in " ".join(capsys.readouterr().out.split())


def test_hits_and_misses_are_shown(tmp_path, capsys):
    run(tmp_path, num_prompts=4, num_samples=2)
    shown = capsys.readouterr().out
    assert shown.count("Hit: ") == 2


@pytest.mark.slow
def test_several_turns_are_scored_as_they_were_played(tmp_path, capsys):
    settings = {"model": "tiny-sokoban", "env_name": "sokoban", "env_args": "max_turns=2", "max_new_tokens": 200}
    report = run(tmp_path, **settings, num_prompts=8, num_samples=4)
    (turn, *_) = report["later_turns"]
    assert turn == "turn_2"
    for form in (report["later_turns"][turn]["metrics"], report["later_turns"][turn]["without_own_words"]):
        assert 0 <= form["retrieval_accuracy"] <= 1
    shown = " ".join(capsys.readouterr().out.split())
    assert "turn 2: retrieval" in shown and "earlier words left out" in shown


# Completions that TRL saved


def test_reasoning_moved_to_other_prompts_is_found_out(played, tmp_path, capsys):
    prompts, texts = played
    path = save(tmp_path / "saved", 10, prompts, messages(texts[2:] + texts[:2]))
    report = run(tmp_path, completions=path)
    assert report["metrics"]["retrieval_accuracy"] < 0.4
    assert report["regime"] == "foreign"
    shown = " ".join(capsys.readouterr().out.split())
    assert "The completions do not belong to these prompts, or not to this model." in shown
    assert "ollapse" not in shown
    assert shown.count("nats likelier under another prompt") == 2


@pytest.mark.slow
def test_a_folder_is_a_path_that_ends_with_its_last_step(played, tmp_path, capsys):
    prompts, texts = played
    folder = tmp_path / "saved"
    for step in (9, 100_000):
        moved = texts if step < 100 else texts[2:] + texts[:2]
        save(folder, step, prompts, messages(moved))
        save(folder, step + 1, prompts, messages(moved))  # a step that uses the same completions
    report = run(tmp_path, completions=folder)
    assert [point["label"] for point in report["path"]] == ["step 9", "step 100000"]
    assert [point["regime"] for point in report["path"]] == ["diverse", "foreign"]
    assert report["regime"] == "foreign"
    assert report["metrics"] == report["path"][-1]["metrics"]
    assert "completions_100000.parquet scored by tiny" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("saved", "steps"), [(1, [1]), (8, list(range(1, 9))), (15, list(range(1, 16, 2))), (22, list(range(1, 23, 3)))]
)
def test_up_to_eight_files_are_taken_evenly_and_the_last_always(saved, steps, tmp_path):
    for step in range(1, saved + 1):
        (tmp_path / f"{step}.jsonl").write_text(json.dumps({"prompt": "a", "completion": f"b{step}"}))
    assert [int(path.stem) for path in read_generations(tmp_path, [])[0]] == steps


@pytest.mark.parametrize("conversational", [pytest.param(True, marks=pytest.mark.slow), False])
def test_a_file_of_a_real_run_is_diagnosed(conversational, policy_path, prompts, make_args, tmp_path):
    if conversational:
        prompts = Dataset.from_dict({"prompt": [[{"role": "user", "content": text}] for text in prompts["prompt"]]})

    def length_reward(completions, **kwargs):
        return [float(len(str(completion))) for completion in completions]

    args = make_args(snr=False, max_steps=2, gradient_accumulation_steps=2, log_completions=True)
    trainer = GRPOTrainer(policy_path, length_reward, args, prompts)
    trainer.train()
    report = run(tmp_path, model=policy_path, completions=tmp_path / "run" / "completions")
    assert [point["label"] for point in report["path"]] == ["step 1", "step 2"]
    assert report["metrics"]["num_prompts"] == 4.0
    assert 8 <= report["metrics"]["num_completions"] <= 16  # those of special tokens alone are empty as text


def test_only_the_first_of_several_turns_is_taken():
    turns = [
        {"role": "assistant", "content": "<think>one</think>", "tool_calls": None},
        {"role": "tool", "content": "answer", "tool_calls": None},
        {"role": "assistant", "content": "<think>two</think>", "tool_calls": None},
    ]
    assert first_turn_text(turns) == "<think>one</think>"
    assert first_turn_text("as it is") == "as it is"
    assert first_turn_text([]) == ""


# Hostile text, and input that cannot be used


def test_prompts_of_a_file_are_sampled_for(tmp_path):
    lines = [json.dumps({"prompt": f"Say {number}.", "other": number}) for number in range(4)]
    (tmp_path / "mine.jsonl").write_text("\n".join(lines))
    run(tmp_path, prompts=tmp_path / "mine.jsonl", num_prompts=8, num_samples=2, max_new_tokens=12)
    assert (tmp_path / "diagnosis" / "diagnosis.json").exists()


@pytest.mark.parametrize(
    "hostile",
    [
        "\x1b[31mred",
        "\u202eevil",
        *(
            pytest.param(text, marks=pytest.mark.slow)
            for text in ("\x1b]0;title\x07", "\x9b31m", "\x1b]8;;http://example.com\x1b\\", "a\rb", "\x08\x08")
        ),
    ],
)
def test_model_text_cannot_steer_the_terminal(hostile, played, tmp_path, capsys):
    prompts, texts = played
    moved = [text.replace("<think>", f"<think>[bold]{hostile}[/nothing] ", 1) for text in texts[2:] + texts[:2]]
    marked = [[*prompt[:-1], {**prompt[-1], "content": f"{hostile}\n{prompt[-1]['content']}"}] for prompt in prompts]
    run(tmp_path, completions=save(tmp_path / "saved", 10, marked, messages(moved)))
    shown = capsys.readouterr().out
    assert "nats likelier" in shown
    assert not [char for char in shown if not (char.isprintable() or char == "\n")]


def test_brackets_in_names_and_text_are_no_markup(played, tmp_path, capsys):
    prompts, texts = played
    moved = [text.replace("<think>", "<think>[bold]x[/nothing] ", 1) for text in texts[2:] + texts[:2]]
    path = save(tmp_path / "saved", 10, prompts, messages(moved))
    path = path.rename(path.with_name("[red].parquet"))
    run(tmp_path, completions=path)
    shown = capsys.readouterr().out
    assert "[red].parquet scored by tiny" in " ".join(shown.split())
    assert "[bold]x[/nothing]" in shown


def test_long_text_is_cut():
    assert len(beginning("word " * 10_000)) <= diagnose.MAX_SHOWN_CHARS
    assert beginning("\n".join("x" * 200)).count("\n") == diagnose.MAX_SHOWN_LINES - 1


# Bad input


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"temperature": 0.0}, "temperature must be above 0 .* got 0.0"),
        ({"num_prompts": 1}, "num_prompts must be at least 2, got 1"),
        ({"control": "true", "completions": "runs"}, "control must be False with completions"),
        ({"num_samples": 0}, "num_samples must be at least 1, got 0"),
        ({"env_name": "chess"}, "environment must be one of .*frozen_lake.* got 'chess'"),
        ({"output_dir": __file__}, "output_dir=.*is a file"),
        ({"completions": "nowhere"}, "'nowhere' is not a file or folder"),
    ],
)
def test_bad_settings_are_named(settings, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        run(tmp_path, **settings)
    assert not (tmp_path / "diagnosis").exists()


def test_a_folder_without_a_table_is_named(tmp_path):
    with pytest.raises(ValueError, match=f"completions={str(tmp_path)!r} holds no completions; allowed: "):
        run(tmp_path, completions=tmp_path)


@pytest.mark.parametrize("broken", [{"prompt_ids": ["x"]}, {"completion_ids": None}, {"group": 1.5}])
def test_ids_that_are_none_are_named_before_a_model_is_loaded(broken, tmp_path):
    own = {"group": 0, "prompt_ids": [1], "completion_ids": [2], "env_mask": [1], "success": None, "clipped": 0.0}
    path = tmp_path / "own.jsonl"
    path.write_text(json.dumps({"prompt": "a", "completion": "b", **own, **broken}))
    with pytest.raises(ValueError, match=rf"row 0 of own\.jsonl: {next(iter(broken))}"):
        read_saved(path)


def test_one_prompt_alone_is_not_measurable_and_the_step_is_named(played, tmp_path):
    prompts, texts = played
    path = save(tmp_path / "saved", 40, prompts[:2], messages(texts[:2]))
    with pytest.raises(InputError, match="step 40 cannot be diagnosed: all 1 prompts are the same"):
        run(tmp_path, completions=path)


def test_completions_without_reasoning_are_not_measurable(played, tmp_path):
    prompts, texts = played
    path = save(tmp_path / "saved", 40, prompts, messages([""] * len(texts)))
    with pytest.raises(InputError, match="step 40 cannot be diagnosed"):
        run(tmp_path, completions=path)


def test_completions_are_scored_by_the_model_that_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"model=None.*completions='completions\.parquet'"):
        DiagnoseArguments(completions="completions.parquet")
    assert DiagnoseArguments().model == "tiny"

"""What the diagnose command makes of hostile text and of input that it cannot use."""

import json

import pytest
from diagnosed import messages, run, save
from diagnosed import played_fixture as played_fixture

from ragen2_trl.cli import diagnose
from ragen2_trl.cli.arguments import DiagnoseArguments
from ragen2_trl.cli.diagnose import beginning
from ragen2_trl.cli.samples import read_saved
from ragen2_trl.cli.typed import InputError


def test_prompts_of_a_file_are_sampled_for(tmp_path):
    lines = [json.dumps({"prompt": f"Say {number}.", "other": number}) for number in range(4)]
    (tmp_path / "mine.jsonl").write_text("\n".join(lines))
    run(tmp_path, prompts=tmp_path / "mine.jsonl", num_prompts=8, num_samples=2, max_new_tokens=12)
    assert (tmp_path / "diagnosis" / "diagnosis.json").exists()


# Hostile text


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


def test_content_in_parts_is_read_as_its_text(tmp_path):
    said = [
        [{"role": role, "content": [{"type": "text", "text": "Go "}, {"type": "text", "text": "up."}]}]
        for role in ("user", "assistant")
    ]
    (tmp_path / "parts.jsonl").write_text(json.dumps({"prompt": said[0], "completion": said[1]}))
    (row,) = read_saved(tmp_path / "parts.jsonl")
    assert [row[name][0]["content"] for name in ("prompt", "completion")] == ["Go up.", "Go up."]


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

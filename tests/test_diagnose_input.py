"""What the diagnose command makes of hostile text and of input that it cannot use."""

import json

import pandas as pd
import pytest
from diagnosed import messages, run, save
from diagnosed import played_fixture as played_fixture

from ragen2_trl.cli import diagnose
from ragen2_trl.cli.arguments import DiagnoseArguments
from ragen2_trl.cli.diagnose import beginning
from ragen2_trl.cli.samples import read_completions
from ragen2_trl.cli.typed import InputError

# Other people's files


def test_lines_of_json_without_a_step_are_diagnosed_like_a_table(played, tmp_path):
    prompts, texts = played
    lines = [json.dumps({"prompt": p, "completion": c}) for p, c in zip(prompts, messages(texts), strict=True)]
    (tmp_path / "mine.jsonl").write_text("\n".join(lines))
    of_lines = run(tmp_path / "lines", completions=tmp_path / "mine.jsonl")
    of_table = run(tmp_path / "table", completions=save(tmp_path / "saved", 0, prompts, messages(texts)))
    for found in (of_lines, of_table):  # all but the clock's
        found["metrics"] = {name: value for name, value in found["metrics"].items() if "seconds" not in name}
    assert of_lines["metrics"] == of_table["metrics"]


def test_lines_of_json_may_have_a_byte_order_mark_blank_lines_and_line_separators_in_texts(played, tmp_path):
    prompts, texts = played
    path = tmp_path / "mine.jsonl"
    rows = [{"prompt": p, "completion": f"{text}\u2028end"} for p, text in zip(prompts, texts, strict=True)]
    lines = [json.dumps(row, ensure_ascii=False) for row in rows]
    path.write_text("\r\n\r\n".join(lines), encoding="utf-8-sig")
    assert read_completions(path) == rows


@pytest.mark.parametrize(
    "lines",
    [
        "",
        "{",
        "[1]",
        '{"prompt": "a"}',
        '{"prompt": "a", "completion": 1}',
        '{"prompt": [{"text": "a"}], "completion": "b"}',
        '{"prompt": "a", "completion": ["b"]}',
        '{"prompt": "a", "completion": "b", "step": "ten"}',
        '{"prompt": "\xe9", "completion": "b"}',
    ],
)
def test_lines_of_something_else_are_named(lines, tmp_path):
    (tmp_path / "mine.jsonl").write_text(lines, encoding="latin-1")
    with pytest.raises(ValueError, match=r"mine\.jsonl"):
        run(tmp_path, completions=tmp_path / "mine.jsonl")


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
        ({"completions": "nowhere"}, "completions must be .* got 'nowhere': no such file or folder"),
    ],
)
def test_bad_settings_are_named(settings, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        run(tmp_path, **settings)
    assert not (tmp_path / "diagnosis").exists()


def test_a_folder_without_a_table_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"got .*: a folder without \*.parquet"):
        run(tmp_path, completions=tmp_path)


def test_a_table_without_a_column_is_named(tmp_path):
    path = tmp_path / "other.parquet"
    pd.DataFrame({"step": [1], "prompt": ["Go"], "text": ["there"]}).to_parquet(path)
    with pytest.raises(ValueError, match=r"columns \('prompt', 'completion'\), but other.parquet lacks"):
        run(tmp_path, completions=path)


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ([], r"at least one row, got none in completions_00001.parquet"),
        ([7, 8], "prompt must be a string or a list of messages, got int in row 0 of completions_00001.parquet"),
        (["Go", None], "got NoneType in row 1"),
    ],
)
def test_a_table_of_something_else_is_named(prompts, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        run(tmp_path, completions=save(tmp_path / "saved", 1, prompts, ["there"] * len(prompts)))


def test_a_file_that_is_no_table_is_a_value_error(tmp_path):
    path = tmp_path / "completions.parquet"
    path.write_text("step,prompt,completion\n")
    with pytest.raises(ValueError, match=r"[Pp]arquet"):
        run(tmp_path, completions=path)


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
    with pytest.raises(ValueError, match="model must be named for completions"):
        DiagnoseArguments(completions="completions.parquet")
    assert DiagnoseArguments().model == "tiny"


def test_content_in_parts_is_read_as_its_text(tmp_path):
    said = [
        [{"role": role, "content": [{"type": "text", "text": "Go "}, {"type": "text", "text": "up."}]}]
        for role in ("user", "assistant")
    ]
    (tmp_path / "parts.jsonl").write_text(json.dumps({"prompt": said[0], "completion": said[1]}))
    (row,) = read_completions(tmp_path / "parts.jsonl")
    assert [row[name][0]["content"] for name in ("prompt", "completion")] == ["Go up.", "Go up."]


def test_half_of_a_surrogate_pair_is_named_with_file_and_line(tmp_path):
    (tmp_path / "half.jsonl").write_text(
        '{"prompt": "a", "completion": "b"}\n{"prompt": "a", "completion": "\\ud800"}\n'
    )
    with pytest.raises(ValueError, match=r"line 2 of half\.jsonl"):
        read_completions(tmp_path / "half.jsonl")

"""The one reader of completions: every form gives every command the same rows, and what is wrong is said in a line."""

import csv
import json
import tempfile
from pathlib import Path

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from diagnosed import played_fixture as played_fixture
from diagnosed import run as diagnose
from hypothesis import example, given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from ragen2_trl import cli, what_if
from ragen2_trl.cli.samples import read_generations, read_sample
from ragen2_trl.record import rows as reader
from ragen2_trl.record.completions import read_completion_log
from ragen2_trl.record.rows import find_files, read_rows
from ragen2_trl.record.run import read_run
from ragen2_trl.report import page
from ragen2_trl.report.samples import pick_samples
from ragen2_trl.text import flatten
from ragen2_trl.tiny import TINY_MODEL_PATH

STEP = 7
ROW = {"prompt": "a", "completion": "b", "reward": 1}


def lines(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def parsed(text, name):
    """As a response parser leaves it: the reasoning in a field of its own."""
    reasoning, closed, rest = text.removeprefix("<think>").partition("</think>")
    is_parsed = closed and text.startswith("<think>") and reasoning
    return [
        {"role": "assistant", name: reasoning, "content": rest}
        if is_parsed
        else {"role": "assistant", "content": text}
    ]


def save_dump(folder, rows):
    dump = [{"input": prompt, "output": text, "score": reward} for prompt, text, reward in rows]
    return lines(folder / f"{STEP}.jsonl", dump)


def save_table(folder, rows):
    table = pd.DataFrame(
        {"step": STEP, "prompt": prompt, "completion": parsed(text, "thinking"), "length": reward, "advantage": 0.0}
        for prompt, text, reward in rows
    )
    table.to_parquet(folder / f"completions_{STEP:05d}.parquet")
    return folder / f"completions_{STEP:05d}.parquet"


def save_sheet(folder, rows):
    with (folder / "rows.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerows([("step", "prompt", "completion", "reward"), *((STEP, *row) for row in rows)])
    return folder / "rows.csv"


def save_lines(folder, rows):
    found = [
        {"prompt": prompt, "completion": parsed(text, "reasoning_content"), "reward": reward, "step": STEP}
        for prompt, text, reward in rows
    ]
    return lines(folder / "rows.jsonl", found)


def save_run(folder, rows):
    save_table(folder, rows)
    return folder.parent


FORMS = {"verl": save_dump, "TRL": save_table, "CSV": save_sheet, "JSONL": save_lines, "run": save_run}


def test_every_form_gives_every_command_the_same_rows(played, tmp_path, monkeypatch):
    monkeypatch.setattr(page, "_figures", lambda *_: [])
    tokenizer = AutoTokenizer.from_pretrained(TINY_MODEL_PATH)
    prompts = [tokenizer.apply_chat_template(one, tokenize=False, add_generation_prompt=True) for one in played[0]]
    rows = [(prompt, text, float(n % 2)) for n, (prompt, text) in enumerate(zip(prompts, played[1], strict=True))]
    read, logs, samples = [], [], []
    for name, save in FORMS.items():
        folder = tmp_path / name
        (folder / "completions").mkdir(parents=True)
        state = {"global_step": STEP, "max_steps": STEP, "log_history": [{"step": STEP, "reward": 0.5, "loss": 0.1}]}
        (folder / "trainer_state.json").write_text(json.dumps(state))
        path = save(folder / "completions", rows)
        read.append([(row["step"], row["prompt"], flatten(row["completion"])) for row in read_rows(path)])
        logs.append(what_if(path, tokenizer=TINY_MODEL_PATH).log)
        _, (table,) = read_generations(path, [])
        samples.append(read_sample(tokenizer, table, name))
    assert all(one == [(STEP, prompt, text) for prompt, text, _ in rows] for one in read)
    for log in logs:
        assert log.rewards.tolist() == [[0.0, 1.0]] * 8 and log.steps.tolist() == [STEP] * 8
        assert log.lengths.tolist() == logs[0].lengths.tolist()
        assert log.prompt_lengths.tolist() == logs[0].prompt_lengths.tolist()
    assert samples[0].step == STEP and all(one == samples[0] for one in samples)
    found = diagnose(tmp_path, completions=tmp_path / "verl" / "completions" / f"{STEP}.jsonl")
    assert [one["step"] for one in found["path"]] == [STEP]
    cli.main(["report", *(str(tmp_path / name) for name in FORMS), "--output", str(tmp_path / "report.html")])
    assert (tmp_path / "report.html").read_text().count('class="samples"') == len(FORMS)
    picked = [pick_samples(read_run(tmp_path / name), []) for name in FORMS]
    shown = [[(group.prompt, [(one.earned, one.text) for one in group.samples]) for group in one] for one in picked]
    assert shown == [shown[0]] * len(FORMS) and shown[0]


@pytest.mark.parametrize("command", ["what-if", "diagnose"])
@pytest.mark.parametrize(
    ("name", "content", "parts"),
    [
        ("odd.jsonl", '{"prompt": "a", "reward": 1}', ["row 0", "completion", "reward"]),
        (
            "odd.jsonl",
            json.dumps(ROW) + "\n" + json.dumps({**ROW, "prompt": 5}),
            ["row 1", "prompt", "messages", "int"],
        ),
        ("odd.jsonl", '{"prompt": [{"text": "a"}], "completion": "b"}', ["row 0", "prompt", "role"]),
        ("odd.jsonl", '{"prompt": "a", "completion": ["b"]}', ["row 0", "completion", "messages"]),
        ("odd.jsonl", json.dumps({**ROW, "step": 0.5}), ["row 0", "step", "0.5"]),
        ("odd.jsonl", json.dumps({**ROW, "step": "ten"}), ["row 0", "step", "ten"]),
        ("odd.jsonl", "[1, 2]", ["row 0", "JSON", "list"]),
        ("odd.jsonl", "{", ["row 0", "JSON"]),
        ("odd.jsonl", '{"prompt": "a", "completion": "\\ud800"}', ["row 0", "UTF-8"]),
        ("odd.jsonl", b"\xff\n{}", ["UTF-8"]),
        ("odd.json", json.dumps([ROW, 7]), ["row 1", "JSON", "int"]),
        ("odd.csv", "prompt,completion\na,b,c\n", ["row 0", "header"]),
        ("odd.csv", b"prompt,completion\n\xff\xfe,b\n", ["UTF-8"]),
        ("odd.parquet", b"PAR1 no more", ["Parquet"]),
        ("odd.pt", "x", ["allowed", ".parquet"]),
        ("odd.jsonl", "", ["completions"]),
    ],
)
def test_what_is_wrong_is_said_in_a_line_before_a_model_is_loaded(
    command, name, content, parts, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr("ragen2_trl.cli.diagnose.load_model", lambda *_: pytest.fail("a model is loaded for nothing"))
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    arguments = [str(path)] if command == "what-if" else ["--model", "tiny", "--completions", str(path)]
    with pytest.raises(SystemExit) as ended:
        cli.main([command, *arguments])
    said = capsys.readouterr().err.strip().splitlines()[-1]
    assert ended.value.code == 2 and said.startswith(f"ragen2-trl {command}: ")
    assert all(part in said for part in [name, *parts])


# Hostile files

NAMES = ("prompt", "input", "completion", "output", "reward", "score", "step", "generation", "advantage", "a\nb")
SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(NAMES), inner, max_size=3)
)
PARTS = st.fixed_dictionaries({"type": st.sampled_from(["text", "image"]), "text": st.none() | st.text(max_size=5)})
MESSAGES = st.lists(
    st.fixed_dictionaries({"role": st.sampled_from(["user", "assistant"]), "content": SCALARS | st.lists(PARTS)}),
    max_size=2,
)
ROWS = st.lists(st.dictionaries(st.sampled_from(NAMES), SCALARS | MESSAGES | VALUES, max_size=6), max_size=4)


def write(path, rows):
    if path.suffix == ".parquet":
        try:
            pq.write_table(pa.Table.from_pylist(rows), path)
        except (pa.ArrowException, TypeError, OverflowError, UnicodeEncodeError):  # not every value is one of Parquet
            path.write_bytes(b"PAR1")
    elif path.suffix == ".csv":
        with path.open("w", newline="", encoding="utf-8", errors="replace") as file:
            writer = csv.DictWriter(file, NAMES)
            writer.writeheader()
            writer.writerows(rows)
    else:
        text = json.dumps(rows) if path.suffix == ".json" else "\n".join(map(json.dumps, rows))
        path.write_text(text, encoding="utf-8")


@given(
    ROWS | st.lists(st.fixed_dictionaries(dict.fromkeys(("prompt", "completion"), st.text(max_size=3) | MESSAGES))),
    st.sampled_from([".parquet", ".jsonl", ".json", ".csv"]),
    st.none() | st.tuples(st.integers(0, 200), st.binary(max_size=4)),
)
@example([ROW], ".jsonl", (5, b"[" * 100_000))
@example([{**ROW, "step": 10**400}], ".jsonl", None)
@example([{**ROW, "reward": [1]}], ".parquet", None)
def test_a_file_of_any_content_gives_checked_rows_or_one_line(rows, suffix, damage):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"odd{suffix}"
        write(path, rows)
        if damage is not None:
            content, (place, more) = path.read_bytes(), damage
            path.write_bytes(content[:place] + more + content[place:])
        try:
            for row in read_rows(path):
                assert all(
                    isinstance(row[name], str) or flatten(row[name]) is not None for name in ("prompt", "completion")
                )
                assert all(isinstance(row[name], int | None) for name in ("step", "generation"))
        except (ValueError, OSError) as error:
            assert "\n" not in str(error) and path.name in str(error)
        try:
            read_completion_log(path)
        except (ValueError, OSError) as error:
            assert path.name in str(error) or "odd" in str(error)


def test_few_bytes_that_stand_for_more_than_fits_are_refused(tmp_path, monkeypatch):
    path = tmp_path / "bomb.parquet"
    count = reader.MAX_ROWS + 1
    same = pa.DictionaryArray.from_arrays(pa.nulls(count, pa.int32()).fill_null(0), ["a"])
    pq.write_table(pa.table({"prompt": same, "completion": same}), path)
    assert path.stat().st_size < 200_000
    with pytest.raises(OSError, match=r"bomb\.parquet .*rows must be at most"):
        next(read_rows(path))
    wide = pa.table({"prompt": ["x" * 100] * 1000, "completion": ["y"] * 1000})
    pq.write_table(wide, path)
    assert len(list(read_rows(path))) == 1000
    monkeypatch.setattr(reader, "MAX_BYTES", 10_000)
    with pytest.raises(OSError, match=r"bomb\.parquet .*bytes"):
        list(read_rows(path))
    monkeypatch.setattr(reader, "MAX_LINE", 150)
    for text in (json.dumps({**ROW, "completion": "a" * 200}), f"prompt,completion\na,{'b' * 200}\n"):
        other = tmp_path / ("long.jsonl" if text.startswith("{") else "long.csv")
        other.write_text(text)
        with pytest.raises(ValueError, match="must have at most 150 characters"):
            list(read_rows(other))
    monkeypatch.setattr(reader, "MAX_ROWS", 2)
    with pytest.raises(ValueError, match="must have at most 2 rows"):
        list(read_rows(lines(tmp_path / "rows.jsonl", [ROW] * 3)))


# What others write


def test_lines_may_have_a_byte_order_mark_blank_lines_and_line_separators_in_texts(tmp_path):
    rows = [{"prompt": "a", "completion": f"{n}\u2028end"} for n in range(3)]
    text = "\r\n\r\n".join(json.dumps(row, ensure_ascii=False) for row in rows)
    (tmp_path / "mine.jsonl").write_text(text, encoding="utf-8-sig")
    (tmp_path / "mine.json").write_text(json.dumps(rows, indent=2), encoding="utf-8-sig")
    for name in ("mine.jsonl", "mine.json"):
        assert [row["completion"] for row in read_rows(tmp_path / name)] == [row["completion"] for row in rows]


def test_half_of_the_last_line_is_left_out_where_that_can_be_said(tmp_path):
    path = lines(tmp_path / "rows.jsonl", [ROW] * 2)
    path.write_text(path.read_text() + '{"prompt": "first", "comp')
    notes = []
    assert len(list(read_rows(path, notes))) == 2 and "half written" in notes[0]
    with pytest.raises(ValueError, match="row 2"):
        list(read_rows(path))


def test_messages_of_a_table_have_no_empty_keys(tmp_path):
    messages = [{"role": "user", "content": "go", "name": None}, {"role": "assistant", "content": "Up", "name": "x"}]
    pd.DataFrame({"prompt": [messages[:1]], "completion": [messages[1:]]}).to_parquet(tmp_path / "rows.parquet")
    (row,) = read_rows(tmp_path / "rows.parquet")
    assert row["prompt"] == [{"role": "user", "content": "go"}] and row["completion"] == messages[1:]


def test_pictures_are_no_text_and_taken_where_nobody_looks_at_them(tmp_path):
    prompt = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "see"}]}]
    path = lines(tmp_path / "rows.jsonl", [{**ROW, "prompt": prompt}])
    assert [flatten(row["prompt"]) for row in read_rows(path)] == ["see"]
    with pytest.raises(ValueError, match="row 0 of rows"):
        list(read_rows(path, pictures=False))


def test_a_folder_s_files_come_by_step_without_episodes_and_controls(tmp_path):
    for name in ("100000.jsonl", "99.jsonl", "train_00001.jsonl", "evaluation_00001.jsonl"):
        lines(tmp_path / name, [ROW])
    assert [file.name for file in find_files(tmp_path)] == ["99.jsonl", "100000.jsonl"]
    for name in ("completions.parquet", "completions_control.parquet"):
        (tmp_path / name).touch()
    assert [file.name for file in find_files(tmp_path)] == ["completions.parquet"]
    with pytest.raises(ValueError, match="none' is not a file"):
        find_files(tmp_path / "none")

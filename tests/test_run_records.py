"""Run records and checkpoints that somebody has changed: read, or refused in one line that names file and field."""

import copy
import json
import random
import re

import pytest
from huggingface_hub import ModelCard
from markdown_it import MarkdownIt
from reported_runs import HOSTILE as HOSTILE_TEXT
from reported_runs import make_run

from ragen2_trl import cli
from ragen2_trl.record.run import read_run
from ragen2_trl.report.card import add_diagnostics
from ragen2_trl.report.page import render_report

STATE, ABOUT, EVALUATION = "diagnostics/trainer_state.json", "diagnostics/run.json", "evaluation_after.json"
HUGE = 10**400
VALUES = [
    None,
    True,
    -1,
    2.5,
    1e308,
    10**19,
    HUGE,
    float("nan"),
    float("inf"),
    "x",
    "",
    HOSTILE_TEXT,
    [],
    [[]],
    [1, 2],
    {},
    {"a": 1},
]
MARKDOWN = "![x](https://evil.example/x.png)\n# Owned <script>alert(1)</script> | `a` | [b](c)"


@pytest.fixture(name="record")
def record_fixture(tmp_path):
    folder = make_run(tmp_path / "run", steps=20)
    about = {
        "settings": {"seed": 3, "snr_score": "reward_std", "environment": {
            "name": "lake", "options": {"size": 5}, "max_turns": 3, "max_actions": 2,
        }},
        "versions": {"trl": "1.16.0"},
    }  # fmt: skip
    metrics = {"success": 0.5, "success_ci_low": 0.4, "success_ci_high": 0.6, "return": 1.0}
    (folder / ABOUT).write_text(json.dumps(about))
    (folder / EVALUATION).write_text(json.dumps(metrics))
    return folder


def places(value, path=()):
    """Where a value can be changed; of the rows of a log the first and the last."""
    yield path
    if isinstance(value, dict):
        for key in value:
            yield from places(value[key], (*path, key))
    if isinstance(value, list):
        for index in sorted({0, len(value) - 1} if value else ()):
            yield from places(value[index], (*path, index))


def changed(value, path, new):
    if not path:
        return new
    value = copy.deepcopy(value)
    place = value
    for key in path[:-1]:
        place = place[key]
    if new is DELETED:
        del place[path[-1]]
    else:
        place[path[-1]] = new
    return value


DELETED = object()


def tell(folder):
    """What a card and a page say of a run; the page without its pictures, which take long."""
    run = read_run(folder)
    card = ModelCard("---\ntags: []\n---\n# Title\n\n## Quick start\n\n## Citations\n")
    add_diagnostics(card, run, "tester/x")
    return run, card


@pytest.mark.slow
@pytest.mark.parametrize("file", [STATE, ABOUT, EVALUATION])
def test_no_change_of_a_record_is_a_traceback(file, record):
    original = json.loads((record / file).read_text())
    count = 0
    for path in places(original):
        for new in [*VALUES, DELETED] if path else VALUES:
            (record / file).write_text(json.dumps(changed(original, path, new)))
            try:
                tell(record)
            except ValueError as error:
                message = str(error)
                assert "\n" not in message and len(message) < 600
                assert file in message or "holds no log of a run" in message, (path, new, message)
                field = next((key for key in path[::-1] if isinstance(key, str)), "")
                assert field in message or "holds no log" in message, (path, new, message)
            count += 1
    assert count > 80


@pytest.mark.parametrize("count", [6, pytest.param(20, marks=pytest.mark.slow)])
def test_no_change_of_a_record_breaks_the_report(count, record, monkeypatch):
    monkeypatch.setattr("ragen2_trl.report.page.figures_of", lambda *args: iter(())) if count == 6 else None
    rng = random.Random(0)
    files = {file: json.loads((record / file).read_text()) for file in (STATE, ABOUT, EVALUATION)}
    for _ in range(count):
        file, original = rng.choice(sorted(files.items()))
        (record / file).write_text(
            json.dumps(changed(original, rng.choice(list(places(original))), rng.choice(VALUES)))
        )
        try:
            runs = [read_run(record)]
        except ValueError:
            continue
        finally:
            (record / file).write_text(json.dumps(original))
        assert "<script>document" not in render_report(runs)


@pytest.mark.parametrize(
    ("path", "new", "field"),
    [
        (("global_step",), "x", "global_step must be a number between -1 and 1000000000000, got 'x'"),
        (("log_history", 0, "reward"), [HUGE], "log_history[0].'reward' must be a number of at most 64 bits"),
        (("stateful_callbacks", "ragen2_run", "resumed_at"), [MARKDOWN], "ragen2_run.resumed_at must be"),
    ],
)
def test_the_command_says_in_one_line_which_file_and_field(path, new, field, record, capsys):
    original = json.loads((record / STATE).read_text())
    (record / STATE).write_text(json.dumps(changed(original, path, new)))
    with pytest.raises(SystemExit) as ended:
        cli.main(["report", str(record), "--output", str(record / "report.html")])
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert ended.value.code == 2
    assert error.startswith("ragen2-trl report: ") and STATE in error and field in error


def test_brackets_without_end_are_no_record(record):
    for file in (STATE, ABOUT, EVALUATION):
        (record / file).write_text("[" * 200_000)
    with pytest.raises(ValueError, match="holds no log of a run"):
        read_run(record)


def card_of_values(record, text):
    """The card of a record whose names and values are a text wherever they can be."""
    about = json.loads((record / ABOUT).read_text())
    about["settings"] |= {"snr_score": text, text: text, "seed": text}
    about["settings"]["environment"] |= {"name": text, "options": {text: text}}
    about["versions"] = {text: text, "trl": text}
    (record / ABOUT).write_text(json.dumps(about))
    state = json.loads((record / STATE).read_text())
    for row in state["log_history"]:
        row[f"env/{text}/success"] = row.pop("env/frozen_lake/success")
    (record / STATE).write_text(json.dumps(state))
    (record / "diagnostics" / "reward_variance.png").touch()  # its caption names the score
    return tell(record)[1]


def test_no_value_of_a_record_is_markup_on_the_card(record):
    card = card_of_values(record, MARKDOWN)
    html = MarkdownIt("commonmark", {"html": True}).enable("table").render(card.text)
    assert "<script" not in html and 'evil.example/x.png"' not in html and "Owned</h1>" not in html
    assert html.count("<h1>") == 1
    sources = re.findall(r'<img src="([^"]*)"', html)
    assert set(sources) <= {"diagnostics/reward_variance.png"}, sources
    json.dumps(card.data.to_dict())


def test_no_value_of_a_record_steers_a_terminal_that_shows_the_card(record):
    card = card_of_values(record, "\x1b[2J\x9b31m\u202elake")
    assert "lake" in card.text and not {*"\x1b\x9b\u202e"} & {*str(card)}


def test_a_hostile_checkpoint_is_refused_before_it_is_resumed(policy_path, make_args, tmp_path):
    from cards import OURS, make

    trainer = make(
        OURS, policy_path, tmp_path / "run", callback=False, max_steps=1, save_steps=1, save_strategy="steps"
    )
    trainer.train()
    path = tmp_path / "run" / "checkpoint-1" / "trainer_state.json"
    state = json.loads(path.read_text())
    state["stateful_callbacks"]["ragen2_run"]["resumed_at"] = [MARKDOWN]
    path.write_text(json.dumps(state))
    again = make(OURS, policy_path, tmp_path / "run", callback=False, max_steps=2, save_steps=1, save_strategy="steps")
    with pytest.raises(ValueError, match=r"trainer_state\.json: ragen2_run\.resumed_at must be"):
        again.train(resume_from_checkpoint=str(path.parent))

"""The report's episodes: the map of groups, turns with boards, filters without a script, and bounded numbers."""

import random
from dataclasses import replace

import pytest
from played_episodes import lake, play
from reported_runs import HOSTILE, Page, make_run, report_of
from reported_runs import browser_fixture as browser_fixture
from reported_runs import words_only_fixture as words_only_fixture

from ragen2_trl import cli
from ragen2_trl.envs import make_env
from ragen2_trl.record.files import EVALUATION, TRAINING
from ragen2_trl.record.run import read_run
from ragen2_trl.record.saved_episodes import PlayedEpisode, PlayedTurn, save_episodes
from ragen2_trl.report.episodes import (
    MAX_EPISODES,
    MAX_GROUPS,
    MAX_ROWS,
    MAX_TURNS,
    GroupResult,
    bands_of,
    pick_groups,
    picture_of,
    read_album,
)
from ragen2_trl.report.page import render_report

pytestmark = pytest.mark.slow


def episode(group, success, sample=0, seed=None, turns=1, text="Up."):
    said = [{"role": "user", "content": "Go."}] + [
        {"role": role, "content": text} for _ in range(turns) for role in ("assistant", "user")
    ]
    seed = group if seed is None else seed
    return PlayedEpisode(
        "lake", seed, success, float(success), said, [PlayedTurn(["Up"], True, 0.0)] * turns, [], group, sample
    )


def groups(*successes):
    """Episodes of groups, by how many of four members solve their task."""
    return [episode(g, sample < solved, sample) for g, solved in enumerate(successes) for sample in range(4)]


def album_of(folder):
    problems = []
    return read_album(read_run(folder), problems), problems


@pytest.fixture(name="run")
def run_fixture(tmp_path):
    return make_run(tmp_path / "run", steps=20)


def test_cells_are_groups_and_rows_are_files_by_step(run):
    save_episodes(run / "_episodes", groups(4, 2, 0), TRAINING, 10)
    save_episodes(run / "_episodes", groups(0, 0, 3), EVALUATION, 10)
    save_episodes(run / "_episodes", groups(1, 4, 4), EVALUATION, 20)
    save_episodes(run / "_episodes", groups(1, 4, 4), EVALUATION, 30)  # of an earlier, longer run
    album, problems = album_of(run)
    assert problems == []
    assert [(row.label, list(row.counts.values())) for row in album.rows] == [
        ("evaluation, step 10", [0, 1, 2]),
        ("evaluation, step 20", [2, 1, 0]),
        ("training, step 10", [1, 1, 1]),
    ]
    # The task that is solved most often stands first in both evaluations, the same tasks below one another.
    assert [one.solved for one in album.rows[0].groups] == [3, 0, 0]
    assert [one.solved for one in album.rows[1].groups] == [4, 4, 1]
    assert [row.success for row in album.rows] == [3 / 12, 9 / 12, 6 / 12]
    assert {GroupResult(4, 4).kind, GroupResult(1, 4).kind, GroupResult(0, 4).kind} == {"right", "mixed", "wrong"}


def test_numbers_are_bounded_and_the_last_row_is_shown(run, words_only):
    many = [episode(group, group % 2 == 0, text="x" * 2000, turns=15) for group in range(60)]
    save_episodes(run / "_episodes", many, TRAINING, 20)
    for step in range(40):
        save_episodes(run / "_episodes", groups(1), EVALUATION, step)
    edit = read_run(run)
    album = read_album(replace(edit, step=50), [])
    assert len(album.rows) == MAX_ROWS + 1 and album.left_out == 41 - len(album.rows)
    assert max(row.step for row in album.rows if row.source == EVALUATION) == 39
    assert len(album.rows[-1].groups) == MAX_GROUPS
    assert sum(album.rows[-1].counts.values()) == 60
    assert len(album.episodes) <= MAX_EPISODES
    assert max(len(one.turns) for one in album.episodes) == MAX_TURNS
    page = render_report([edit])
    assert len(page) < 700_000 and "Later turns left out: 3." in page


def test_mixed_groups_come_first_with_both_outcomes():
    picked = pick_groups(groups(4, 0, 2, 1, 0), limit=12)
    assert [(kind, [one.success for one in group]) for kind, group in picked] == [
        ("mixed", [True, True, False, False]),
        ("wrong", [False] * 4),
        ("right", [True] * 4),
    ]
    big = [episode(0, sample >= 6, sample) for sample in range(8)]
    ((_, members),) = pick_groups(big, limit=12)
    assert [one.success for one in members] == [False, False, True, True]


@pytest.mark.parametrize("seed", range(20))
def test_every_return_is_in_the_band_that_names_it(seed):
    rng = random.Random(seed)
    returns = [rng.choice([0.0, 1.0, -0.1, rng.gauss(0, 1)]) for _ in range(rng.randint(1, 30))]
    names, edges = bands_of(returns)
    assert 1 <= len(names) == len(edges) + 1 <= 4
    for value in returns:
        words = names[sum(value > edge for edge in edges)].replace(",", "").split()
        low = float(words[words.index("above") + 1]) if "above" in words else None
        high = float(words[words.index("to") + 1]) if "to" in words else None
        assert low is None or value > low - 1e-3 * max(1, abs(low))
        assert high is None or value <= high + 1e-3 * max(1, abs(high))
        assert low is not None or high is not None or float(words[0]) == pytest.approx(value, rel=1e-3)


def test_turns_are_shown_with_boards_actions_and_rewards(run, words_only):
    episodes = lake(0.5, step=20)
    save_episodes(run / "_episodes", episodes, TRAINING, 20)
    album, _ = album_of(run)
    for one in album.episodes:
        assert len(one.turns) == len(one.played.turns)
        assert [turn.picture for turn in one.turns] == [picture_of(board) for board in one.played.boards[:-1]]
        assert one.end == picture_of(one.played.boards[-1])
        assert all(turn.text.head.startswith("<think>So.") for turn in one.turns)
    page = report_of(run)
    assert {"img", "input"} <= page.tags and not page.tags & {"script", "form"}
    assert "Turn 1 : " in page.text and "group 1 (seed" in page.text


def test_tasks_without_a_board_show_what_was_said_to_the_model(run):
    env = make_env("metamath_qa", multi_turn=True)
    save_episodes(run / "_episodes", play(env, 0.0, 3), TRAINING, 20)
    album, _ = album_of(run)
    several = next(one for one in album.episodes if len(one.turns) > 1)
    assert several.turns[0].picture is None and "Turn 2 of" in several.turns[1].seen.head
    assert not several.turns[0].seen.head  # that is the prompt


def test_hostile_texts_and_boards_stay_text(run, words_only):
    bad = replace(
        episode(0, True, text=HOSTILE), task=HOSTILE, boards=["P<script>", "#" * 10_000], turns=[
            PlayedTurn([HOSTILE, "||"], True, float("inf"))
        ]
    )  # fmt: skip
    save_episodes(run / "_episodes", [bad, episode(1, False, text=HOSTILE)], EVALUATION, 5)
    page = render_report([read_run(run)])
    read = Page(page)
    assert not read.tags & {"script", "img", "iframe", "object", "embed", "form", "base"}
    assert not [name for name in read.attributes if name.startswith("on")]
    assert not any(char in page for char in "\0\x1b\u202e")
    assert "<script>document.title='owned'</script>" in read.text


def test_files_of_others_are_left_out_by_name(run, words_only):
    save_episodes(run / "_episodes", groups(1, 2), TRAINING, 10)
    (run / "_episodes" / "train_00020.jsonl").write_bytes(b"\xff")
    (run / "_episodes" / "train_00015.jsonl").write_text('{"task": "x"}')
    album, problems = album_of(run)
    assert [row.step for row in album.rows] == [10] and album.episodes
    assert any("train_00020.jsonl cannot be read" in problem for problem in problems)
    assert any("train_00015.jsonl cannot be read" in problem for problem in problems)


def test_a_folder_of_episodes_alone_has_a_report(tmp_path, words_only):
    save_episodes(tmp_path / "played", groups(4, 2, 0, 0), EVALUATION)
    cli.main(["report", str(tmp_path / "played"), "--output", str(tmp_path / "page.html")])
    page = Page((tmp_path / "page.html").read_text())
    assert page.headline == "“played”: 38% of 16 episodes solved"
    both = report_of(tmp_path / "played", make_run(tmp_path / "run", steps=10))
    assert both.headline.startswith("“played”: 38% of 16 episodes solved; “run”: ")


@pytest.mark.needs("chromium")
def test_filters_choose_episodes_without_a_script(browser, run, tmp_path, words_only):
    save_episodes(run / "_episodes", groups(4, 2, 0), EVALUATION, 10)
    save_episodes(run / "_episodes", lake(0.5, step=20), TRAINING, 20)
    path = tmp_path / "report.html"
    cli.main(["report", str(run), "--output", str(path)])
    album, _ = album_of(run)
    browser.open(path)
    assert browser.complaints == [] and browser.evaluate("document.scripts.length") == 0
    seen = "[...document.querySelectorAll('.episode')].map(one => getComputedStyle(one).display != 'none')"
    uncheck = (
        "document.querySelectorAll('.filters fieldset').forEach(one => one.querySelector('input').checked = true)"
    )
    assert browser.evaluate(seen) == [True] * len(album.episodes)
    for _, choices in album.filters:
        for choice, _ in choices:
            browser.evaluate(f"{uncheck}; document.querySelector('.only-{choice}').checked = true")
            assert browser.evaluate(seen) == [choice in one.classes.split() for one in album.episodes], choice
    browser.evaluate(f"{uncheck}; for (let one of ['solved', 's-evaluation', 'of-mixed'])"
                     " document.querySelector('.only-' + one).checked = true")  # fmt: skip
    wanted = [{"solved", "s-evaluation", "of-mixed"} <= set(one.classes.split()) for one in album.episodes]
    assert browser.evaluate(seen) == wanted and any(wanted)
    for width in (1400, 390):
        browser.open(path, width)
        assert browser.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth")

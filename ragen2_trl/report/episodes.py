"""Episodes of a run as its report shows them: how each group fared over time, and some turn by turn."""

import base64
import io
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice, pairwise, zip_longest
from pathlib import Path
from statistics import fmean
from typing import Any

from PIL import Image

from ragen2_trl.envs.drawing import draw_board
from ragen2_trl.messages import counted
from ragen2_trl.record.files import EPISODES, EVALUATION, TRAINING, measured_step, numbered, unreadable
from ragen2_trl.record.run import Run
from ragen2_trl.record.saved_episodes import (
    PlayedEpisode,
    PlayedTurn,
    read_episodes,
    read_outcomes,
)
from ragen2_trl.report.examples import Excerpt, as_text, excerpt

SOURCES = {EVALUATION: "evaluation", TRAINING: "training"}  # by the names of files, in the order of the page
MAX_ROWS, MAX_GROUPS = 32, 48  # of the map: files, and groups of each
MAX_EPISODES, MAX_OF_GROUP = 24, 4  # that are shown of a run
MAX_TURNS, MAX_TEXT = 12, 800  # of an episode, and characters of a turn
MAX_TILES, TILE = 400, 20  # of a picture; pixels a tile
MAX_BANDS = 4  # of returns

RIGHT, MIXED, WRONG = "right", "mixed", "wrong"
KINDS = {RIGHT: "all right", MIXED: "mixed", WRONG: "all wrong"}
# Classes of episodes that radio buttons leave alone.
CHOICES = (
    *("solved", "unsolved"),
    *(f"b{number}" for number in range(MAX_BANDS)),
    *(f"of-{kind}" for kind in KINDS),
    *(f"g{number}" for number in range(MAX_EPISODES)),
    *(f"s-{name}" for name in SOURCES),
)


@dataclass(frozen=True)
class GroupResult:
    """A group in the map: how many of its episodes solved their task."""

    solved: int
    size: int

    @property
    def kind(self) -> str:
        return RIGHT if self.solved == self.size else MIXED if self.solved else WRONG


@dataclass(frozen=True)
class Row:
    """A file of episodes in the map.

    Args:
        source: Of `SOURCES`.
        step: Optimizer step.
        groups: Its groups, or some of them, the easiest tasks first.
        counts: Of all of its groups, by kind.
        success: Share of all of its episodes that solved their task.
        size: Number of its episodes.
    """

    source: str
    step: int
    groups: list[GroupResult]
    counts: dict[str, int]
    success: float
    size: int

    @property
    def label(self) -> str:
        return f"{SOURCES[self.source]}, step {self.step}"


@dataclass(frozen=True)
class ShownTurn:
    """A turn on the page: what was seen before it, what was said, and what came of it."""

    picture: str | None
    seen: Excerpt | None
    text: Excerpt | None
    turn: PlayedTurn


@dataclass(frozen=True)
class ShownEpisode:
    """An episode on the page.

    Args:
        played: The episode.
        source: Of `SOURCES`.
        group: Its number on the page, from 0.
        kind: Of its group.
        band: Number of its return's band.
        prompt: All messages before the first turn.
        turns: The first of its turns.
        end: Picture of the last state, or what was seen last.
        transcript: All that followed the prompt, where it is not one text a turn.
    """

    played: PlayedEpisode
    source: str
    group: int
    kind: str
    band: int
    prompt: Excerpt
    turns: list[ShownTurn]
    end: str | None
    transcript: Excerpt | None

    @property
    def classes(self) -> str:
        """Of `CHOICES`."""
        solved = "solved" if self.played.success else "unsolved"
        return f"{solved} b{self.band} of-{self.kind} g{self.group} s-{self.source}"


@dataclass(frozen=True)
class Album:
    """What the page shows of a run's episodes.

    Args:
        rows: The map, evaluations first, each by step.
        episodes: To be looked at.
        bands: Names of the bands of returns, from low to high.
        left_out: How many files the map leaves out.
    """

    rows: list[Row]
    episodes: list[ShownEpisode]
    bands: list[str]
    left_out: int

    @property
    def summary(self) -> str:
        """The latest evaluation, or else the latest training step, in words."""
        last = [row for row in self.rows if row.source == self.rows[0].source][-1]
        return f"{last.success:.0%} of {counted(last.size, 'episode')} solved"

    @property
    def filters(self) -> list[tuple[str, list[tuple[str, str]]]]:
        """(title, (class, name) of each choice) of what episodes can be chosen by."""
        sources = dict.fromkeys(one.source for one in self.episodes)
        kinds = {one.kind for one in self.episodes}
        groups = dict.fromkeys(one.group for one in self.episodes)
        return [
            ("Success", [("solved", "solved"), ("unsolved", "not solved")]),
            ("Return", [(f"b{number}", name) for number, name in enumerate(self.bands)]),
            ("Kind of group", [(f"of-{kind}", name) for kind, name in KINDS.items() if kind in kinds]),
            ("Group", [(f"g{group}", str(group + 1)) for group in groups]),
            ("From", [(f"s-{source}", SOURCES[source]) for source in sources]),
        ]


def read_album(run: Run, problems: list[str]) -> Album | None:
    """What there is of a run's episodes, or nothing.

    Args:
        run: The run.
        problems: Takes in what cannot be read, in words.
    """
    files = {name: episode_files(run, name) for name in SOURCES}
    rows: list[Row] = []
    for name, paths in files.items():
        rows += _rows(name, _evenly(paths, MAX_ROWS), problems)
    newest = {name: episodes for name, paths in files.items() if (episodes := _newest(paths, problems))}
    if not rows:  # what can be read whole can be read in part
        return None
    picked: list[tuple[str, str, list[PlayedEpisode]]] = []
    for name, episodes in newest.items():
        picked += [(name, *group) for group in pick_groups(episodes, MAX_EPISODES // len(newest))]
    bands, edges = bands_of([one.episode_return for _, _, group in picked for one in group])
    shown = [
        _shown(one, name, number, kind, sum((one.episode_return or 0.0) > edge for edge in edges))
        for number, (name, kind, group) in enumerate(picked)
        for one in group
    ]
    return Album(rows, shown, bands, sum(map(len, files.values())) - len(rows))


def episode_files(run: Run, name: str) -> list[Path]:
    """Files of a run's episodes, or of a folder that holds nothing else, by step."""
    folder = run.folder if run.is_played else run.folder / EPISODES
    return numbered(folder, name, ".jsonl", run.step)


def pick_groups(episodes: Sequence[PlayedEpisode], limit: int) -> list[tuple[str, list[PlayedEpisode]]]:
    """(kind, some of its members) of some groups: kinds take turns, mixed ones first, as do successes and failures.

    Args:
        episodes: All of a file.
        limit: Most episodes together.
    """
    by_kind: dict[str, list[list[PlayedEpisode]]] = {MIXED: [], WRONG: [], RIGHT: []}
    for group in _groups(episodes).values():
        by_kind[GroupResult(sum(one.success for one in group), len(group)).kind].append(group)
    turns = zip_longest(*([(kind, group) for group in groups] for kind, groups in by_kind.items()))
    picked: list[tuple[str, list[PlayedEpisode]]] = []
    for kind, group in (one for turn in turns for one in turn if one is not None):
        room = min(MAX_OF_GROUP, limit - sum(len(members) for _, members in picked))
        if room > 0:
            picked.append((kind, _both_outcomes(group, room)))
    return picked


def bands_of(returns: Sequence[float | None]) -> tuple[list[str], list[float]]:
    """Names of up to `MAX_BANDS` bands of returns from low to high, and the edges that a return is above.

    >>> bands_of([0.0, 1.0, 0.0])
    (['0', '1'], [0.0])
    """
    distinct = sorted({value or 0.0 for value in returns})
    if len(distinct) <= MAX_BANDS:
        return [f"{value:.4g}" for value in distinct], distinct[:-1]
    ordered = sorted(value or 0.0 for value in returns)
    edges = sorted({ordered[len(ordered) * part // MAX_BANDS] for part in range(1, MAX_BANDS)} - {ordered[-1]})
    edges = edges or distinct[-2:-1]  # nearly all are the best
    between = [f"above {low:.4g}, up to {high:.4g}" for low, high in pairwise(edges)]
    return [f"up to {edges[0]:.4g}", *between, f"above {edges[-1]:.4g}"], edges


@lru_cache(maxsize=1024)
def picture_of(board: str) -> str | None:
    """A board as an address that holds its picture; `None` for letters or a size that are no board's."""
    if len(board) > MAX_TILES:
        return None
    try:
        picture = draw_board(board, TILE)
    except ValueError:
        return None
    buffer = io.BytesIO()
    picture.quantize(64, Image.Quantize.MAXCOVERAGE).save(buffer, "PNG", optimize=True)  # a third, and looks the same
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"


def _rows(name: str, paths: Sequence[Path], problems: list[str]) -> list[Row]:
    outcomes = {}
    for path in paths:
        try:
            outcomes[path] = read_outcomes(path)
        except (OSError, ValueError) as error:
            problems.append(unreadable(path, error))
    # Columns of the same tasks stand below one another: by how often a task is solved over all rows.
    tasks: defaultdict[tuple[str, int], list[bool]] = defaultdict(list)
    for groups in outcomes.values():
        for task, solved in groups:
            tasks[task] += solved
    ease = {task: fmean(solved) for task, solved in tasks.items()}
    rows = []
    for path, groups in outcomes.items():
        results = [
            GroupResult(sum(solved), len(solved))
            for task, solved in sorted(groups, key=lambda group: (-ease[group[0]], group[0], -fmean(group[1])))
        ]
        counts = {kind: sum(one.kind == kind for one in results) for kind in KINDS}
        size = sum(one.size for one in results)
        success = sum(one.solved for one in results) / size
        rows.append(Row(name, measured_step(path) or 0, _evenly(results, MAX_GROUPS), counts, success, size))
    return rows


def _newest(paths: Sequence[Path], problems: list[str]) -> list[PlayedEpisode]:
    for path in reversed(paths):
        try:
            return read_episodes(path)
        except (OSError, ValueError) as error:
            if (problem := unreadable(path, error)) not in problems:
                problems.append(problem)
    return []


def _groups(episodes: Sequence[PlayedEpisode]) -> dict[tuple[str, int], list[PlayedEpisode]]:
    groups: dict[tuple[str, int], list[PlayedEpisode]] = {}
    for episode in episodes:
        groups.setdefault((episode.task, episode.group), []).append(episode)
    return groups


def _both_outcomes(group: Sequence[PlayedEpisode], count: int) -> list[PlayedEpisode]:
    """Some members in their order, as many successes as failures where there are."""
    pairs = zip_longest(*([one for one in group if one.success == success] for success in (True, False)))
    chosen = islice((one for pair in pairs for one in pair if one is not None), count)
    return sorted(chosen, key=lambda one: one.sample)


def _shown(episode: PlayedEpisode, source: str, group: int, kind: str, band: int) -> ShownEpisode:
    first = next((n for n, message in enumerate(episode.messages) if _by_model(message)), len(episode.messages))
    prompt, said = episode.messages[:first], episode.messages[first:]
    texts = [message for message in said if _by_model(message)]
    in_pairs = len(texts) == len(episode.turns)
    pictures = [picture_of(board) for board in episode.boards[: MAX_TURNS + 1]]
    seen = list(_seen(episode.messages, first)) if in_pairs else []
    turns = [
        ShownTurn(
            picture=_at(pictures, number),
            seen=None if _at(pictures, number) else _at(seen, number),
            text=excerpt(as_text([texts[number]]), MAX_TEXT) if in_pairs else None,
            turn=turn,
        )
        for number, turn in enumerate(episode.turns[:MAX_TURNS])
    ]
    return ShownEpisode(
        played=episode,
        source=source,
        group=group,
        kind=kind,
        band=band,
        prompt=excerpt(as_text(prompt), 2 * MAX_TEXT),
        turns=turns,
        end=_at(pictures, len(turns)) if len(turns) == len(episode.turns) else None,
        transcript=None if in_pairs else excerpt(as_text(said), 4 * MAX_TEXT),
    )


def _seen(messages: Sequence[Mapping[str, Any]], first: int) -> Iterator[Excerpt]:
    """What the model was told right before each of its messages; the prompt is shown on its own."""
    for number, message in enumerate(messages):
        if number >= first and _by_model(message):
            before = messages[number - 1 : number] if number > first else []
            yield excerpt(as_text(before), MAX_TEXT)


def _by_model(message: Mapping[str, Any]) -> bool:
    return bool(message["role"] == "assistant")


def _at(values: Sequence[Any], number: int) -> Any:
    return values[number] if number < len(values) else None


def _evenly(values: Sequence[Any], count: int) -> list[Any]:
    """At most `count` of them, evenly spaced, the last included."""
    if len(values) <= count:
        return list(values)
    return [values[number * (len(values) - 1) // (count - 1)] for number in range(count)]

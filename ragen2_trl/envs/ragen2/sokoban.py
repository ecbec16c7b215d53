"""Sokoban as RAGEN-2 plays it: its rooms, its layout, and what its prompt says, in our words."""

import random
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

from ragen2_trl.envs.checks import check_choice, check_count
from ragen2_trl.envs.episode import Limits
from ragen2_trl.envs.ragen2.protocol import RagenGrid
from ragen2_trl.envs.sokoban.environment import ACTIONS, Sokoban, SokobanEpisode, room_of
from ragen2_trl.envs.sokoban.reverse_play import play_backwards
from ragen2_trl.envs.sokoban.rooms import Room, State, write_room
from ragen2_trl.envs.tasks import Row

LABELS = {"Targets": "O", "Boxes": "X", "Boxes on target": "√", "Player": "P", "Player on target": "S"}

_TASK = "This is Sokoban. You are the player, and you have to push every box onto a target.\n"
_COORDINATES = (
    "You are given the room as a grid of symbols, and the coordinates of player, boxes and targets, counted from "
    "zero.\nThey go from (0, 0) at the top left to ({last}, {last}) at the bottom right.\n"
)
_RULES = (
    "When you stand beside a box, a move towards it pushes it. No box goes through a wall, and no box can be pulled.\n"
    "Your answer is a sequence of actions, for instance <answer>Left || Down || Down</answer>.\n"
)


class RagenSokobanEpisode(SokobanEpisode):
    """One play of one room.

    Args:
        room, state, longest, show: As for `SokobanEpisode`.
        symbols: For `str.translate`, what stands for the usual symbols.
    """

    def __init__(
        self,
        room: Room,
        state: State,
        longest: int,
        show: Callable[[Room, State], str],
        symbols: Mapping[int, int],
    ):
        super().__init__(room, state, longest, show)
        self._symbols = symbols

    def plan(self, rng: random.Random) -> tuple[str, list[str]]:
        reasoning, actions = super().plan(rng)
        return reasoning.translate(self._symbols), actions


class RagenSokoban(RagenGrid, Sokoban):
    """Sokoban as RAGEN-2 plays it: rooms of any length, a single action included, or further than the limits.

    Args:
        search_depth: How far rooms are played backwards from the solved one, 3 to 1000.
        **options: Those of `RagenGrid`, and `size` and `boxes` of `Sokoban`.

    Raises:
        ValueError: If an option is outside its range.
    """

    limits = Limits(turns=5, actions=2)
    max_total, turn_tokens = 10, 400
    actions = ACTIONS
    meanings = MappingProxyType(
        {
            "#": "wall",
            "_": "empty",
            "O": "target",
            "√": "box on target",
            "X": "box",
            "P": "player",
            "S": "player on target",
        }
    )

    def __init__(self, search_depth: int = 300, **options: Any):
        super().__init__(**options)
        check_count("search_depth", search_depth, 3, 1000)
        self.search_depth = search_depth

    def texts(self) -> dict[str, str]:
        """RAGEN advertises 120 words where it gives coordinates, else 100."""
        coordinates = self.observation != "grid"
        where = _COORDINATES.format(last=self.size - 1) if coordinates else ""
        return {
            "instruction": f"{_TASK}{where}{_RULES}",
            "length": f"Use no more than {120 if coordinates else 100} words.",
        }

    def numbered_tasks(self, seeds: Iterator[int], split: str, data: str | None) -> Iterator[dict[str, Any]]:
        check_choice("data", data, (None,))
        return ({"seed": seed, "room": self.make_room(seed)} for seed in seeds)

    def make_room(self, seed: int) -> str:
        return write_room(*play_backwards(self.size, self.boxes, self.search_depth, seed))

    def episode(self, row: Row, rng: random.Random) -> RagenSokobanEpisode:
        return RagenSokobanEpisode(*room_of(row), self.longest, self.show, self.symbols)

    def show(self, room: Room, state: State) -> str:
        lines = write_room(room, state).split("\n")
        places = {
            label: [(row, column) for row, line in enumerate(lines) for column, at in enumerate(line) if at == symbol]
            for label, symbol in LABELS.items()
        }
        return self.show_board(lines, places)

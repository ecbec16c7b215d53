"""Pictures of grid worlds: one square tile a cell, each a stack of layers.

Colours are those of Okabe and Ito, which colour-blind people tell apart; things differ in shape and lightness, too.
"""

import itertools
from collections.abc import Callable
from functools import lru_cache
from typing import TypeAlias

from PIL import Image, ImageDraw

Color: TypeAlias = tuple[int, int, int]

WHITE: Color = (255, 255, 255)
INK: Color = (38, 42, 51)
BLUE: Color = (0, 114, 178)
ORANGE: Color = (230, 159, 0)
BROWN: Color = (122, 76, 0)
GREEN: Color = (0, 158, 115)
DARK_GREEN: Color = (0, 84, 61)
VERMILION: Color = (213, 94, 0)
FLOOR: Color = (241, 238, 230)
FLOOR_EDGE: Color = (222, 217, 205)
BRICK: Color = (88, 96, 110)
MORTAR: Color = (62, 68, 80)
ICE: Color = (217, 237, 250)
ICE_EDGE: Color = (178, 213, 236)
WATER: Color = (22, 44, 74)
WATER_EDGE: Color = (110, 160, 198)

_UNITS = 32  # shapes are drawn in units of a 32nd of a tile
_OVERSAMPLING = 4  # drawn so much larger and then scaled down, for smooth edges


class _Pen:
    """Draws shapes given in units of a tile, x to the right and y down, both from 0 to `_UNITS`."""

    def __init__(self, tile: int):
        self._scale = tile * _OVERSAMPLING / _UNITS
        self.image = Image.new("RGB", (tile * _OVERSAMPLING,) * 2, WHITE)
        self._draw = ImageDraw.Draw(self.image)

    def _at(self, *coordinates: float) -> list[float]:
        return [coordinate * self._scale for coordinate in coordinates]

    def box(self, left: float, top: float, right: float, bottom: float, fill: Color, radius: float = 0) -> None:
        self._draw.rounded_rectangle(self._at(left, top, right, bottom), radius * self._scale, fill)

    def disc(self, x: float, y: float, radius: float, fill: Color) -> None:
        self._draw.ellipse(self._at(x - radius, y - radius, x + radius, y + radius), fill)

    def half_disc(self, x: float, y: float, radius: float, fill: Color) -> None:
        self._draw.pieslice(self._at(x - radius, y - radius, x + radius, y + radius), 180, 360, fill)

    def line(self, *points: float, fill: Color, width: float) -> None:
        self._draw.line(self._at(*points), fill, round(width * self._scale), joint="curve")

    def polygon(self, *points: float, fill: Color) -> None:
        self._draw.polygon(self._at(*points), fill)


def _ground(fill: Color, edge: Color) -> Callable[[_Pen], None]:
    def draw(pen: _Pen) -> None:
        pen.box(0, 0, 32, 32, edge)
        pen.box(0.75, 0.75, 31.25, 31.25, fill)

    return draw


def _wall(pen: _Pen) -> None:
    pen.box(0, 0, 32, 32, MORTAR)
    for top, joints in ((0, (0, 16, 32)), (11, (-8, 8, 24, 40)), (22, (0, 16, 32))):
        for left, right in itertools.pairwise(joints):
            pen.box(left + 0.75, top + 0.75, right - 0.75, top + 9.5, BRICK)


def _ice(pen: _Pen) -> None:
    _ground(ICE, ICE_EDGE)(pen)
    pen.line(6, 13, 13, 6, fill=WHITE, width=1.5)
    pen.line(19, 27, 27, 19, fill=WHITE, width=1.5)


def _hole(pen: _Pen) -> None:
    pen.disc(16, 16, 13, WATER_EDGE)
    pen.disc(16, 16, 11.5, WATER)


def _target(pen: _Pen) -> None:
    for radius, fill in ((13.5, VERMILION), (10.5, WHITE), (5, VERMILION)):
        pen.disc(16, 16, radius, fill)


def _box(pen: _Pen) -> None:
    pen.box(4, 4, 28, 28, BROWN, radius=2)
    pen.box(6, 6, 26, 26, ORANGE)
    pen.line(7.5, 7.5, 24.5, 24.5, fill=BROWN, width=2.5)
    pen.line(24.5, 7.5, 7.5, 24.5, fill=BROWN, width=2.5)


def _box_on_target(pen: _Pen) -> None:
    pen.box(4, 4, 28, 28, DARK_GREEN, radius=2)
    pen.box(6, 6, 26, 26, GREEN)
    pen.line(9.5, 16.5, 14.5, 21.5, 23, 11, fill=WHITE, width=3.5)


def _player(pen: _Pen) -> None:
    for outline, fill in ((1.2, WHITE), (0, BLUE)):
        pen.half_disc(16, 27, 9.5 + outline, fill)
        pen.box(6.5 - outline, 26, 25.5 + outline, 27.5 + outline, fill)
        pen.disc(16, 10.5, 6 + outline, fill)


def _goal(pen: _Pen) -> None:
    pen.polygon(11, 5, 26, 10.5, 11, 16, fill=VERMILION)
    pen.line(10.5, 4, 10.5, 27, fill=INK, width=2.2)
    pen.box(6, 26, 15, 28.5, INK, radius=1)


_LAYERS: dict[str, Callable[[_Pen], None]] = {
    "wall": _wall,
    "floor": _ground(FLOOR, FLOOR_EDGE),
    "target": _target,
    "box": _box,
    "box_on_target": _box_on_target,
    "player": _player,
    "ice": _ice,
    "hole": _hole,
    "goal": _goal,
}

# The cells that tasks draw, one letter each, by their layers from the ground up: a room with walls, and a frozen lake.
TILES: dict[str, tuple[str, ...]] = {
    "#": ("wall",),
    "_": ("floor",),
    "O": ("floor", "target"),
    "X": ("floor", "box"),
    "√": ("floor", "box_on_target"),
    "P": ("floor", "player"),
    "S": ("floor", "target", "player"),
    ".": ("ice",),
    "o": ("ice", "hole"),
    "g": ("ice", "goal"),
    "p": ("ice", "player"),
    "d": ("ice", "hole", "player"),
    "w": ("ice", "goal", "player"),
}


@lru_cache(maxsize=256)
def _tile(letter: str, tile: int) -> Image.Image:
    pen = _Pen(tile)
    for layer in TILES[letter]:
        _LAYERS[layer](pen)
    return pen.image.resize((tile, tile), Image.Resampling.LANCZOS)


def draw_board(board: str, tile: int = 32) -> Image.Image:
    """A picture of a board, `Episode.board_letters`: lines of letters of `TILES` from the top, `tile` pixels a cell.

    Raises:
        ValueError: If a letter is not known, or the lines are not equally long.

    >>> draw_board("p.\\n.g", tile=16).size
    (32, 32)
    """
    lines = board.split("\n")
    unknown = sorted({letter for line in lines for letter in line} - set(TILES))
    if unknown or len({len(line) for line in lines}) > 1 or not lines[0]:
        raise ValueError(f"board must be equally long lines of {''.join(TILES)}, got {board[:200]!r}")
    picture = Image.new("RGB", (len(lines[0]) * tile, len(lines) * tile))
    for row, line in enumerate(lines):
        for column, letter in enumerate(line):
            picture.paste(_tile(letter, tile), (column * tile, row * tile))
    return picture

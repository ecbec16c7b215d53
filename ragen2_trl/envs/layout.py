"""How RAGEN-2 lays out the state of a board: lists of zero-based coordinates, and a grid without spaces."""

from collections.abc import Mapping, Sequence

LAYOUTS = ("own", "ragen2")


def show_board(lines: Sequence[str], cells: Mapping[str, Sequence[tuple[int, int]]], observation: str) -> str:
    """A board in words.

    Args:
        lines: The rows of the grid.
        cells: For each label the (row, column) of its cells; labels without cells are left out.
        observation: `"grid"`, `"coordinates"` or `"both"`.

    >>> print(show_board(["P_", "_G"], {"Goal": [(1, 1)], "Holes": []}, "both").replace(": \\n", ": |\\n"))
    Coordinates: |
    Board size: 2 rows x 2 cols (zero-indexed).
    Goal: (1, 1)
    Grid Map: |
    P_
    _G
    """
    grid = "\n".join(lines)
    if observation == "grid":
        return grid
    parts = ["Coordinates: ", f"Board size: {len(lines)} rows x {len(lines[0])} cols (zero-indexed)."]
    parts += [f"{label}: {', '.join(map(str, places))}" for label, places in cells.items() if places]
    return "\n".join(parts if observation == "coordinates" else [*parts, "Grid Map: ", grid])


def check_symbols(symbols: object, usual: str) -> None:
    """Raises a `ValueError` unless `symbols` can stand for the `usual` ones: as many, all different, no space."""
    if (
        not isinstance(symbols, str)
        or not len(symbols) == len(usual) == len(set(symbols))
        or not symbols.isprintable()
        or " " in symbols
    ):
        raise ValueError(
            f"symbols must be {len(usual)} different ones, none a space, in place of {usual!r}, got {symbols!r}"
        )

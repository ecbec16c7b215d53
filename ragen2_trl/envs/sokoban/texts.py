"""What RAGEN-2's prompt says of Sokoban, in our words."""

# Symbols in the order of the reference's legend, and what they mean.
MEANINGS = {
    "#": "wall",
    "_": "empty",
    "O": "target",
    "√": "box on target",
    "X": "box",
    "P": "player",
    "S": "player on target",
}
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


def reference_texts(size: int, coordinates: bool) -> dict[str, str]:
    """Texts of the wording `"ragen2"`: the reference advertises 120 words where it gives coordinates, else 100."""
    where = _COORDINATES.format(last=size - 1) if coordinates else ""
    return {
        "instruction": f"{_TASK}{where}{_RULES}",
        "length": f"Use no more than {120 if coordinates else 100} words.",
    }

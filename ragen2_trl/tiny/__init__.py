"""The embedded default: causal LMs of about a million parameters, warmed up on our tasks, that need no download.

`tiny` knows FrozenLake in one turn, `tiny-sokoban` also Sokoban in several, `tiny-countdown` Countdown in one.
`build.py` makes their tokenizer and untrained weights; `recipes/warm_start_tiny*.yaml` train them. `smollm2` is a real
instruct model out of a package, see `smollm2.py`.
"""

from pathlib import Path

TINY_MODEL_PATH = Path(__file__).parent / "model"
TINY_SOKOBAN_PATH = Path(__file__).parent / "model_sokoban"
TINY_COUNTDOWN_PATH = Path(__file__).parent / "model_countdown"
_SHIPPED = {"tiny": TINY_MODEL_PATH, "tiny-sokoban": TINY_SOKOBAN_PATH, "tiny-countdown": TINY_COUNTDOWN_PATH}


def resolve_model(name: str) -> str:
    """The path of a model for its name, `"tiny"` and so on or `"smollm2"`; any other path or Hub id as it is.

    Raises:
        OSError: For `"smollm2"` where the extra of that name is not installed.

    >>> resolve_model("Qwen/Qwen2.5-0.5B-Instruct")
    'Qwen/Qwen2.5-0.5B-Instruct'
    """
    if name == "smollm2":
        from ragen2_trl.tiny.smollm2 import smollm2_path  # the one name that costs something

        return str(smollm2_path())
    return str(_SHIPPED.get(name, name))


__all__ = ["TINY_COUNTDOWN_PATH", "TINY_MODEL_PATH", "TINY_SOKOBAN_PATH", "resolve_model"]

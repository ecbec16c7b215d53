"""The embedded default: a causal LM of about a million parameters, warmed up on two tasks, that needs no download.

`build.py` makes its tokenizer and its untrained weights; `recipes/warm_start_tiny*.yaml` train them.
"""

from pathlib import Path

TINY_MODEL_PATH = Path(__file__).parent / "model"


def resolve_model(name: str) -> str:
    """The path of the shipped model for `"tiny"`; any other path or Hub id as it is.

    >>> resolve_model("Qwen/Qwen2.5-0.5B-Instruct")
    'Qwen/Qwen2.5-0.5B-Instruct'
    """
    return str(TINY_MODEL_PATH) if name == "tiny" else name


__all__ = ["TINY_MODEL_PATH", "resolve_model"]

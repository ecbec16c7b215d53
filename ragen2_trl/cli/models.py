"""Loads models by the names that the command line has for them."""

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from ragen2_trl.cli.typed import InputError, checked_input
from ragen2_trl.tiny import resolve_model


def load_model(name: str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The model, on the accelerator if there is one, and its tokenizer; `name` is `tiny`, a path or a Hub id.

    Raises:
        InputError: If there is no such model.
    """
    with checked_input():
        path = resolve_model(name)
    try:
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(path, dtype="auto")
    except OSError as error:
        reason = str(error).strip().splitlines()[0]
        allowed = (
            "tiny, tiny-sokoban, tiny-countdown, smollm2, a path or a Hub id; to evaluate, also oracle and random"
        )
        raise InputError(f"model={name!r} cannot be loaded; allowed: {allowed}. {reason}") from error
    model.to("cuda" if torch.cuda.is_available() else "cpu")  # type: ignore[arg-type]  # its decorator hides its types
    return model, AutoTokenizer.from_pretrained(path)

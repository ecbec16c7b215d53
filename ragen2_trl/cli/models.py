"""Finds and loads models by the names that the command line has for them."""

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from trl import ModelConfig

from ragen2_trl.cli.typed import InputError, checked_input
from ragen2_trl.envs.tasks import means_a_path
from ragen2_trl.tiny import is_shipped, resolve_model

ALLOWED = "tiny, tiny-sokoban, tiny-countdown, smollm2, a path or a Hub id; to evaluate, also oracle and random"


def check_model(name: str | None) -> str:
    """The name itself; whether the Hub has a model of that name is for whoever loads it to find out.

    Raises:
        ValueError: If there is no name, or it is of a folder that is not there or holds no model.
    """
    if name is None:
        raise ValueError(f"model=None; allowed: {ALLOWED}.")
    path = Path(name)
    if is_shipped(name):
        return name
    if path.is_dir():
        if not any((path / file).is_file() for file in ("config.json", "adapter_config.json")):
            inside = sorted(one.parent.name for one in path.glob("checkpoint-*/config.json"))
            has = f" It holds {', '.join(inside)}." if inside else ""
            raise ValueError(f"model={name!r} is a folder without config.json; allowed: the folder of a model.{has}")
    elif means_a_path(name):
        raise ValueError(f"model={name!r} is neither a folder nor a Hub model id; allowed: {ALLOWED}.")
    return name


@contextmanager
def loading(name: str | None) -> Iterator[None]:
    """Makes it an error of input that transformers finds no model of this name, or one that was cut off.

    Raises:
        InputError: With the first line of what transformers says.
    """
    try:
        yield
    except (OSError, ValueError, SafetensorError) as error:
        on_the_way = [frame.name for frame in traceback.extract_tb(error.__traceback__)]
        of_the_model = isinstance(error, SafetensorError) or "from_pretrained" in on_the_way
        if not of_the_model or (isinstance(error, OSError) and error.errno is not None):
            raise  # of a disk, of a server for sampling, of what else is made along with the model
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        first, slash, _ = str(name).partition("/")
        if slash and Path(first).is_dir() and not Path(str(name)).exists():  # most likely meant one in this folder
            reason = f"There is no such folder in {first!r}, and from the Hub: {reason}"
        raise InputError(f"model={name!r} cannot be loaded; allowed: {ALLOWED}. {reason}") from error


def options_of_model(training_args: Any, model_args: ModelConfig) -> None:
    """Adds revision, attention and dtype to the options that a trainer loads a model with; given ones win."""
    given = training_args.model_init_kwargs or {}  # a mapping, once it is parsed
    options = {"revision": model_args.model_revision, "attn_implementation": model_args.attn_implementation}
    training_args.model_init_kwargs = {**options, "dtype": model_args.dtype, **given}


def load_model(name: str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The model, on the accelerator if there is one, and its tokenizer; `name` is `tiny`, a path or a Hub id.

    Raises:
        InputError: If there is no such model.
    """
    with checked_input():
        path = resolve_model(check_model(name))
    with loading(name):
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(path, dtype="auto")
        tokenizer = AutoTokenizer.from_pretrained(path)
    model.to("cuda" if torch.cuda.is_available() else "cpu")  # type: ignore[arg-type]  # its decorator hides its types
    return model, tokenizer

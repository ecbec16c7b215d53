"""Tokens for the Hub in a trainer's arguments are hidden from the files and trackers that its arguments go to."""

from __future__ import annotations

import copy
from typing import Any


class Token(str):
    """A token that is `None` in a pickle, and not shown where arguments are printed."""

    def __repr__(self) -> str:
        return "<TOKEN>"

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()

    def __copy__(self) -> Token:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Token:
        return self


def with_hidden_tokens(args: Any) -> Any:
    """A trainer's own copy of its arguments, from which `training_args.bin` and trackers get no tokens.

    transformers writes all arguments to both, and masks only `hub_token`, for trackers. That of `model_init_kwargs`
    has done its work when the trainer has its model. Arguments without tokens are given back, others stay as they are.

    Args:
        args: transformers' `TrainingArguments`, or a subclass such as `GRPOConfig`.
    """
    model_init = vars(args).get("model_init_kwargs")
    has_token = isinstance(args.hub_token, str) and not isinstance(args.hub_token, Token)
    has_model_token = isinstance(model_init, dict) and "token" in model_init
    if not (has_token or has_model_token):
        return args
    args = copy.copy(args)
    if has_token:
        args.hub_token = Token(args.hub_token)
    if has_model_token:
        args.model_init_kwargs = {name: value for name, value in model_init.items() if name != "token"}
    return args

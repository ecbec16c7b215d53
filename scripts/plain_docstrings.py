"""Docstrings as the site shows them: their types and references are written as TRL's, [`~trl.GRPOTrainer`]."""

import re
from typing import Any

import griffe

REFERENCE = re.compile(r"\[`~?(?:[\w.]+\.)?(\w+)`\]")
ARGUMENT = re.compile(r"^( +[\w*, /]+ )\((.+)\):$", re.MULTILINE)
FIELD = re.compile(r"^(\w+) \((.+)\):$", re.MULTILINE)  # of a configuration


class PlainDocstrings(griffe.Extension):
    """Takes brackets and modules off references, and marks off types, which are shown as code anyway."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        if obj.docstring:
            text = REFERENCE.sub(r"`\1`", obj.docstring.value)
            text = FIELD.sub(r"\n- `\1` (\2):\n", text)
            obj.docstring.value = ARGUMENT.sub(
                lambda found: f"{found[1]}({found[2].replace('`', '').replace('*', '')}):", text
            )

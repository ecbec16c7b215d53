"""Objects that a setting names as text: `package.module:name`."""

from importlib import import_module
from typing import Any


def named_object(name: str, field_name: str) -> Any:
    """What `package.module:name` names.

    Args:
        name: as in `my_package.selectors:hardest_half`.
        field_name: of the setting that it is of, for messages.

    Raises:
        ValueError: for another form, or where there is no such module or name.
    """
    module, colon, attribute = name.partition(":")
    if not (colon and module and attribute):
        raise ValueError(f"{field_name}={name!r} is not supported; allowed: 'package.module:name'.")
    try:
        return getattr(import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ValueError(
            f"{field_name}={name!r} cannot be imported ({error}); allowed: 'package.module:name'."
        ) from error

"""Objects that a setting names as text: `package.module:name`."""

from importlib import import_module
from typing import Any


def named_object(name: str, field_name: str) -> Any:
    """What `package.module:name` names.

    Args:
        name: as in `my_package.selectors:hardest_half`.
        field_name: of the setting that it is of, for messages.

    Raises:
        ValueError: for another form, or where there is no such module or name, or the module fails.
    """
    module, colon, attribute = name.partition(":")
    if not (colon and module and attribute):
        raise ValueError(f"{field_name}={name!r} is not supported; allowed: 'package.module:name'.")
    try:
        return getattr(import_module(module), attribute)
    except Exception as error:  # a module of one's own may raise anything
        what = str(error) if isinstance(error, (ImportError, AttributeError)) else f"{type(error).__name__}: {error}"
        raise ValueError(
            f"{field_name}={name!r} cannot be imported ({what}); allowed: 'package.module:name'."
        ) from error

"""Rotary embeddings that depend on the length of a forward pass."""

from typing import Any


def length_dependent(config: Any) -> tuple[int, str] | None:
    """Tokens up to which a model's rotary frequencies are the same whatever else is in a forward pass, and the
    `rope_type`: beyond them its longest position decides on the frequencies of all. `None` for other models.

    Args:
        config: of the text model, with one `rope_parameters` for all layers or one for each type of layer.
    """
    parameters = getattr(config, "rope_parameters", None) or {}
    of_layers = [parameters, *(value for value in parameters.values() if isinstance(value, dict))]
    kinds = [(one, one.get("rope_type") or "default") for one in of_layers]
    found = [(one["original_max_position_embeddings"], kind) for one, kind in kinds if kind == "longrope"]
    found += [(config.max_position_embeddings, kind) for _, kind in kinds if "dynamic" in kind]
    return min(found, default=None)

"""Which metrics trackers and the console get: of eighty in a row, eight that a person reads."""

from collections.abc import Mapping
from typing import Any

FAMILIES = ("snr/", "mi/", "health/")  # of which a row has more than a person reads; others were asked for one by one
SCOPES = ("mi/first_turn", "mi/trajectory", "mi/trajectory_reference")  # the first that was measured is shown
OF_SCOPE = ("retrieval_accuracy", "retrieval_chance", "mi_seq", "mi_upper_bound")
OTHERS = ("mi/valid_thinking_rate", "snr/kept_fraction", "snr/update_compute_fraction", "snr/empty_steps")


def shown_metrics(row: Mapping[str, Any]) -> dict[str, Any]:
    """A log row with eight metrics of these families, in an order that is always the same, after all others.

    >>> shown_metrics({"snr/kept_fraction": 0.5, "mi/tokens": 9, "mi/valid_thinking_rate": 1.0, "reward": 0.2})
    {'reward': 0.2, 'mi/valid_thinking_rate': 1.0, 'snr/kept_fraction': 0.5}
    """
    scope = next((one for one in SCOPES if f"{one}/{OF_SCOPE[0]}" in row), SCOPES[0])
    shown = (*(f"{scope}/{name}" for name in OF_SCOPE), *OTHERS)
    others = {key: value for key, value in row.items() if not key.startswith(FAMILIES)}
    return others | {key: row[key] for key in shown if key in row}

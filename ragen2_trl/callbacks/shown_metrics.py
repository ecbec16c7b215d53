"""Which metrics trackers and the console get: of eighty in a row, eight that a person reads."""

from collections.abc import Mapping
from typing import Any

from ragen2_trl.metrics import METRICS, SCOPES

# A row has more of these than a person reads; others were asked for one by one.
FAMILIES = ("snr/", "mi/", "health/", "cost/")
SHOWN = tuple(one.name for one in METRICS if one.shown)


def shown_metrics(row: Mapping[str, Any]) -> dict[str, Any]:
    """A log row with eight metrics of these families, in an order that is always the same, after all others.

    >>> shown_metrics({"snr/kept_fraction": 0.5, "mi/tokens": 9, "mi/valid_thinking_rate": 1.0, "reward": 0.2})
    {'reward': 0.2, 'mi/valid_thinking_rate': 1.0, 'snr/kept_fraction': 0.5}
    """
    scope = next((one for one in SCOPES if SHOWN[0].format(scope=one) in row), SCOPES[0])  # the first measured one
    shown = [name.format(scope=scope) for name in SHOWN]
    others = {key: value for key, value in row.items() if not key.startswith(FAMILIES)}
    return others | {key: row[key] for key in shown if key in row}

"""What is drawn and printed of a run: figures, model card, page, tables, images in trackers."""

from importlib import import_module
from typing import Any

# By name, the module that has it: imported only when it is asked for, since most runs need no matplotlib.
_HOMES = {
    "add_diagnostics": "card",
    "log_figures": "trackers",
    "plot_comparison": "figures",
    "plot_held_out": "figures",
    "plot_matrix": "figures",
    "plot_quadrant": "figures",
    "plot_reward_variance": "figures",
    "plot_training": "figures",
    "render_report": "page",
    "save_figure": "style",
    "svg": "style",
}

__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

"""What is drawn of a run: figures, model card, page, summary, images in trackers."""

from importlib import import_module
from typing import Any

# By name, the module that has it: imported only when it is asked for, since most runs need no matplotlib.
_HOMES = {
    "add_diagnostics": "card",
    "log_figures": "trackers",
    "plot_arrows": "plots",
    "plot_comparison": "plots",
    "plot_held_out": "plots",
    "plot_matrix": "measurement_plots",
    "plot_proxies": "plots",
    "plot_quadrant": "measurement_plots",
    "plot_reward_variance": "measurement_plots",
    "plot_training": "plots",
    "render_report": "page",
    "save_figure": "style",
    "svg": "style",
}

__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

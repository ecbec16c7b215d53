"""From a run's log history and its measurements to pictures, reports, model cards and metrics."""

from importlib import import_module
from typing import Any

# By name, the module that has it: imported only when it is asked for. Trainers lean on this package and need no
# matplotlib, and `python scripts/train.py` puts scripts/ first on the path, where `import evaluate` would find
# scripts/evaluate.py.
_HOMES = {
    "ReasoningInformation": "metric",
    "Run": "run",
    "add_diagnostics": "card",
    "log_figures": "trackers",
    "plot_arrows": "information_plots",
    "plot_calibration": "prompt_plots",
    "plot_comparison": "plots",
    "plot_compute": "plots",
    "plot_gradients": "gradient_plots",
    "plot_held_out": "held_out_plots",
    "plot_matrix": "plots",
    "plot_prompts": "prompt_plots",
    "plot_proxies": "information_plots",
    "plot_quadrant": "plots",
    "plot_reward_distribution": "reward_plots",
    "plot_reward_variance": "plots",
    "plot_training": "plots",
    "plot_validity": "information_plots",
    "read_run": "run",
    "render_report": "report",
    "save_figure": "plots",
    "svg": "plots",
}

__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

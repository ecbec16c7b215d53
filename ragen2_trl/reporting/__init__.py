"""From a run's log history and its measurements to pictures and metrics."""

from typing import TYPE_CHECKING, Any

from ragen2_trl.reporting.plots import plot_matrix, plot_quadrant, plot_training

if TYPE_CHECKING:
    from ragen2_trl.reporting.metric import ReasoningInformation

__all__ = ["ReasoningInformation", "plot_matrix", "plot_quadrant", "plot_training"]


def __getattr__(name: str) -> Any:
    # Only when it is asked for: `python scripts/train.py` puts scripts/ first on the path, where `import evaluate`
    # finds scripts/evaluate.py.
    if name == "ReasoningInformation":
        from ragen2_trl.reporting.metric import ReasoningInformation

        return ReasoningInformation
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

"""A progress bar with one compact line of what matters, in place of a printed dictionary per step."""

from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from transformers import TrainerCallback


class LiveLineCallback(TrainerCallback):
    """Shows reward, kept fraction, success and, where it is measured, retrieval accuracy beside a progress bar.

    On a pipe, a plain line every tenth of the run.

    Args:
        success_metric: log key of the success rate, for instance `rewards/frozen_lake_success/mean`.
        console: where to draw.
    """

    def __init__(self, success_metric: str, console: Console | None = None):
        self.success_metric = success_metric
        self.console = console or Console()
        self._progress: Progress | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if not state.is_world_process_zero:
            return
        self._progress = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(bar_width=24),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            TextColumn("{task.description}"),
            console=self.console,
            disable=not self.console.is_terminal,
        )
        self._next_line = 0
        self._task = self._progress.add_task("", total=state.max_steps, completed=state.global_step)
        self._progress.start()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._progress is not None:
            self._progress.update(self._task, completed=state.global_step)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        if self._progress is None or not logs or logs.get("reward") is None:
            return
        line = self.line(logs)
        self._progress.update(self._task, description=line)
        if not self.console.is_terminal and state.global_step >= self._next_line:
            self._next_line = state.global_step + state.max_steps // 10
            self.console.print(f"step {state.global_step}/{state.max_steps}  {line}")

    def line(self, logs: dict[str, Any]) -> str:
        """The line for one log row; what the row does not have is left out."""
        parts = [f"reward {logs['reward']:.2f}"]
        if logs.get("snr/kept_fraction") is not None:
            parts.append(f"kept {logs['snr/kept_fraction']:.0%}")
        if logs.get(self.success_metric) is not None:
            parts.append(f"success {logs[self.success_metric]:.0%}")
        if logs.get("mi/first_turn/retrieval_accuracy") is not None:
            parts.append(f"retrieval {logs['mi/first_turn/retrieval_accuracy']:.0%}")
        return "  ".join(parts)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.close()

    def close(self) -> None:
        """Give the terminal back, also after an interruption."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None

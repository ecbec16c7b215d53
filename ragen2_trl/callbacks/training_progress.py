"""What a person sees of a training: one line of what matters while it lasts, and a table of what it was good for."""

import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Column
from transformers import ProgressCallback, TrainerCallback

from ragen2_trl.instrument.health import TITLES
from ragen2_trl.metrics import ACCURACY, INFORMATION, KEPT, label
from ragen2_trl.record.held_out import LOGGED
from ragen2_trl.record.run import HEALTH_STATE
from ragen2_trl.report.summary import summarize, summary_table

MEASURED = (ACCURACY, INFORMATION)
HELD_OUT = re.compile(f"{LOGGED}[^/]+/success")
TRAINED = re.compile("env/[^/]+/success")


def next_command(command: str, folder: Any) -> str:
    """How to look at the run in a folder."""
    return f"To look at it: {shlex.join(['ragen2-trl', command, str(folder)])}"


def show_progress(trainer: Any) -> None:
    """Let a trainer show its progress, unless progress bars are off."""
    if not trainer.args.disable_tqdm:
        trainer.add_callback(TrainingProgressCallback(trainer))


class TrainingProgressCallback(TrainerCallback):
    """Shows reward, kept fraction, success, and the latest held-out success and measurement of reasoning beside a
    progress bar, and the state of training once it can be told; loss and accuracy of tokens where there is no reward.
    In the end there is a table: completions kept, what the filter saved, whether reasoning depends on its prompt,
    health.
    On the main process alone, and nothing where nothing is logged; the trainers with the filter bring it along unless
    progress bars are off.

    The line stands on transformers' bar. Where that is off (`disable_tqdm`), the bar is one of its own, and on a pipe
    a plain line every tenth of the run.

    Args:
        trainer: The trainer that the callback is then added to.
        console: Where to draw.
        with_table: Whether the table comes when training ends.
    """

    def __init__(self, trainer: Any, console: Console | None = None, with_table: bool = True):
        self.trainer = trainer
        self.console = console or Console()
        self.with_table = with_table
        self._progress: Progress | None = None
        self._measured: dict[str, Any] = {}  # what rows seldom have, and the line keeps
        self._held_out: float | None = None  # the same, of the first of several tasks
        self._health: dict[str, Any] = {}  # the state of training

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._measured, self._held_out, self._health = {}, None, {}
        if not state.is_world_process_zero or not self.trainer.args.disable_tqdm:
            return
        self._progress = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(bar_width=12),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            TextColumn("{task.description}", table_column=Column(ratio=1, no_wrap=True)),  # what there is room for
            expand=True,
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
        logs = logs or {}
        history = state.stateful_callbacks.get(HEALTH_STATE, {}).get("health", {}).get("history")
        self._health = history[-1] if history else {}
        self._held_out = next((logs[key] for key in logs if HELD_OUT.fullmatch(key)), self._held_out)
        if not state.is_world_process_zero or (logs.get("reward") is None and "loss" not in logs):
            return
        line = self.line(logs)
        for callback in self.trainer.callback_handler.callbacks:
            if isinstance(callback, ProgressCallback) and callback.training_bar is not None:
                callback.training_bar.set_postfix_str(line)
        if self._progress is None:
            return
        self._progress.update(self._task, description=line)
        if not self.console.is_terminal and state.global_step >= self._next_line:
            self._next_line = state.global_step + state.max_steps // 10
            # Whole, also where a log is taken for a terminal of 80 columns.
            self.console.print(f"step {state.global_step}/{state.max_steps}  {line}", soft_wrap=True)

    def line(self, logs: dict[str, Any]) -> str:
        """The line for one log row; what the row does not have is left out."""
        if logs.get("reward") is None:
            parts = [f"loss {logs['loss']:.3f}"]
            if logs.get("mean_token_accuracy") is not None:
                parts.append(f"right tokens {logs['mean_token_accuracy']:.0%}")
            return "  ".join(parts)
        parts = [f"reward {logs['reward']:.2f}"]
        name = self._health.get("name", "too_early")
        if name != "too_early":
            parts.insert(0, f"FAILING: {self._health['what']}" if name == "failing" else TITLES[name])
        if logs.get(KEPT) is not None:
            parts.append(f"kept {logs[KEPT]:.0%}")
        success = min((key for key in logs if TRAINED.fullmatch(key)), default=None)  # of several tasks that of all
        if success is not None and logs[success] is not None:
            parts.append(f"success {logs[success]:.0%}")
        if self._held_out is not None:
            parts.append(f"held out {self._held_out:.0%}")
        self._measured |= {key: logs[key] for key in MEASURED if logs.get(key) is not None}
        accuracy, information = (self._measured.get(key) for key in MEASURED)
        if accuracy is not None:
            parts.append(f"retrieval {accuracy:.0%}")
        if information is not None:
            parts.append(f"{label(INFORMATION)} {information:.2f} nats")
        return "  ".join(parts)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.close()
        is_logged = args.logging_strategy != "no"
        if self.with_table and is_logged and any(row.get("reward") is not None for row in state.log_history):
            folder = Path(args.output_dir)
            self.show_table(summarize(state, folder), args.run_name or folder.resolve().name)

    def show_table(self, summary: Mapping[str, Any], title: str) -> None:
        """On the main process: a run's summary, and how to look at more of it."""
        if self.trainer.is_world_process_zero():
            self.console.print(summary_table(summary, title))
            command = next_command("report", self.trainer.args.output_dir)
            self.console.print(command, highlight=False, markup=False, soft_wrap=True)

    def close(self) -> None:
        """Give the terminal back, also after an interruption."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None

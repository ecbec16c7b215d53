"""What a person sees of a training: one line of what matters on its progress bar, and a table of facts at the end."""

import re
import shlex
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from tqdm.auto import tqdm
from transformers import ProgressCallback, TrainerCallback

from ragen2_trl.instrument.health import TITLES
from ragen2_trl.metrics import ACCURACY, INFORMATION, KEPT, label
from ragen2_trl.record.facts import facts
from ragen2_trl.record.held_out import LOGGED
from ragen2_trl.record.run import HEALTH_STATE, run_of
from ragen2_trl.report.tables import facts_table, print_findings

MEASURED = (ACCURACY, INFORMATION)
EVERY = 60.0  # seconds between two lines of a log
HELD_OUT = re.compile(f"{LOGGED}[^/]+/success")
TRAINED = re.compile("env/[^/]+/success")


def next_command(command: str, folder: Any) -> str:
    """How to look at the run in a folder."""
    return f"To look at it: {shlex.join(['ragen2-trl', command, str(folder)])}"


def show_progress(trainer: Any) -> None:
    """Let a trainer show its progress, unless progress bars are off."""
    if not trainer.args.disable_tqdm:
        trainer.add_callback(TrainingProgressCallback(trainer))


class QuietBar(ProgressCallback):
    """transformers' progress bar without the log rows between it; none where no terminal shows it."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.current_step = 0
        if state.is_world_process_zero:
            self.training_bar = tqdm(total=state.max_steps, dynamic_ncols=True, disable=None)

    def on_log(self, *args: Any, **kwargs: Any) -> None:
        """What a row says stands on the bar."""


class TrainingProgressCallback(TrainerCallback):
    """Shows reward, kept fraction, success, and the latest held-out success and measurement of reasoning on
    transformers' progress bar, and the state of training once it can be told; loss and accuracy of tokens where there
    is no reward. In the end there is a table of the run's facts, and its findings.
    On the main process alone, and nothing where nothing is logged; the trainers with the filter bring it along unless
    progress bars are off.

    Args:
        trainer: The trainer that the callback is then added to.
        console: Where the table goes.
        quiet: For a command: log rows do not stand between the bars, the table comes when `show_table` is called and,
            where no terminal shows a bar, a line is printed at the first and the last log row and once a minute.
    """

    def __init__(self, trainer: Any, console: Console | None = None, quiet: bool = False):
        self.trainer = trainer
        self.console = console or Console()
        self.quiet = quiet
        if quiet:
            trainer.remove_callback(ProgressCallback)
            trainer.add_callback(QuietBar())
        self._next_line = 0.0  # second at which it is due
        self._measured: dict[str, Any] = {}  # what rows seldom have, and the line keeps
        self._held_out: float | None = None  # the same, of the first of several tasks
        self._health: dict[str, Any] = {}  # the state of training

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._next_line, self._measured, self._held_out, self._health = 0.0, {}, None, {}

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        logs = logs or {}
        history = state.stateful_callbacks.get(HEALTH_STATE, {}).get("health", {}).get("history")
        self._health = history[-1] if history else {}
        self._held_out = next((logs[key] for key in logs if HELD_OUT.fullmatch(key)), self._held_out)
        if not state.is_world_process_zero or (logs.get("reward") is None and "loss" not in logs):
            return
        line = self.line(logs)
        bars = self._bars()
        for bar in bars:
            bar.set_postfix_str(line)
        is_due = time.monotonic() >= self._next_line or state.global_step >= state.max_steps
        if self.quiet and all(bar.disable for bar in bars) and is_due:
            self._next_line = time.monotonic() + EVERY
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
        is_logged = args.logging_strategy != "no" and any(row.get("reward") is not None for row in state.log_history)
        if is_logged and not self.quiet:
            self.show_table(args.run_name or Path(args.output_dir).resolve().name)

    def show_table(self, title: str) -> None:
        """On the main process: facts and findings of the run, and how to look at more of it."""
        if self.trainer.is_world_process_zero():
            run = run_of(self.trainer)
            self.console.print(facts_table(facts(run), title))
            print_findings(self.console, run.findings)
            command = next_command("report", self.trainer.args.output_dir)
            self.console.print(command, highlight=False, markup=False, soft_wrap=True)

    def close(self) -> None:
        """Give the terminal back after an interruption."""
        for bar in self._bars():
            bar.close()

    def _bars(self) -> list[Any]:
        callbacks = self.trainer.callback_handler.callbacks
        bars = [callback.training_bar for callback in callbacks if isinstance(callback, ProgressCallback)]
        return [bar for bar in bars if bar is not None]

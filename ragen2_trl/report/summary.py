"""A run in a table, for the person who has waited for it: outcome, cost against plain TRL, then the diagnosis."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text
from transformers import TrainerState

from ragen2_trl.metrics import ACCURACY, EMPTY_STEPS, FIRST_TURN, INFORMATION, KEPT, ZERO_VARIANCE, label
from ragen2_trl.record.run import COST_STATE, run_of_state, step_of

ENDS = ("first", "last")


def summarize(
    state: TrainerState,
    folder: Path,
    before: Mapping[str, float] | None = None,
    after: Mapping[str, float] | None = None,
) -> dict[str, Any]:
    """The numbers of a run: its outcome, its cost against plain TRL, the filter's work on average over the logged
    steps, health, and the verdict on reasoning.

    Args:
        state: Of the trainer, when training is over.
        folder: The trainer's `output_dir`.
        before, after: Metrics on held-out tasks.
    """
    rows = [row for row in state.log_history if KEPT in row]

    def mean(key: str) -> float | None:
        values = [row[key] for row in rows if row.get(key) is not None]
        return sum(values) / len(values) if values else None

    kept: Any = state.stateful_callbacks  # in a finished run states by name, not callbacks
    runtime = next((row["train_runtime"] for row in reversed(state.log_history) if "train_runtime" in row), 0.0)
    run = run_of_state(folder, state)
    return {
        "before": before,
        "after": after,
        "held_out": {task: curve.summary for task, curve in run.held_out.items()},
        "outcomes": {
            name: {"first": points[0][1], "last": points[-1][1], "is_fraction": is_fraction}
            for name, points, is_fraction in run.outcomes
        },
        "best_checkpoint": state.best_model_checkpoint and Path(state.best_model_checkpoint).name,
        "cost": run.cost and run.cost.summary,
        "train_seconds": round(kept.get(COST_STATE, {}).get("seconds", runtime), 1),
        "steps": state.global_step,
        "empty_steps": rows[-1].get(EMPTY_STEPS) if rows else None,
        "kept_fraction": mean(KEPT),
        "zero_variance_fraction": mean(ZERO_VARIANCE),
        "health": run.health.state.sentence,
        "answers": run.answers_said,
        "verdict": run.verdict if run.evidence else None,
        "mutual_information": _first_and_last(state.log_history),
    }


def _first_and_last(history: list[dict[str, Any]]) -> dict[str, Any] | None:
    """The first and the last measurement of whether reasoning depends on its prompt."""
    names = ("retrieval_accuracy", "retrieval_chance", "mi_seq", "mi_upper_bound")
    measured = [
        {"step": step_of(row, FIRST_TURN), **{name: row[f"{FIRST_TURN}/{name}"] for name in names}}
        for row in history
        if row.get(ACCURACY) is not None
    ]
    return {"first": measured[0], "last": measured[-1]} if measured else None


def _chance(measured: Mapping[str, float]) -> str:
    return f" (chance {measured['retrieval_chance']:.1%})"


def summary_table(summary: Mapping[str, Any], title: str) -> Table:
    """A run's summary as a table."""
    table = Table(title=Text(title), show_header=False)
    for when in ("before", "after"):
        metrics = summary[when]
        if metrics is not None:
            interval = f"{metrics['success_ci_low']:.1%} to {metrics['success_ci_high']:.1%}"
            random_success = metrics.get("random_success")
            baseline = "" if random_success is None else f"; random baseline: {random_success:.1%}"
            table.add_row(
                f"held-out success {when}", f"{metrics['success']:.1%}  (95 % interval {interval}{baseline})"
            )
            for key in (key for key in metrics if key.endswith("/success")):
                table.add_row(f"  {key.partition('/')[0]}", f"{metrics[key]:.1%}")
    for task, curve in summary["held_out"].items():
        peak, last = curve["peak"], curve["last"]
        table.add_row(
            f"held-out success on {task}, best and last",
            f"{peak['success']:.1%} at step {peak['step']}, {last['success']:.1%} at step {last['step']} "
            f"(mean over the steps {curve['area_under_curve']:.1%})",
        )
    for name, points in summary["outcomes"].items():
        first, last = (f"{points[when]:.1%}" if points["is_fraction"] else f"{points[when]:.3f}" for when in ENDS)
        table.add_row(Text(name), last if first == last else f"{first} → {last}")
    if summary["best_checkpoint"] is not None:
        table.add_row("best checkpoint", summary["best_checkpoint"])
    cost = summary["cost"]
    if cost is not None:
        table.add_row("sampling", cost["sampling"])
        if cost["updates"]:
            table.add_row("updates", cost["updates"])
    empty = summary["empty_steps"]
    of_them = "" if empty is None else f", {empty:.0f} of them without a kept group"
    table.add_row("steps", f"{summary['steps']}{of_them}, {summary['train_seconds']:.0f} s")
    for name, key in (("kept_fraction", KEPT), ("zero_variance_fraction", ZERO_VARIANCE)):
        if summary[name] is not None:
            table.add_row(label(key), f"{summary[name]:.1%}")
    table.add_row("health", summary["health"])
    if summary["answers"]:
        table.add_row("answers", " ".join(summary["answers"]))
    if summary["verdict"] is not None:
        table.add_row("verdict", summary["verdict"])
    if summary["mutual_information"] is not None:
        first, last = (summary["mutual_information"][when] for when in ENDS)
        differs = first["retrieval_chance"] != last["retrieval_chance"]  # another number of prompts
        began = f"{first['retrieval_accuracy']:.1%} at step {first['step']}{_chance(first) if differs else ''}, "
        ended = f"{last['retrieval_accuracy']:.1%} at step {last['step']}{_chance(last)}"
        once = first["step"] == last["step"]
        table.add_row(label(ACCURACY), f"{ended}, measured once" if once else began + ended)
        table.add_row(label(INFORMATION), f"{last['mi_seq']:.2f} of at most {last['mi_upper_bound']:.2f} nats")
    return table

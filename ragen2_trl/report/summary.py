"""A run in a table: what its training was good for, for the one who has just waited for it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text
from transformers import TrainerState

from ragen2_trl.metrics import ACCURACY, COMPUTE, EMPTY_STEPS, FIRST_TURN, INFORMATION, KEPT, ZERO_VARIANCE, label
from ragen2_trl.record.held_out import curves_of
from ragen2_trl.record.run import COST_STATE, run_of_state


def summarize(
    state: TrainerState,
    folder: Path,
    before: Mapping[str, float] | None = None,
    after: Mapping[str, float] | None = None,
) -> dict[str, Any]:
    """The numbers of a run: evaluations before and after, what the filter did on average over the logged steps, and
    what may be said of reasoning and health.

    Args:
        state: Of the trainer, when training is over.
        folder: The trainer's `output_dir`.
        before, after: Metrics on held-out tasks.
    """
    rows = [row for row in state.log_history if KEPT in row]

    def mean(key: str) -> float | None:
        values = [row[key] for row in rows if row.get(key) is not None]
        return sum(values) / len(values) if values else None

    # Nothing is saved where nothing was trained.
    shares = [share for row in rows if (share := row.get(COMPUTE))]
    computed = sum(shares) / len(shares) if shares else None
    kept: Any = state.stateful_callbacks  # in a finished run states by name, not callbacks
    runtime = next((row["train_runtime"] for row in reversed(state.log_history) if "train_runtime" in row), 0.0)
    run = run_of_state(folder, state)
    return {
        "before": before,
        "after": after,
        "steps": state.global_step,
        "empty_steps": rows[-1][EMPTY_STEPS] if rows else None,
        "train_seconds": round(kept.get(COST_STATE, {}).get("seconds", runtime), 1),
        "kept_fraction": mean(KEPT),
        "zero_variance_fraction": mean(ZERO_VARIANCE),
        "update_compute_saved": None if computed is None else 1 - computed,
        "positions_saved": _positions_saved(state.log_history),
        "mutual_information": _first_and_last(state.log_history),
        "answers": run.answers_said,
        "verdict": run.verdict if run.evidence else None,
        "health": run.health.state.sentence,
        "held_out": {task: curve.summary for task, curve in curves_of(state.log_history).items()},
        "best_checkpoint": state.best_model_checkpoint and Path(state.best_model_checkpoint).name,
    }


def _positions_saved(history: list[dict[str, Any]]) -> float | None:
    """Positions of plain TRL's updates that were not computed; `None` where `CostCallback` has not counted them."""
    counted = [row for row in history if row.get("cost/update_positions")]
    return counted[-1]["cost/plain_update_positions"] - counted[-1]["cost/update_positions"] if counted else None


def _first_and_last(history: list[dict[str, Any]]) -> dict[str, Any] | None:
    """The first and the last measurement of whether reasoning depends on its prompt."""
    names = ("retrieval_accuracy", "retrieval_chance", "mi_seq", "mi_upper_bound")
    measured = [
        {"step": row["step"], **{name: row[f"{FIRST_TURN}/{name}"] for name in names}}
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
    if summary["best_checkpoint"] is not None:
        table.add_row("best checkpoint", summary["best_checkpoint"])
    empty = summary["empty_steps"]
    of_them = "" if empty is None else f", {empty:.0f} of them without a kept group"
    table.add_row("steps", f"{summary['steps']}{of_them}")
    table.add_row("training time", f"{summary['train_seconds']:.0f} s")
    for name, key in (("kept_fraction", KEPT), ("zero_variance_fraction", ZERO_VARIANCE)):
        if summary[name] is not None:
            table.add_row(label(key), f"{summary[name]:.1%}")
    if summary["update_compute_saved"] is not None:
        amount, saved = f"{summary['update_compute_saved']:.1%}", summary["positions_saved"]
        table.add_row(
            f"{label(COMPUTE)} saved by the filter", amount if saved is None else f"{amount}, {saved:,.0f} positions"
        )
    if summary["mutual_information"] is not None:
        first, last = (summary["mutual_information"][when] for when in ("first", "last"))
        differs = first["retrieval_chance"] != last["retrieval_chance"]  # another number of prompts
        table.add_row(
            label(ACCURACY),
            f"{first['retrieval_accuracy']:.1%} at step {first['step']}{_chance(first) if differs else ''}, "
            f"{last['retrieval_accuracy']:.1%} at step {last['step']}{_chance(last)}",
        )
        table.add_row(label(INFORMATION), f"{last['mi_seq']:.2f} of at most {last['mi_upper_bound']:.2f} nats")
    if summary["answers"]:
        table.add_row("answers", " ".join(summary["answers"]))
    if summary["verdict"] is not None:
        table.add_row("verdict", summary["verdict"])
    table.add_row("health", summary["health"])
    return table

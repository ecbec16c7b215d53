"""What training is doing, said while it trains: from the rows that are logged anyway, without a forward pass."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypedDict

from accelerate.logging import get_logger
from accelerate.utils import broadcast_object_list, gather_object
from transformers import TrainerCallback

from ragen2_trl.callbacks.attached import check_own_trainer, is_newest
from ragen2_trl.callbacks.run_record import RunRecord, reported
from ragen2_trl.callbacks.training_progress import next_command
from ragen2_trl.filtering import check_choice
from ragen2_trl.instrument.findings import Finding, training_finding
from ragen2_trl.instrument.health import COUNT, TITLES, Health, HealthState
from ragen2_trl.instrument.reasoning import Trajectories
from ragen2_trl.record.run import HEALTH_STATE
from ragen2_trl.record.settings import steps_per_generation
from ragen2_trl.rollout_events import Listener, LocalRollout, announces_sampling, listen, log_row
from ragen2_trl.saved_state import kept_by_callback

logger = get_logger(__name__)

STOP_ON = tuple(name for name in TITLES if name not in ("learning", "too_early"))


class WatchState(TypedDict):
    """What a checkpoint keeps."""

    health: HealthState
    closes: bool
    keys: dict[str, str]


def keep_watch(trainer: Any) -> None:
    """Let a trainer follow its health, unless it has a callback that does."""
    if not any(isinstance(callback, TrainingHealthCallback) for callback in trainer.callback_handler.callbacks):
        trainer.add_callback(TrainingHealthCallback(trainer))


class TrainingHealthCallback(TrainerCallback):
    """
    Tells what training is doing: too early to tell, learning, flat, drifting or failing (see
    [`~ragen2_trl.instrument.health`]). The trainers with the filter bring it along.

    It reads log rows, and counts the valid answers of each generation; training is left bit-identical. Each new state
    is a line in the log, and an alert in trackio and wandb unless it is good news; the live line, the model card and
    the report show the state, too.

    `health/completions` is how many completions a row is about, and `health/valid_rate` the share of them that are
    valid: by `valid`, or where no environment of ours says it, the share of turns that close their reasoning. A run
    that has never closed any has no such rate.

    Of several on one trainer the one that was added last watches.

    Args:
        trainer ([`~transformers.Trainer`]):
            The trainer that the callback is then added to.
        stop_on (`Sequence[str]`, *optional*, defaults to `()`):
            States that end training, of `"failing"`, `"nothing_to_learn"`, `"drifting"` and `"no_rise"`.
        valid (`Callable[[str], bool]`, *optional*):
            Whether the text of a completion, without what tools have said, is a valid answer.
        keys (`Mapping[str, str]`, *optional*):
            Further log keys and the quantities they hold, for instance `{"rewards/solved/mean": "success"}`.

    Raises:
        ValueError: For a setting outside its range.

    Example:

    ```python
    >>> from ragen2_trl import TrainingHealthCallback

    >>> trainer.add_callback(TrainingHealthCallback(trainer, stop_on=("failing",)))  # doctest: +SKIP
    ```
    """

    def __init__(
        self,
        trainer: Any,
        stop_on: Sequence[str] = (),
        valid: Callable[[str], bool] | None = None,
        keys: Mapping[str, str] | None = None,
    ):
        for name in (stop_on,) if isinstance(stop_on, str) else stop_on:
            check_choice("stop_on", name, STOP_ON)
        self.trainer, self.valid, self.own_keys = trainer, valid, dict(keys or {})
        self.stop_on = {stop_on} if isinstance(stop_on, str) else set(stop_on)
        self.health = Health(self.own_keys)
        self._closes = False  # whether any reasoning has been closed
        self._listener: Listener | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        check_own_trainer(self, self.trainer, state)
        each = steps_per_generation(vars(args))
        self.health, self._closes = Health(self.own_keys, steps_per_generation=each), False
        if (saved := kept_by_callback(state, HEALTH_STATE, WatchState)) is not None:
            self.health.load_state_dict(saved["health"])
            self._closes = saved["closes"]
        if self._listener is None and announces_sampling(self.trainer):
            self._listener = listen(self.trainer, on_rollout=self._on_rollout)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if not is_newest(self, self.trainer):
            return
        begun = self.health.update(state.log_history[-1])
        state.stateful_callbacks[HEALTH_STATE] = {
            "health": self.health.state_dict(),
            "closes": self._closes,
            "keys": self.own_keys,
        }
        if begun is not None:
            finding = training_finding(begun)
            logger.warning(finding.text)
            self._alert(finding, f"Training: {begun.title}" + (f", {begun.what}" if begun.what else ""))
        if self.stop_on and self._agreed(self.health.state.name in self.stop_on):
            logger.warning(f"Training stops after step {state.global_step}: stop_on={sorted(self.stop_on)}.")
            control.should_training_stop = True

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        callbacks = self.trainer.callback_handler.callbacks
        if is_newest(self, self.trainer) and not any(isinstance(one, RunRecord) for one in callbacks):  # which says it
            look = [] if args.save_strategy == "no" else [next_command("health", args.output_dir)]  # of a checkpoint
            logger.warning(" ".join(["Training has ended.", training_finding(self.health.state).sentence, *look]))

    def _agreed(self, ends: bool) -> bool:
        """What the main process says: rows may differ between processes, and all must stop together."""
        if self.trainer.accelerator.num_processes == 1:
            return ends
        told = [ends]
        broadcast_object_list(told)
        return told[0]

    def _alert(self, finding: Finding, title: str) -> None:
        calls = finding.severity in ("warning", "failure")
        if calls and self.trainer.args.report_to and self.trainer.state.is_world_process_zero:
            from ragen2_trl.report.trackers import send_alert

            with reported("The alert for the trackers"):
                send_alert(self.trainer, title, finding.text, is_error=finding.severity == "failure")

    def _on_rollout(self, local: LocalRollout) -> None:
        if not is_newest(self, self.trainer):
            return
        log_row(self.trainer, {COUNT: float(local.rewards.numel())}, replace=True)
        counted = [one for one in gather_object([self._count_valid(local)]) if one is not None]
        valid, answers = (sum(one[number] for one in counted) for number in (0, 1))
        self._closes = self._closes or valid > 0
        if answers and (self.valid is not None or self._closes):
            log_row(self.trainer, {"health/valid_rate": valid / answers})

    def _count_valid(self, local: LocalRollout) -> tuple[int, int] | None:
        """(valid, all) answers of this process; `None` where an environment of ours tells."""
        tokenizer = self.trainer._tokenizer
        if self.valid is not None:
            masks = (mask or [1] * len(ids) for ids, mask in zip(local.completion_ids, local.tool_masks, strict=True))
            own = [
                [token for token, is_own in zip(ids, mask, strict=True) if is_own]
                for ids, mask in zip(local.completion_ids, masks, strict=True)
            ]
            texts = tokenizer.batch_decode(own, skip_special_tokens=True)
            return sum(bool(self.valid(text)) for text in texts), len(texts)
        logged = self.trainer._metrics["train"]
        if any(key.startswith("env/") and key.endswith("/valid_rate") for key in logged):
            return None
        trajectories = Trajectories(
            local.prompt_ids, local.completion_ids, tokenizer, local.tool_masks, local.turn_samples
        )
        turns = [turn for number in range(len(trajectories)) for turn in trajectories[number]]
        return sum(turn.valid for turn in turns), len(turns)

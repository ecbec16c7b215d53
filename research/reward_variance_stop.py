"""The paper's stopping rule: a run ends when its rewards have stopped varying within groups."""

from typing import Any

from accelerate.logging import get_logger
from transformers import Trainer, TrainerCallback

from ragen2_trl.callbacks.attached import check_own_trainer, is_newest
from ragen2_trl.filtering import group_score
from ragen2_trl.rollout_events import Listener, LocalRollout, listen, log_row

logger = get_logger(__name__)

STATE_KEY = "ragen2_reward_variance_stop"


class RewardVarianceStopCallback(TrainerCallback):
    """
    Ends training when the mean reward variance within groups stays below a share of what it was at the start
    (arXiv 2604.06268, Section 4: below 10 % of the first ten steps, five times in a row).

    Logs `reward_variance/mean` (of all groups of a generation, ddof 1) and, once the start is known,
    `reward_variance/of_start`. Of several on one trainer the one that was added last counts.

    Args:
        trainer ([`~trl.GRPOTrainer`] or [`~trl.RLOOTrainer`], or a subclass):
            The trainer that the callback is then added to.
        fraction (`float`, *optional*, defaults to `0.1`):
            Share of the start below which a generation counts as collapsed.
        start_generations (`int`, *optional*, defaults to `10`):
            Number of generations with any variance that make up the start.
        patience (`int`, *optional*, defaults to `5`):
            Collapsed generations in a row that end training.
    """

    def __init__(self, trainer: Trainer, fraction: float = 0.1, start_generations: int = 10, patience: int = 5):
        if not 0 < fraction < 1:
            raise ValueError(f"fraction must be between 0 and 1, got {fraction!r}")
        for name, value in (("start_generations", start_generations), ("patience", patience)):
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value!r}")
        self.trainer = trainer
        self.fraction = fraction
        self.start_generations = start_generations
        self.patience = patience
        self._listener: Listener | None = None
        self.start: list[float] = []
        self.streak = 0

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        check_own_trainer(self, self.trainer, state)
        saved = state.stateful_callbacks.get(STATE_KEY, {"start": [], "streak": 0})
        self.start, self.streak = list(saved["start"]), saved["streak"]
        self._listener = self._listener or listen(self.trainer, on_rollout=self._on_rollout)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.streak < self.patience or not is_newest(self, self.trainer):
            return
        control.should_training_stop = True
        logger.warning(
            f"Training stops after step {state.global_step}: the mean reward variance within groups was below "
            f"{self.fraction:.0%} of its start ({self._start_mean():.3g}) for {self.streak} generations in a row."
        )

    def _on_rollout(self, local: LocalRollout) -> None:
        if not is_newest(self, self.trainer):
            return
        variance = group_score(local.rewards).mean().item()
        log_row(self.trainer, {"reward_variance/mean": variance})
        if len(self.start) < self.start_generations:
            if variance > 0:
                self.start.append(variance)
        else:
            share = variance / self._start_mean()
            log_row(self.trainer, {"reward_variance/of_start": share})
            self.streak = self.streak + 1 if share < self.fraction else 0
        state: Any = self.trainer.state  # which annotates what follows as a list
        state.stateful_callbacks[STATE_KEY] = {"start": self.start, "streak": self.streak}

    def _start_mean(self) -> float:
        return sum(self.start) / len(self.start)

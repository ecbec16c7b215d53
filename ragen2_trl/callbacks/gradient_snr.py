"""Where a policy's gradient comes from: signal and noise by reward variance (arXiv 2604.06268, Figure 3)."""

import time
from math import ceil
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from accelerate.utils import gather_object
from transformers import Trainer, TrainerCallback

from ragen2_trl.callbacks.attached import check_own_trainer, is_newest
from ragen2_trl.callbacks.gradient_probe import check_can_probe, measure_gradients
from ragen2_trl.callbacks.run_record import keep_record, reported
from ragen2_trl.instrument.gradients import GradientMeasurement
from ragen2_trl.instrument.scoring import count_tokens
from ragen2_trl.reporting.files import MEASUREMENTS
from ragen2_trl.reporting.saved_gradients import save_gradients
from ragen2_trl.rollout_events import Listener, LocalRollout, listen, log_row
from ragen2_trl.trainers.stock import StockTrainer


class GradientSNRCallback(TrainerCallback):
    """
    Logs how large the gradients of the task and of the regularisers are for groups of low and of high reward variance,
    and how much of them is signal.

    The groups of a generation batch, before any is dropped, are sorted into buckets of reward variance with as many
    samples each. For each bucket, each term of the trainer's own loss (`task`; `kl` and `entropy` where the loss has
    them) is differentiated by itself, in two halves that have half of each group's completions. In the row of TRL's
    metrics, under `grad/bucket_<b>/<part>/`, with bucket 1 of the lowest variance, and `grad/all/<part>/`: `norm` of
    the mean gradient of a sample; `squared_norm_debiased`, from which the noise of few samples is taken out; `cosine`
    with the gradient of the whole batch; `half_cosine`, that between the halves. `_measurements/gradients_<step>.json`
    in `output_dir` has the same for attention, MLPs, embeddings and norms.

    Training is left bit-identical. One measurement computes the batch forward and backward twice for each term, which
    `grad/seconds` and `grad/tokens` tell, and keeps up to three copies of the gradient and two more for each term
    (float32; of all but one, each process keeps its share). A load-balancing loss is not measured. What RLOO, or PPO
    with `kl_in="reward"`, takes off the reward belongs to the task. Whatever else a subclass adds to the loss counts
    as task. Of several on one trainer the one that was added last measures.

    Args:
        trainer ([`~trl.GRPOTrainer`] or [`~trl.RLOOTrainer`], or a subclass):
            The trainer that the callback is then added to. One process, DDP, or ZeRO-1, 2 or 3, whose parameters are
            gathered for it.
        every (`int`, *optional*, defaults to `50`):
            Measure at the first optimizer step and at multiples of it.
        num_buckets (`int`, *optional*, defaults to `6`):
            Buckets of equal size. With a number of groups that it does not divide, some groups are in none of them.
        entropy_coef (`float`, *optional*):
            Measure the entropy bonus as if the run had this coefficient, for instance where it has none. Norms have
            the coefficient in them; the gradient of the batch has the run's own.

    Raises:
        ValueError: for a setting outside its range; at the start of training, where gradients cannot be taken.
        TypeError: at the start of training, for a trainer that does not sample completions.

    Example:

    ```python
    >>> from ragen2_trl import GradientSNRCallback

    >>> trainer.add_callback(GradientSNRCallback(trainer, every=20))  # doctest: +SKIP
    ```
    """

    def __init__(self, trainer: Trainer, every: int = 50, num_buckets: int = 6, entropy_coef: float | None = None):
        for name, value in (("every", every), ("num_buckets", num_buckets)):
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value!r}")
        if entropy_coef is not None and entropy_coef <= 0:
            raise ValueError(f"entropy_coef must be above 0, or None for the run's own, got {entropy_coef!r}")
        self.trainer = cast(StockTrainer, trainer)  # `check_can_probe` refuses others
        self.every = every
        self.num_buckets = num_buckets
        self.entropy_coef = entropy_coef
        self.latest: GradientMeasurement | None = None
        self._listener: Listener | None = None
        self._last_step = 0
        keep_record(trainer)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        check_own_trainer(self, self.trainer, state)
        check_can_probe(self.trainer)
        self.latest, self._last_step = None, state.global_step
        self._listener = self._listener or listen(self.trainer, on_rollout=self._on_rollout)

    def _on_rollout(self, local: LocalRollout) -> None:
        step = self._due_step()
        if step is None or not is_newest(self, self.trainer):
            return
        self._last_step = step
        measurement, cost = self.measure(local, self.trainer.state.global_step + 1)
        log_row(self.trainer, {f"grad/{key}": value for key, value in {**measurement.metrics(), **cost}.items()})
        if self.trainer.is_world_process_zero():
            with reported("The gradients by reward variance"):
                save_gradients(measurement, Path(self.trainer.args.output_dir) / MEASUREMENTS)

    def measure(self, local: LocalRollout, step: int) -> tuple[GradientMeasurement, dict[str, float]]:
        """The gradients of a generation batch, and what they cost: `seconds`, and `tokens` forward, padding included.

        A call for all processes together.
        """
        started = time.perf_counter()
        # The same halves on every process, and after a resume; no global generator moves.
        seed = np.random.SeedSequence([self.trainer.args.seed, step]).generate_state(1)[0]
        generator = torch.Generator().manual_seed(int(seed))
        with count_tokens(self.trainer.model) as tokens:
            measurement = measure_gradients(self.trainer, local, step, self.num_buckets, self.entropy_coef, generator)
        total = sum(gather_object([sum(tokens)]))
        self.latest = measurement
        return measurement, {"seconds": time.perf_counter() - started, "tokens": float(total)}

    def _due_step(self) -> int | None:
        """The optimizer step that asks for the gradients of the current completions, if one does."""
        args, done = self.trainer.args, self.trainer.state.global_step
        per_generation = args.steps_per_generation * self.trainer.num_iterations / args.gradient_accumulation_steps
        served = range(max(done, self._last_step) + 1, done + ceil(per_generation) + 1)
        return next((step for step in served if step == 1 or step % self.every == 0), None)

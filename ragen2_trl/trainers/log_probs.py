"""Log-probs beside the update: TRL's own passes over fewer rows, and passes over batches of our own."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from trl import RLOOTrainer

from ragen2_trl.trainers.batches import IMAGE_KEYS, Batch, chunks, loss_mask, take, whole_rows
from ragen2_trl.trainers.processes import forward_in_step
from ragen2_trl.trainers.trl_contract import overridden

LOGPS = ("old_per_token_logps", "ref_per_token_logps", "old_logps")


class LogProbs:
    """Passes of a trainer without gradients, through its hook for log-probs.

    Args:
        trainer: One of ours.
    """

    def __init__(self, trainer: Any):
        self.trainer, self.accelerator = trainer, trainer.accelerator
        self._has_own_advantages = "_generate_and_score_completions" in overridden(type(trainer))
        self._inputs: list[dict[str, Any]] | None = None  # rows of the dataset, where dead rows are left out
        self.end_batch()

    # While TRL makes a batch: log-probs of the rows that may be trained on

    def begin_batch(self, inputs: list[dict[str, Any]], number: int) -> None:
        """TRL is about to make a batch from these rows of the dataset, in a round from 0."""
        self._is_first = number == 0
        if self._is_first:
            self._of_every_row = self._needs_every_row()
        self._inputs = None if self._of_every_row else inputs

    def _needs_every_row(self) -> bool:
        """Whether rows of dead groups have log-probs, too: KL is part of RLOO's rewards, and these may be kept."""
        trainer = self.trainer
        return (
            trainer._strategy.reads_every_row(self._has_own_advantages)
            or trainer.args.snr_score_reward not in (None, *trainer.reward_func_names)
            or (isinstance(trainer, RLOOTrainer) and trainer.beta != 0)
            # A process may have images beside one that has none: all must call the same passes.
            or getattr(trainer.model.config, "vision_config", None) is not None
        )

    def end_batch(self, batch: Batch | None = None) -> None:
        """TRL has made it. Rows whose log-probs were not computed get 0, so that no loss of them is NaN."""
        if batch is not None and self._live is not None and not self.trainer.rollout_events.needs_all_rows:
            for key in LOGPS:
                if key in batch:
                    dead = ~self._live if batch[key].ndim == 1 else ~self._live.unsqueeze(1)
                    batch[key] = batch[key].masked_fill(dead, 0.0)
        self._is_first = False
        self._inputs = None
        self._live: Tensor | None = None  # (rows,) bool, those of groups with varying rewards, once these are known

    def of_generation(self, rows: tuple[Any, Tensor, Tensor, int], size: int, is_plain: bool) -> Tensor | None:
        """TRL asks for the log-probs of a whole generation, in passes of `size` rows.

        Args:
            rows: model, input ids, attention mask and the number T of completion columns.
            size: rows of a pass.
            is_plain: whether it asks for nothing else.

        Returns:
            (rows, T), NaN for rows of groups without varying rewards, which TRL leaves out of its means; `None` where
            TRL is to compute all rows.
        """
        trainer, ids = self.trainer, rows[1]
        if self._is_first:  # the only call of TRL, whose rows pilots leave out
            of_process = trainer.args.generation_batch_size // self.accelerator.num_processes
            trainer._micro_batches.count_ahead(0, of_process * ids.size(1))
        if is_plain and self._inputs is not None and trainer.rollout_events.has_generated:
            return self._of_live_rows(*rows, size)
        trainer._micro_batches.count_ahead(ids.numel(), 0)
        return None

    def _of_live_rows(self, model: Any, input_ids: Tensor, attention_mask: Tensor, width: int, size: int) -> Tensor:
        """A listener that needs the other rows, too, gets them from passes of their own, so that training does not
        change."""
        if self._live is None:
            self._live = self._rows_of_varying_groups().to(input_ids.device)
        before = input_ids.size(1) - width
        batch = {
            "prompt_ids": input_ids[:, :before],
            "prompt_mask": attention_mask[:, :before],
            "completion_ids": input_ids[:, before:],
            "completion_mask": attention_mask[:, before:],
        }
        self.trainer._check_sharing(batch)
        logps = self._scattered(batch, self._live, size, model)
        if self.trainer.rollout_events.needs_all_rows:
            devices = [input_ids.device] if input_ids.device.type == "cuda" else []
            with torch.random.fork_rng(devices):
                dead = self._scattered(batch, ~self._live, size, model)
            logps = torch.where(self._live.unsqueeze(1), logps, dead)
        return logps

    def _rows_of_varying_groups(self) -> Tensor:
        """(rows,) bool of this process. Scores the completions now; TRL gets the same rewards when it asks."""
        assert self._inputs is not None  # TRL is making a batch
        rewards, size = self.trainer.rollout_events.score_ahead(self._inputs), self.trainer.num_generations
        groups = rewards.view(-1, size, rewards.size(1))
        groups = groups.nan_to_num(nan=torch.finfo(groups.dtype).min)  # a missing reward differs from any other
        varies = (groups != groups[:, :1]).flatten(1).any(dim=1)
        rows: Tensor = self.trainer._local(varies.repeat_interleave(size))
        return rows

    def _scattered(self, batch: Batch, rows: Tensor, size: int, model: Any) -> Tensor:
        """(rows, T) of passes over some rows, NaN for the others. A call for all processes together."""
        of_pass = rows.nonzero().squeeze(1).tolist(), take(batch, [0]), size, self.accelerator, torch.nan
        found = forward_in_step(
            lambda part: self._pass(model, part)[0], batch, *of_pass, **self.trainer._plan.trimming
        )
        assert found is not None  # of a batch
        return found

    def _pass(
        self, model: Any, batch: Batch, compute_entropy: bool = False, counted: bool = True
    ) -> tuple[Tensor, Any]:
        """A single pass; for the rest see `and_entropies`."""
        trainer, images = self.trainer, {key: batch[key] for key in IMAGE_KEYS if key in batch}
        if counted:
            trainer._micro_batches.count_ahead(trainer._micro_batches.positions([batch]), 0)
        hook: Callable[..., tuple[Any, ...]] = trainer._get_per_token_logps_and_entropies
        logps, entropies, *_ = hook(model, *whole_rows(batch), compute_entropy=compute_entropy, **images)
        return logps, entropies

    # Passes over batches of our own

    @torch.no_grad()
    def and_entropies(
        self, batch: Batch, compute_entropy: bool = False, model: Any = None, counted: bool = True
    ) -> tuple[Tensor, Any]:
        """(rows, T) each, log-probs and entropies in nats under the present weights, or under those of a model.

        Without `compute_entropy`, entropies are `None`; with `counted`, the pass counts among those of the update.
        """
        trainer = self.trainer
        model = trainer.model if model is None else model
        # TRL would show a part without images none of them, which models do not take.
        batches = chunks(batch, trainer.args.per_device_train_batch_size)
        parts = [self._pass(model, part, compute_entropy, counted) for part in batches]
        logps, entropies = zip(*parts, strict=True)
        return torch.cat(logps), torch.cat(entropies) if compute_entropy else None

    def now(self, batch: Batch) -> Tensor:
        """(rows, T) under the present weights."""
        return self.and_entropies(batch)[0]

    def reference(self, batch: Batch) -> Tensor:
        """(rows, T) under the reference policy."""
        trainer = self.trainer
        if trainer.ref_model is not None:
            return self.and_entropies(batch, model=trainer.ref_model)[0]
        from trl.trainer.utils import use_adapter  # for adapters alone

        model = self.accelerator.unwrap_model(trainer.model)  # of adapters: without them, or with those it began with
        with use_adapter(model, adapter_name="ref" if "ref" in model.peft_config else None):
            return self.now(batch)

    def mean_entropies(self, batch: Batch) -> Tensor:
        """(B,) mean token entropy of each completion in nats, on the CPU: known otherwise only once it is updated."""
        mask = loss_mask(batch)
        per_token = self.and_entropies(batch, compute_entropy=True)[1]
        means: Tensor = self.accelerator.gather((per_token * mask).sum(dim=1) / mask.sum(dim=1).clamp(min=1))
        return means.cpu()

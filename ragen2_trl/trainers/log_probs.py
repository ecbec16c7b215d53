"""Log-probs beside the update: TRL's own passes over fewer rows, and passes over batches of our own."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object, send_to_device
from torch import Tensor
from trl import RLOOTrainer

from ragen2_trl.trainers.batches import IMAGE_KEYS, Batch, chunks, loss_mask, take, whole_rows
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

    # While TRL makes a batch: log-probs of the rows that may be trained on

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
        if trainer._sampler.round.key[-1] == 0:  # the only call of TRL, whose rows pilots leave out
            of_process = trainer.args.generation_batch_size // self.accelerator.num_processes
            trainer._plan.count_ahead(0, of_process * ids.size(1))
        if is_plain and not self.needs_every_row() and trainer.rollout_events.has_generated:
            return self._of_live_rows(*rows, size)
        trainer._plan.count_ahead(ids.numel(), 0)
        return None

    def needs_every_row(self) -> bool:
        """Whether rows of dead groups have log-probs, too: KL is part of RLOO's rewards, and these may be kept."""
        trainer = self.trainer
        return (
            trainer._strategy.reads_every_row(self._has_own_advantages)
            or trainer.args.snr_score_reward not in (None, *trainer.reward_func_names)
            or (isinstance(trainer, RLOOTrainer) and trainer.beta != 0)
            # A process may have images beside one that has none: all must call the same passes.
            or getattr(trainer.model.config, "vision_config", None) is not None
        )

    def without_dead(self, batch: Batch, live: Tensor) -> Batch:
        """TRL's batch with 0 for log-probs that were not computed, so that no loss is NaN. `live` is (rows,) bool."""
        if self.trainer.rollout_events.needs_all_rows:
            return batch
        dead = {key: ~live if batch[key].ndim == 1 else ~live.unsqueeze(1) for key in LOGPS if key in batch}
        return batch | {key: batch[key].masked_fill(mask, 0.0) for key, mask in dead.items()}

    def _of_live_rows(self, model: Any, input_ids: Tensor, attention_mask: Tensor, width: int, size: int) -> Tensor:
        """A listener that needs the other rows, too, gets them from passes of their own, so that training does not
        change."""
        current = self.trainer._sampler.round
        if current.live is None:
            current.live = self._rows_of_varying_groups(current.inputs).to(input_ids.device)
        live: Tensor = current.live
        before = input_ids.size(1) - width
        batch = {
            "prompt_ids": input_ids[:, :before],
            "prompt_mask": attention_mask[:, :before],
            "completion_ids": input_ids[:, before:],
            "completion_mask": attention_mask[:, before:],
        }
        self.trainer._check_sharing(batch)
        logps = self._scattered(batch, live, size, model)
        if self.trainer.rollout_events.needs_all_rows:
            devices = [input_ids.device] if input_ids.device.type == "cuda" else []
            with torch.random.fork_rng(devices):
                dead = self._scattered(batch, ~live, size, model)
            logps = torch.where(live.unsqueeze(1), logps, dead)
        return logps

    def _rows_of_varying_groups(self, inputs: list[dict[str, Any]]) -> Tensor:
        """(rows,) bool of this process. Scores the completions now; TRL gets the same rewards when it asks."""
        rewards, size = self.trainer.rollout_events.score_ahead(inputs), self.trainer.num_generations
        groups = rewards.view(-1, size, rewards.size(1))
        groups = groups.nan_to_num(nan=torch.finfo(groups.dtype).min)  # a missing reward differs from any other
        varies = (groups != groups[:, :1]).flatten(1).any(dim=1)
        rows: Tensor = self.trainer._local(varies.repeat_interleave(size))
        return rows

    def _scattered(self, batch: Batch, rows: Tensor, size: int, model: Any) -> Tensor:
        """(rows, T) of passes over some rows, NaN for the others. A call for all processes together."""
        chosen, trimming = rows.nonzero().squeeze(1).tolist(), self.trainer._plan.trimming
        passes = partial(self._logps, model)
        found = forward_in_step(passes, batch, chosen, take(batch, [0]), size, self.accelerator, torch.nan, **trimming)
        assert found is not None  # of a batch
        return found

    # Passes over batches of our own

    def _logps(self, model: Any, batches: list[Batch]) -> list[Tensor]:
        return [logps for logps, _ in self._passes(model, batches)]

    def _passes(
        self, model: Any, batches: list[Batch], compute_entropy: bool = False, counted: bool = True
    ) -> list[tuple[Tensor, Any]]:
        """A pass over each batch; for the rest see `and_entropies`."""
        plan, hook = self.trainer._plan, self.trainer._get_per_token_logps_and_entropies
        if counted and batches:
            plan.count_ahead(plan.positions(batches), 0)
        results = []
        for batch in batches:
            images = {key: batch[key] for key in IMAGE_KEYS if key in batch}
            logps, entropies, *_ = hook(model, *whole_rows(batch), compute_entropy=compute_entropy, **images)
            results.append((logps, entropies))
        return results

    @torch.no_grad()
    def and_entropies(
        self, batch: Batch, compute_entropy: bool = False, model: Any = None, counted: bool = True
    ) -> tuple[Tensor, Any]:
        """(rows, T) each, log-probs and entropies in nats under the present weights, or under those of a model.

        Without `compute_entropy`, entropies are `None`; with `counted`, the pass counts among those of the update.
        """
        trainer = self.trainer
        # TRL would show a part without images none of them, which models do not take.
        parts = chunks(batch, trainer.args.per_device_train_batch_size)
        passes = self._passes(trainer.model if model is None else model, parts, compute_entropy, counted)
        logps, entropies = zip(*passes, strict=True)
        return torch.cat(logps), torch.cat(entropies) if compute_entropy else None

    @torch.no_grad()
    def filled_in(self, batch: Batch | None, spare: Batch) -> Any:
        """The batch with log-probs under the present policy for rows without any. A call for all processes together.

        Args:
            batch: of this process, `None` where it has no rows.
            spare: a batch to run where another process has more rows to compute.
        """
        rows = [] if batch is None else batch["old_per_token_logps"].isnan().any(dim=1).nonzero().squeeze(1).tolist()
        size = self.trainer.args.per_device_train_batch_size
        passes = partial(self._logps, self.trainer.model)
        computed = forward_in_step(passes, batch, rows, take(spare, [0]), size, self.accelerator)
        if batch is None or computed is None or not rows:
            return batch
        filled = batch["old_per_token_logps"].clone()
        filled[rows] = computed[rows].to(filled)
        return {**batch, "old_per_token_logps": filled}

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


def forward_in_step(
    forward: Callable[[list[Batch]], Iterable[Tensor]],
    batch: Batch | None,
    rows: list[int],
    spare: Batch,
    size: int,
    accelerator: Accelerator,
    fill: float = 0.0,
    **trimming: Any,
) -> Tensor | None:
    """Forward passes over some rows of a batch, as many on every process as on every other.

    Sharded models need all processes for each pass. A call for all processes together.

    Args:
        forward: from batches of R rows with T completion tokens each to (R, T) of each.
        batch: this process's rows, or `None` where it has none.
        rows: of the batch, any number.
        spare: a batch to run where another process has more rows.
        size: most rows of a pass.
        accelerator: of the trainer.
        fill: for the other rows.
        **trimming: as for `take`.

    Returns:
        (R, T), 0 where the rows have no tokens; `None` without a batch.
    """
    chunks = [rows[start : start + size] for start in range(0, len(rows), size)]
    most = max(gather_object([len(chunks)])) if accelerator.num_processes > 1 else len(chunks)
    parts = [] if batch is None else [take(batch, chunk, **trimming) for chunk in chunks]
    parts = [send_to_device(part, accelerator.device) for part in parts]
    values = list(forward(parts + [spare] * (most - len(parts))))
    if batch is None:
        return None
    kind = values[0] if values else torch.empty(0, device=accelerator.device)
    found = kind.new_full(batch["completion_ids"].shape, fill)
    for chunk, of_chunk in zip(chunks, values, strict=False):
        found[chunk] = torch.nn.functional.pad(of_chunk, (0, found.size(1) - of_chunk.size(1)))
    return found

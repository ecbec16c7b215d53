"""Forward passes of a trainer for log-probs: TRL's own, over fewer rows and with each prompt computed once."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from trl import RLOOTrainer

from ragen2_trl.trainers.batches import IMAGE_KEYS, Batch, chunks, loss_mask, take, whole_rows
from ragen2_trl.trainers.checkpointed import Checkpointed
from ragen2_trl.trainers.checks import overridden
from ragen2_trl.trainers.processes import forward_in_step, own_share

LOGPS = ("old_per_token_logps", "ref_per_token_logps", "old_logps")


class ForwardPasses(Checkpointed):
    """The hook for log-probs, and passes without gradients over batches of our own."""

    # While TRL makes a batch: its rows, and (rows,) bool for those whose group has varying rewards, once these are
    # known. `None` at any other time, and where TRL computes the log-probs of all rows.
    _sampled: list[dict[str, Any]] | None = None
    _live: Tensor | None = None
    _round = 0  # of the step's sampling

    def _get_per_token_logps_and_entropies(
        self,
        model: Any,
        input_ids: Tensor,
        attention_mask: Tensor,
        logits_to_keep: int,
        batch_size: int | None = None,
        compute_entropy: bool = False,
        compute_aux_loss: bool = False,
        **images: Any,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """(rows, T) log-probs and entropies in nats, and the router loss."""
        rows = model, input_ids, attention_mask, logits_to_keep
        plain = super()._get_per_token_logps_and_entropies
        other = compute_aux_loss or any(value is not None for value in images.values())
        if batch_size is not None and self._row_means is not None:  # only TRL's calls for a whole generation give one
            if self._round == 0:  # the only one of TRL, whose rows pilots leave out
                of_process = self.args.generation_batch_size // self.accelerator.num_processes
                self._micro_batches.count_ahead(0, of_process * input_ids.size(1))
            if not other and self._sampled is not None and self.rollout_events.has_generated:
                return self._logps_of_live_rows(*rows, batch_size), None, None
            self._micro_batches.count_ahead(input_ids.numel(), 0)
        if not other and self._shared_prompts is not None and batch_size is None and self.model.training:
            shared = self._shared_prompts(*rows)
            if shared is not None:
                return shared[0], shared[1] if compute_entropy else None, None
        result: tuple[Tensor, Tensor | None, Tensor | None] = plain(
            *rows, batch_size, compute_entropy, compute_aux_loss, **images
        )
        return result

    # While TRL makes a batch: log-probs of the rows that may be trained on

    def _begin_batch(self, inputs: list[dict[str, Any]], number: int) -> None:
        """TRL is about to make a batch from these rows of the dataset, in a round from 0."""
        names = [None, *self.reward_func_names]
        # The other cases need the log-probs of every row: KL is part of RLOO's rewards, and these may be kept.
        of_every_row = (
            self._strategy.reads_every_row("_generate_and_score_completions" in overridden(type(self)))
            or self.args.snr_score_reward not in names
            or (isinstance(self, RLOOTrainer) and self.beta != 0)
            # A process may have images beside one that has none: all must call the same passes.
            or getattr(self.model.config, "vision_config", None) is not None
        )
        self._sampled, self._live, self._round = None if of_every_row else inputs, None, number

    def _end_batch(self, batch: Batch) -> None:
        """Rows whose log-probs were not computed get 0, so that no loss of them is NaN."""
        if self._live is not None and not self.rollout_events.needs_all_rows:
            for key in LOGPS:
                if key in batch:
                    dead = ~self._live if batch[key].ndim == 1 else ~self._live.unsqueeze(1)
                    batch[key] = batch[key].masked_fill(dead, 0.0)
        self._sampled = self._live = None

    def _logps_of_live_rows(
        self, model: Any, input_ids: Tensor, attention_mask: Tensor, width: int, size: int
    ) -> Tensor:
        """(rows, T), NaN for rows of groups without varying rewards: TRL leaves NaN out of its means.

        A listener that needs those rows, too, gets them from passes of their own, so that training does not change.
        """
        if self._live is None:
            self._live = self._rows_of_varying_groups().to(input_ids.device)
        before = input_ids.size(1) - width
        batch = {
            "prompt_ids": input_ids[:, :before],
            "prompt_mask": attention_mask[:, :before],
            "completion_ids": input_ids[:, before:],
            "completion_mask": attention_mask[:, before:],
        }
        self._check_sharing(batch)
        logps = self._scattered(batch, self._live, size, partial(self._counted_logps, model))
        if self.rollout_events.needs_all_rows:
            devices = [input_ids.device] if input_ids.device.type == "cuda" else []
            with torch.random.fork_rng(devices):
                dead = self._scattered(batch, ~self._live, size, partial(self._counted_logps, model))
            logps = torch.where(self._live.unsqueeze(1), logps, dead)
        return logps

    def _rows_of_varying_groups(self) -> Tensor:
        """(rows,) bool of this process. Scores the completions now; TRL gets the same rewards when it asks."""
        assert self._sampled is not None  # TRL is making a batch
        rewards = self.rollout_events.score_ahead(self._sampled)
        groups = rewards.view(-1, self.num_generations, rewards.size(1))
        groups = groups.nan_to_num(nan=torch.finfo(groups.dtype).min)  # a missing reward differs from any other
        varies = (groups != groups[:, :1]).flatten(1).any(dim=1)
        return self._local(varies.repeat_interleave(self.num_generations))

    def _scattered(self, batch: Batch, rows: Tensor, size: int, forward: Callable[[Batch], Tensor]) -> Tensor:
        """(rows, T) of a forward pass over some rows, NaN for the others. A call for all processes together."""
        chosen, accelerator = rows.nonzero().squeeze(1), self.accelerator
        trimming = self._plan.trimming
        found = forward_in_step(forward, batch, chosen.tolist(), take(batch, [0]), size, accelerator, **trimming)
        assert found is not None  # of a batch
        return found.new_full((len(rows), found.size(1)), torch.nan).index_copy(0, chosen, found)

    def _counted_logps(self, model: Any, batch: Batch) -> Tensor:
        self._micro_batches.count_ahead(self._micro_batches.positions(batch), 0)
        logps: Tensor = self._get_per_token_logps_and_entropies(model, *whole_rows(batch))[0]
        return logps

    def _load_run_state(self, folder: str | None) -> None:
        super()._load_run_state(folder)
        if self._buffered_inputs is not None:  # in the middle of a generation batch, which is not checked again
            self._check_sharing(self._buffered_inputs[0])

    def _check_sharing(self, batch: Batch) -> None:
        """Whether prompts can be shared; a call for all processes together."""
        if self._shared_prompts is not None:
            plain = super()._get_per_token_logps_and_entropies
            self._shared_prompts.check(self.model, lambda *rows: plain(self.model, *rows)[0], batch)

    # Passes of our own, without gradients

    @torch.no_grad()
    def _logps_and_entropies(
        self, batch: Batch, compute_entropy: bool = False, model: Any = None, counted: bool = True
    ) -> tuple[Tensor, Any]:
        """(rows, T) each, log-probs and entropies in nats under the present weights, or under those of a model.

        Without `compute_entropy`, entropies are `None`; with `counted`, the pass counts among those of the update.
        """
        batches = chunks(batch, self.args.per_device_train_batch_size)
        if counted:
            self._micro_batches.count_ahead(sum(map(self._micro_batches.positions, batches)), 0)
        parts = [
            self._get_per_token_logps_and_entropies(
                self.model if model is None else model,
                *whole_rows(part),
                compute_entropy=compute_entropy,
                **{key: part[key] for key in IMAGE_KEYS if key in part},
            )[:2]
            # TRL would show a part without images none of them, which models do not take.
            for part in batches
        ]
        logps, entropies = zip(*parts, strict=True)
        return torch.cat(logps), torch.cat(entropies) if compute_entropy else None

    def _logps_now(self, batch: Batch) -> Tensor:
        return self._logps_and_entropies(batch)[0]

    def _reference_logps(self, batch: Batch) -> Tensor:
        if self.ref_model is not None:
            return self._logps_and_entropies(batch, model=self.ref_model)[0]
        from trl.trainer.utils import use_adapter  # for adapters alone

        model = self.accelerator.unwrap_model(self.model)  # of adapters: without them, or with those it began with
        with use_adapter(model, adapter_name="ref" if "ref" in model.peft_config else None):
            return self._logps_and_entropies(batch)[0]

    def _mean_entropies(self, batch: Batch) -> Tensor:
        """(B,) mean token entropy of each completion in nats, on the CPU: known otherwise only once it is updated."""
        mask = loss_mask(batch)
        per_token = self._logps_and_entropies(batch, compute_entropy=True)[1]
        means: Tensor = self.accelerator.gather((per_token * mask).sum(dim=1) / mask.sum(dim=1).clamp(min=1))
        return means.cpu()

    def _local(self, values: Tensor) -> Tensor:
        """This process's part of values over the rows of all processes. (B,) -> (rows,)."""
        own: Tensor = own_share(values, self.accelerator)
        return own

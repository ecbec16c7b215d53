"""Forward passes of a trainer over rows of its batch, without gradients."""

from typing import Any

import torch
from torch import Tensor

from ragen2_trl.trainers.batches import Batch, chunks, loss_mask
from ragen2_trl.trainers.images import IMAGE_KEYS


class ForwardPasses:
    """Log-probs of a batch's completions, and the policy's entropy. Mixed into one of TRL's trainers."""

    model: Any
    ref_model: Any
    args: Any
    accelerator: Any

    @torch.no_grad()
    def _logps_and_entropies(
        self, batch: Batch, compute_entropy: bool = False, model: Any = None
    ) -> tuple[Tensor, Tensor | None]:
        """(rows, T) each, log-probs and entropies in nats under the present weights, or under those of a model."""
        parts = [
            self._get_per_token_logps_and_entropies(
                self.model if model is None else model,
                torch.cat([part["prompt_ids"], part["completion_ids"]], dim=1),
                torch.cat([part["prompt_mask"], part["completion_mask"]], dim=1),
                part["completion_ids"].size(1),
                compute_entropy=compute_entropy,
                **{key: part[key] for key in IMAGE_KEYS if key in part},
            )[:2]
            # TRL would show a part without images none of them, which models do not take.
            for part in chunks(batch, self.args.per_device_train_batch_size)
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

    def _entropy_of_some(self, batch: Batch) -> float:
        """In nats per token, for the log row of a batch that is not computed: over a micro-batch of each process."""
        part = chunks(batch, self.args.per_device_train_batch_size)[0]
        mask = loss_mask(part)
        device = self.accelerator.device
        with torch.random.fork_rng([device] if device.type == "cuda" else []):  # dropout draws, and nothing may change
            entropies = self._logps_and_entropies(part, compute_entropy=True)[1]
        total, count = self.accelerator.reduce(
            torch.stack([(entropies * mask).sum(), mask.sum().float()]), reduction="sum"
        )
        return (total / count.clamp(min=1)).item()

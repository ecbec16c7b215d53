"""Training samples of an episode after its first: turns that were sampled from contexts of their own.

A rollout gives one completion for each row of TRL's batch, the first sample of its episode. The others come along in
a column and join the batch once groups are selected: each with the advantage of its episode, and kept or dropped with
it.
What the model saw when it sampled a turn is the prompt of that turn's row.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor
from trl.trainer.utils import pad

from ragen2_trl.columns import TURN_SAMPLES
from ragen2_trl.rollout_events import end_tokens
from ragen2_trl.trainers.batches import Batch, join, take
from ragen2_trl.trainers.log_probs import forward_in_step


def check_turn_samples(trainer: Any) -> None:
    """Raise a `ValueError` for settings under which an episode cannot be several training samples."""
    args = trainer.args
    unfit = {
        f"snr_dynamic_sampling_rounds={args.snr_dynamic_sampling_rounds}": args.snr_dynamic_sampling_rounds > 0,
        f"snr_pilot_generations={args.snr_pilot_generations}": bool(args.snr_pilot_generations),
        f"snr_score={args.snr_score!r}": args.snr_score.startswith("entropy"),
        "vllm_importance_sampling_correction=True": args.use_vllm and args.vllm_importance_sampling_correction,
    }
    if found := [setting for setting, is_unfit in unfit.items() if is_unfit]:
        raise ValueError(
            f"{found[0]} knows of one training sample an episode; allowed with contexts of single turns: "
            "snr_dynamic_sampling_rounds=0, snr_pilot_generations=0, a snr_score of rewards or lengths, "
            "vllm_importance_sampling_correction=False."
        )


def with_turn_samples(trainer: Any, batch: Batch, kept: Tensor) -> tuple[Batch, Tensor]:
    """A batch of all samples, each with the advantage of its episode. A call for all processes together.

    Args:
        trainer: One of ours.
        batch: One row an episode, with its turn samples in a list.
        kept: (rows,) bool, the episodes that are trained on.

    Returns:
        A multiple of `steps_per_generation` rows, filled up with others, and (rows,) bool for those to train on.
    """
    args, log_probs = trainer.args, trainer._log_probs
    batch = dict(batch)
    later = batch.pop(TURN_SAMPLES)
    episodes = len(later)
    owners = [episode for episode, samples in enumerate(later) for _ in samples]
    all_samples = [sample for samples in later for sample in samples]
    further = _laid_out(all_samples, owners, batch, end_tokens(trainer), args)
    # Under the policy that sampled, and under the reference.
    for key, logps in (("old_per_token_logps", log_probs.now), ("ref_per_token_logps", log_probs.reference)):
        if key in batch:
            own = kept[owners].nonzero().squeeze(1).tolist()
            size, spare = args.per_device_train_batch_size, take(batch, [0])
            computed = forward_in_step(partial(map, logps), further or None, own, spare, size, trainer.accelerator)
            if computed is not None:
                further[key] = computed.float()
    whole = join([batch, further], trainer._plan.padding[0]) if further else batch
    rows = list(range(episodes + len(owners)))
    spare_rows = [0] * (-len(rows) % args.steps_per_generation)
    kept = torch.cat([kept, kept[owners], kept.new_zeros(len(spare_rows))])
    return take(whole, rows + spare_rows), kept


def _laid_out(
    samples: list[dict[str, Any]], owners: list[int], batch: Batch, end_tokens: list[int], args: Any
) -> Batch:
    """Samples as TRL lays out rows, with what they share with the rows of their episodes; empty without any."""
    if not samples:
        return {}
    device = batch["prompt_ids"].device
    # Fill values do not matter where masks are 0.
    prompts = [torch.tensor(sample["prompt_ids"]) for sample in samples]
    completions = [torch.tensor(sample["completion_ids"]) for sample in samples]
    laid_out: Batch = {
        "prompt_ids": pad(prompts, padding_value=0, padding_side="left"),
        "prompt_mask": pad([torch.ones_like(ids) for ids in prompts], padding_value=0, padding_side="left"),
        "completion_ids": pad(completions, padding_value=0),
        "completion_mask": pad([torch.ones_like(ids) for ids in completions], padding_value=0),
        "tool_mask": pad([torch.tensor(sample["env_mask"]) for sample in samples], padding_value=1),
    }
    if args.mask_truncated_completions:
        ended = torch.tensor([sample["completion_ids"][-1] in end_tokens for sample in samples])
        for key in ("completion_mask", "tool_mask"):
            laid_out[key] = laid_out[key] * ended.unsqueeze(1)
    if "sampling_per_token_logps" in batch:
        logps = [torch.tensor([torch.nan if x is None else x for x in sample["logprobs"]]) for sample in samples]
        laid_out["sampling_per_token_logps"] = pad(logps, padding_value=0)
    laid_out = {key: value.to(device) for key, value in laid_out.items()}
    shared = {"advantages": batch["advantages"][owners]}
    whole = {key: value for key, value in batch.items() if not (isinstance(value, Tensor) and value.ndim)}
    return {**whole, **laid_out, **shared}

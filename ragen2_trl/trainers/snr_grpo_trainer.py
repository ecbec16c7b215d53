"""GRPO that trains only on prompts whose rewards vary (SNR-aware filtering, arXiv 2604.06268)."""

import copy
import os
import textwrap
from typing import Any

import numpy as np
import torch
from accelerate.logging import get_logger
from accelerate.utils import broadcast_object_list, gather_object, send_to_device
from datasets import Dataset, IterableDataset
from torch import Tensor
from torch.utils.data import Sampler
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from trl import GRPOConfig, GRPOTrainer
from trl.trainer.utils import nanstd

from ragen2_trl.callbacks.run_record import keep_record
from ragen2_trl.filtering import group_score, select_groups, selection_metrics, zero_variance
from ragen2_trl.rollouts import TextRollout
from ragen2_trl.trainers.batches import (
    Batch,
    join,
    loss_mask,
    padded_size,
    row_lengths,
    take,
    without_loss,
)
from ragen2_trl.trainers.dealing import accumulation_segments, deal_rows
from ragen2_trl.trainers.empty_steps import EmptyStepCallback
from ragen2_trl.trainers.refill import Pool, PromptStream, own_share, round_size
from ragen2_trl.trainers.resumable_sampler import ResumableSampler
from ragen2_trl.trainers.snr_grpo_config import TOKEN_NORMALIZED_LOSSES, SNRFilteredGRPOConfig

logger = get_logger(__name__)

# Keys that ride along in TRL's batches.
KEPT = "snr_kept"  # (rows,) bool: shuffled and split together with the rows
WEIGHT = "snr_weight"  # what a micro-batch's loss is multiplied by, see `_weighted`
ROWS = "snr_rows"  # number of kept rows in a micro-step, over all processes
SKIP: Batch = {}  # a micro-step that is skipped: it has no rows

STATE_FILE = "snr_state_{rank}.pt"
LAYOUT_FIELDS = (
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "steps_per_generation",
    "num_generations",
    "num_iterations",
    "loss_type",
    "seed",
)
VISION_KEYS = (
    "pixel_values",
    "image_grid_thw",
    "num_images",
    "pixel_attention_mask",
    "spatial_shapes",
    "num_tiles",
    "image_sizes",
    "token_type_ids",
    "mm_token_type_ids",
    "image_position_ids",
)


class SNRFilteredGRPOTrainer(GRPOTrainer):
    """
    GRPO on the prompt groups that carry signal: after each generation, groups of completions are ranked by the
    variance of their rewards, and only those that hold most of it are trained on.

    Everything else is inherited from [`~trl.GRPOTrainer`], which this class can replace in an existing script. With a
    filter that keeps every group it computes bit-identical parameters. In `drop` mode (the default) dropped
    completions take no part in the update's forward and backward passes, and the gradient equals the one GRPO
    computes on a batch of the kept groups alone. Evaluation is never filtered.

    Groups of a generation batch are scored together. Where one optimizer step spans several generation batches
    (`steps_per_generation` smaller than `gradient_accumulation_steps`), each of them keeps TRL's equal weight, and one
    without a kept group adds nothing.

    Args:
        model, reward_funcs, train_dataset, eval_dataset, processing_class, **kwargs:
            As for [`~trl.GRPOTrainer`].
        args ([`SNRFilteredGRPOConfig`] or [`~trl.GRPOConfig`], *optional*):
            A plain `GRPOConfig` gets the filter's default settings, in a copy.

    Raises:
        ValueError: before training for a setting out of range or a dataset without prompts; at the first generation
            when no reward function returns a number.
        TypeError: for a configuration that is neither of the two.

    Example:

    ```python
    >>> from ragen2_trl import SNRFilteredGRPOConfig, SNRFilteredGRPOTrainer
    >>> from trl.rewards import accuracy_reward
    >>> from datasets import load_dataset

    >>> trainer = SNRFilteredGRPOTrainer(  # doctest: +SKIP
    ...     model="Qwen/Qwen2.5-0.5B-Instruct",
    ...     reward_funcs=accuracy_reward,
    ...     args=SNRFilteredGRPOConfig(snr_value=0.9),
    ...     train_dataset=load_dataset("trl-lib/DeepMath-103K", split="train"),
    ... )
    >>> trainer.train()  # doctest: +SKIP
    ```
    """

    _tag_names = ["trl", "grpo", "snr-filter", "ragen2"]  # noqa: RUF012 -- TRL declares it so
    _name = "SNR-filtered GRPO"
    _paper = {  # noqa: RUF012 -- TRL declares it so
        "title": "RAGEN-2: Reasoning Collapse in Agentic RL",
        "id": "2604.06268",
        "citation": textwrap.dedent("""\
            @article{wang2026ragen2,
                title  = {{RAGEN-2: Reasoning Collapse in Agentic RL}},
                author = {Zihan Wang and Chi Gui and Xing Jin and Qineng Wang and Licheng Liu and Kangrui Wang and Shiqi Chen and Linjie Li and Zhengyuan Yang and Pingyue Zhang and Yiping Lu and Jiajun Wu and Li Fei-Fei and Lijuan Wang and Yejin Choi and Manling Li},
                year   = 2026,
                eprint = {arXiv:2604.06268},
            }"""),  # noqa: E501 -- BibTeX
    }

    args: SNRFilteredGRPOConfig

    def __init__(
        self,
        model: Any,
        reward_funcs: Any = None,
        args: GRPOConfig | None = None,
        train_dataset: Dataset | IterableDataset | None = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        **kwargs: Any,
    ):
        if args is None:
            name = model if isinstance(model, str) else model.config._name_or_path
            args = SNRFilteredGRPOConfig(f"{name.split('/')[-1]}-SNR-GRPO")
        _check_prompt_column(train_dataset, kwargs.get("environment_factory"))
        args = _with_snr_fields(args)
        super().__init__(model, reward_funcs, args, train_dataset, eval_dataset, processing_class, **kwargs)
        if self.args.snr_mode == "mask" and self.aux_loss_enabled:
            raise ValueError(
                f"snr_mode='mask' cannot weigh the load-balancing loss (router_aux_loss_coef="
                f"{self.router_aux_loss_coef}); allowed: snr_mode='drop', or router_aux_loss_coef=0."
            )
        if self.is_deepspeed_enabled:
            self._guard_engine()
        _check_same_on_all_processes(self.args, self.accelerator.num_processes)
        if self.args.snr_refill_rounds > 0 and not isinstance(self.train_dataset, Dataset):
            raise ValueError(
                f"snr_refill_rounds={self.args.snr_refill_rounds} draws further prompts by their row, which a "
                f"{type(self.train_dataset).__name__} does not have; allowed: datasets.Dataset, or 0 rounds."
            )
        if isinstance(self.rollout_func, TextRollout):
            self.rollout_func.attach(self)
        self._start_run()
        self.add_callback(EmptyStepCallback(self))
        keep_record(self)

    def _start_run(self) -> None:
        """The state of a run that begins."""
        self.latest_selection: tuple[Tensor, Tensor] | None = None  # (N,) scores, (N,) which groups are kept
        self._rewards_per_func: Tensor | None = None  # (B, F) of the latest generation, over all processes
        self._refill_rows: Any = []
        if self.args.snr_refill_rounds > 0:
            self._refill_rows = self._remove_unused_columns(self.train_dataset, description="training")
        self._prompt_stream = PromptStream(len(self._refill_rows), self.args.seed)
        self._waiting: Batch | None = None  # kept groups that had no room, on the CPU, those of all processes
        self._waiting_since = 0  # optimizer steps when they were sampled
        self._reward_range: tuple[float, float] | None = None  # lowest and highest reward of the run so far
        self._before_packing: list[Batch] | None = None  # TRL's own micro-batches, where rows were dropped
        self._latest_metrics: dict[str, float] = {}  # for steps that reuse completions
        self._skipping = False  # whether the micro-step at hand has no rows
        self._window_position = 0  # micro-steps since the last optimizer step
        self._window_has_rows = False  # whether one of them had a kept row
        self._empty_steps = 0
        self._empty_streak = 0

    # Selection: after TRL has generated and scored

    def _calculate_rewards(self, inputs: list, prompts: list, completions: list, completion_ids_list: list) -> Tensor:
        self._rewards_per_func = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
        return self._rewards_per_func

    def _sample_and_score(self, inputs: list[dict[str, Any]]) -> Batch:
        """TRL's batch before any of it is dropped."""
        return super()._generate_and_score_completions(inputs)

    def _sample_first(self, inputs: list[dict[str, Any]]) -> Batch:
        """That of the prompts a step begins with: what callbacks watch, and no round of a refill."""
        return self._sample_and_score(inputs)

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> Batch:
        batch = self._sample_first(inputs)
        if not self.model.training:
            return batch
        self._before_packing = None
        kept = self._select(batch)  # (N,)
        lengths = self.accelerator.gather(loss_mask(batch).sum(dim=1))  # (B,)
        tokens = lengths.view(len(kept), -1).sum(dim=1).cpu()
        self._log("kept_tokens_fraction", (tokens[kept].sum() / tokens.sum().clamp(min=1)).item())
        if self.args.snr_refill_rounds > 0:
            return self._refill(batch, kept)
        if not kept.all():
            kept_rows = kept.repeat_interleave(self.num_generations).to(lengths.device)  # (B,)
            batch["num_items_in_batch"] = (lengths * kept_rows).sum()
            batch[KEPT] = self._local(kept_rows)
        return batch

    def _select(self, batch: Batch, refilling: bool = False) -> Tensor:
        """(N,) which groups of a batch are kept, its advantages scaled accordingly."""
        rewards = self._group_rewards()  # (N, G)
        scores = self._score_groups(batch, rewards)  # (N,)
        signal = ~zero_variance(rewards).cpu()
        if self.args.snr_mode == "soft":
            kept = signal.any().expand(len(signal))  # every group, unless none can teach anything
        else:
            kept = select_groups(
                scores,
                self.args.snr_strategy,
                self.args.snr_value,
                include_zero=self.args.snr_include_zero,
                selection_eps=self.args.snr_selection_eps,
                keep=self.args.snr_keep,
                is_zero=~signal,
            )
        self._widen_reward_range(rewards)
        if not refilling:  # the first prompts of a step are what other runs are compared by
            for name, value in selection_metrics(rewards, scores, kept, self._reward_range).items():
                self._log(name, value)
            self.latest_selection = (scores.cpu(), kept)
        self._scale_advantages(batch, rewards, kept)
        return kept

    def _group_rewards(self) -> Tensor:
        """(N, G) weighted reward sums as sampled, before any normalisation; NaN where there is no finite one."""
        per_func = self._rewards_per_func
        rewards = (per_func * self.reward_weights.to(per_func.device)).nansum(dim=1)
        unscorable = per_func.isnan().all(dim=1) | ~rewards.isfinite()
        rewards = rewards.masked_fill(unscorable, torch.nan).view(-1, self.num_generations)
        if self._reward_range is None and rewards.isnan().all():
            raise ValueError(
                f"reward_funcs={self.reward_func_names} returned None, NaN or infinity for every one of the first "
                f"{rewards.numel()} completions; allowed: a finite number for at least one completion."
            )
        return rewards

    def _score_groups(self, batch: Batch, rewards: Tensor) -> Tensor:
        kind = self.args.snr_score
        mask = loss_mask(batch)
        per_group = (-1, self.num_generations)
        entropies = lengths = generator = None
        if kind == "length":
            lengths = self.accelerator.gather(mask.sum(dim=1)).view(per_group)
        elif kind.startswith("entropy"):
            entropies = self.accelerator.gather(self._mean_token_entropy(batch, mask)).view(per_group)
        elif kind == "random":
            # A generator of its own, so that training draws the same global random numbers; the same on every
            # process and after a resume.
            seed = np.random.SeedSequence([self.args.seed, self.state.global_step, self._window_position])
            generator = torch.Generator().manual_seed(int(seed.generate_state(1)[0]))
        return group_score(rewards, kind, entropies=entropies, lengths=lengths, generator=generator)

    def _mean_token_entropy(self, batch: Batch, mask: Tensor) -> Tensor:
        """(rows,) in nats, from a forward pass of its own: GRPO knows entropies only once it updates."""
        _, entropies = self._logps_and_entropies(batch, compute_entropy=True)
        return (entropies * mask).sum(dim=1) / mask.sum(dim=1).clamp(min=1)

    @torch.no_grad()
    def _logps_and_entropies(self, batch: Batch, compute_entropy: bool = False) -> tuple[Tensor, Tensor | None]:
        """(rows, T) each, under the present weights."""
        logps, entropies, _ = self._get_per_token_logps_and_entropies(
            self.model,
            torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1),
            torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1),
            batch["completion_ids"].size(1),
            batch_size=self.args.per_device_train_batch_size,
            compute_entropy=compute_entropy,
            **{key: batch[key] for key in VISION_KEYS if key in batch},
        )
        return logps, entropies

    def _scale_advantages(self, batch: Batch, rewards: Tensor, kept: Tensor) -> None:
        """Advantages as if the kept groups were the whole batch, with the weights of `soft` and `snr_loss_scaling`."""
        advantages = batch["advantages"]
        if self.args.snr_mode == "soft":
            std = group_score(rewards, "reward_std")
            weight = (std / std.max().clamp(min=1e-6)).repeat_interleave(self.num_generations)
            batch["advantages"] = advantages * self._local(weight).to(advantages)
            return
        if kept.all() or not kept.any():
            return
        of_kept = kept.repeat_interleave(self.num_generations).to(rewards.device) & ~rewards.flatten().isnan()
        if self.multi_objective_aggregation == "normalize_then_sum":
            # TRL has computed a = (R - mean(R)) / (std(R) + 1e-4) over the whole batch. Over the kept rows,
            # (R - mean) / (std + 1e-4) follows from a alone, since 1e-4 / (std(R) + 1e-4) = 1 - std(a).
            everywhere = self.accelerator.gather(advantages)
            scorable = everywhere.where(~rewards.flatten().isnan(), torch.nan)
            over_kept = everywhere.where(of_kept, torch.nan)
            advantages = (advantages - over_kept.nanmean()) / (nanstd(over_kept) + 1 - nanstd(scorable))
            advantages = advantages * self._local(of_kept)
        elif self.scale_rewards == "batch":
            std_of_kept = nanstd(rewards.flatten().where(of_kept, torch.nan))
            advantages = advantages * (nanstd(rewards.flatten()) + 1e-4) / (std_of_kept + 1e-4)
        exponent = {"none": 0.0, "linear": 1.0, "sqrt": 0.5}[self.args.snr_loss_scaling]
        batch["advantages"] = advantages * float(kept.double().mean()) ** exponent

    def _widen_reward_range(self, rewards: Tensor) -> None:
        valid = rewards[~rewards.isnan()]
        if valid.numel():
            low, high = self._reward_range or (torch.inf, -torch.inf)
            self._reward_range = (min(low, valid.min().item()), max(high, valid.max().item()))

    def _log(self, name: str, value: float) -> None:
        self._metrics["train"][f"snr/{name}"].append(value)
        self._latest_metrics[f"snr/{name}"] = value

    def _local(self, values: Tensor) -> Tensor:
        """This process's part of values over the rows of all processes. (B,) -> (rows,)."""
        return own_share(values, self.accelerator)

    # Refilling: where too few groups were kept

    def _refill(self, batch: Batch, kept: Tensor) -> Batch:
        """Sample further prompts until N groups are kept or the rounds are used up; what is too much waits."""
        limit, processes = len(kept), self.accelerator.num_processes
        self._trl_gives_logps = "old_per_token_logps" in batch
        age = self.state.global_step - self._waiting_since
        waiting = self._pool([] if self._waiting is None else [self._waiting])
        stale = waiting.num_groups if age > self.args.snr_max_staleness else 0
        pool = self._pool([]) if stale else waiting
        carried = pool.num_groups
        pool.add(self._with_logps_to_come(batch), self._kept_rows(kept))
        rounds, sampled, found = 0, limit, int(kept.sum())
        while pool.num_groups < limit and rounds < self.args.snr_refill_rounds:
            size = round_size(limit - pool.num_groups, found, sampled, limit, self.num_generations, processes)
            rows = [self._refill_rows[row] for row in self._prompt_stream.draw(size)]
            # One for each completion: TRL writes into them what a rollout function returns, environments what they do.
            rows = [copy.deepcopy(row) for row in rows for _ in range(self.num_generations)]
            further = self._sample_and_score(own_share(rows, self.accelerator))
            kept = self._select(further, refilling=True)
            pool.add(self._with_logps_to_come(further), self._kept_rows(kept))
            rounds, sampled, found = rounds + 1, sampled + size, found + int(kept.sum())

        used, self._waiting = pool.split(limit)
        self._waiting_since = self.state.global_step
        surplus = max(0, pool.num_groups - limit)
        if self._updates_per_generation() > self.args.snr_max_staleness:  # too old by then: not worth keeping
            self._waiting, stale, surplus = None, stale + surplus, 0
        if self._waiting is not None:
            self._fill_in_logps(self._waiting)  # now: the policy that sampled them is about to change
        for name, value in (
            ("refill_rounds", rounds),
            ("refilled_groups", min(pool.num_groups, limit)),
            ("carried_groups", carried),
            ("waiting_groups", surplus),
            ("stale_groups", stale),
            ("prompts_used", sampled),
        ):
            self._log(name, float(value))
        return self._lay_out(used, self._with_logps_to_come(batch), carried > 0)

    def _pool(self, batches: list[Batch]) -> Pool:
        return Pool(self.num_generations, self._tokenizer.pad_token_id, self.pad_to_multiple_of, batches)

    def _updates_per_generation(self) -> int:
        """Whole optimizer steps from one generation to the next."""
        return self.args.steps_per_generation * self.num_iterations // self.args.gradient_accumulation_steps

    def _kept_rows(self, kept: Tensor) -> list[int]:
        """Numbers of this process's rows in kept groups."""
        return self._local(kept.repeat_interleave(self.num_generations)).nonzero().squeeze(1).tolist()

    def _lay_out(self, used: Batch | None, batch: Batch, carried: bool) -> Batch:
        """This process's share of the pooled groups, filled up with rows of `batch` that count as dropped."""
        rows = len(batch["prompt_ids"])
        total = 0 if used is None else len(used["prompt_ids"])
        own = list(range(self.accelerator.process_index * rows, total))[:rows]
        multiple = self.pad_to_multiple_of
        parts = [send_to_device(take(used, own, multiple), self.accelerator.device)] if own else []
        if len(own) < rows:
            parts.append(take(batch, list(range(rows - len(own))), multiple))
        laid_out = take(join(parts, self._tokenizer.pad_token_id), list(range(rows)), multiple)
        if carried:  # an older policy's rows need ratios, so that all need the log-probs of their policies
            self._fill_in_logps(laid_out)
        elif not self._trl_gives_logps:
            del laid_out["old_per_token_logps"]
        tokens = 0 if used is None else int(loss_mask(used).sum())
        laid_out["num_items_in_batch"] = torch.tensor(tokens, device=self.accelerator.device)
        laid_out[KEPT] = torch.arange(rows, device=self.accelerator.device) < len(own)
        return laid_out

    def _with_logps_to_come(self, batch: Batch) -> Batch:
        """TRL leaves out `old_per_token_logps` where an update begins with the policy that sampled: NaN for now."""
        return {"old_per_token_logps": torch.full_like(batch["completion_ids"], torch.nan, dtype=torch.float), **batch}

    def _fill_in_logps(self, batch: Batch) -> None:
        """Log-probs under the present policy for the rows that have none. A call for all processes together."""
        if self._trl_gives_logps:
            return
        given = batch["old_per_token_logps"]
        logps, _ = self._logps_and_entropies(send_to_device(batch, self.accelerator.device))
        batch["old_per_token_logps"] = given.where(~given.isnan(), logps.to(given))

    # Packing: before each pass over a generation batch

    def _prepare_inputs(self, generation_batch: Any) -> Batch:
        inputs = super()._prepare_inputs(generation_batch)
        if not self.model.training:
            return inputs
        if self._step % self.args.steps_per_generation == 0:
            if KEPT in self._buffered_inputs[0]:  # fresh from TRL; packed micro-batches no longer carry it
                self._before_packing = self._buffered_inputs
            if self._before_packing is not None:
                self._buffered_inputs = self._pack(self._before_packing)
                inputs = self._buffered_inputs[0]
                if self.num_iterations == 1:
                    self._before_packing = None  # no second pass will cut it differently
            else:  # nothing was dropped: TRL's micro-batches stand as they are
                self._log("update_compute_fraction", 1.0)
        self._window_has_rows |= bool(inputs) and inputs.get(ROWS, 1) > 0
        self._window_position += 1
        return inputs

    def _pack(self, micro_batches: list[Batch]) -> list[Batch]:
        """The micro-batches of the kept rows, for one pass over TRL's micro-batches of kept and dropped ones."""
        left_in_window = self.current_gradient_accumulation_steps - self._window_position
        segments = accumulation_segments(len(micro_batches), left_in_window, self.args.gradient_accumulation_steps)
        if self.args.snr_mode == "mask":
            packed = self._mask_rows(micro_batches)
        else:
            packed = self._deal_rows(micro_batches, segments)
        ends_window = segments[0] == left_in_window
        if ends_window and self._window_has_rows and not any(packed[:left_in_window]):
            # Earlier generation batches of this optimizer step had rows: let its last micro-step run, where gradients
            # synchronise and TRL closes the step's books.
            packed[left_in_window - 1] = self._spare_row(micro_batches)
        sizes = torch.tensor([sum(map(padded_size, filter(None, batches))) for batches in (packed, micro_batches)])
        computed, sampled = self.accelerator.reduce(sizes.to(self.accelerator.device), reduction="sum").tolist()
        self._log("update_compute_fraction", computed / sampled)
        return packed

    def _deal_rows(self, micro_batches: list[Batch], segments: list[int]) -> list[Batch]:
        """`drop`: pack the kept rows into as few micro-batches as they need; the others stay empty."""
        num_processes, process = self.accelerator.num_processes, self.accelerator.process_index
        rows = join(micro_batches, self._tokenizer.pad_token_id)
        kept = rows.pop(KEPT).nonzero().squeeze(1).tolist()
        if num_processes > 1:
            everyones = gather_object([send_to_device(take(rows, kept), "cpu")] if kept else [])
            if everyones:
                rows = send_to_device(join(everyones, self._tokenizer.pad_token_id), self.accelerator.device)
            kept = list(range(len(rows["prompt_ids"]))) if everyones else []
        lengths = row_lengths(rows).tolist()

        packed: list[Batch] = []
        for shares in deal_rows(
            [lengths[row] for row in kept], segments, self.args.per_device_train_batch_size, num_processes
        ):
            own, num_rows = [kept[number] for number in shares[process]], sum(map(len, shares))
            if own:
                weight = len(micro_batches) * num_processes * len(own) / len(kept)
                packed.append(self._weighted(take(rows, own, self.pad_to_multiple_of), weight, num_rows))
            else:  # another process has rows: all must run the same number of forward passes
                packed.append({**self._spare_row(micro_batches), ROWS: num_rows} if num_rows else SKIP)
        return packed

    def _mask_rows(self, micro_batches: list[Batch]) -> list[Batch]:
        """`mask`: compute every row, count the tokens of the kept ones only."""
        num_kept = torch.stack([batch[KEPT].sum() for batch in micro_batches])  # (steps_per_generation,)
        num_kept = self.accelerator.reduce(num_kept, reduction="sum").tolist()
        if not any(num_kept):
            return [SKIP] * len(micro_batches)
        mean_over_tokens = self.loss_type in (*TOKEN_NORMALIZED_LOSSES, "bnpo")
        packed: list[Batch] = []
        for batch, num_rows in zip(micro_batches, num_kept, strict=True):
            kept = batch[KEPT]
            # A mean over the micro-batch's tokens is one over its kept rows; a mean over rows counts zeros, too.
            own = int(kept.sum()) if mean_over_tokens else len(kept)
            weight = len(micro_batches) * self.accelerator.num_processes * own / sum(num_kept)
            packed.append(self._weighted(without_loss(batch, ~kept), weight, num_rows))
        return packed

    def _spare_row(self, micro_batches: list[Batch]) -> Batch:
        """A micro-batch of one row without any token in the loss, where a forward pass must run without rows."""
        row = take(join(micro_batches[:1], self._tokenizer.pad_token_id), [0])
        return self._weighted(without_loss(row, torch.ones_like(row[KEPT])), 0.0, 0)

    def _weighted(self, batch: Batch, weight: float, num_rows: int) -> Batch:
        """Attach the weight that makes TRL's mean over equal micro-batches a mean over the kept rows.

        `weight` is the micro-batch's share of the kept rows, times what plain TRL would make of that share: 1 where
        every micro-batch of every process is equally full.
        The rows of a generation batch weigh the same whichever micro-batch and optimizer step they are dealt to.
        Losses that divide by the tokens of the generation batch need none, but the entropy bonus and the
        load-balancing loss beside them do: dividing by `weight` times the tokens leaves the former as they were.
        """
        batch = {**batch, WEIGHT: weight, ROWS: num_rows}
        batch.pop(KEPT, None)
        if self.loss_type in TOKEN_NORMALIZED_LOSSES and weight > 0:
            batch["num_items_in_batch"] = batch["num_items_in_batch"] * weight
        return batch

    def compute_loss(self, model: Any, inputs: Batch, *args: Any, **kwargs: Any) -> Tensor:
        self._skipping = not inputs
        if self._skipping:
            # A leaf of its own: TRL's training step runs backward on it and reaches no parameter.
            return torch.zeros((), device=self.accelerator.device, requires_grad=True)
        return super().compute_loss(model, inputs, *args, **kwargs)

    def _guard_engine(self) -> None:
        """Keep DeepSpeed's engine out of micro-steps that are skipped, and so its optimizer out of empty steps.

        Its backward pass counts micro-steps (in ZeRO-3 the first one of a step overwrites the gradients of the last
        step, and later ones add), reduces buckets that a skipped micro-step has not filled, and takes the step itself.
        """
        backward = self.accelerator.backward

        def guarded(loss: Tensor, **kwargs: Any) -> None:
            if not self._skipping:
                backward(loss, **kwargs)

        self.accelerator.backward = guarded

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
        # DeepSpeed would report that of the last step it took.
        return super()._get_grad_norm(model, grad_norm=grad_norm) if self._window_has_rows else 0.0

    def _compute_loss(self, model: Any, inputs: Batch) -> Tensor:
        loss = super()._compute_loss(model, inputs)
        return loss * inputs[WEIGHT] if WEIGHT in inputs else loss

    # Resuming

    def _get_train_sampler(self, dataset: Dataset | None = None) -> Sampler:
        return ResumableSampler(super()._get_train_sampler(dataset), self)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        folder = os.path.join(self._get_output_dir(trial=trial), f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}")
        os.makedirs(folder, exist_ok=True)
        amid_generation = self._step % (self.args.steps_per_generation * self.num_iterations) != 0
        state = {
            "layout": self._batch_layout(),
            "shared": {
                "latest": self._latest_metrics,
                "reward_range": self._reward_range,
                "empty_steps": self._empty_steps,
                "empty_streak": self._empty_streak,
                "waiting": self._waiting,
                "waiting_since": self._waiting_since,
                "prompts_drawn": self._prompt_stream.drawn,
            },
            "step": self._step,
            # TRL samples anew after a resume; a checkpoint in the middle of a generation batch takes it along.
            "buffered_inputs": self._buffered_inputs if amid_generation else None,
            "generated": self._before_packing if amid_generation else None,
        }
        # Written before the rest: a checkpoint that has its trainer_state.json is complete.
        torch.save(state, os.path.join(folder, STATE_FILE.format(rank=self.accelerator.process_index)))
        super()._save_checkpoint(model, trial)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        self._start_run()
        own = self._read_state(checkpoint)
        # What all processes share comes from the first of them: others may be new, or on another machine.
        (shared,) = broadcast_object_list([own and own["shared"]])
        if shared is None:
            return  # a fresh run, or a checkpoint of TRL's own trainer
        self._latest_metrics, self._reward_range = shared["latest"], shared["reward_range"]
        self._empty_steps, self._empty_streak = shared["empty_steps"], shared["empty_streak"]
        self._prompt_stream.drawn = shared["prompts_drawn"]
        layouts = gather_object([own and own["layout"]])
        if any(layout != self._batch_layout() for layout in layouts):
            logger.warning(
                f"The checkpoint was written with {layouts[0]} and is resumed with {self._batch_layout()}: "
                "the generation batch in progress and groups that wait for the next, if any, are sampled anew."
            )
            return
        self._waiting, self._waiting_since = shared["waiting"], shared["waiting_since"]
        self._step = own["step"]
        self._buffered_inputs, self._before_packing = own["buffered_inputs"], own["generated"]

    def _read_state(self, checkpoint: str | None) -> dict[str, Any] | None:
        """What this process wrote into a checkpoint; `None` if it did not."""
        path = checkpoint and os.path.join(checkpoint, STATE_FILE.format(rank=self.accelerator.process_index))
        if not path or not os.path.exists(path):
            return None
        state = torch.load(path, map_location=self.accelerator.device, weights_only=True)
        state["shared"]["waiting"] = send_to_device(state["shared"]["waiting"], "cpu")
        return state

    def _batch_layout(self) -> dict[str, int]:
        return {
            "per_device_train_batch_size": self.args.per_device_train_batch_size,
            "steps_per_generation": self.args.steps_per_generation,
            "num_generations": self.num_generations,
            "num_iterations": self.num_iterations,
            "num_processes": self.accelerator.num_processes,
        }


def _with_snr_fields(args: GRPOConfig) -> SNRFilteredGRPOConfig:
    """Let a plain `GRPOConfig` carry the filter's defaults, so that swapping the trainer class is enough."""
    if isinstance(args, SNRFilteredGRPOConfig):
        return args
    if type(args) is not GRPOConfig:
        raise TypeError(
            f"args={type(args).__name__}; allowed: SNRFilteredGRPOConfig, a class derived from it, or exactly "
            "trl.GRPOConfig."
        )
    # The new fields' defaults are class attributes. Building a new instance would instead check and derive again
    # what GRPOConfig has already derived.
    args = copy.copy(args)
    args.__class__ = SNRFilteredGRPOConfig
    return args


def _check_same_on_all_processes(args: SNRFilteredGRPOConfig, num_processes: int) -> None:
    """Processes that select differently would wait for one another forever."""
    if num_processes == 1:
        return
    names = [name for name in args.__dataclass_fields__ if name.startswith("snr_")] + [*LAYOUT_FIELDS]
    settings = gather_object([{name: getattr(args, name) for name in names}])
    for name in names:
        values = [one[name] for one in settings]
        if any(value != values[0] for value in values):
            raise ValueError(
                f"{name} differs between processes, in their order: {values}; allowed: one value for all."
            )


def _check_prompt_column(train_dataset: Dataset | IterableDataset | None, environment_factory: Any) -> None:
    columns = train_dataset.column_names if isinstance(train_dataset, (Dataset, IterableDataset)) else None
    if isinstance(train_dataset, Dataset) and train_dataset.format["type"] == "custom":
        return  # a transform may make the prompt of other columns
    if columns is not None and "prompt" not in columns and environment_factory is None:
        raise ValueError(f"train_dataset has the columns {columns}; one of them must be 'prompt'.")

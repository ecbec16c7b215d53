"""What the filtered trainers share: TRL's hooks, in the order in which a training step comes through them.

Each hook calls TRL's and then one of four things that know little of one another: `selecting` says which groups of a
generation are kept, `refilling` samples further ones, `packing` cuts the kept rows into micro-batches, `resuming`
takes along what a checkpoint needs. `accounting` counts what became of each optimizer step.
"""

import functools
import os
import textwrap
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, ClassVar

import torch
from accelerate.logging import get_logger
from accelerate.utils import gather_object
from datasets import Dataset, IterableDataset
from torch import Tensor
from torch.utils.data import Sampler
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from ragen2_trl.callbacks.run_record import keep_record
from ragen2_trl.columns import TASK, TURN_SAMPLES
from ragen2_trl.filtering import group_score
from ragen2_trl.hidden_tokens import with_hidden_tokens
from ragen2_trl.rollouts import TextRollout
from ragen2_trl.rollouts.text_rollout import end_tokens
from ragen2_trl.trainers.accounting import Accounting
from ragen2_trl.trainers.batches import Batch, loss_mask
from ragen2_trl.trainers.checks import (
    LAYOUT_FIELDS,
    check_has_rows,
    check_prompt_column,
    check_same_on_all_processes,
    check_task_column,
    known_range,
    nothing_to_rank,
    warn_of_equal_rows,
    with_snr_fields,
)
from ragen2_trl.trainers.config import SNRFilterConfig
from ragen2_trl.trainers.forward_passes import ForwardPasses
from ragen2_trl.trainers.packing import KEPT, LossMean, Packing
from ragen2_trl.trainers.processes import own_share
from ragen2_trl.trainers.prompting import selection_of
from ragen2_trl.trainers.refilling import Refill
from ragen2_trl.trainers.resuming import ResumableSampler, load_state, save_state
from ragen2_trl.trainers.selecting import Selection, Selector, generator_of
from ragen2_trl.trainers.turns import check_later_samples, sampled_tokens, with_later_samples

CLIP_RATIOS = tuple(f"clip_ratio/{name}" for name in ("low_mean", "low_min", "high_mean", "high_max", "region_mean"))
logger = get_logger(__name__)


class SNRFilter(ForwardPasses):
    """Trains one of TRL's trainers only on the prompt groups that carry signal. Mixed in before that trainer.

    What is particular to a trainer: its configurations, what its loss is a mean over, and what becomes of advantages
    when groups are dropped.
    """

    _config_class: ClassVar[type]  # with the filter's settings
    _trl_config_class: ClassVar[type]  # that it stands in for
    takes_later_samples: ClassVar[bool] = False  # whether an episode may be several training samples
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

    args: SNRFilterConfig

    def __init__(
        self,
        model: Any,
        reward_funcs: Any = None,
        args: Any = None,
        train_dataset: Dataset | IterableDataset | None = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        **kwargs: Any,
    ):
        if args is None:
            name = model if isinstance(model, str) else model.config._name_or_path
            args = self._config_class(f"{name.split('/')[-1]}-{self._name.replace(' ', '-')}")
        check_prompt_column(train_dataset, kwargs.get("environment_factory"))
        check_task_column(getattr(train_dataset, "column_names", None), args)
        plays = any(kwargs.get(name) is not None for name in ("environment_factory", "rollout_func"))
        args = with_snr_fields(args, self._config_class, self._trl_config_class)
        super().__init__(model, reward_funcs, args, train_dataset, eval_dataset, processing_class, **kwargs)
        self.args = with_hidden_tokens(self.args)  # before others hold them
        if self.args.snr_mode == "mask" and self.aux_loss_enabled:
            raise ValueError(
                f"snr_mode='mask' cannot weigh the load-balancing loss (router_aux_loss_coef="
                f"{self.router_aux_loss_coef}); allowed: snr_mode='drop', or router_aux_loss_coef=0."
            )
        check_same_on_all_processes(self.args, self.accelerator.num_processes)
        if (reason := nothing_to_rank(self.args)) is not None:
            logger.warning(reason)
        if plays:
            warn_of_equal_rows(self.train_dataset)
        check_has_rows(self.train_dataset, self.args)
        self._packing = Packing(
            self.accelerator,
            self.args,
            self.num_iterations,
            self._loss_mean,
            self._tokenizer.pad_token_id,
            self.pad_to_multiple_of,
        )
        self._accounting = Accounting(self)
        self._begin_run()
        # Outside of what subclasses make of these methods: none can lose a weight, or a reward.
        wrap(self, "_calculate_rewards", self._remember_rewards)
        wrap(self, "compute_loss", self._loss_of_kept_rows)
        if self.is_deepspeed_enabled:
            wrap(self.accelerator, "backward", self._backward_of_kept_rows)
        if isinstance(rollout := kwargs.get("rollout_func"), TextRollout):
            rollout.attach(self)
            if rollout.window.splits_episodes:
                check_later_samples(self)
        self.add_callback(self._accounting)
        keep_record(self)

    def _begin_run(self) -> None:
        """No state of an earlier run, or of another dataset."""
        self.latest_selection: Selection | None = None
        self._rewards_per_func: Tensor | None = None  # (B, F) of the latest generation, over all processes
        self._selector = Selector(self.args, known_range(self.reward_funcs, self.reward_weights.tolist()))
        self._accounting.begin_run(self._selector)
        self._prompts = selection_of(self)
        self._refill: Refill | None = None
        if self.args.snr_refill_rounds > 0:
            self._refill = Refill(
                self.accelerator,
                self.args,
                self.args.steps_per_generation * self.num_iterations // self.args.gradient_accumulation_steps,
                self._remove_unused_columns(self.train_dataset, description="training"),
                self._tokenizer.pad_token_id,
                self.pad_to_multiple_of,
                self._accounting.log,
                self._prompts.draw_further,
            )

    def train(self, *args: Any, **kwargs: Any) -> Any:
        self._begin_run()
        self._metrics["train"].clear()  # of a step that was interrupted before it was logged
        if self._packing.steps is not None:  # cut for the windows of an earlier run, which ended amid them
            self._packing.forget()
            self._step, self._buffered_inputs = 0, None
        return super().train(*args, **kwargs)

    # Selecting: after TRL has generated and scored

    def _remember_rewards(self, calculate_rewards: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
        self._rewards_per_func = calculate_rewards(*args, **kwargs)
        return self._rewards_per_func

    def _sample_and_score(self, inputs: list[dict[str, Any]]) -> Batch:
        """TRL's batch before any of it is dropped."""
        batch = super()._generate_and_score_completions(inputs)
        if self.model.training and TURN_SAMPLES in inputs[0]:
            batch[TURN_SAMPLES] = [row[TURN_SAMPLES] for row in inputs]
        return batch

    def _sample_first(self, inputs: list[dict[str, Any]]) -> Batch:
        """That of the prompts a step begins with: what callbacks watch, and no round of a refill."""
        return self._sample_and_score(inputs)

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> Batch:
        if self.model.training:
            self._prompts.replace(inputs)
        batch = self._sample_first(inputs)
        if not self.model.training:
            return batch
        self._packing.forget()
        self._has_selected = True
        selection = self._select(inputs, batch)
        self._log_selection(batch, selection)
        if self._refill is not None:
            step = self.state.global_step
            batch = self._refill.fill(batch, selection.kept, step, self._sample_further, self._logps_now)
        elif not selection.keeps_all:
            kept_rows = self._local(selection.kept_rows)
            if "num_items_in_batch" in batch:
                tokens = (loss_mask(batch).sum(dim=1) * kept_rows).sum()
                batch["num_items_in_batch"] = self.accelerator.reduce(tokens, reduction="sum")
            batch[KEPT] = kept_rows
        self._packing.drops = KEPT in batch
        if self._packing.drops and not self.accelerator.reduce(batch[KEPT].sum(), reduction="sum"):
            self._accounting.entropy = self._entropy_of_some(batch)
        self._finish_advantages(batch)
        if (weights := self._selector.row_weights(selection)) is not None:
            own = self._local(weights).to(batch["advantages"])
            batch["advantages"] = batch["advantages"] * (own if batch["advantages"].ndim == 1 else own.unsqueeze(1))
        batch["advantages"] = self._prompts.weighted(batch["advantages"])
        if TURN_SAMPLES in batch:
            self._packing.drops = True  # whether it does or not, episodes have unequal numbers of samples
            logps = {"old_per_token_logps": self._logps_now, "ref_per_token_logps": self._reference_logps}
            batch = with_later_samples(
                batch, end_tokens(self), logps, self.args, self._tokenizer.pad_token_id, self.accelerator
            )
        return batch

    def _sample_further(self, inputs: list[dict[str, Any]], number: int) -> tuple[Batch, Tensor]:
        """A round of a refill, from 1."""
        batch = self._sample_and_score(inputs)
        return batch, self._select(inputs, batch, number).kept

    def _select(self, inputs: list[dict[str, Any]], batch: Batch, *number: int) -> Selection:
        """Which groups of a batch, or of a refill's round of some number, are kept; its advantages become theirs."""
        rewards, moment = self._group_rewards(), (*self._moment, *number)
        scores = self._score_groups(batch, rewards, moment)
        selection = self._selector.select(rewards, scores, self._tasks(inputs), moment)
        self._set_advantages(inputs, batch, selection)
        if self.args.snr_zero_task_advantage:
            self._zero_task_advantages(batch, selection)
        return replace(selection, predicted=self._prompts.learn(self._selector.in_units(selection)))

    def _tasks(self, inputs: list[dict[str, Any]]) -> list[str] | None:
        """(N,) the task of each group over all processes, where the dataset tells; a call for all processes."""
        if TASK not in inputs[0]:
            check_task_column(list(inputs[0]), self.args)
            return None
        names = gather_object([str(row[TASK]) for row in inputs])
        return names[:: self.num_generations]

    def _group_rewards(self) -> Tensor:
        """(N, G) weighted reward sums as sampled, before any normalisation; NaN where there is no finite one."""
        per_func = self._rewards_per_func
        rewards = (per_func * self.reward_weights.to(per_func.device)).nansum(dim=1)
        unscorable = per_func.isnan().all(dim=1) | ~rewards.isfinite()
        return rewards.masked_fill(unscorable, torch.nan).view(-1, self.num_generations)

    def _score_groups(self, batch: Batch, rewards: Tensor, moment: Sequence[int]) -> Tensor:
        kind = self.args.snr_score
        mask = loss_mask(batch)
        per_group = (-1, self.num_generations)
        entropies = lengths = generator = None
        if kind == "length":
            lengths = self.accelerator.gather(sampled_tokens(batch)).view(per_group)
        elif kind.startswith("entropy"):  # from a forward pass of its own: entropies are known only once it updates
            per_token = self._logps_and_entropies(batch, compute_entropy=True)[1]
            means = (per_token * mask).sum(dim=1) / mask.sum(dim=1).clamp(min=1)
            entropies = self.accelerator.gather(means).view(per_group)
        elif kind == "random":
            generator = generator_of(self.args.seed, *moment)
        return group_score(rewards, kind, entropies=entropies, lengths=lengths, generator=generator)

    @property
    def _moment(self) -> tuple[int, int]:
        """When a generation is sampled: optimizer steps so far, and micro-steps since the last of them."""
        return self.state.global_step, self._accounting.position

    def _log_selection(self, batch: Batch, selection: Selection) -> None:
        self.latest_selection = selection
        self._accounting.latest.clear()  # what this selection has no number for
        for name, value in {**self._selector.metrics(selection), **self._prompts.metrics()}.items():
            self._accounting.log(name, value)
        tokens = self.accelerator.gather(sampled_tokens(batch)).cpu()  # (B,)
        kept = tokens[selection.kept_rows.cpu()].sum()
        self._accounting.log("kept_tokens_fraction", (kept / tokens.sum().clamp(min=1)).item())

    def _local(self, values: Tensor) -> Tensor:
        """This process's part of values over the rows of all processes. (B,) -> (rows,)."""
        return own_share(values, self.accelerator)

    # What is particular to a trainer

    @property
    def _of_no_update(self) -> tuple[str, ...]:
        """Metrics of the update that are 0 where there is none."""
        return CLIP_RATIOS

    @property
    def _loss_mean(self) -> LossMean:
        raise NotImplementedError

    def _set_advantages(self, inputs: list[dict[str, Any]], batch: Batch, selection: Selection) -> None:
        """Make the advantages of a batch what they would be if its kept groups were all of it."""

    def _zero_task_advantages(self, batch: Batch, selection: Selection) -> None:
        """Leave in the advantages what is not of the task: nothing, where KL and entropy are terms of the loss."""
        batch["advantages"] = torch.zeros_like(batch["advantages"])

    def _finish_advantages(self, batch: Batch) -> None:
        """What needs all kept groups, those of a refill, too."""

    # Packing: before each pass over a generation batch, and around each loss

    def _prepare_inputs(self, generation_batch: Any) -> Batch:
        before, self._has_selected = self._buffered_inputs, False
        inputs = super()._prepare_inputs(generation_batch)
        if not self.model.training:
            return inputs
        number = self._step % self.args.steps_per_generation
        if number == 0:
            if self._buffered_inputs is not before and not self._has_selected:
                raise RuntimeError(
                    f"{type(self).__name__}._generate_and_score_completions must call "
                    "super()._generate_and_score_completions, which selects; it did not."
                )
            left_in_window = self.current_gradient_accumulation_steps - self._accounting.position
            self._buffered_inputs, computed = self._packing.begin_pass(
                self._buffered_inputs, left_in_window, self._accounting.has_rows
            )
            self._accounting.log("update_compute_fraction", computed)
            inputs = self._buffered_inputs[0]
        self._accounting.count(self._packing.take_up(number))
        return inputs

    def _loss_of_kept_rows(
        self, compute_loss: Callable[..., Tensor], model: Any, inputs: Batch, *args: Any, **kwargs: Any
    ) -> Tensor:
        if not self.model.training:
            return compute_loss(model, inputs, *args, **kwargs)
        if self._packing.at_hand is None:
            raise RuntimeError(
                f"{type(self).__name__}._prepare_inputs must call super()._prepare_inputs, which leaves out what the "
                "filter drops; it did not."
            )
        if not self._packing.at_hand.runs:
            # A leaf of its own: TRL's training step runs backward on it and reaches no parameter.
            return torch.zeros((), device=self.accelerator.device, requires_grad=True)
        without_rows = nullcontext() if self._packing.at_hand.kept else self._accounting.without_rows()
        with self._packing.gathering(), without_rows:
            loss = compute_loss(model, inputs, *args, **kwargs)
        return self._packing.weighted(loss)

    def _backward_of_kept_rows(self, backward: Callable[..., None], loss: Tensor, **kwargs: Any) -> None:
        """Keep DeepSpeed's engine out of micro-steps that are skipped, and so its optimizer out of empty steps.

        Its backward pass counts micro-steps (in ZeRO-3 the first one of a step overwrites the gradients of the last
        step, and later ones add), reduces buckets that a skipped micro-step has not filled, and takes the step itself.
        """
        if self._packing.at_hand is None or self._packing.at_hand.runs:
            backward(loss, **kwargs)

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
        # DeepSpeed would report that of the last step it took.
        return super()._get_grad_norm(model, grad_norm=grad_norm) if self._accounting.has_rows else 0.0

    # Resuming

    def _get_train_sampler(self, dataset: Dataset | None = None) -> Sampler:
        return ResumableSampler(super()._get_train_sampler(dataset), self)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        folder = os.path.join(self._get_output_dir(trial=trial), f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}")
        amid_generation = self._step % (self.args.steps_per_generation * self.num_iterations) != 0
        shared = {"selector": self._selector.state(), "accounting": self._accounting.state()}
        # TRL samples anew after a resume; a checkpoint in the middle of a generation batch takes it along.
        own = {"step": self._step, "buffered_inputs": self._buffered_inputs if amid_generation else None}
        own["packing"] = self._packing.state() if amid_generation else None
        shared["prompts"] = self._prompts.state()
        if self._refill is not None:
            shared["refill"], own["refill"] = self._refill.shared_state(), self._refill.own_state()
        # Written before the rest: a checkpoint that has its trainer_state.json is complete.
        save_state(folder, self.accelerator.process_index, self._batch_layout(), shared, own)
        super()._save_checkpoint(model, trial)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        shared, own = load_state(checkpoint, self.accelerator, self._batch_layout())
        if shared is not None:
            self._selector.load(shared["selector"])
            self._accounting.load(shared["accounting"])
            self._prompts.load(shared.get("prompts"))
            if self._refill is not None and "refill" in shared:
                self._refill.stream.drawn = shared["refill"]["drawn"]
        if own is not None:
            self._step, self._buffered_inputs = own["step"], own["buffered_inputs"]
            if own["packing"] is not None:
                self._packing.load(own["packing"])
            if self._refill is not None and "refill" in own:
                self._refill.load_waiting(shared["refill"], own["refill"])

    def _issue_warnings_after_load(self, load_result: Any) -> None:
        """Without a word of weights that are tied to others, such as `lm_head`'s: these have been loaded."""
        tied = getattr(self.model, "all_tied_weights_keys", {})
        load_result.missing_keys[:] = [name for name in load_result.missing_keys if name not in tied]
        super()._issue_warnings_after_load(load_result)

    def _batch_layout(self) -> dict[str, int]:
        layout = {name: getattr(self.args, name) for name in LAYOUT_FIELDS}
        return {**layout, "num_processes": self.accelerator.num_processes}


def wrap(owner: Any, name: str, wrapper: Callable[..., Any]) -> None:
    """Call `wrapper(method, ...)` in place of a method of one object, whatever class it is of."""
    method = getattr(owner, name)
    setattr(owner, name, functools.wraps(method)(functools.partial(wrapper, method)))

"""What the filtered trainers share: TRL's hooks, in the order in which a training step comes through them.

A step samples and scores completions, selects the groups that carry signal, cuts their rows into micro-batches,
computes the loss of each and takes an optimizer step. What is decided on the way travels with the batch: `KEPT` says
which of its rows are kept, until micro-batches are cut of them.
"""

import os
import textwrap
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from accelerate.logging import get_logger
from accelerate.utils import broadcast_object_list
from datasets import Dataset, IterableDataset
from torch import Tensor
from torch.utils.data import Sampler
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from ragen2_trl.columns import TURN_SAMPLES
from ragen2_trl.messages import tell_last
from ragen2_trl.names import named_object
from ragen2_trl.redaction import hide_credentials, with_hidden_credentials
from ragen2_trl.rollout_events import NeedsRows, RolloutEvents, end_tokens, extend
from ragen2_trl.trainers.batches import Batch, chunks, loss_mask
from ragen2_trl.trainers.checkpoints import (
    LAYOUT_FIELDS,
    ResumableSampler,
    checkpoint_to_resume,
    last_complete_checkpoint,
    load_state,
    open_checkpoint,
    save_state,
    write_manifest,
)
from ragen2_trl.trainers.checks import (
    check_enough_prompts,
    check_has_rows,
    check_loss_of_trl,
    check_pilots,
    check_prompt_column,
    check_router_loss,
    check_same_on_all_processes,
    check_subclass,
    known_range,
    nothing_to_rank,
    warn_of_equal_rows,
    with_default_pilots,
    with_snr_fields,
)
from ragen2_trl.trainers.config import SNRFilterConfig
from ragen2_trl.trainers.dynamic_sampling import DynamicSampling
from ragen2_trl.trainers.empty_steps import EmptySteps
from ragen2_trl.trainers.images import IMAGE_KEYS
from ragen2_trl.trainers.micro_batches import KEPT, LossMean, MicroBatches, MicroStep, keep_rows
from ragen2_trl.trainers.pilots import PilotSampling
from ragen2_trl.trainers.processes import own_share
from ragen2_trl.trainers.prompt_selection import selection_of
from ragen2_trl.trainers.savings import Savings
from ragen2_trl.trainers.selection import (
    GroupFilter,
    Groups,
    Selection,
    Selector,
    finer_than,
    joined_selections,
    score_rewards,
    seeded_generator,
    with_advantage,
)
from ragen2_trl.trainers.trl_contract import check_trl
from ragen2_trl.trainers.turn_samples import check_turn_samples, sampled_tokens, with_turn_samples

if TYPE_CHECKING:
    from ragen2_trl.trainers.stock import StockTrainer
else:
    StockTrainer = object  # it is mixed in before one of TRL's

CLIP_RATIOS = tuple(f"clip_ratio/{name}" for name in ("low_mean", "low_min", "high_mean", "high_max", "region_mean"))
# What a trainer brings along, as `package.module:name` of a function that takes it: by name, as the filter knows
# nothing of callbacks and of what they report.
COMPANIONS = (
    "ragen2_trl.callbacks.run_record:keep_record",
    "ragen2_trl.callbacks.training_health:keep_watch",
    "ragen2_trl.callbacks.training_progress:show_progress",
)
logger = get_logger(__name__)


class SNRFilter(StockTrainer):
    """Trains one of TRL's trainers only on the prompt groups that carry signal. Mixed in before that trainer.

    What is particular to a trainer: its configurations, what its loss is a mean over, and what becomes of advantages
    when groups are dropped.
    """

    _config_class: ClassVar[type]  # with the filter's settings
    _trl_config_class: ClassVar[type]  # that it stands in for
    takes_turn_samples: ClassVar[bool] = False  # whether an episode may be several training samples
    how_to_resume = "train(resume_from_checkpoint=True)"  # as whoever reads an error's last line would
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
        *positional: Any,
        selector: Selector | None = None,
        **kwargs: Any,
    ):
        check_trl(type(self))
        if args is None:
            name = model if isinstance(model, str) else model.config._name_or_path
            args = self._config_class(f"{name.split('/')[-1]}-{self._name.replace(' ', '-')}")
        check_prompt_column(train_dataset, kwargs.get("environment_factory"))
        args = with_snr_fields(args, self._config_class, self._trl_config_class)
        args = with_default_pilots(args, type(self))
        check_subclass(type(self), args)
        if selector is not None:
            if args.snr_selector is not None:
                raise ValueError(f"selector is given and snr_selector={args.snr_selector!r}; allowed: one of them.")
            args.check_alone(f"selector={selector!r}")
        super().__init__(
            model, reward_funcs, args, train_dataset, eval_dataset, processing_class, *positional, **kwargs
        )
        self.args = with_hidden_credentials(self.args)  # before others hold them
        check_router_loss(self)
        check_same_on_all_processes(self.args, self.accelerator.num_processes)
        if (reason := nothing_to_rank(self.args)) is not None:
            logger.warning(reason)
        if any(kwargs.get(name) is not None for name in ("environment_factory", "rollout_func")):
            warn_of_equal_rows(self.train_dataset)
        check_has_rows(self.train_dataset, self.args)
        check_pilots(self.args, self.accelerator.num_processes)
        named = self.args.snr_selector
        self._own_selector = selector if named is None else named_object(named, "snr_selector")
        self._micro_batches = MicroBatches(
            self.accelerator,
            self.args,
            self.num_iterations,
            lambda: self._loss_mean,
            self._tokenizer.pad_token_id,
            self.pad_to_multiple_of,
        )
        self._empty_steps = EmptySteps(self, self._check_weighted)
        self._savings = Savings()
        self._begin_run()
        # Around what subclasses make of these methods: none can lose a weight, or a reward.
        self.rollout_events = RolloutEvents(self, announces=True)
        self._in_loss = False
        for name in ("compute_loss", "_compute_loss"):
            extend(self, name, self._loss_of_kept_rows)
        if self.is_deepspeed_enabled:
            extend(self.accelerator, "backward", self._backward_of_kept_rows)
        if isinstance(rollout := kwargs.get("rollout_func"), NeedsRows):
            rollout.attach(self)
            if rollout.splits_episodes:
                check_turn_samples(self)
        self.add_callback(self._empty_steps)
        self.add_callback(self._savings)
        for companion in COMPANIONS:
            named_object(companion, "companion")(self)

    def _begin_run(self) -> None:
        """No state of an earlier run, or of another dataset."""
        self.latest_selection: Selection | None = None
        self._micro_step: MicroStep | None = None  # of the micro-batch that is about to be computed
        self._is_weighted = True  # whether its loss has come through `_loss_of_kept_rows`
        self._has_suggested = False  # what to score groups by
        known = known_range(
            self.reward_funcs, self.reward_func_names, self.reward_weights.tolist(), self.args.snr_score_reward
        )
        self._filter = GroupFilter(self.args, self._own_selector, known)
        self._empty_steps.begin_run(self._filter)
        self._prompts = selection_of(self)
        self._pilots = PilotSampling(self, self._prompts) if self.args.snr_pilot_generations else None
        self._dynamic_sampling: DynamicSampling | None = None
        rounds = self.args.snr_dynamic_sampling_rounds
        if rounds > 0 or self._pilots is not None:  # pilots leave places in a batch, with further prompts or without
            self._dynamic_sampling = DynamicSampling(
                self.accelerator,
                self.args,
                self.args.steps_per_generation * self.num_iterations // self.args.gradient_accumulation_steps,
                self._remove_unused_columns(self.train_dataset, description="training") if rounds > 0 else [],
                self._tokenizer.pad_token_id,
                self.pad_to_multiple_of,
                self._empty_steps.log,
                self._prompts.draw_further,
            )

    def init_hf_repo(self, *args: Any, **kwargs: Any) -> None:
        """A Hub that cannot be reached, or refuses, ends no training before it begins: uploads are tried later."""
        try:
            super().init_hf_repo(*args, **kwargs)
        except Exception as error:  # noqa: BLE001 - of whichever HTTP library
            self.push_in_progress: Any = None
            self.hub_model_id: Any = self.args.hub_model_id or Path(str(self.args.output_dir)).absolute().name
            logger.warning(
                f"push_to_hub=True: {self.hub_model_id} cannot be made on the Hub ({hide_credentials(str(error))}). "
                "Training goes on, and each upload is tried when its time comes."
            )

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        check_loss_of_trl(type(self), self.args)
        check_enough_prompts(self.train_dataset, self.args)
        checkpoint = checkpoint_to_resume(self.args.output_dir, resume_from_checkpoint, self.accelerator)
        self._begin_run()
        self._metrics["train"].clear()  # of a step that was interrupted before it was logged
        if self._micro_batches.steps is not None:  # cut for the steps of an earlier run, which ended in the middle
            self._step, self._buffered_inputs = 0, None
        if not self._filter.keeps_everything and not self.args.is_lossless:
            logger.warning(
                "loss and grad_norm are means over the rows that the filter keeps: where it drops some, both are "
                "larger than those of the plain trainer, which has the others in its mean (see docs/mathematics.md)."
            )
        try:
            return super().train(checkpoint, *args, **kwargs)
        except (KeyboardInterrupt, Exception) as end:
            self._tell_where_to_resume(end)
            raise

    def _tell_where_to_resume(self, end: BaseException) -> None:
        """A line below the traceback; of an error only where a step was done, and not if there is no checkpoint."""
        interrupted = isinstance(end, KeyboardInterrupt)  # which all processes are; an error may be of one alone
        if not (self.is_world_process_zero() if interrupted else self.state.global_step):
            return
        last = last_complete_checkpoint(Path(str(self.args.output_dir)))
        if last is None and not interrupted:
            return
        how = f"{self.how_to_resume} goes on from {last.name}" if last else "no checkpoint is whole"
        what = "Interrupted" if interrupted else "Failed"
        where = f"{what} at step {self.state.global_step}; {how} in {self.args.output_dir}."
        tell_last(end, where, logger.warning)

    # 1. TRL asks for the inputs of a micro-step, and samples where a generation batch begins

    def _prepare_inputs(self, generation_batch: Any) -> Batch:
        before = self._buffered_inputs
        inputs = super()._prepare_inputs(generation_batch)
        if not self.model.training:
            return inputs
        if self._buffered_inputs is not before:
            self._buffered_inputs = self._micro_batches.begin_generation(self._buffered_inputs)
        number = self._step % self.args.steps_per_generation
        if number == 0:
            left_to_step = self.current_gradient_accumulation_steps - self._empty_steps.position
            self._buffered_inputs, computed, plain = self._micro_batches.begin_pass(
                self._buffered_inputs, left_to_step, self._empty_steps.has_rows
            )
            self._empty_steps.log("update_compute_fraction", computed / plain)
            self._savings.add_pass(computed, plain)
        self._micro_step, self._is_weighted = self._micro_batches.step(number), False
        self._empty_steps.count(self._micro_step)
        self._savings.begin_update()
        return self._buffered_inputs[number]

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        loss: Tensor = super().training_step(*args, **kwargs)
        self._savings.end_update(self.accelerator.device, ends_step=self.accelerator.sync_gradients)
        return loss

    # 2. Sampling, scoring, selecting

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> Batch:
        if not self.model.training:
            return self._sample_and_score(inputs)
        if self._pilots is not None:
            self._pilots.begin_step()
        self._prompts.replace(inputs)
        batch = self._sample_round(inputs, self._sampling_key)
        self.rollout_events.rollout(inputs, batch)
        selection = self._select(inputs, batch, self._sampling_key)
        self.latest_selection = selection
        self._empty_steps.begin_generation(self._prompts.metrics())
        rounds = [selection]
        if self._dynamic_sampling is not None:

            def sample_further(inputs: list[dict[str, Any]], number: int) -> tuple[Batch, Tensor]:
                batch, further = self._sample_further(inputs, number)
                rounds.append(further)
                return batch, further.kept

            step = self.state.global_step
            batch = self._dynamic_sampling.fill(batch, selection.kept, step, sample_further, self._logps_now)
        elif selection.keeps_all or self.args.is_lossless:
            # Without loss, every mean is one over all rows, and micro-batches are cut of those with an advantage.
            batch[KEPT] = torch.ones(len(batch["prompt_ids"]), dtype=torch.bool, device=self.accelerator.device)
        else:
            batch = keep_rows(batch, self._local(selection.kept_rows), self.accelerator)
        metrics = self._filter.metrics(joined_selections(rounds))
        for name, value in (metrics if self._pilots is None else metrics | self._pilots.metrics()).items():
            self._empty_steps.log(name, value)
        if not self.accelerator.reduce(batch[KEPT].sum(), reduction="sum"):
            self._empty_steps.entropy = self._entropy_of_some(batch)
        self._finish_advantages(batch)
        if TURN_SAMPLES in batch:
            logps: dict[str, Callable[[Batch], Tensor]] = {
                "old_per_token_logps": self._logps_now,
                "ref_per_token_logps": self._reference_logps,
            }
            batch = with_turn_samples(
                batch, end_tokens(self), logps, self.args, self._tokenizer.pad_token_id, self.accelerator
            )
        return batch

    def _sample_and_score(self, inputs: list[dict[str, Any]]) -> Batch:
        """TRL's batch before any of it is dropped."""
        self.rollout_events.rows(inputs)
        batch = super()._generate_and_score_completions(inputs)
        if self.model.training and TURN_SAMPLES in inputs[0]:
            batch[TURN_SAMPLES] = [row[TURN_SAMPLES] for row in inputs]
        return batch

    def _sample_round(self, inputs: list[dict[str, Any]], key: tuple[int, ...]) -> Batch:
        """TRL's batch of the prompts, or of those that their pilots speak for; `inputs` become its rows."""
        if self._pilots is None:
            return self._sample_and_score(inputs)
        return self._pilots.sample(inputs, key, super()._generate_and_score_completions)

    def _generate(self, prompts: list[Any]) -> tuple[Any, ...]:
        if self._pilots is None:
            return super()._generate(prompts)
        return self._pilots.generate(super()._generate, super()._calculate_rewards, prompts)

    def _calculate_rewards(self, *rows: list[Any]) -> Tensor:
        if self._pilots is None:
            return super()._calculate_rewards(*rows)
        return self._pilots.calculate(super()._calculate_rewards, *rows)

    def _sample_further(self, inputs: list[dict[str, Any]], number: int) -> tuple[Batch, Selection]:
        """A round of dynamic sampling, from 1."""
        key = (*self._sampling_key, number)
        batch = self._sample_round(inputs, key)
        return batch, self._select(inputs, batch, key)

    @property
    def _sampling_key(self) -> tuple[int, int]:
        """Tells a generation from others of the run: optimizer steps so far, and micro-steps since the last."""
        return self.state.global_step, self._empty_steps.position

    def _select(self, inputs: list[dict[str, Any]], batch: Batch, key: tuple[int, ...]) -> Selection:
        """Which groups of a batch are kept; its advantages become theirs."""
        rewards = self.rollout_events.group_rewards
        per_func = self.rollout_events.rewards_per_func
        assert per_func is not None  # a batch has been scored
        scored = self._scored_rewards(rewards)
        earned = scored if self._pilots is None else self._pilots.learn(scored)
        tokens = self.accelerator.gather(sampled_tokens(batch)).cpu()  # (B,)
        groups = Groups(
            scored,
            per_func.view(*rewards.shape, -1),
            tokens.view(rewards.shape),
            seeded_generator(self.args.seed, *key),
            self._filter.see(earned),
            lambda: self._mean_entropies(batch).view(rewards.shape),
        )
        if self.args.is_lossless:
            selection = with_advantage(rewards, self.accelerator.gather(batch["advantages"]))
        else:
            selection = self._filter.select(groups)
            if self._own_selector is not None and self.accelerator.num_processes > 1:
                # Whatever somebody's function draws from: processes that select differently wait for ever.
                kept, completions = broadcast_object_list([selection.kept, selection.completions])
                selection = replace(selection, kept=kept, completions=completions)
            self._set_advantages(inputs, batch, replace(selection, rewards=rewards))
        predicted = self._prompts.learn(earned, self.args.snr_pilot_generations or None)
        if predicted is not None and self._pilots is not None:
            predicted = [predicted[prompt] for prompt in self._pilots.whole]
        return replace(selection, lengths=groups.lengths, predicted=predicted)

    def _scored_rewards(self, sums: Tensor) -> Tensor:
        """(N, G) what groups are scored by: the weighted sums of all rewards, or the rewards of `snr_score_reward`."""
        per_func, logged = self.rollout_events.rewards_per_func, self._logs["extra"]
        assert per_func is not None  # a batch has been scored
        if self.args.snr_score_reward is not None:
            return score_rewards(self.args.snr_score_reward, sums, self.reward_func_names, per_func, logged)
        if not self._has_suggested and self._filter.ranks_rewards:
            suggestion = finer_than(sums, self.reward_func_names, per_func, logged)
            self._has_suggested = suggestion is not None
            if suggestion is not None:
                logger.warning(suggestion)
        return sums

    # 3. The loss of each micro-batch, weighted by its share of the kept rows

    def _loss_of_kept_rows(
        self, compute_loss: Callable[..., Tensor], model: Any, inputs: Batch, *args: Any, **kwargs: Any
    ) -> Tensor:
        """Around `compute_loss` and `_compute_loss`: whichever is called first, whoever calls it, weighs the loss."""
        if self._in_loss or not self.model.training:
            return compute_loss(model, inputs, *args, **kwargs)
        step = self._micro_step
        if step is None:
            raise RuntimeError(
                f"{type(self).__name__}._prepare_inputs must call super()._prepare_inputs, which leaves out what the "
                "filter drops; it did not."
            )
        self._is_weighted = True
        if not step.runs:
            # A leaf of its own: TRL's training step runs backward on it and reaches no parameter.
            return torch.zeros((), device=self.accelerator.device, requires_grad=True)
        without_rows = nullcontext() if step.kept else self._empty_steps.without_rows()
        self._in_loss = True
        try:
            with self._micro_batches.gathering(), without_rows:
                loss = compute_loss(model, inputs, *args, **kwargs)
        finally:
            self._in_loss = False
        return loss if step.weight == 1.0 else loss * step.weight

    def _check_weighted(self) -> None:
        """Before an optimizer step: no micro-batch may have passed the weights by."""
        if self._micro_batches.steps is not None and not self._is_weighted:
            raise RuntimeError(
                f"{type(self).__name__}.training_step has not called self.compute_loss or self._compute_loss of this "
                "trainer, which weigh what the filter keeps; allowed: to call one of them."
            )

    def _backward_of_kept_rows(self, backward: Callable[..., None], loss: Tensor, **kwargs: Any) -> None:
        """Keep DeepSpeed's engine out of micro-steps that are skipped, and so its optimizer out of empty steps.

        Its backward pass counts micro-steps (in ZeRO-3 the first one of a step overwrites the gradients of the last
        step, and later ones add), reduces buckets that a skipped micro-step has not filled, and takes the step itself.
        """
        if self._micro_step is None or self._micro_step.runs:
            backward(loss, **kwargs)

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
        """Of the latest step of a log row that had rows; `None`, which is not logged, where none had any."""
        if self._empty_steps.has_rows:  # else DeepSpeed would report that of the last step it took
            self._empty_steps.grad_norm = super()._get_grad_norm(model, grad_norm=grad_norm)
        return self._empty_steps.grad_norm

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

    def _finish_advantages(self, batch: Batch) -> None:
        """What needs all kept groups, those of dynamic sampling, too."""

    # Forward passes over a batch, without gradients

    @torch.no_grad()
    def _logps_and_entropies(
        self, batch: Batch, compute_entropy: bool = False, model: Any = None
    ) -> tuple[Tensor, Any]:
        """(rows, T) each, log-probs and entropies in nats under the present weights, or under those of a model.

        Without `compute_entropy`, entropies are `None`.
        """
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

    def _mean_entropies(self, batch: Batch) -> Tensor:
        """(B,) mean token entropy of each completion in nats, on the CPU: known otherwise only once it is updated."""
        mask = loss_mask(batch)
        per_token = self._logps_and_entropies(batch, compute_entropy=True)[1]
        return self.accelerator.gather((per_token * mask).sum(dim=1) / mask.sum(dim=1).clamp(min=1)).cpu()

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

    def _local(self, values: Tensor) -> Tensor:
        """This process's part of values over the rows of all processes. (B,) -> (rows,)."""
        return own_share(values, self.accelerator)

    # Checkpoints

    def _get_train_sampler(self, dataset: Dataset | None = None) -> Sampler[int]:
        return ResumableSampler(super()._get_train_sampler(dataset), self)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        folder = os.path.join(self._get_output_dir(trial=trial), f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}")
        shared = {"filter": self._filter.state(), "steps": self._empty_steps.state(), "prompts": self._prompts.state()}
        own: dict[str, Any] = {"step": self._step, "buffered_inputs": None, "micro_batches": None}
        if self._step % (self.args.steps_per_generation * self.num_iterations) != 0:
            # TRL samples again after a resume; a checkpoint in the middle of a generation batch takes it along.
            own |= {"buffered_inputs": self._buffered_inputs, "micro_batches": self._micro_batches.state()}
        if self._pilots is not None:
            shared["pilots"] = self._pilots.state()
        if self._dynamic_sampling is not None:
            shared["dynamic_sampling"] = self._dynamic_sampling.shared_state()
            own["dynamic_sampling"] = self._dynamic_sampling.own_state()
        if self.args.should_save:
            open_checkpoint(folder)
        self.accelerator.wait_for_everyone()
        save_state(folder, self.accelerator.process_index, self._batch_layout(), shared, own)
        super()._save_checkpoint(model, trial)

    def _save_rng_state(self, output_dir: str) -> None:
        """The last thing of a checkpoint that every process writes."""
        super()._save_rng_state(output_dir)
        self.accelerator.wait_for_everyone()
        if self.args.should_save:
            write_manifest(output_dir)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        shared, own = load_state(checkpoint, self.accelerator, self._batch_layout())
        if shared is None:
            return
        self._filter.load(shared["filter"])
        self._empty_steps.load(shared["steps"])
        self._prompts.load(shared["prompts"])
        if self._pilots is not None and "pilots" in shared:
            self._pilots.load(shared["pilots"])
        if self._dynamic_sampling is not None and "dynamic_sampling" in shared:
            self._dynamic_sampling.load(shared["dynamic_sampling"], own and own.get("dynamic_sampling"))
        if own is not None:
            self._step, self._buffered_inputs = own["step"], own["buffered_inputs"]
            if own["micro_batches"] is not None:
                self._micro_batches.load(own["micro_batches"])

    def _batch_layout(self) -> dict[str, int]:
        layout = {name: getattr(self.args, name) for name in LAYOUT_FIELDS}
        return {**layout, "num_processes": self.accelerator.num_processes}

    def _issue_warnings_after_load(self, load_result: Any) -> None:
        """Without a word of weights that are tied to others, such as `lm_head`'s: these have been loaded."""
        tied = getattr(self.model, "all_tied_weights_keys", {})
        load_result.missing_keys[:] = [name for name in load_result.missing_keys if name not in tied]
        super()._issue_warnings_after_load(load_result)

"""The filtered trainers: TRL's hooks in the order of a training step, then runs and checkpoints, then construction.

A step samples and scores completions, selects the groups that carry signal, cuts their rows into micro-batches,
computes the loss of each and takes an optimizer step. The decision is one bool mask: (N, G) over all processes in a
`Selection`, and this process's rows of it, `KEPT`, in the batch until micro-batches are cut.
"""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, ClassVar, TypedDict

import torch
from accelerate.logging import get_logger
from accelerate.utils import broadcast_object_list
from datasets import Dataset, IterableDataset
from torch import Tensor

from ragen2_trl.columns import TURN_SAMPLES
from ragen2_trl.rollout_events import NeedsRows, RolloutEvents, extend
from ragen2_trl.sampling.policy import Pilots, Policy, PromptOrder, PromptSelection
from ragen2_trl.sampling.sampler import PromptSampler, permutations_of_trl
from ragen2_trl.trainers.batches import Batch, sampled_tokens
from ragen2_trl.trainers.checkpoints import LAYOUT_FIELDS, RunState
from ragen2_trl.trainers.checks import (
    check_enough_prompts,
    check_has_rows,
    check_loss_of_trl,
    check_pilots,
    check_subclass,
    pilots_of,
    shares_prompts,
    super_not_called,
)
from ragen2_trl.trainers.config import SNRFilterConfig
from ragen2_trl.trainers.dynamic_sampling import DynamicSampling
from ragen2_trl.trainers.empty_steps import EmptySteps
from ragen2_trl.trainers.generation import keeping_vllm_awake, reading_prompts_once, reads_prompts_once
from ragen2_trl.trainers.log_probs import LogProbs
from ragen2_trl.trainers.plans import KEPT, DropPlan, LossMean, MicroStep, PlanState
from ragen2_trl.trainers.runs import FilteredRun
from ragen2_trl.trainers.selection import (
    Groups,
    Selection,
    Selector,
    joined_selections,
    seeded_generator,
    strategy_class,
)
from ragen2_trl.trainers.shared_prompts import SharedPrompts
from ragen2_trl.trainers.turn_samples import check_turn_samples, with_turn_samples

logger = get_logger(__name__)


class OwnState(TypedDict):
    """State of a process's generation batch in a checkpoint; in the middle of one with the batch itself."""

    step: int
    buffered_inputs: list[Batch] | None
    micro_batches: PlanState | None


class SNRFilter(FilteredRun):
    """Trains one of TRL's trainers only on the prompt groups that carry signal. Mixed in before that trainer.

    A trainer adds its configurations, the mean that its loss is, and how advantages change when groups are dropped.
    """

    can_share_prompts: ClassVar[bool] = True  # whether the loss reads log-probs and entropies alone
    takes_turn_samples: ClassVar[bool] = False  # whether an episode may be several training samples

    args: SNRFilterConfig

    _sampler: PromptSampler
    _plan: DropPlan
    _micro_step: MicroStep | None  # of the micro-batch that is about to be computed
    _is_weighted: bool  # whether its loss has come through `_loss_of_kept_rows`
    _empty_steps: EmptySteps
    _log_probs: LogProbs
    _dynamic_sampling: DynamicSampling | None
    _rounds: list[Selection]  # of the generation that is, or was last, sampled for training

    # Defaults of the class: a trainer that was made without `__init__`, as in TRL's unit tests, has TRL's own hooks.
    _is_made: bool = False
    _shared_prompts: SharedPrompts | None = None
    _reads_prompts_once: bool = False
    _in_loss: bool = False

    # 1. TRL asks for the inputs of a micro-step, and samples where a generation batch begins

    def _prepare_inputs(self, generation_batch: Any) -> Batch:
        if not self._is_made:
            return super()._prepare_inputs(generation_batch)
        before, generation = self._buffered_inputs, self._empty_steps.generation
        inputs: Batch = super()._prepare_inputs(generation_batch)
        if not self.model.training:
            return inputs
        if self._buffered_inputs is not before:
            # A batch of an earlier generation, as of a replay buffer, has its mark, or is TRL's own.
            made = KEPT in self._buffered_inputs[0] or (self._strategy.keeps_trl_batch and generation > 0)
            if self._empty_steps.generation == generation and not made:
                raise super_not_called(self, "_generate_and_score_completions")
            if self._shared_prompts is not None:
                self._check_sharing(self._buffered_inputs[0])
            self._plan.begin_generation(self._buffered_inputs, self._strategy.keeps_trl_batch)
        number = self._step % self.args.steps_per_generation
        if number == 0:
            left_to_step = self.current_gradient_accumulation_steps - self._empty_steps.position
            has_rows = self._empty_steps.has_rows
            self._buffered_inputs = self._plan.begin_pass(self._buffered_inputs, left_to_step, has_rows)
        steps = self._plan.steps
        self._micro_step, self._is_weighted = MicroStep() if steps is None else steps[number], False
        self._empty_steps.count(self._micro_step)
        return self._buffered_inputs[number]

    # 2. Sampling, scoring, selecting

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> Batch:
        if not self._is_made:
            return super()._generate_and_score_completions(inputs)
        mode = "train" if self.model.training else "eval"
        try:
            if mode == "train":
                return self._sample_generation(inputs)
            self.rollout_events.tell("on_rows", inputs)
            evaluated: Batch = super()._generate_and_score_completions(inputs)
            self.rollout_events.number(len(inputs), None)
            return evaluated
        except BaseException:  # Ctrl-C, too: nothing of these completions may reach a later call
            self._sampler.forget()
            for collected in (self._pending_extra_logs, self._pending_metrics, self._metrics[mode]):
                collected.clear()
            raise

    def _sample_generation(self, inputs: list[dict[str, Any]]) -> Batch:
        """A batch for training: TRL's, of all rounds, with the rows marked that the loss is a mean over."""
        self._rounds, sampler, dynamic = [], self._sampler, self._dynamic_sampling
        sampler.begin_step(inputs, self.state.global_step, self._empty_steps.position)
        batch, kept = self._take_round(inputs)
        metrics, trained = dict[str, float](), int(kept.any(dim=1).sum())
        if dynamic is None:
            own = self._local(kept.flatten()).to(batch["advantages"].device)
        else:
            dynamic.begin(batch, kept)
            while further := sampler.further(dynamic.missing, dynamic.kept):
                dynamic.add(*self._take_round(further))
            batch, own, metrics = dynamic.filled(batch)
            trained = int(metrics["trained_groups"])
        metrics = sampler.end_step() | metrics
        self.latest_selection = joined_selections(self._rounds)
        self._empty_steps.begin_generation(trained, metrics | self._strategy.metrics(self.latest_selection))
        if not self._strategy.keeps_trl_batch or TURN_SAMPLES in batch:  # plain TRL's batch stays as it is
            if self._strategy.is_trl_update:
                own = torch.ones_like(own)
            if TURN_SAMPLES in batch:
                batch, own = with_turn_samples(self, batch, own)
            batch = self._plan.marked(batch, own)
        return batch

    def _take_round(self, inputs: list[dict[str, Any]]) -> tuple[Batch, Tensor]:
        """TRL's batch of the next round, with advantages as if it held the groups alone that the round selects.

        Returns:
            The batch, and (n, G) bool, the completions over all processes that are selected; with pilots of the
            prompts that were sampled in full.
        """
        number = len(self._rounds)
        batch = self._sample_round(inputs, number)
        lengths = sampled_tokens(batch)
        rewards, earned = self._sampler.end_round(lengths)
        if number == 0:
            self.rollout_events.rollout(inputs, batch)
        selection = self._select(batch, lengths, rewards, earned)
        self._rounds.append(selection)
        kept, scored = selection.kept, self.rollout_events.scored
        assert scored is not None  # the round has been scored
        if self._strategy.zeroes_advantages:
            own = self._local(kept.flatten()).to(batch["advantages"].device)
            batch["advantages"] = batch["advantages"].masked_fill(~own, 0.0)
        in_mean = torch.ones_like(kept) if self._strategy.is_trl_update else kept
        self._set_advantages(inputs, batch, replace(selection, rewards=scored.sums.view(kept.shape), kept=in_mean))
        return batch, kept

    def _sample_round(self, inputs: list[dict[str, Any]], number: int) -> Batch:
        """TRL's batch of a round, from 0; with pilots `inputs` become the rows that were sampled in full."""
        batch: Batch = super()._generate_and_score_completions(inputs)
        self.rollout_events.number(len(inputs), self._empty_steps.generation + 1)
        current = self._sampler.round
        if current is not None and current.live is not None:
            batch = self._log_probs.without_dead(batch, current.live)
        if len(batch["advantages"]) != len(inputs):
            raise RuntimeError(
                f"_generate_and_score_completions made a batch of {len(batch['advantages'])} rows from {len(inputs)}; "
                "allowed with pilots: TRL's own method, which goes on with the lists that it gave to _generate."
            )
        if TURN_SAMPLES in inputs[0]:
            batch[TURN_SAMPLES] = [row[TURN_SAMPLES] for row in inputs]
        return batch

    def _select(self, batch: Batch, lengths: Tensor, rewards: Tensor, earned: Tensor) -> Selection:
        """The completions of a round to train on, the same on every process.

        Args:
            batch: TRL's, of the groups that were sampled in full.
            lengths: (rows,) tokens that the model wrote, of this process.
            rewards: (n, G) by which these groups are scored, over all processes.
            earned: (P, G) rewards of all prompts of the round, NaN for completions that were not sampled.
        """
        scored, strategy, shape = self.rollout_events.scored, self._strategy, rewards.shape
        assert scored is not None  # the round has been scored
        gather, position = self.accelerator.gather, self._empty_steps.position
        clip = getattr(self, "reward_clip_range", None)  # RLOO clips before it makes advantages
        sums = scored.exact_sums.clamp(*clip) if clip else scored.exact_sums
        groups = Groups(
            rewards,
            scored.rewards_per_func.view(*shape, -1),
            gather(lengths).cpu().view(shape),
            seeded_generator(self.args.seed, self.state.global_step, position, len(self._rounds)),
            strategy.see(earned),
            lambda: self._log_probs.mean_entropies(batch).view(shape),
            sums.view(shape),
            lambda: gather(batch["advantages"]).view(shape).cpu(),
        )
        scores, kept = strategy.select(groups)
        if not strategy.keeps_trl_batch:
            kept = kept & ~scored.failed.cpu().view(shape)
        if strategy.own_selector is not None and self.accelerator.num_processes > 1:
            # Somebody's function may draw from anywhere: processes that select differently wait for ever.
            (kept,) = broadcast_object_list([kept])
        return Selection(rewards, scores, kept, groups.lengths, self._sampler.policy.predicted)

    def _generate(self, prompts: list[Any]) -> tuple[Any, ...]:
        plain, calculate, pilots = super()._generate, super()._calculate_rewards, self._samples_pilots
        awake = keeping_vllm_awake(self) if getattr(self, "vllm_generation", None) else nullcontext()
        with awake, reading_prompts_once(self) if self._reads_prompts_once else nullcontext():
            sampled: tuple[Any, ...] = self._sampler.generate(plain, calculate, prompts) if pilots else plain(prompts)
        return sampled

    def _calculate_rewards(self, *rows: list[Any]) -> Tensor:
        calculate = super()._calculate_rewards
        rewards: Tensor = self._sampler.calculate(calculate, *rows) if self._samples_pilots else calculate(*rows)
        return rewards

    @property
    def _samples_pilots(self) -> bool:
        return self._is_made and self.model.training and self._sampler.first > 0

    def _local(self, values: Tensor) -> Tensor:
        """This process's part of values over the rows of all processes. (B,) -> (rows,)."""
        return values.chunk(self.accelerator.num_processes)[self.accelerator.process_index]

    # 3. Log-probs, of old and reference policies and in the loss

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
        is_plain = not compute_aux_loss and all(value is None for value in images.values())
        # Only TRL's calls for a whole generation give a size, and only for training is a round sampled.
        if batch_size is not None and self._is_made and self._sampler.round is not None:
            of_live = self._log_probs.of_generation(rows, batch_size, is_plain)
            if of_live is not None:
                return of_live, None, None
        if is_plain and self._shared_prompts is not None and batch_size is None and self.model.training:
            shared = self._shared_prompts(*rows)
            if shared is not None:
                return shared[0], shared[1] if compute_entropy else None, None
        result: tuple[Tensor, Tensor | None, Tensor | None] = super()._get_per_token_logps_and_entropies(
            *rows, batch_size, compute_entropy, compute_aux_loss, **images
        )
        return result

    def _check_sharing(self, batch: Batch) -> None:
        """Whether prompts can be shared; a call for all processes together."""
        if self._shared_prompts is not None:
            plain = super()._get_per_token_logps_and_entropies
            self._shared_prompts.check(self.model, lambda *rows: plain(self.model, *rows)[0], batch)

    # 4. The loss of each micro-batch, weighted by its share of the kept rows

    def _loss_of_kept_rows(
        self, compute_loss: Callable[..., Tensor], model: Any, inputs: Batch, *args: Any, **kwargs: Any
    ) -> Tensor:
        """Around `compute_loss` and `_compute_loss`: the outermost call weighs the loss, whoever makes it."""
        if self._in_loss or not self.model.training:
            return compute_loss(model, inputs, *args, **kwargs)
        step = self._micro_step
        if step is None:
            raise super_not_called(self, "_prepare_inputs")
        self._is_weighted = True
        if not step.runs:
            # A leaf of its own: TRL's training step runs backward on it and reaches no parameter.
            return torch.zeros((), device=self.accelerator.device, requires_grad=True)
        counted = nullcontext() if self._plan.steps is None else self._empty_steps.means_of(step.kept)
        self._in_loss = True
        try:
            with self._plan.gathering(), counted:
                loss = compute_loss(model, inputs, *args, **kwargs)
        finally:
            self._in_loss = False
        return loss if step.weight == 1.0 else loss * step.weight

    def _check_weighted(self) -> None:
        """Before an optimizer step: no micro-batch may have escaped the weights."""
        if self._micro_step is None:
            raise super_not_called(self, "_prepare_inputs")
        if self._plan.steps is not None and not self._is_weighted:
            raise RuntimeError(
                f"{type(self).__name__}.training_step must call self.compute_loss or self._compute_loss, which weigh "
                "the kept rows; it called neither."
            )

    def _backward_of_kept_rows(self, backward: Callable[..., None], loss: Tensor, **kwargs: Any) -> None:
        """Keep DeepSpeed's engine out of skipped micro-steps, and so its optimizer out of empty steps.

        Its backward pass counts micro-steps (in ZeRO-3 the first one of a step overwrites the gradients of the last
        step, and later ones add), reduces buckets that a skipped micro-step has not filled, and takes the step itself.
        A scheduler of the engine's own still takes its step, as transformers' does.
        """
        if self._micro_step is None:
            raise super_not_called(self, "_prepare_inputs")
        if self._micro_step.runs:
            backward(loss, **kwargs)
        elif self.accelerator.sync_gradients:  # the last micro-step of an optimizer step only skips if all have
            engine = self.accelerator.deepspeed_engine_wrapped.engine
            if engine.lr_scheduler is not None:
                engine.lr_scheduler.step()
            engine.global_steps += 1
            engine.global_samples += engine.train_batch_size()

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
        """Of the latest step of a log row that had rows; `None`, which is not logged, without any."""
        if not self._is_made:
            return super()._get_grad_norm(model, grad_norm=grad_norm)
        if self._empty_steps.has_rows:  # else DeepSpeed would report the norm of the last step that it took
            self._empty_steps.grad_norm = super()._get_grad_norm(model, grad_norm=grad_norm)
        return self._empty_steps.grad_norm

    # For each trainer to fill in

    def _set_advantages(self, inputs: list[dict[str, Any]], batch: Batch, selection: Selection) -> None:
        """Recompute the advantages of a round as if its batch held only the groups of the plan's mean."""

    @property
    def _loss_mean(self) -> LossMean:
        """The mean that the loss is, before micro-batches are averaged."""
        raise NotImplementedError

    # A run, and its checkpoints

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        check_loss_of_trl(type(self), self.args)
        check_enough_prompts(self.train_dataset, self.args)
        if self._empty_steps.position and self._plan.steps is not None:
            # An optimizer step was interrupted: its micro-batches are cut for the rest of it.
            self._step, self._buffered_inputs = 0, None
        self._begin_run()
        self._metrics["train"].clear()  # of a step that was interrupted before it was logged
        if not self._strategy.is_trl_update:
            logger.warning(
                "loss and grad_norm are means over the kept completions only, so grad_norm is usually larger than the "
                "plain trainer's; for max_grad_norm see docs/filter.md, 'The gradient norm'."
            )
        return super().train(resume_from_checkpoint, *args, **kwargs)

    def _begin_run(self) -> None:
        """No state of an earlier run, or of another dataset."""
        self.latest_selection = None
        self._micro_step, self._is_weighted = None, True
        self._strategy = self._new_strategy()
        self._empty_steps.begin_run()
        policy, rows = self._policy()
        self._sampler = PromptSampler(self, policy, rows)
        self._run_state = RunState(shared={"filter": self._strategy, "steps": self._empty_steps})
        self._run_state.shared |= policy.parts
        self._dynamic_sampling = None
        if policy.rounds or policy.pilots is not None:  # pilots leave places in a batch, even without further prompts
            self._dynamic_sampling = DynamicSampling(self)
            self._run_state.own["dynamic_sampling"] = self._dynamic_sampling

    def _policy(self) -> tuple[Policy, Any]:
        """What the run samples, and the rows of the dataset that it is sampled from."""
        args, processes, size = self.args, self.accelerator.num_processes, self.args.num_generations
        groups, first, rounds = args.groups_per_generation, self.pilot_generations, args.snr_dynamic_sampling_rounds
        order, rows = None, ()
        if args.snr_prompt_selection or rounds > 0:
            rows = self._remove_unused_columns(self.train_dataset, description="training")
            orders = permutations_of_trl(len(rows), args.seed, self.shuffle_dataset)
            selects = args.snr_prompt_selection
            order = PromptSelection(len(rows), orders, args.seed) if selects else PromptOrder(len(rows), orders)
        pilots = Pilots(first, size, groups, args.seed, processes) if first else None
        # Pilots of as many prompts as a batch has room for; TRL resets an environment for each of their rows.
        environments = getattr(self, "environment_factories", None) is not None
        most = groups * size // first if first and not environments else groups
        return Policy(order, pilots, rounds, most, processes, unit=1 if first else size), rows

    @property
    def _has_begun(self) -> bool:
        return self._empty_steps.has_begun

    def _save_run_state(self, folder: str) -> None:
        own: OwnState = {"step": self._step, "buffered_inputs": None, "micro_batches": None}
        if self._step % (self.args.steps_per_generation * self.num_iterations) != 0:
            # A checkpoint in the middle of a generation batch takes it along; else TRL samples again.
            own |= {"buffered_inputs": self._buffered_inputs, "micro_batches": self._plan.state()}
        self._run_state.save(folder, self.accelerator.process_index, self._batch_layout(), own)

    def _load_run_state(self, folder: str | None) -> None:
        own = self._run_state.load(folder, self.accelerator, self._batch_layout(), OwnState)
        if own is not None:
            self._step, self._buffered_inputs = own["step"], own["buffered_inputs"]
            if own["micro_batches"] is not None:
                self._plan.load(own["micro_batches"])
        if self._buffered_inputs is not None:  # in the middle of a generation batch, which is not checked again
            self._check_sharing(self._buffered_inputs[0])

    def _batch_layout(self) -> dict[str, int]:
        layout = {name: getattr(self.args, name) for name in LAYOUT_FIELDS}
        return {**layout, "num_processes": self.accelerator.num_processes}

    # Construction

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
        args = self._checked_args(model, args, train_dataset, selector, kwargs.get("environment_factory"))
        self.pilot_generations = pilots_of(args, type(self))
        check_subclass(type(self), args, self.pilot_generations)
        super().__init__(
            model, reward_funcs, args, train_dataset, eval_dataset, processing_class, *positional, **kwargs
        )
        rollout = kwargs.get("rollout_func")
        self._check_made(selector, rollout is not None or kwargs.get("environment_factory") is not None)
        check_has_rows(self.train_dataset, self.args)
        check_pilots(self, rollout)
        shared = SharedPrompts(self.accelerator, self.model) if shares_prompts(self) else None
        self._shared_prompts, self._reads_prompts_once = shared, reads_prompts_once(self)
        self._plan = strategy_class(self.args).plan(self)
        self._empty_steps, self._log_probs = EmptySteps(self), LogProbs(self)
        self._begin_run()
        self._is_made = True
        # Around the methods of subclasses: none can lose a weight, or a reward.
        self.rollout_events = RolloutEvents(self, announces=True)
        self.rollout_events.watch_environments()
        for name in ("compute_loss", "_compute_loss"):
            extend(self, name, self._loss_of_kept_rows)
        if self.is_deepspeed_enabled:
            extend(self.accelerator, "backward", self._backward_of_kept_rows)
        if shared is not None:
            extend(self.accelerator, "backward", shared.backward)
        if isinstance(rollout, NeedsRows):
            rollout.attach(self)
            if rollout.splits_episodes:
                check_turn_samples(self)
        self.add_callback(self._empty_steps)
        self._add_companions()

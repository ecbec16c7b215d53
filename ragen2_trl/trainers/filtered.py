"""The hooks of a training step, from top to bottom: what the filtered trainers do to TRL's.

A step samples and scores completions, selects the groups that carry signal, cuts their rows into micro-batches,
computes the loss of each and takes an optimizer step. The decision is one bool mask: (N, G) over all processes in a
`Selection`, and this process's rows of it, `KEPT`, in the batch until micro-batches are cut. `construction.py` makes a
trainer, `checkpointed.py` holds its runs and checkpoints.
"""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from accelerate.utils import broadcast_object_list, gather_object
from torch import Tensor

from ragen2_trl.columns import GENERATION, TURN_SAMPLES
from ragen2_trl.filtering import group_score
from ragen2_trl.rollout_events import end_tokens, group_rewards
from ragen2_trl.trainers.batches import Batch, loss_mask
from ragen2_trl.trainers.checks import super_not_called
from ragen2_trl.trainers.forward_passes import ForwardPasses
from ragen2_trl.trainers.generation import keeping_vllm_awake, reading_prompts_once
from ragen2_trl.trainers.prompt_source import separate
from ragen2_trl.trainers.row_means import TOKEN_MEANS, RowMeans
from ragen2_trl.trainers.selection import (
    Groups,
    Selection,
    equal_rewards,
    joined_selections,
    rewards_to_score,
    seeded_generator,
    with_advantage,
)
from ragen2_trl.trainers.turn_samples import sampled_tokens, with_turn_samples


class SNRFilter(ForwardPasses):
    """Trains one of TRL's trainers only on the prompt groups that carry signal. Mixed in before that trainer.

    A trainer adds its configurations, the mean that its loss is, and how advantages change when groups are dropped.
    """

    # 1. TRL asks for the inputs of a micro-step, and samples where a generation batch begins

    def _prepare_inputs(self, generation_batch: Any) -> Batch:
        if not self._is_made:
            return super()._prepare_inputs(generation_batch)
        before, generations = self._buffered_inputs, self._empty_steps.generations
        inputs: Batch = super()._prepare_inputs(generation_batch)
        if not self.model.training:
            return inputs
        if self._buffered_inputs is not before:
            if self._empty_steps.generations == generations:
                raise super_not_called(self, "_generate_and_score_completions")
            self._micro_batches.begin_generation(self._buffered_inputs, self._is_neutral)
            self._check_sharing(self._buffered_inputs[0])
        number = self._step % self.args.steps_per_generation
        if number == 0:
            left_to_step = self.current_gradient_accumulation_steps - self._empty_steps.position
            self._buffered_inputs = self._micro_batches.begin_pass(
                self._buffered_inputs, left_to_step, self._empty_steps.has_rows
            )
        self._micro_step, self._is_weighted = self._micro_batches.step(number), False
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
            self.rollout_events.rows(inputs)
            evaluated: Batch = super()._generate_and_score_completions(inputs)
            self._number_completions(len(inputs), None)
            return evaluated
        except BaseException:  # Ctrl-C, too: nothing of these completions may reach a later call
            self._row_means = self._sampled = self._live = None
            for collected in (self._pending_extra_logs, self._pending_metrics, self._metrics[mode]):
                collected.clear()
            raise

    def _sample_generation(self, inputs: list[dict[str, Any]]) -> Batch:
        """A batch for training: TRL's, of all rounds, with the rows marked that the loss is a mean over."""
        self._row_means = RowMeans(self._metrics["train"])
        if self._pilots is not None:
            self._pilots.begin_step()
        self._prompts.begin_step(inputs)
        batch = self._sample_round(inputs, 0)
        self.rollout_events.rollout(inputs, batch)
        rounds = [self._select(inputs, batch, 0)]
        metrics = self._prompts.metrics()
        if self._dynamic_sampling is None:
            kept = self._local(rounds[0].kept.flatten()).to(self.accelerator.device)
            trained = int(rounds[0].groups.sum())
        else:

            def sample(rows: list[dict[str, Any]], number: int) -> tuple[Batch, Tensor]:
                further = self._sample_round(rows, number)
                rounds.append(self._select(rows, further, number))
                return further, rounds[-1].kept

            step, further = self.state.global_step, self._prompts.further
            batch, kept, of_rounds = self._dynamic_sampling.fill(
                batch, rounds[0].kept, step, further, sample, self._logps_now
            )
            trained = int(of_rounds["trained_groups"])
            metrics |= of_rounds
        if self._pilots is not None or len(rounds) > 1:
            self._row_means.close(self.reward_weights, self.reward_func_names)
        self._row_means = None
        self.latest_selection = joined_selections(rounds)
        metrics |= self._filter.metrics(self.latest_selection)
        if self._pilots is not None:
            metrics |= self._pilots.metrics()
        self._empty_steps.begin_generation(trained, metrics)
        if not self._is_neutral or TURN_SAMPLES in batch:  # plain TRL's batch stays as it is
            kept = self._plan.in_mean(kept)
            if TURN_SAMPLES in batch:
                batch, kept = self._with_turn_samples(batch, kept)
            batch = self._plan.marked(batch, kept)
        self._finish_advantages(batch)
        return batch

    def _sample_round(self, inputs: list[dict[str, Any]], number: int) -> Batch:
        """TRL's batch of a round, from 0; with pilots `inputs` become the rows that were sampled in full."""
        if self._pilots is None:
            inputs[:] = separate(inputs)
            self.rollout_events.rows(inputs)
        else:
            self._pilots.begin_round(inputs, self._sampling_key(number))
        self._begin_batch(inputs, number)
        batch = super()._generate_and_score_completions(inputs)
        self._number_completions(len(inputs), self._empty_steps.generations + 1)
        self._add_to_means(batch, len(inputs))
        self._end_batch(batch)
        if len(batch["advantages"]) != len(inputs):
            raise RuntimeError(
                f"_generate_and_score_completions made a batch of {len(batch['advantages'])} rows from {len(inputs)}; "
                "allowed with pilots: TRL's own method, which goes on with the lists that it gave to _generate."
            )
        if TURN_SAMPLES in inputs[0]:
            batch[TURN_SAMPLES] = [row[TURN_SAMPLES] for row in inputs]
        return batch

    def _number_completions(self, rows: int, generation: int | None) -> None:
        """Number this process's latest completions in TRL's table, unless a reward function logs such a column."""
        scored = self.rollout_events.scored
        if scored is None or GENERATION not in scored.columns:
            self._logs["extra"][GENERATION].extend(gather_object([generation] * rows))

    def _generate(self, prompts: list[Any]) -> tuple[Any, ...]:
        with keeping_vllm_awake(self):
            if self._pilots is None or not self.model.training:
                return self._generate_call(prompts)
            return self._pilots.generate(self._generate_call, self._calculate_call, prompts)

    def _calculate_rewards(self, *rows: list[Any]) -> Tensor:
        if self._pilots is None or not self.model.training:
            return self._calculate_call(*rows)
        return self._pilots.calculate(self._calculate_call, *rows)

    def _generate_call(self, prompts: list[Any]) -> tuple[Any, ...]:
        with reading_prompts_once(self):
            generated: tuple[Any, ...] = super()._generate(prompts)
        if self._row_means is not None:
            self._row_means.add(len(prompts))
        return generated

    def _calculate_call(self, *rows: list[Any]) -> Tensor:
        rewards: Tensor = super()._calculate_rewards(*rows)
        if self._row_means is not None:
            self._row_means.add(len(rows[0]))
        return rewards

    def _add_to_means(self, batch: Batch, rows: int) -> None:
        """A round of so many rows is scored. A call for all processes together."""
        scored = self.rollout_events.scored
        assert self._row_means is not None and scored is not None  # a step is being sampled
        given_up = [] if self._pilots is None else [self._pilots.given_up]
        per_func = torch.cat([scored.rewards_per_func, *given_up])
        self._row_means.scored.append(per_func)
        tokens = self.accelerator.reduce(loss_mask(batch).sum(), reduction="sum").item()
        self._row_means.add(len(per_func), {"frac_reward_zero_std": rows, **dict.fromkeys(TOKEN_MEANS, tokens)})

    def _sampling_key(self, number: int) -> tuple[int, int, int]:
        """Tells a round from others of the run: optimizer steps so far, micro-steps since the last, and its number."""
        return self.state.global_step, self._empty_steps.position, number

    def _select(self, inputs: list[dict[str, Any]], batch: Batch, number: int) -> Selection:
        """The completions of a round to train on. Advantages in its batch are made over kept groups alone."""
        scored, sums = self.rollout_events.scored, self.rollout_events.group_rewards
        assert scored is not None  # the round has been scored
        rewards = rewards_to_score(self.args.snr_score_reward, sums, self.reward_func_names, scored, len(inputs))
        earned = rewards if self._pilots is None else self._pilots.learn(rewards)
        lengths = self.accelerator.gather(sampled_tokens(batch)).cpu().view(sums.shape)
        groups = Groups(
            rewards,
            scored.rewards_per_func.view(*sums.shape, -1),
            lengths,
            seeded_generator(self.args.seed, *self._sampling_key(number)),
            self._filter.see(earned),
            lambda: self._mean_entropies(batch).view(sums.shape),
        )
        if self.args.snr_strategy == "lossless":
            # Float64 sums do not depend on the order of functions; RLOO clips before it makes advantages.
            exact = group_rewards(scored.rewards_per_func.double(), self.reward_weights.double(), sums.size(1))
            clip = getattr(self, "reward_clip_range", None)
            earned_alike = equal_rewards(exact.clamp(*clip) if clip else exact).repeat_interleave(sums.size(1))
            equal = self._local(earned_alike).to(batch["advantages"].device)
            batch["advantages"] = batch["advantages"].masked_fill(equal, 0.0)  # rounding noise in TRL
            kept = with_advantage(groups, self.accelerator.gather(batch["advantages"]))
            scores = group_score(rewards)
        else:
            scores, kept = self._filter.select(groups)
        if not self._is_neutral:
            kept = kept & ~scored.failed.cpu().view(kept.shape)
        if self._own_selector is not None and self.accelerator.num_processes > 1:
            # Somebody's function may draw from anywhere: processes that select differently wait for ever.
            (kept,) = broadcast_object_list([kept])
        predicted = self._prompts.learn(earned, None if self._pilots is None else self._pilots.first)
        if predicted is not None and self._pilots is not None:
            predicted = [predicted[prompt] for prompt in self._pilots.whole]
        selection = Selection(rewards, scores, kept, lengths, predicted)
        self._set_advantages(inputs, batch, replace(selection, rewards=sums, kept=self._plan.in_mean(kept)))
        return selection

    def _with_turn_samples(self, batch: Batch, kept: Tensor) -> tuple[Batch, Tensor]:
        logps: dict[str, Callable[[Batch], Tensor]] = {
            "old_per_token_logps": self._logps_now,
            "ref_per_token_logps": self._reference_logps,
        }
        pad_token_id = self._tokenizer.pad_token_id
        return with_turn_samples(batch, kept, end_tokens(self), logps, self.args, pad_token_id, self.accelerator)

    # 3. The loss of each micro-batch, weighted by its share of the kept rows

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
        counted = nullcontext() if self._micro_batches.steps is None else self._empty_steps.means_of(step.kept)
        self._in_loss = True
        try:
            with self._micro_batches.gathering(), counted:
                loss = compute_loss(model, inputs, *args, **kwargs)
        finally:
            self._in_loss = False
        return loss if step.weight == 1.0 else loss * step.weight

    def _check_weighted(self) -> None:
        """Before an optimizer step: no micro-batch may have escaped the weights."""
        if self._micro_step is None:
            raise super_not_called(self, "_prepare_inputs")
        if self._micro_batches.steps is not None and not self._is_weighted:
            raise RuntimeError(
                f"{type(self).__name__}.training_step has not called self.compute_loss or self._compute_loss of this "
                "trainer, which weigh the kept rows; allowed: to call one of them."
            )

    def _backward_of_kept_rows(self, backward: Callable[..., None], loss: Tensor, **kwargs: Any) -> None:
        """Keep DeepSpeed's engine out of skipped micro-steps, and so its optimizer out of empty steps.

        Its backward pass counts micro-steps (in ZeRO-3 the first one of a step overwrites the gradients of the last
        step, and later ones add), reduces buckets that a skipped micro-step has not filled, and takes the step itself.
        A scheduler of the engine's own still takes its step, as transformers' does.
        """
        if self._micro_step is None or self._micro_step.runs:
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

    def _finish_advantages(self, batch: Batch) -> None:
        """Adapt advantages to all kept groups of the step, dynamic sampling included."""

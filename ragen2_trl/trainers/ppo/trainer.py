"""PPO with the filter, on the rollouts of TRL's GRPO (arXiv 2604.06268, Section 4.1; TRL has no PPO any more)."""

from functools import partial
from typing import Any, ClassVar

import torch
import trl
from packaging.version import Version
from torch import Tensor
from trl import GRPOConfig, GRPOTrainer

from ragen2_trl.columns import TURN_REWARDS
from ragen2_trl.rollout_events import log_row
from ragen2_trl.trainers.batches import Batch, loss_mask, take
from ragen2_trl.trainers.filtered import SNRFilter
from ragen2_trl.trainers.log_probs import forward_in_step
from ragen2_trl.trainers.plans import KEPT, LossMean
from ragen2_trl.trainers.ppo import advantages as mathematics
from ragen2_trl.trainers.ppo.actor_critic import ActorCritic
from ragen2_trl.trainers.ppo.config import SNRFilteredPPOConfig, check_loss
from ragen2_trl.trainers.ppo.critic import without_critic
from ragen2_trl.trainers.selection import Selection


class SNRFilteredPPOTrainer(ActorCritic, SNRFilter, GRPOTrainer):
    """
    PPO on the prompt groups that carry signal, as [`SNRFilteredGRPOTrainer`] is GRPO on them.

    Generation, rewards, tools, rollout functions, vLLM and the clipped loss are those of [`~trl.GRPOTrainer`]. In
    place of advantages over a group's rewards there are generalised advantages over tokens, from the values of a
    critic. The return of an episode lands on the last token that the model wrote, and rewards of single turns on the
    last token of each, where a rollout function gives a column `turn_rewards`. Tokens of the environment carry neither
    reward nor value and are stepped over. A group is the completions of one prompt; dropped rows take part in neither
    the actor's nor the critic's update, and advantages are whitened over the kept ones.

    Args:
        model, reward_funcs, train_dataset, eval_dataset, processing_class, **kwargs:
            As for [`~trl.GRPOTrainer`].
        args ([`SNRFilteredPPOConfig`] or [`~trl.GRPOConfig`], *optional*):
            A plain `GRPOConfig` gets the default settings of PPO and of the filter.
        value_model (`str`, [`~transformers.PreTrainedModel`] or [`~peft.PeftModel`], *optional*):
            The critic's backbone, for `value_head="separate"`: a model with a `last_hidden_state`, its path or Hub id,
            or the folder of a critic that was saved. By default the model that the policy was loaded from.

    Raises:
        ValueError: before training for a setting out of range or a dataset without prompts.
        TypeError: for a configuration that is neither of the two.
        RuntimeError: in the first step for a subclass that loses the filter, before a parameter moves.

    Example:

    ```python
    >>> from ragen2_trl import SNRFilteredPPOConfig, SNRFilteredPPOTrainer
    >>> from trl.rewards import accuracy_reward
    >>> from datasets import load_dataset

    >>> trainer = SNRFilteredPPOTrainer(  # doctest: +SKIP
    ...     model="Qwen/Qwen2.5-0.5B-Instruct",
    ...     reward_funcs=accuracy_reward,
    ...     args=SNRFilteredPPOConfig(value_head="separate", critic_lr=1e-5),
    ...     train_dataset=load_dataset("trl-lib/DeepMath-103K", split="train"),
    ... )
    >>> trainer.train()  # doctest: +SKIP
    ```
    """

    _tag_names = ["trl", "ppo", "snr-filter", "ragen2"]  # noqa: RUF012 -- TRL declares it so
    _name = "SNR-filtered PPO"
    _config_class: ClassVar[type] = SNRFilteredPPOConfig
    _trl_config_class: ClassVar[type] = GRPOConfig
    can_share_prompts: ClassVar[bool] = False  # the critic reads hidden states
    args: SNRFilteredPPOConfig

    def __init__(self, model: Any, reward_funcs: Any = None, args: Any = None, *positional: Any, **kwargs: Any):
        value_model = kwargs.pop("value_model", None)
        if isinstance(args, GRPOConfig):  # a plain one has not been checked
            check_loss(args)
        # Until 1.13 it takes another loss than the one that we add the critic's to, until 1.14 another forward pass.
        if args is not None and args.use_liger_kernel and Version(trl.__version__) < Version("1.15"):
            raise ValueError(
                f"use_liger_kernel=True does not work with a critic in TRL {trl.__version__}; allowed: False, or TRL "
                "1.16 or newer."
            )
        super().__init__(model, reward_funcs, args, *positional, **kwargs)
        self._add_critic(value_model)

    def _check_trainable(self) -> None:
        with without_critic(self.model):
            super()._check_trainable()

    @property
    def _loss_mean(self) -> LossMean:
        return LossMean.TOKENS_OF_GENERATION

    # Advantages

    def _set_advantages(self, inputs: list[dict[str, Any]], batch: Batch, selection: Selection) -> None:
        mask = loss_mask(batch)
        kept = self._local(selection.kept.flatten()).to(mask.device)
        returns = self._local(selection.rewards.flatten()).to(mask.device)  # (rows,), NaN where nothing scored it
        rewards = mathematics.token_rewards(returns, mask, [row.get(TURN_REWARDS) for row in inputs])
        rows, size = kept.nonzero().squeeze(1).tolist(), self.args.per_device_train_batch_size
        # Under the present weights; dropped rows need none.
        values = forward_in_step(partial(map, self._values), batch, rows, take(batch, [0]), size, self.accelerator)
        assert values is not None  # of a batch
        advantages, targets = mathematics.gae(rewards, values, mask, self.args.gamma, self.args.gae_lambda)
        scored = ~returns.isnan().unsqueeze(1)
        batch["advantages"] = advantages * scored
        batch["returns"] = targets.masked_fill(~scored, torch.nan)  # what nothing scored teaches the critic nothing
        batch["old_values"] = values

    def _with_all_groups(self, inputs: list[dict[str, Any]], batch: Batch) -> Batch:
        """A batch as an update of the policy on all of its groups would have it, for those who look at gradients."""
        batch, rewards = dict(batch), self.rollout_events.group_rewards
        everything = torch.ones(rewards.shape, dtype=torch.bool)
        self._set_advantages(inputs, batch, Selection(rewards, rewards[:, 0], everything, torch.ones_like(rewards)))
        self._finish_advantages(batch)
        return {**batch, "returns": torch.full_like(batch["returns"], torch.nan)}  # teach the critic nothing

    @torch.no_grad()
    def _values(self, batch: Batch) -> Tensor:
        with self.critic.listening() as heard:
            self._log_probs.and_entropies(batch, counted=False)  # plain TRL has no values to compare with
        return _of_completions(torch.cat(heard), batch)

    def _sample_generation(self, inputs: list[dict[str, Any]]) -> Batch:
        batch = super()._sample_generation(inputs)
        self._finish_advantages(batch)  # of all kept groups of the step, dynamic sampling included
        return batch

    def _finish_advantages(self, batch: Batch) -> None:
        mask = loss_mask(batch) * ~batch["returns"].isnan()
        if KEPT in batch:
            mask = mask * batch[KEPT].unsqueeze(1)
        returns, errors = batch["returns"], batch["returns"] - batch["old_values"]
        moments = torch.stack([mathematics.masked_moments(v, mask) for v in (batch["advantages"], returns, errors)])
        of_advantages, of_returns, of_errors = self.accelerator.reduce(moments, reduction="sum")
        batch["advantages"] = mathematics.whiten(batch["advantages"], mask, of_advantages)
        if of_returns[2] > 0:
            log_row(self, {"ppo/return_mean": (of_returns[0] / of_returns[2]).item()})
        explained = mathematics.explained_variance(of_errors, of_returns)
        if explained == explained:  # NaN where returns do not vary
            log_row(self, {"ppo/explained_variance": explained})

    # Loss

    def _compute_loss(self, model: Any, inputs: Batch) -> Tensor:
        if "returns" not in inputs:  # evaluation: there is nothing to update
            return super()._compute_loss(model, inputs)
        with self.critic.listening() as heard:
            loss = super()._compute_loss(model, inputs)
        mask = loss_mask(inputs)
        tokens = inputs["num_items_in_batch"].clamp(min=1.0) / self.accelerator.num_processes
        tokens = tokens * self.current_gradient_accumulation_steps / self.args.steps_per_generation
        per_token = self.args.value_coef * self._value_loss(_of_completions(heard[-1], inputs), inputs, mask)
        return loss + (per_token * mask).sum() / tokens

    def _value_loss(self, values: Tensor, inputs: Batch, mask: Tensor) -> Tensor:
        """(rows, T), 0 where nothing scored the row."""
        known = ~inputs["returns"].isnan()
        clip = self.args.value_clip if self.args.value_clip > 0 else None
        targets = inputs["returns"].where(known, values.detach())
        losses = mathematics.clipped_value_loss(values, inputs["old_values"], targets, clip) * known
        self._log_mean("ppo/value_loss", losses.detach(), mask * known)
        return losses

    def _log_mean(self, name: str, values: Tensor, mask: Tensor) -> None:
        sums = torch.stack([(values * mask).sum(), mask.sum().float()])
        total, count = self.accelerator.reduce(sums, reduction="sum").tolist()
        if count > 0:
            log_row(self, {name: total / count})


def _of_completions(values: Tensor, batch: Batch) -> Tensor:
    """Values of the states in which completion tokens were chosen: (rows, prompt + T) -> (rows, T)."""
    return values[:, -batch["completion_ids"].size(1) - 1 : -1]

"""A trainer whose policy has a critic: one optimizer, two learning rates, and files of their own."""

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from transformers.integrations import is_deepspeed_zero3_enabled

from ragen2_trl.trainers.ppo.critic import FOLDER, WEIGHTS, Critic, make_critic, split_weights, without_critic

if TYPE_CHECKING:
    from ragen2_trl.trainers.stock import StockTrainer
else:
    StockTrainer = object  # it is mixed in before one of TRL's


class ActorCritic(StockTrainer):
    """Mixed in before one of TRL's trainers, whose arguments have `value_head`, `critic_lr` and
    `critic_warmup_steps`."""

    critic: Critic

    def _add_critic(self, value_model: Any) -> None:
        """Make the critic a part of the policy, see `Critic`."""
        if self.args.value_head == "separate":
            value_model = value_model or self.model.config._name_or_path
            if not value_model:
                raise ValueError(
                    "value_model=None, and the policy was not loaded from a folder or the Hub: the critic of "
                    "value_head='separate' has no weights to start from; allowed: a path, a Hub id or a model."
                )
        elif value_model is not None:
            raise ValueError("value_model is given and value_head='shared'; allowed with it: value_head='separate'.")
        self.critic = make_critic(self.model, value_model)
        if not is_deepspeed_zero3_enabled():
            self.critic.to(self.accelerator.device)
        self.critic.join(self.model)

    def create_optimizer(self, model: Any = None) -> Any:
        optimizer = super().create_optimizer(model)
        _give_critic_its_rate(optimizer, self.critic, self.args.critic_lr)
        return optimizer

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        scheduler = super().create_scheduler(num_training_steps, optimizer)
        _hold_policy_back(scheduler, self.args.critic_warmup_steps)
        return scheduler

    def _clip_grad_norm(self, model: nn.Module) -> Any:
        """Each by its own norm, as in the paper; the policy's is logged. Where shards clip themselves, both as one."""
        if self.is_deepspeed_enabled or self.is_fsdp_enabled:
            return super()._clip_grad_norm(model)
        with without_critic(self.model):
            norm = super()._clip_grad_norm(self.model)
        torch.nn.utils.clip_grad_norm_(self.critic.parameters(), self.args.max_grad_norm)
        return norm

    def _generate(self, *args: Any, **kwargs: Any) -> Any:
        # Inference engines, to which TRL copies the weights in here, know the policy alone.
        with without_critic(self.model) if self.use_vllm else nullcontext():
            return super()._generate(*args, **kwargs)

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Tensor] | None = None) -> None:
        policy, critic = split_weights(self.model.state_dict() if state_dict is None else state_dict)
        with without_critic(self.model):
            super()._save(output_dir, policy)
        if self.args.should_save and critic:
            self.critic.save(Path(output_dir or self.args.output_dir) / FOLDER, critic)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        if self.is_fsdp_enabled:  # its shards hold both
            super()._load_from_checkpoint(resume_from_checkpoint, model)
            return
        with without_critic(self.model):
            super()._load_from_checkpoint(resume_from_checkpoint, model)
        self._load_critic(resume_from_checkpoint)

    def _load_best_model(self) -> None:
        if self.is_deepspeed_enabled or self.is_fsdp_enabled:  # whose shards hold both
            super()._load_best_model()
            return
        with without_critic(self.model):
            super()._load_best_model()
        assert self.state.best_model_checkpoint is not None  # without one, there is nothing to load
        self._load_critic(self.state.best_model_checkpoint)

    def _load_critic(self, checkpoint: str) -> None:
        if (Path(checkpoint) / FOLDER / WEIGHTS).exists():
            self.critic.load(Path(checkpoint) / FOLDER)

    def push_critic_to_hub(self, repo_id: str, **kwargs: Any) -> Any:
        """Upload the critic, which stays out of the policy's repository, to one of its own.

        Args:
            repo_id: Of the critic's repository, which is made if there is none.
            **kwargs: For `huggingface_hub.upload_folder`.
        """
        from huggingface_hub import create_repo, upload_folder

        create_repo(repo_id, exist_ok=True, private=self.args.hub_private_repo, token=self.args.hub_token)
        self.save_model(_internal_call=True)
        folder = Path(self.args.output_dir) / FOLDER
        return upload_folder(repo_id=repo_id, folder_path=folder, token=self.args.hub_token, **kwargs)


def _give_critic_its_rate(optimizer: Any, critic: nn.Module, rate: float) -> None:
    """Move the critic's parameters into a group of their own, if they are not in one."""
    if not hasattr(optimizer, "param_groups"):  # accelerate's stand-in for an optimizer of DeepSpeed's file
        raise ValueError(
            "The DeepSpeed configuration has an 'optimizer', in which the critic would learn at the policy's rate; "
            "allowed: a configuration without it, and optim in the trainer's settings."
        )
    if any("is_critic" in group for group in optimizer.param_groups):
        return
    parameters = [parameter for parameter in critic.parameters() if parameter.requires_grad]
    own = set(map(id, parameters))
    for group in optimizer.param_groups:
        group["params"] = [parameter for parameter in group["params"] if id(parameter) not in own]
    optimizer.add_param_group({"params": parameters, "lr": rate, "weight_decay": 0.0, "is_critic": True})


def _hold_policy_back(scheduler: Any, num_steps: int) -> None:
    """Keep the policy's learning rate at 0 for so many optimizer steps, while the critic learns to foresee returns.

    Its gradients are still computed, so that the optimizer's moments are there when it begins.
    """
    if num_steps == 0:
        return
    if not isinstance(scheduler, LambdaLR):
        raise ValueError(
            f"critic_warmup_steps={num_steps} needs a learning rate that is a function of the step, and the scheduler "
            f"is a {type(scheduler).__name__}; allowed: 0, or an lr_scheduler_type such as constant, linear or cosine."
        )
    for number, group in enumerate(scheduler.optimizer.param_groups):
        if "is_critic" not in group:
            scheduler.lr_lambdas[number] = _later(scheduler.lr_lambdas[number], num_steps)
            group["lr"] = scheduler.base_lrs[number] * scheduler.lr_lambdas[number](scheduler.last_epoch)


def _later(schedule: Callable[[int], float], num_steps: int) -> Callable[[int], float]:
    """A schedule that is 0 for its first steps. A function: of any other callable, checkpoints would hold what it has,
    and reading that back would mean running code."""

    def later(step: int) -> float:
        return float(schedule(step)) if step >= num_steps else 0.0

    return later

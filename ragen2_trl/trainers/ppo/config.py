"""Configuration of PPO with the filter."""

from dataclasses import dataclass

from trl import GRPOConfig

from ragen2_trl.filtering import check_choice
from ragen2_trl.trainers.config import STRATEGIES, SNRFilterConfig, with_help


def check_loss(args: GRPOConfig) -> None:
    """Raise a `ValueError` for a loss of GRPO's that is not PPO's."""
    check_choice("loss_type", args.loss_type, ("dapo",))
    check_choice("importance_sampling_level", args.importance_sampling_level, ("token",))
    check_choice("multi_objective_aggregation", args.multi_objective_aggregation, ("sum_then_normalize",))


@with_help
@dataclass
class SNRFilteredPPOConfig(SNRFilterConfig, GRPOConfig):
    r"""
    Configuration class for the [`SNRFilteredPPOTrainer`].

    Inherits the parameters of [`~trl.GRPOConfig`], and the filter's from [`SNRFilterConfig`]. `loss_type` is `"dapo"`,
    whose mean goes over the tokens of the generation batch, as PPO's does in the paper; `scale_rewards` has no effect.
    Advantages get zero mean and unit variance over the tokens of the kept rows, and `beta` is the weight of TRL's KL
    term in the loss.

    Parameters:
        value_head (`str`, *optional*, defaults to `"shared"`):
            `"shared"` reads values from the policy's last hidden state, `"separate"` from a model of its own (the
            paper's), see `value_model` of the trainer.
        critic_lr (`float`, *optional*, defaults to `1e-5`):
            Learning rate of the critic, under the schedule of the policy's.
        critic_warmup_steps (`int`, *optional*, defaults to `0`):
            Optimizer steps for which only the critic learns.
        value_coef (`float`, *optional*, defaults to `0.1`):
            Weight of the value loss. A separate critic under Adam does not feel it; with a shared one it says how much
            the policy's body bends to the values.
        value_clip (`float`, *optional*, defaults to `0.5`):
            How far a value may move from that of the rollout before the loss stops following (paper, Appendix B);
            0 or less does not clip.
        gamma, gae_lambda (`float`, *optional*, default to `1.0`):
            Discount and lambda from token to token.

    Raises:
        ValueError: for a value outside its allowed set; the message names the field, the value and the set.
    """

    value_head: str = "shared"
    critic_lr: float = 1e-5
    critic_warmup_steps: int = 0
    value_coef: float = 0.1
    value_clip: float = 0.5
    gamma: float = 1.0
    gae_lambda: float = 1.0

    def __post_init__(self) -> None:
        check_choice("value_head", self.value_head, ("shared", "separate"))
        if self.snr_strategy == "lossless":
            raise ValueError(
                "snr_strategy='lossless' leaves out rows without an advantage, and PPO's critic learns from every "
                f"row; allowed: {', '.join(one for one in STRATEGIES if one != 'lossless')}."
            )
        check_loss(self)
        for name in ("gamma", "gae_lambda"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name}={getattr(self, name)!r} is out of range; allowed: 0 <= value <= 1.")
        for name in ("critic_lr", "critic_warmup_steps", "value_coef"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise ValueError(f"{name}={getattr(self, name)!r} is out of range; allowed: finite, >= 0.")
        super().__post_init__()

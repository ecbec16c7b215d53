"""GRPO with the filter (arXiv 2604.06268, Section 3.3)."""

from dataclasses import dataclass
from typing import Any, ClassVar

from trl import GRPOConfig, GRPOTrainer

from ragen2_trl.trainers.advantages import renormalised, std_ratio
from ragen2_trl.trainers.config import SNRFilterConfig
from ragen2_trl.trainers.filtered import SNRFilter
from ragen2_trl.trainers.plans import LossMean
from ragen2_trl.trainers.selection import Selection

# Their losses divide by the tokens of the whole generation batch. Of the others, bnpo's is a mean over the tokens of a
# micro-batch, and the rest are means over its rows.
TOKEN_NORMALIZED_LOSSES = ("cispo", "dapo", "vespo")


@dataclass
class SNRFilteredGRPOConfig(SNRFilterConfig, GRPOConfig):
    r"""
    Configuration class for the [`SNRFilteredGRPOTrainer`].

    Inherits every parameter of [`~trl.GRPOConfig`], and the filter's from [`SNRFilterConfig`].

    Raises:
        ValueError: for a value outside its allowed set; the message names the field, the value and the set.
    """

    @property
    def _required_by_lossless(self) -> dict[str, tuple[Any, str]]:
        bonus = "is an entropy bonus, which also acts on rows without an advantage"
        return {
            **super()._required_by_lossless,
            "entropy_coef": (0.0, bonus),
            "use_adaptive_entropy": (False, bonus),
            "top_entropy_quantile": (1.0, "takes its threshold from all rows, also those without an advantage"),
            "multi_objective_aggregation": (
                "sum_then_normalize",
                "centres advantages over the batch, where rounding leaves none at zero",
            ),
        }

    @property
    def _scaled_over_batches(self) -> tuple[str, str] | None:
        if self.multi_objective_aggregation != "normalize_then_sum" and self.scale_rewards != "batch":
            return None
        found = f"scale_rewards={self.scale_rewards!r} with "
        found += f"multi_objective_aggregation={self.multi_objective_aggregation!r}"
        return found, "scale_rewards 'group' or 'none', multi_objective_aggregation 'sum_then_normalize'"


class SNRFilteredGRPOTrainer(SNRFilter, GRPOTrainer):
    """
    GRPO on the prompt groups that carry signal: after each generation, groups of completions are ranked by the
    variance of their rewards, and only those that hold most of it are trained on.

    Everything else is inherited from [`~trl.GRPOTrainer`], which this class can replace in an existing script. With
    `snr_strategy="all"` it computes bit-identical parameters. Dropped completions take no part in the update's forward
    and backward passes, and the gradient equals the one GRPO computes on a batch of the kept groups alone. Evaluation
    is never filtered.

    Groups of a generation batch are scored together. Where one optimizer step spans several generation batches
    (`steps_per_generation` smaller than `gradient_accumulation_steps`), each of them keeps TRL's equal weight, and one
    without a kept group adds nothing.

    Args:
        model, reward_funcs, train_dataset, eval_dataset, processing_class, **kwargs:
            As for [`~trl.GRPOTrainer`].
        args ([`SNRFilteredGRPOConfig`] or [`~trl.GRPOConfig`], *optional*):
            A plain `GRPOConfig` gets the filter's default settings.
        selector ([`~ragen2_trl.trainers.selection.Selector`], *optional*):
            A function from the groups of a generation to a mask of kept groups or completions, in place of
            `snr_strategy`, `snr_value` and `snr_score`.

    Raises:
        ValueError: before training for a setting out of range or a dataset without prompts.
        TypeError: for a configuration that is neither of the two, or a subclass that a setting would make wrong.
        RuntimeError: in the first step for a subclass that loses the filter, before a parameter moves.

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
    _config_class: ClassVar[type] = SNRFilteredGRPOConfig
    _trl_config_class: ClassVar[type] = GRPOConfig
    takes_turn_samples: ClassVar[bool] = True

    @property
    def _loss_mean(self) -> LossMean:
        if self.loss_type in TOKEN_NORMALIZED_LOSSES:
            return LossMean.TOKENS_OF_GENERATION
        return LossMean.TOKENS if self.loss_type == "bnpo" else LossMean.ROWS

    def _set_advantages(self, inputs: list[dict[str, Any]], batch: dict[str, Any], selection: Selection) -> None:
        """As if the kept groups were the whole batch. Those scaled by group are so already."""
        normalises = self.multi_objective_aggregation == "normalize_then_sum"
        if not (normalises or self.scale_rewards == "batch") or selection.groups.all() or not selection.groups.any():
            return
        if normalises:
            everywhere = self.accelerator.gather(batch["advantages"])
            scorable = ~selection.rewards.isnan().flatten()
            batch["advantages"] = self._local(renormalised(everywhere, scorable, selection))
        else:
            batch["advantages"] = batch["advantages"] * std_ratio(selection)

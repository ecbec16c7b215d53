"""RLOO with the filter."""

from dataclasses import dataclass
from typing import Any, ClassVar

from trl import RLOOConfig, RLOOTrainer

from ragen2_trl.trainers.advantages import renormalised
from ragen2_trl.trainers.config import SNRFilterConfig
from ragen2_trl.trainers.filtered import SNRFilter
from ragen2_trl.trainers.plans import LossMean
from ragen2_trl.trainers.selection import Selection


@dataclass
class SNRFilteredRLOOConfig(SNRFilterConfig, RLOOConfig):
    r"""
    Configuration class for the [`SNRFilteredRLOOTrainer`].

    Inherits every parameter of [`~trl.RLOOConfig`], and the filter's from [`SNRFilterConfig`].

    Raises:
        ValueError: for a value outside its allowed set; the message names the field, the value and the set.
    """

    @property
    def _required_by_lossless(self) -> dict[str, tuple[Any, str]]:
        centred = "centres advantages over the batch, where rounding leaves none at zero"
        return {**super()._required_by_lossless, "normalize_advantages": (False, centred)}

    @property
    def _scaled_over_batches(self) -> tuple[str, str] | None:
        return ("normalize_advantages=True", "False") if self.normalize_advantages else None


class SNRFilteredRLOOTrainer(SNRFilter, RLOOTrainer):
    """
    RLOO on the prompt groups that carry signal, as [`SNRFilteredGRPOTrainer`] is GRPO on them.

    Everything else is inherited from [`~trl.RLOOTrainer`], which this class can replace in an existing script. Groups
    are ranked by the rewards that were given; the KL penalty, which RLOO takes off the reward, is not one of them. A
    filter that keeps every group gives bit-identical parameters, and a filtered update is RLOO's on a batch of the
    kept groups alone: `normalize_advantages` goes over these.

    Args:
        model, reward_funcs, train_dataset, eval_dataset, processing_class, **kwargs:
            As for [`~trl.RLOOTrainer`].
        args ([`SNRFilteredRLOOConfig`] or [`~trl.RLOOConfig`], *optional*):
            A plain `RLOOConfig` gets the filter's default settings.
        selector: as for [`SNRFilteredGRPOTrainer`].

    Raises:
        ValueError: before training for a setting out of range or a dataset without prompts.
        TypeError: for a configuration that is neither of the two, or for a rollout function or tools.
        RuntimeError: in the first step for a subclass that loses the filter, before a parameter moves.

    Example:

    ```python
    >>> from ragen2_trl import SNRFilteredRLOOConfig, SNRFilteredRLOOTrainer
    >>> from trl.rewards import accuracy_reward
    >>> from datasets import load_dataset

    >>> trainer = SNRFilteredRLOOTrainer(  # doctest: +SKIP
    ...     model="Qwen/Qwen2.5-0.5B-Instruct",
    ...     reward_funcs=accuracy_reward,
    ...     args=SNRFilteredRLOOConfig(snr_value=0.9),
    ...     train_dataset=load_dataset("trl-lib/DeepMath-103K", split="train"),
    ... )
    >>> trainer.train()  # doctest: +SKIP
    ```
    """

    _tag_names = ["trl", "rloo", "snr-filter", "ragen2"]  # noqa: RUF012 -- TRL declares it so
    _name = "SNR-filtered RLOO"
    _config_class: ClassVar[type] = SNRFilteredRLOOConfig
    _trl_config_class: ClassVar[type] = RLOOConfig
    args: SNRFilteredRLOOConfig

    def __init__(self, model: Any, reward_funcs: Any = None, args: Any = None, *positional: Any, **kwargs: Any):
        for name in ("rollout_func", "environment_factory", "tools"):
            if kwargs.pop(name, None) is not None:
                raise TypeError(
                    f"{type(self).__name__} takes no {name}: TRL's RLOO counts every token of a completion, also "
                    "those that an environment wrote; allowed for several turns: SNRFilteredGRPOTrainer, "
                    "SNRFilteredPPOTrainer."
                )
        super().__init__(model, reward_funcs, args, *positional, **kwargs)

    @property
    def _loss_mean(self) -> LossMean:
        return LossMean.ROWS

    def _set_advantages(self, inputs: list[dict[str, Any]], batch: dict[str, Any], selection: Selection) -> None:
        """Each leaves the own row out of its group's mean, which dropping other groups does not change."""
        if not self.args.normalize_advantages or selection.groups.all() or not selection.groups.any():
            return
        valid = ~selection.rewards.isnan()
        scorable = valid & (valid.sum(dim=1, keepdim=True) > 1)  # one alone in its group has no others to be left of
        everywhere = self.accelerator.gather(batch["advantages"])
        batch["advantages"] = self._local(renormalised(everywhere, scorable.flatten(), selection))

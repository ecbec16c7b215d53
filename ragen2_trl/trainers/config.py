"""The filter's settings, mixed into the configuration of each trainer."""

import inspect
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from ragen2_trl.filtering import SCORES, check_choice, check_selection_value
from ragen2_trl.names import named_object
from ragen2_trl.trainers.trl_contract import check_trl

if TYPE_CHECKING:
    from ragen2_trl.trainers.stock import StockConfig
else:
    StockConfig = object  # it is mixed in before one of TRL's

STRATEGIES = ("all", "lossless", "nonzero", "top_p", "top_k", "min_p")
SHARES_OF_SCORE = ("top_p", "min_p")  # strategies that take a share of the score, which must not be negative
TOKEN_SCORES = ("entropy", "entropy_variance", "length")  # scores of the sampled tokens rather than of the rewards

_DESCRIBED = re.compile(r"^( *)([\w, ]+) \(.+\):\n((?:\1 +.*\n?)+)", re.MULTILINE)  # indent, names and text of fields


def with_help(config: Any) -> Any:
    """Give the fields of a dataclass the text of its docstring as their help on a command line."""
    by_name = {one.name: one for one in fields(config)}
    for _, names, text in _DESCRIBED.findall(inspect.cleandoc(config.__doc__ or "")):
        said = " ".join(re.sub(r"[`\[\]]", "", text).replace("%", "%%").split())  # argparse reads a single percent
        for name in names.split(", "):
            by_name[name].metadata = MappingProxyType({"help": said})
    return config


@with_help
@dataclass
class SNRFilterConfig(StockConfig):
    r"""
    The settings of the filter, the same for each trainer. The defaults are the paper's recommendation: keep the
    prompts that hold 90 % of the summed reward variance, and drop prompts without any.

    > Parameters that control which groups are kept

    snr_strategy (`str`, *optional*, defaults to `"top_p"`):
        How groups are selected. `"all"` keeps every group: plain TRL, bit for bit. `"lossless"` is TRL's own update
        for less: it leaves out only rows without an advantage, which add nothing to the gradient, and every mean stays
        a mean over all rows. `"nonzero"` keeps every group whose rewards vary. `"top_p"` (fraction of the summed
        score), `"top_k"` (fraction of the groups) and `"min_p"` (fraction of the largest score) are the paper's, see
        [`select_groups`]. Where a generation batch has fewer than 8 groups, these three rank its groups among the
        latest 256.
    snr_value (`float`, *optional*, defaults to `0.9`):
        Threshold of `"top_p"`, `"top_k"` or `"min_p"` (rho in the paper).
    snr_score (`str`, *optional*, defaults to `"reward_variance"`):
        The score that ranks groups. See [`group_score`].
    snr_score_reward (`str`, *optional*):
        Name of the reward function whose rewards are scored in place of the weighted sum of all: in a shaped sum,
        failures differ, too. Or a column that a reward function logs with TRL's `log_extra` in every call, as our
        tasks do `"success"`. Advantages are still made of the sum.
    snr_selector (`str`, *optional*):
        `"package.module:name"` of a function from [`Groups`] to a mask of kept groups or completions. It replaces
        `snr_strategy`, `snr_value` and `snr_score`, and is the same as `selector=` of the trainer.

    > Parameters that control the update

    snr_max_empty_steps (`int`, *optional*, defaults to `50`):
        Training stops after this many optimizer steps in a row without a kept group; 0 or less never stops. RAGEN
        stops after 5 steps of 8 prompts; scripts with one or two prompts a step see such series by chance.

    snr_share_prompts (`bool`, *optional*):
        Whether the update computes each prompt once for all completions of its group, in one row for all groups, and
        transformers' `generate` reads it once. Both are the same up to rounding. By default `True` with
        `snr_strategy="lossless"`, unless the model has dropout (a shared prompt gets one draw), else `False`.

    > Parameters that control which prompts are sampled

    snr_dynamic_sampling_rounds (`int`, *optional*, defaults to `0`):
        How often a step may sample further prompts, until as many groups are kept as the generation batch has (dynamic
        sampling, DAPO). Prompts come in the order of TRL's sampler; surplus groups are carried over to the next batch.
        `0` trains on the kept groups of the first prompts.
    snr_pilot_generations (`int`, *optional*):
        Number of completions of each prompt that are sampled and scored first. The remaining ones are sampled only for
        prompts whose rewards can be expected to vary enough; a batch is filled up by dynamic sampling, or has fewer
        groups. `0` samples all completions at once. Reward functions see a group in two calls. By default `2` with
        `snr_dynamic_sampling_rounds` and `snr_strategy="nonzero"` if `num_generations` is 16 or more and each process
        has whole groups, else `0`.
    snr_prompt_selection (`bool`, *optional*, defaults to `False`):
        Whether prompts are chosen before sampling, by the reward variance predicted from their earlier groups. New
        prompts come in the order of TRL's sampler; the prompts of dynamic sampling are chosen by the same rule.

    > Parameters that control logging

    snr_verbose (`bool`, *optional*, defaults to `False`):
        Whether trackers and the console get every metric of the filter, of mutual information and of health, in place
        of eight; the same as `verbose=` of [`MutualInformationCallback`]. `trainer.state.log_history` and the run's
        files always have all.

    Raises:
        ValueError: for a value outside its allowed set; the message names the field, the value and the set.
    """

    snr_strategy: str = "top_p"
    snr_value: float = 0.9
    snr_score: str = "reward_variance"
    snr_score_reward: str | None = None
    snr_selector: str | None = None
    snr_max_empty_steps: int = 50
    snr_share_prompts: bool | None = None
    snr_dynamic_sampling_rounds: int = 0
    snr_pilot_generations: int | None = None
    snr_prompt_selection: bool = False
    snr_verbose: bool = False

    def __post_init__(self) -> None:
        check_trl(type(self))
        check_choice("snr_strategy", self.snr_strategy, STRATEGIES)
        check_selection_value("snr_value", self.snr_strategy, self.snr_value)
        check_choice("snr_score", self.snr_score, SCORES)
        if self.num_generations is not None and self.num_generations < 2:
            raise ValueError(
                f"num_generations={self.num_generations} leaves no reward variance to filter by; allowed: >= 2."
            )
        if self.snr_dynamic_sampling_rounds < 0:
            raise ValueError(
                f"snr_dynamic_sampling_rounds={self.snr_dynamic_sampling_rounds!r} is out of range; allowed: 0 or "
                "more."
            )
        if self.snr_pilot_generations and not 2 <= self.snr_pilot_generations < self.num_generations:
            raise ValueError(
                f"snr_pilot_generations={self.snr_pilot_generations!r} is out of range; allowed: 0, or >= 2 and "
                f"< num_generations={self.num_generations}."
            )
        if self.snr_selector is not None:
            named_object(self.snr_selector, "snr_selector")
            self.check_alone(f"snr_selector={self.snr_selector!r}")
        if self.snr_score in ("reward_mean", "reward_sum") and self.snr_strategy in SHARES_OF_SCORE:
            raise ValueError(
                f"snr_strategy={self.snr_strategy!r} takes a share of the score, and snr_score={self.snr_score!r} has "
                "none where it is negative; allowed with it: all, nonzero, top_k."
            )
        if self.mask_truncated_completions and self.snr_score in TOKEN_SCORES:
            raise ValueError(
                f"snr_score={self.snr_score!r} scores tokens, which mask_truncated_completions=True hides; allowed "
                f"with it: {', '.join(one for one in SCORES if one not in TOKEN_SCORES)}."
            )
        if self.snr_dynamic_sampling_rounds > 0 and (scaled := self._scaled_over_batches) is not None:
            raise ValueError(
                f"snr_dynamic_sampling_rounds={self.snr_dynamic_sampling_rounds} mixes groups of several generations, "
                f"whose advantages {scaled[0]} would scale by different batches; allowed with it: {scaled[1]}."
            )
        check_required(self, self._required_by_strategy, f"with snr_strategy={self.snr_strategy!r}")
        super().__post_init__()

    def check_alone(self, selector: str) -> None:
        """Refuse settings that a selector replaces."""
        for name in ("snr_strategy", "snr_value", "snr_score"):
            default = SNRFilterConfig.__dataclass_fields__[name].default
            if (value := getattr(self, name)) != default:
                raise ValueError(f"{name}={value!r} has no effect when {selector} is set; leave it at {default!r}.")

    @property
    def groups_per_generation(self) -> int:
        """N, over all processes."""
        groups: int = self.generation_batch_size // self.num_generations
        return groups

    @property
    def keeps_every_varying_group(self) -> bool:
        """Whether the strategy drops no group whose rewards vary."""
        share_of_all = self.snr_strategy == "top_p" and self.snr_value >= 1
        return self.snr_selector is None and (self.snr_strategy in ("all", "lossless", "nonzero") or share_of_all)

    @property
    def _required_by_strategy(self) -> dict[str, tuple[Any, str]]:
        """Settings with a single allowed value under this strategy, and the reason."""
        no_effect = "has no effect where no group is ranked"
        nothing_to_fill = "samples in place of dropped groups, and none is dropped"
        unranked: dict[str, tuple[Any, str]] = {
            "snr_value": (0.9, no_effect),
            "snr_score": ("reward_variance", no_effect),
        }
        unscored: dict[str, tuple[Any, str]] = unranked | {"snr_score_reward": (None, no_effect)}
        return {
            "all": unscored
            | {
                "snr_share_prompts": (False, "rounds otherwise than TRL, whose bits 'all' keeps"),
                "snr_dynamic_sampling_rounds": (0, nothing_to_fill),
                "snr_pilot_generations": (0, nothing_to_fill),
            },
            "lossless": unscored | self._required_by_lossless,
            "nonzero": unranked,
        }.get(self.snr_strategy, {})

    @property
    def _required_by_lossless(self) -> dict[str, tuple[Any, str]]:
        """Settings under which leaving out rows without an advantage would not be TRL's own update."""
        other = "samples other prompts than TRL, whose training lossless reproduces"
        return {
            "snr_dynamic_sampling_rounds": (0, other),
            "snr_prompt_selection": (False, other),
            "snr_pilot_generations": (0, other),
            "beta": (0.0, "is the weight of a KL penalty, which also acts on rows without reward variance"),
            "neftune_noise_alpha": (None, "scales its noise by the padded length, which lossless trims"),
        }

    @property
    def _scaled_over_batches(self) -> tuple[str, str] | None:
        """The settings that scale advantages over a whole batch, if they do, and what does not."""
        return None


def check_required(args: Any, required: Mapping[str, tuple[Any, str]], where: str) -> None:
    """Raise a `ValueError` for a setting that is neither its allowed value nor `None`, which is no explicit choice.

    Args:
        args: The settings.
        required: By name, the only allowed value, and what is wrong with any other.
        where: Under which conditions it is so, for the message.
    """
    for name, (allowed, reason) in required.items():
        if (value := getattr(args, name)) not in (allowed, None):
            raise ValueError(f"{name}={value!r} {reason}; allowed {where}: {allowed!r}.")

"""The filter's settings, mixed into the configuration of each trainer."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ragen2_trl.filtering import SCORES, STRATEGIES, check_choice, check_selection_value
from ragen2_trl.names import named_object

if TYPE_CHECKING:
    from ragen2_trl.trainers.stock import StockConfig
else:
    StockConfig = object  # it is mixed in before one of TRL's

MODES = ("drop", "mask")
LOSSLESS = "lossless"  # the strategy that is TRL's own training: of rows without advantage, not of groups by a score
OF_TOKENS = ("entropy", "entropy_variance", "length")  # scores that are of what was sampled, and not of its reward


@dataclass
class SNRFilterConfig(StockConfig):
    r"""
    The settings of the filter, the same for each trainer. The defaults are the paper's recommendation: keep the
    prompts that hold 90 % of the summed reward variance, drop those without any.

    > Parameters that control which groups are kept

    snr_strategy (`str`, *optional*, defaults to `"top_p"`):
        How groups are selected by their score: `"top_p"` (fraction of the summed score), `"top_p_softmax"`, `"top_k"`
        (fraction of the groups), `"top_k_abs"` (number of groups), `"min_p"` (fraction of the largest score), or
        `"none"`. See [`select_groups`]. Where a generation batch has fewer than 8 groups they are ranked among the
        latest 256, except by `"top_k_abs"`. `"lossless"` is TRL's own training for less: it leaves out only rows whose
        advantage is zero, which add nothing to the gradient, and every mean stays one over all rows.
    snr_value (`float`, *optional*, defaults to `0.9`):
        Threshold of the strategy (rho in the paper).
    snr_score (`str`, *optional*, defaults to `"reward_variance"`):
        What groups are ranked by. See [`group_score`].
    snr_score_reward (`str`, *optional*):
        The reward function whose rewards groups are scored by, in place of the weighted sum of all: by a shaped sum,
        failures differ, too. Or a column that a reward function logs by TRL's `log_extra`, as our tasks do
        `"success"`. Advantages stay those of the sum.
    snr_include_zero (`bool`, *optional*, defaults to `False`):
        Whether groups whose rewards do not vary (standard deviation at most 1e-6) may be kept.
    snr_selector (`str`, *optional*):
        `"package.module:name"` of a function from [`Groups`] to what is kept, in place of the four settings above; the
        same as `selector=` of the trainer.

    > Parameters that control the update

    snr_mode (`str`, *optional*, defaults to `"drop"`):
        What happens to the groups that are not kept. `"drop"` removes them from the update's forward and backward
        passes. `"mask"` computes them and zeroes their contribution: the same gradient for none of the savings, with
        the losses of TRL alone.
    snr_max_empty_steps (`int`, *optional*, defaults to `50`):
        Training stops after this many optimizer steps in a row without a kept group; 0 or less never stops. RAGEN
        stops after 5 steps of 8 prompts; scripts with one or two prompts a step see such series by chance.

    > Parameters that control which prompts are sampled

    snr_dynamic_sampling_rounds (`int`, *optional*, defaults to `0`):
        How often a step may sample further prompts, until as many groups are kept as the generation batch has (dynamic
        sampling, DAPO). What is too much waits for the next generation. `0` trains on what is kept of the first ones.
    snr_pilot_generations (`int`, *optional*):
        How many completions of each prompt are sampled and scored first; the other ones only of prompts whose rewards
        may then be expected to vary enough. Groups of the others have no completions: a batch is filled up by dynamic
        sampling, or has fewer groups. `0` samples all completions at once. Reward functions see a group in two calls.
        By default `2` with `snr_dynamic_sampling_rounds` and `snr_strategy="none"` where `num_generations` is 16 or
        more and each process has whole groups, else `0`.
    snr_prompt_selection (`bool`, *optional*, defaults to `False`):
        Whether prompts are chosen before they are sampled, by the reward variance that their earlier groups let
        expect. Prompts are then drawn by their row in `train_dataset`, in the order of TRL's sampler as long as they
        are new, and those of dynamic sampling by the same rule.

    > Parameters that control logging

    snr_verbose (`bool`, *optional*, defaults to `False`):
        Whether trackers and the console get every metric of the filter, of mutual information and of health, in place
        of eight; the same as `verbose=` of [`MutualInformationCallback`]. `trainer.state.log_history` and the run's
        files always have all.

    Raises:
        ValueError: for a value outside its allowed set; the message names the field, the value and the set.
    """

    snr_strategy: str = field(
        default="top_p",
        metadata={
            "help": f"How groups are selected by their score. One of: {', '.join(STRATEGIES)}. Or {LOSSLESS}: TRL's "
            "own training, without rows whose advantage is zero, and divided by all rows."
        },
    )
    snr_value: float = field(
        default=0.9,
        metadata={
            "help": "Threshold of the strategy: fraction of the summed score (top_p), of the groups (top_k), of the "
            "largest score (min_p), or a number of groups (top_k_abs)."
        },
    )
    snr_score: str = field(
        default="reward_variance",
        metadata={"help": f"What groups are ranked by. One of: {', '.join(SCORES)}."},
    )
    snr_score_reward: str | None = field(
        default=None,
        metadata={
            "help": "The reward function whose rewards groups are scored by, in place of the weighted sum of all; or "
            "a column that one logs for each completion, as our tasks do 'success'. Advantages stay those of the sum."
        },
    )
    snr_include_zero: bool = field(
        default=False,
        metadata={"help": "Whether groups whose rewards do not vary may be kept."},
    )
    snr_selector: str | None = field(
        default=None,
        metadata={
            "help": "'package.module:name' of a function from groups to what is kept, in place of snr_strategy, "
            "snr_value, snr_score and snr_include_zero."
        },
    )
    snr_mode: str = field(
        default="drop",
        metadata={
            "help": "What happens to groups that are not kept: 'drop' does not compute them, 'mask' computes them and "
            "zeroes their contribution."
        },
    )
    snr_max_empty_steps: int = field(
        default=50,
        metadata={
            "help": "Stop after this many optimizer steps in a row without a kept group; 0 or less never stops."
        },
    )
    snr_dynamic_sampling_rounds: int = field(
        default=0,
        metadata={
            "help": "Sample further prompts up to this often in a step, until as many groups are kept as the "
            "generation batch has (dynamic sampling); 0 trains on what is kept of the first ones."
        },
    )
    snr_pilot_generations: int | None = field(
        default=None,
        metadata={
            "help": "Sample and score so many completions of each prompt first, and the others only where rewards may "
            "then be expected to vary; 0 samples all at once. By default 2 with dynamic sampling of groups of 16 or "
            "more and snr_strategy='none', else 0."
        },
    )
    snr_prompt_selection: bool = field(
        default=False,
        metadata={
            "help": "Choose prompts before they are sampled, by the reward variance that their earlier groups let "
            "expect; those never sampled come in TRL's order."
        },
    )
    snr_verbose: bool = field(
        default=False,
        metadata={
            "help": "Show trackers and the console every metric of the filter, of reasoning and of health, in "
            "place of eight; the run's files always have all."
        },
    )

    def __post_init__(self) -> None:
        check_choice("snr_strategy", self.snr_strategy, (*STRATEGIES, LOSSLESS))
        check_selection_value("snr_value", self.snr_strategy, self.snr_value)
        check_choice("snr_score", self.snr_score, SCORES)
        check_choice("snr_mode", self.snr_mode, MODES)
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
                f"snr_pilot_generations={self.snr_pilot_generations!r} is out of range; allowed: 0, or from 2 to "
                f"below num_generations={self.num_generations}."
            )
        if self.snr_selector is not None:
            named_object(self.snr_selector, "snr_selector")
            self.check_alone(f"snr_selector={self.snr_selector!r}")
        if self.snr_score in ("reward_mean", "reward_sum") and self.snr_strategy in ("top_p", "min_p"):
            allowed = ", ".join(one for one in STRATEGIES if one not in ("top_p", "min_p"))
            raise ValueError(
                f"snr_strategy={self.snr_strategy!r} takes a share of the score, and snr_score={self.snr_score!r} has "
                f"none where it is negative; allowed with it: {allowed}."
            )
        if self.mask_truncated_completions and self.snr_score in OF_TOKENS:
            raise ValueError(
                f"snr_score={self.snr_score!r} is of tokens, which mask_truncated_completions=True hides; allowed "
                f"with it: {', '.join(one for one in SCORES if one not in OF_TOKENS)}."
            )
        if self.snr_dynamic_sampling_rounds > 0:
            self._check_dynamic_sampling()
        if self.is_lossless:
            self._check_lossless()
        super().__post_init__()

    def check_alone(self, selector: str) -> None:
        """Refuse settings whose place a selector takes."""
        for name in ("snr_strategy", "snr_value", "snr_score", "snr_include_zero"):
            default = SNRFilterConfig.__dataclass_fields__[name].default
            if (value := getattr(self, name)) != default:
                raise ValueError(
                    f"{name}={value!r} is without effect beside {selector}, which takes its place; allowed with it: "
                    f"{default!r}."
                )

    @property
    def groups_per_generation(self) -> int:
        """N, over all processes."""
        groups: int = self.generation_batch_size // self.num_generations
        return groups

    @property
    def is_lossless(self) -> bool:
        """Whether this is TRL's own training, without the rows that add nothing to it."""
        return self.snr_strategy == LOSSLESS

    @property
    def keeps_all_signal(self) -> bool:
        """Whether every group with reward variance is to be kept."""
        share_of_all = self.snr_strategy.startswith("top_p") and self.snr_value >= 1
        return self.snr_selector is None and (self.snr_strategy in ("none", LOSSLESS) or share_of_all)

    def _check_lossless(self) -> None:
        """Refuse what would make of `lossless` another training than TRL's, or leave it nothing to leave out."""
        for name, (allowed, reason) in self._of_lossless.items():
            if (value := getattr(self, name)) not in (allowed, None):  # None: pilots that nobody asked for
                raise ValueError(f"{name}={value!r} {reason}; allowed with snr_strategy={LOSSLESS!r}: {allowed!r}.")

    @property
    def _of_lossless(self) -> dict[str, tuple[Any, str]]:
        """Settings of which `snr_strategy="lossless"` allows one value, and why no other."""
        no_effect = "is without effect where rows are left out by their advantage"
        other = "samples other prompts than TRL, whose training this is to be"
        return {
            "snr_value": (0.9, no_effect),
            "snr_score": ("reward_variance", no_effect),
            "snr_score_reward": (None, no_effect),
            "snr_include_zero": (False, no_effect),
            "snr_mode": ("drop", "computes what is to be left out"),
            "snr_dynamic_sampling_rounds": (0, other),
            "snr_prompt_selection": (False, other),
            "snr_pilot_generations": (0, other),
            "beta": (0.0, "is the weight of a KL penalty, which acts on rows without reward variance, too"),
        }

    def _check_dynamic_sampling(self) -> None:
        """Refuse what would scale groups of several generations by different batches."""

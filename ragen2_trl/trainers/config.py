"""The filter's settings, mixed into the configuration of each trainer."""

from dataclasses import dataclass, field

from ragen2_trl.filtering import KEEP, SCORES, STRATEGIES, check_choice, check_selection_value
from ragen2_trl.trainers.prompting_config import PromptSelectionConfig
from ragen2_trl.trainers.reference import FEW_GROUPS

EPS_SCALES = ("reward_range", "absolute")
MODES = ("drop", "mask", "soft")
LOSS_SCALINGS = ("none", "linear", "sqrt")
REWARD_SCALINGS = ("batch", "task")


@dataclass
class SNRFilterConfig(PromptSelectionConfig):
    r"""
    What is kept of a generation batch, and how the update goes over it. Which prompts are sampled is of
    [`PromptSelectionConfig`].

    The defaults are the paper's recommendation: keep the prompts that hold 90 % of the summed reward variance, drop
    those without any.

    Parameters:
        snr_strategy (`str`, *optional*, defaults to `"top_p"`):
            How groups are selected by their score: `"top_p"` (fraction of the summed score), `"top_p_softmax"`,
            `"top_k"` (fraction of the groups), `"top_k_abs"` (number of groups), `"min_p"` (fraction of the largest
            score), or `"none"`. See [`select_groups`].
        snr_value (`float`, *optional*, defaults to `0.9`):
            Threshold of the strategy (rho in the paper).
        snr_score (`str`, *optional*, defaults to `"reward_variance"`):
            What groups are ranked by. See [`group_score`].
        snr_include_zero (`bool`, *optional*, defaults to `False`):
            Whether groups whose rewards do not vary (standard deviation at most 1e-6) may be kept.
        snr_window (`int` or `None`, *optional*, defaults to `256`):
            Where a generation batch has fewer than 8 groups, they are ranked among this many of the latest groups, and
            kept if a batch of all these would keep them. `None` ranks every batch by itself. Without effect for
            `"top_k_abs"`, whose number is one of each batch, and for `snr_mode="soft"`.
        snr_selection_eps (`float`, *optional*, defaults to `0.01`):
            Slack of `"top_p"`: the mass that may be missing of `snr_value`.
        snr_selection_eps_scale (`str`, *optional*, defaults to `"reward_range"`):
            Unit of the slack. `"reward_range"`: for rewards that lie 1 apart or more; where those seen so far in the
            run lie closer together, it shrinks with them (for variances, with the square of their range), and the
            group that is ranked first is never dropped for it. `"absolute"`: that of the scores, as in the reference
            code; a batch whose summed score is below `eps / value` then keeps nothing.
        snr_keep (`str`, *optional*, defaults to `"largest"`):
            Which end of the ranking is kept. `"smallest"` is the paper's reverse ablation.
        snr_mode (`str`, *optional*, defaults to `"drop"`):
            What happens to the groups that are not kept. `"drop"` removes them from the update's forward and backward
            passes. `"mask"` computes them and zeroes their contribution: the same gradient for none of the savings.
            `"soft"` selects nothing and scales each group's advantages by its reward standard deviation over the
            largest one.
        snr_loss_scaling (`str`, *optional*, defaults to `"none"`):
            Multiplies the advantages by the kept fraction of the groups (`"linear"`), by its square root (`"sqrt"`),
            or not at all. KL and entropy terms are left alone.
        snr_reward_scaling_by (`str`, *optional*, defaults to `"batch"`):
            What rewards of several tasks in one run are scaled by. `"task"`: whatever TRL normalises over the batch
            (`scale_rewards="batch"`, `multi_objective_aggregation="normalize_then_sum"`, RLOO's
            `normalize_advantages`, PPO's whitening) is normalised over the rows of the same task instead, and groups
            are ranked in units of the range of their task's rewards in the run. The column `environment` of the
            dataset says whose task a row is.
        snr_max_empty_steps (`int`, *optional*, defaults to `50`):
            Training stops after this many optimizer steps in a row without a kept group; 0 or less never stops. The
            reference implementation stops after 5 steps of 8 prompts; scripts with one or two prompts per step see
            such streaks by chance.
        snr_refill_rounds (`int`, *optional*, defaults to `0`):
            How often a step may sample further prompts, until as many groups are kept as the generation batch has
            (dynamic sampling). `0` trains on what is kept of the first ones.
        snr_max_staleness (`int`, *optional*, defaults to `1`):
            Kept groups for which a refilled batch had no room wait for the next one, unless the policy has been
            updated more often than this since they were sampled.

    Raises:
        ValueError: for a value outside its allowed set; the message names the field, the value and the set.
    """

    snr_strategy: str = field(
        default="top_p",
        metadata={"help": f"How groups are selected by their score. One of: {', '.join(STRATEGIES)}."},
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
    snr_include_zero: bool = field(
        default=False,
        metadata={"help": "Whether groups whose rewards do not vary may be kept."},
    )
    snr_window: int | None = field(
        default=256,
        metadata={
            "help": "Where a generation batch has fewer than 8 groups, rank them among so many of the latest groups; "
            "None ranks every batch by itself."
        },
    )
    snr_selection_eps: float = field(
        default=0.01,
        metadata={"help": "Slack of top_p: the mass that may be missing of snr_value."},
    )
    snr_selection_eps_scale: str = field(
        default="reward_range",
        metadata={
            "help": "Unit of snr_selection_eps. 'reward_range': it shrinks where the rewards seen so far lie within "
            "less than 1, and never drops the group ranked first; 'absolute': that of the scores."
        },
    )
    snr_keep: str = field(
        default="largest",
        metadata={"help": f"Which end of the ranking is kept. One of: {', '.join(KEEP)}."},
    )
    snr_mode: str = field(
        default="drop",
        metadata={
            "help": "What happens to groups that are not kept: 'drop' does not compute them, 'mask' computes them and "
            "zeroes their contribution, 'soft' scales advantages by group reward std instead of selecting."
        },
    )
    snr_loss_scaling: str = field(
        default="none",
        metadata={"help": "Multiply advantages by the kept fraction of the groups: 'none', 'linear' or 'sqrt'."},
    )
    snr_reward_scaling_by: str = field(
        default="batch",
        metadata={
            "help": "'task': with several tasks in one run, normalise over the rows of a task what is normalised over "
            "the batch, and rank groups in units of their task's range of rewards."
        },
    )
    snr_max_empty_steps: int = field(
        default=50,
        metadata={
            "help": "Stop after this many optimizer steps in a row without a kept group; 0 or less never stops."
        },
    )
    snr_refill_rounds: int = field(
        default=0,
        metadata={
            "help": "Sample further prompts up to this often in a step, until as many groups are kept as the "
            "generation batch has (dynamic sampling); 0 trains on what is kept of the first ones."
        },
    )
    snr_max_staleness: int = field(
        default=1,
        metadata={
            "help": "Kept groups for which a refilled batch had no room wait for the next one, unless the policy has "
            "been updated more often than this since they were sampled."
        },
    )

    def __post_init__(self) -> None:
        check_choice("snr_strategy", self.snr_strategy, STRATEGIES)
        check_selection_value("snr_value", self.snr_strategy, self.snr_value)
        check_choice("snr_score", self.snr_score, SCORES)
        check_choice("snr_keep", self.snr_keep, KEEP)
        check_choice("snr_mode", self.snr_mode, MODES)
        check_choice("snr_loss_scaling", self.snr_loss_scaling, LOSS_SCALINGS)
        check_choice("snr_reward_scaling_by", self.snr_reward_scaling_by, REWARD_SCALINGS)
        check_choice("snr_selection_eps_scale", self.snr_selection_eps_scale, EPS_SCALES)
        if not 0 <= self.snr_selection_eps < float("inf"):
            raise ValueError(f"snr_selection_eps={self.snr_selection_eps!r} is out of range; allowed: finite, >= 0.")
        if self.snr_window is not None and self.snr_window < FEW_GROUPS:
            raise ValueError(
                f"snr_window={self.snr_window!r} is out of range; allowed: {FEW_GROUPS} or more, or None."
            )
        if self.num_generations is not None and self.num_generations < 2:
            raise ValueError(
                f"num_generations={self.num_generations} leaves no reward variance to filter by; allowed: >= 2."
            )
        for name in ("snr_refill_rounds", "snr_max_staleness"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}={getattr(self, name)!r} is out of range; allowed: 0 or more.")
        self._check_prompt_selection()
        if self.snr_refill_rounds > 0:
            self._check_refill()
        super().__post_init__()

    @property
    def groups_per_generation(self) -> int:
        """N, over all processes."""
        groups: int = self.generation_batch_size // self.num_generations
        return groups

    @property
    def ranks_in_window(self) -> bool:
        """Whether a generation batch is ranked among the groups of recent ones."""
        across_batches = self.snr_mode != "soft" and self.snr_strategy != "top_k_abs"
        return self.snr_window is not None and across_batches and self.groups_per_generation < FEW_GROUPS

    def _check_refill(self) -> None:
        if self.snr_importance_weights > 0:
            raise ValueError(
                f"snr_importance_weights={self.snr_importance_weights} needs the chance that a prompt is drawn, which "
                f"with snr_refill_rounds={self.snr_refill_rounds} hangs on the rewards of others; allowed with it: 0."
            )
        if self.snr_mode == "soft":
            raise ValueError(
                f"snr_refill_rounds={self.snr_refill_rounds} fills up what a selection leaves, and snr_mode='soft' "
                "selects nothing; allowed with it: drop, mask."
            )
        if self.snr_loss_scaling != "none":
            raise ValueError(
                f"snr_loss_scaling={self.snr_loss_scaling!r} scales by the fraction that is kept, of which "
                f"snr_refill_rounds={self.snr_refill_rounds} makes one for each round; allowed with it: none."
            )

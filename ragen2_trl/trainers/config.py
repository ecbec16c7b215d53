"""The filter's settings, mixed into the configuration of each trainer."""

from dataclasses import dataclass, field
from typing import Any

from ragen2_trl.filtering import KEEP, QUARTILES, SCORES, STRATEGIES, check_choice, check_selection_value
from ragen2_trl.trainers.prompting_config import PromptSelectionConfig
from ragen2_trl.trainers.reference import FEW_GROUPS

EPS_SCALES = ("reward_range", "absolute")
MODES = ("drop", "mask", "soft")
LEVELS = ("group", "trajectory")
LOSS_SCALINGS = ("none", "linear", "sqrt", "whole_loss_by_value")
FRACTIONS = ("top_p", "top_p_softmax", "top_k")  # strategies whose value is a fraction, of mass or of groups
REWARD_SCALINGS = ("batch", "task")
OF_TOKENS = ("entropy", "entropy_variance", "length")  # scores that are of what was sampled, and not of its reward


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
            `"top_k_abs"`, whose number is one of each batch, for `snr_level="trajectory"` and for `snr_mode="soft"`.
        snr_selection_eps (`float`, *optional*, defaults to `0.01`):
            Slack of `"top_p"`: the mass that may be missing of `snr_value`.
        snr_selection_eps_scale (`str`, *optional*, defaults to `"reward_range"`):
            Unit of the slack. `"reward_range"`: for rewards that lie 1 apart or more; where those seen so far in the
            run lie closer together, it shrinks with them (for variances, with the square of their range), and the
            group that is ranked first is never dropped for it. `"absolute"`: that of the scores, as in the reference
            code; a batch whose summed score is below `eps / value` then keeps nothing.
        snr_keep (`str`, *optional*, defaults to `"largest"`):
            Which end of the ranking is kept. `"smallest"` is the paper's reverse ablation. `"random"` is the control
            of equal size: as many groups as `"largest"` would keep, drawn from all groups that there are, those
            without variance among them, as dropping at random means. The draw has a generator of its own.
        snr_quartile (`int` or `None`, *optional*):
            Train on one quarter of the groups alone, by the rank of their score: 1 is the highest, 4 the lowest, as
            in the paper's Table 6 (the reference code's gradient buckets count upwards). It takes the place of
            `snr_strategy` and ranks all groups, those without variance too. A quarter in which no group has variance
            is an empty step, unless `snr_include_zero` is set.
        snr_level (`str`, *optional*, defaults to `"group"`):
            What is kept or dropped. `"group"`: whole groups. `"trajectory"` (the paper's Table 7): completions. Of
            every group with variance those with the highest and the lowest rewards are kept, with the advantages that
            they have in their whole group; no group is ranked against another. `snr_include_zero` takes groups
            without variance in.
        snr_trajectory_fraction (`float`, *optional*, defaults to `0.5`):
            For `snr_level="trajectory"`: the fraction of each group's completions that is kept, half of it from the
            top and half from the bottom; at least two completions.
        snr_mode (`str`, *optional*, defaults to `"drop"`):
            What happens to the groups that are not kept. `"drop"` removes them from the update's forward and backward
            passes. `"mask"` computes them and zeroes their contribution: the same gradient for none of the savings.
            `"soft"` selects nothing and scales each group's advantages by its reward standard deviation over the
            largest one.
        snr_loss_scaling (`str`, *optional*, defaults to `"none"`):
            Multiplies the advantages by the kept fraction (`"linear"`), by its square root (`"sqrt"`), or not at all.
            KL and entropy terms are left alone, but for a KL penalty in the reward. `"whole_loss_by_value"` is what
            the paper says in Section 4.1: all of the loss, its KL, entropy and value terms included, times
            `snr_value`. Only for strategies whose value is a fraction.
        snr_zero_task_advantage (`bool`, *optional*, defaults to `False`):
            Ablation: the task's part of all advantages is 0, so that KL and entropy terms act alone, on the rows that
            the filter keeps. PPO's critic goes on to learn.
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
        metadata={
            "help": "Which end of the ranking is kept: 'largest', 'smallest', or 'random': as many groups as "
            "'largest' would keep, drawn from all, those without variance too."
        },
    )
    snr_quartile: int | None = field(
        default=None,
        metadata={
            "help": "Train on one quarter of the groups alone, in place of a strategy: 1 has the highest scores, 4 "
            "the lowest (the paper's Table 6; the reference code's gradient buckets count upwards)."
        },
    )
    snr_level: str = field(
        default="group",
        metadata={
            "help": "What is kept or dropped: 'group', or 'trajectory': in every group the completions with the "
            "highest and the lowest rewards are kept (the paper's Table 7)."
        },
    )
    snr_trajectory_fraction: float = field(
        default=0.5,
        metadata={
            "help": "For snr_level='trajectory': the fraction of each group's completions that is kept, half from the "
            "top and half from the bottom."
        },
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
        metadata={
            "help": "Multiply advantages by the kept fraction: 'none', 'linear' or 'sqrt'; 'whole_loss_by_value': the "
            "loss with all its terms by snr_value."
        },
    )
    snr_zero_task_advantage: bool = field(
        default=False,
        metadata={"help": "Ablation: advantages of the task are 0, so that KL and entropy terms act alone."},
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
        check_choice("snr_keep", self.snr_keep, (*KEEP, "random"))
        check_choice("snr_level", self.snr_level, LEVELS)
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
        if not 0 < self.snr_trajectory_fraction <= 1:
            raise ValueError(
                f"snr_trajectory_fraction={self.snr_trajectory_fraction!r} is out of range; allowed: 0 < value <= 1."
            )
        if self.snr_quartile not in (None, *QUARTILES):
            raise ValueError(
                f"snr_quartile={self.snr_quartile!r} is not supported; allowed values: "
                f"{', '.join(map(str, QUARTILES))}, None."
            )
        if self.snr_refill_rounds > 0:
            self._check_refill()
        self._check_selection()
        super().__post_init__()
        if self.snr_quartile is not None and self.snr_window is None and self.groups_per_generation < len(QUARTILES):
            raise ValueError(
                f"snr_window=None ranks the {self.groups_per_generation} groups of a generation by themselves, and "
                f"snr_quartile={self.snr_quartile} needs 4 to have a quarter of them; allowed with it: {FEW_GROUPS} "
                "or more."
            )

    @property
    def groups_per_generation(self) -> int:
        """N, over all processes."""
        groups: int = self.generation_batch_size // self.num_generations
        return groups

    @property
    def ranks_in_window(self) -> bool:
        """Whether a generation batch is ranked among the groups of recent ones."""
        of_groups = self.snr_mode != "soft" and self.snr_level == "group"
        across_batches = of_groups and self.snr_strategy != "top_k_abs"
        return self.snr_window is not None and across_batches and self.groups_per_generation < FEW_GROUPS

    @property
    def loss_factor(self) -> float:
        """What the loss with all its terms is multiplied by."""
        return self.snr_value if self.snr_loss_scaling == "whole_loss_by_value" else 1.0

    def _check_selection(self) -> None:
        """Refuse what would be without effect beside a setting, or without a meaning."""
        fields = self.__dataclass_fields__
        beside: dict[str, tuple[Any, ...]]
        defaults: dict[str, tuple[Any, ...]] = {n: (fields[n].default,) for n in ("snr_strategy", "snr_value")}
        selects: dict[str, tuple[Any, ...]] = {"snr_mode": ("drop", "mask"), "snr_refill_rounds": (0,)}
        if self.snr_keep == "random":
            self._allow("snr_keep='random'", "draws as many as a selection of one generation keeps", **selects)
        if self.snr_quartile is not None:
            beside = {**defaults, **selects, "snr_keep": ("largest",), "snr_level": ("group",)}
            self._allow(f"snr_quartile={self.snr_quartile}", "takes the place of snr_strategy", **beside)
        if self.snr_level == "trajectory":
            beside = {**defaults, **selects, "snr_score": ("reward_variance",), "snr_keep": ("largest", "random")}
            reason = "keeps snr_trajectory_fraction of the completions of each group and ranks no groups"
            self._allow("snr_level='trajectory'", reason, **beside)
        if self.snr_loss_scaling == "whole_loss_by_value":
            beside = {"snr_strategy": FRACTIONS, "snr_quartile": (None,), "snr_level": ("group",)}
            beside["snr_mode"] = ("drop", "mask")
            self._allow("snr_loss_scaling='whole_loss_by_value'", "needs a fraction in use as snr_value", **beside)
        if self.snr_level == "group":
            beside = {"snr_trajectory_fraction": (fields["snr_trajectory_fraction"].default,)}
            self._allow("snr_level='group'", "keeps whole groups", **beside)
        if self.snr_mode == "soft":
            beside = {**defaults, "snr_keep": ("largest",), "snr_score": ("reward_variance",)}
            beside |= {"snr_include_zero": (False,), "snr_loss_scaling": ("none",)}
            self._allow("snr_mode='soft'", "selects nothing", **beside)
        if self.snr_score in ("reward_mean", "reward_sum") and self.snr_quartile is None:
            strategies = tuple(strategy for strategy in STRATEGIES if strategy not in ("top_p", "min_p"))
            self._allow(f"snr_score={self.snr_score!r}", "has no share where it is negative", snr_strategy=strategies)
        if self.snr_zero_task_advantage and self.beta == 0.0 == getattr(self, "entropy_coef", 0.0):
            raise ValueError(
                "snr_zero_task_advantage=True leaves the KL penalty and the entropy bonus alone, and there is "
                f"neither: beta={self.beta}, entropy_coef=0.0; allowed with it: one of them above 0."
            )
        if self.mask_truncated_completions:
            others = tuple(score for score in SCORES if score not in OF_TOKENS)
            self._allow("mask_truncated_completions=True", "hides the tokens that were cut off", snr_score=others)

    def _allow(self, setting: str, reason: str, **allowed: tuple[Any, ...]) -> None:
        """Raise a `ValueError` where another setting is not one of those allowed beside a setting."""
        for name, values in allowed.items():
            if (value := getattr(self, name)) not in values:
                raise ValueError(
                    f"{name}={value!r} does not go with {setting}, which {reason}; allowed with it: "
                    f"{', '.join(map(str, values))}."
                )

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
        if self.snr_loss_scaling in ("linear", "sqrt"):
            raise ValueError(
                f"snr_loss_scaling={self.snr_loss_scaling!r} scales by the fraction that is kept, of which "
                f"snr_refill_rounds={self.snr_refill_rounds} makes one for each round; allowed with it: none."
            )

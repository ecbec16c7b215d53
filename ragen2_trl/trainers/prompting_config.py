"""The settings of how prompts are chosen, part of the filter's."""

from dataclasses import dataclass, field


@dataclass
class PromptSelectionConfig:
    r"""
    Which prompts are sampled.

    Parameters:
        snr_prompt_selection (`bool`, *optional*, defaults to `False`):
            Whether prompts are chosen before they are sampled, by the reward variance that their earlier groups let
            expect. Prompts are then drawn by their row in `train_dataset`, in the order of TRL's sampler as long as
            they are new, and the further ones of a refill by the same rule.
        snr_candidates (`int`, *optional*, defaults to `4`):
            With `snr_prompt_selection`, how many prompts that have been sampled before compete for each place.
        snr_explore (`float`, *optional*, defaults to `0.1`):
            With `snr_prompt_selection`, the share of these places that goes to the candidates not sampled for longest.
        snr_prompt_half_life (`float`, *optional*, defaults to `1.0`):
            With `snr_prompt_selection`, the time in which what a prompt has shown counts half: so many times the
            dataset's number of prompts sampled.
        snr_difficulty_columns (`list[str]` or `None`, *optional*):
            With `snr_prompt_selection`, numbers of the rows that may predict rewards: numeric columns of the dataset,
            or those that the task knows of its rows (`Episode.difficulty`, such as `solution_length` in Sokoban). A
            regression on them is the prior of prompts that have not been sampled, which then compete for places, too.
        snr_importance_weights (`float`, *optional*, defaults to `0.0`):
            With `snr_prompt_selection`, the largest inverse propensity weight. Advantages are weighted so that the
            expected update is that of prompts drawn evenly; `0` does not weigh them.
    """

    snr_prompt_selection: bool = field(
        default=False,
        metadata={
            "help": "Choose prompts before they are sampled, by the reward variance that their earlier groups let "
            "expect; those never sampled come in TRL's order."
        },
    )
    snr_candidates: int = field(
        default=4,
        metadata={"help": "With snr_prompt_selection: prompts sampled before that compete for each place."},
    )
    snr_explore: float = field(
        default=0.1,
        metadata={
            "help": "With snr_prompt_selection: share of these places that goes to the candidates not sampled for "
            "longest."
        },
    )
    snr_prompt_half_life: float = field(
        default=1.0,
        metadata={
            "help": "With snr_prompt_selection: what a prompt has shown counts half after so many times the dataset's "
            "number of prompts sampled."
        },
    )
    snr_difficulty_columns: list[str] | None = field(
        default=None,
        metadata={
            "help": "With snr_prompt_selection: numeric columns, or numbers that the task knows of its rows (such as "
            "solution_length in sokoban), which predict the rewards of prompts not sampled yet."
        },
    )
    snr_importance_weights: float = field(
        default=0.0,
        metadata={
            "help": "With snr_prompt_selection: largest inverse propensity weight on advantages, which makes the "
            "expected update that of prompts drawn evenly; 0 does not weigh."
        },
    )

    def _check_prompt_selection(self) -> None:
        within = {
            "snr_candidates": (self.snr_candidates >= 1, "1 or more"),
            "snr_explore": (0 <= self.snr_explore <= 1, "0 to 1"),
            "snr_prompt_half_life": (self.snr_prompt_half_life > 0, "above 0"),
            "snr_importance_weights": (
                self.snr_importance_weights == 0 or 1 <= self.snr_importance_weights < float("inf"),
                "0, or 1 and more",
            ),
        }
        for name, (fits, allowed) in within.items():
            if not fits:
                raise ValueError(f"{name}={getattr(self, name)!r} is out of range; allowed: {allowed}.")
        for name in ("snr_importance_weights", "snr_difficulty_columns"):
            if getattr(self, name) and not self.snr_prompt_selection:
                raise ValueError(
                    f"{name}={getattr(self, name)!r} is about how prompts are chosen; allowed without "
                    f"snr_prompt_selection: {self.__dataclass_fields__[name].default!r}."
                )

"""What is looked at before training."""

import copy
from collections.abc import Sequence
from typing import Any

from accelerate.logging import get_logger
from accelerate.utils import gather_object
from datasets import Dataset, IterableDataset

from ragen2_trl.columns import TASK
from ragen2_trl.trainers.config import SNRFilterConfig
from ragen2_trl.trainers.reference import FEW_GROUPS

logger = get_logger(__name__)

EQUAL_ROWS = 16  # that are looked at
LAYOUT_FIELDS = (
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "steps_per_generation",
    "num_generations",
    "num_iterations",
)


def with_snr_fields(args: Any, config_class: type, trl_config_class: type) -> Any:
    """Let TRL's own configuration carry the filter's defaults, so that swapping the trainer class is enough."""
    if isinstance(args, config_class):
        return args
    if type(args) is not trl_config_class:
        raise TypeError(
            f"args={type(args).__name__}; allowed: {config_class.__name__}, a class derived from it, or exactly "
            f"trl.{trl_config_class.__name__}."
        )
    # The new fields' defaults are class attributes. Building a new instance would instead check and derive again
    # what TRL's has already derived.
    args = copy.copy(args)
    args.__class__ = config_class
    return args


def nothing_to_rank(args: SNRFilterConfig) -> str | None:
    """Why a layout leaves the filter nothing to choose among, and which settings would; `None` where it has."""
    groups = args.groups_per_generation
    larger = f"generation_batch_size={-(-FEW_GROUPS // groups) * args.generation_batch_size}"
    if args.snr_mode == "soft":
        reason = f"snr_mode='soft' compares groups of one generation, which has one. What would change that: {larger}."
        return reason if groups == 1 else None
    if neutral(args) or args.snr_level == "trajectory":
        return None
    if args.snr_strategy == "top_k_abs" and args.snr_value >= groups:
        return (
            f"snr_strategy='top_k_abs' with snr_value={args.snr_value:g} keeps every group with signal of a "
            f"generation, which has {groups}. What would change that: a smaller snr_value, or {larger}."
        )
    if groups == 1 and args.snr_window is None:
        return (
            "A generation has one group, and snr_window=None ranks it against no other. What would change that: "
            f"snr_window=256, or {larger}."
        )
    return None


def neutral(args: SNRFilterConfig) -> bool:
    """Whether all groups with signal are to be kept."""
    return args.snr_strategy == "none" or (args.snr_strategy.startswith("top_p") and args.snr_value >= 1)


def check_same_on_all_processes(args: SNRFilterConfig, num_processes: int) -> None:
    """Processes that select differently would wait for one another forever."""
    if num_processes == 1:
        return
    fields = args.__dataclass_fields__
    names = [name for name in fields if name.startswith("snr_")]
    names += [name for name in (*LAYOUT_FIELDS, "loss_type", "seed") if name in fields]
    settings = gather_object([{name: getattr(args, name) for name in names}])
    for name in names:
        values = [one[name] for one in settings]
        if any(value != values[0] for value in values):
            raise ValueError(
                f"{name} differs between processes, in their order: {values}; allowed: one value for all."
            )


def known_range(reward_funcs: Sequence[Any], weights: Sequence[float]) -> tuple[float, float] | None:
    """Reward sums of a failure and of a solved task, where all of the reward is one environment's that knows them."""
    counted = [(func, weight) for func, weight in zip(reward_funcs, weights, strict=True) if weight != 0]
    if len(counted) != 1:
        return None
    ((func, weight),) = counted
    bounds = getattr(func, "bounds", None)
    return None if bounds is None or weight < 0 else (weight * bounds[0], weight * bounds[1])


def warn_of_equal_rows(train_dataset: Dataset | IterableDataset | None) -> None:
    """For datasets of episodes: where all rows are the same, nothing in them says which state one begins in."""
    if not isinstance(train_dataset, Dataset) or len(train_dataset) < 2:
        return
    first, *others = train_dataset.select(range(min(len(train_dataset), EQUAL_ROWS)))
    if all(row == first for row in others):
        logger.warning(
            f"The first {len(others) + 1} rows of train_dataset are the same. If the environment draws its state "
            "itself, the completions of a group begin in different ones: each is another task, and the variance "
            "that groups are kept for is partly luck. Give each row a seed, and let `reset(seed, **row)` or the "
            "rollout function draw from that: see docs/swap.md, 'Environments that draw their state'."
        )


def check_task_column(columns: list[str] | None, args: Any) -> None:
    """Raise a `ValueError` where rewards are to be scaled by task, and no column says whose task a row is.

    Args:
        columns: Of the dataset or of its rows, `None` where it does not know them.
        args: Of the trainer.
    """
    if getattr(args, "snr_reward_scaling_by", "batch") == "task" and columns is not None and TASK not in columns:
        raise ValueError(
            f"snr_reward_scaling_by='task' needs the column {TASK!r} of the dataset, and the rows have {columns}; "
            "allowed: the dataset of a TaskMixture with remove_unused_columns=False, or snr_reward_scaling_by='batch'."
        )


def check_has_rows(train_dataset: Any, args: SNRFilterConfig) -> None:
    """Raise a `ValueError` where prompts are to be drawn by their row, and a dataset has none."""
    found = type(train_dataset).__name__
    if args.snr_prompt_selection and not isinstance(train_dataset, Dataset):
        raise ValueError(
            f"snr_prompt_selection=True draws prompts by their row, which a {found} does not have; allowed: "
            "datasets.Dataset, or False."
        )
    if args.snr_refill_rounds > 0 and not isinstance(train_dataset, Dataset):
        raise ValueError(
            f"snr_refill_rounds={args.snr_refill_rounds} draws further prompts by their row, which a {found} does not "
            "have; allowed: datasets.Dataset, or 0 rounds."
        )


def check_prompt_column(train_dataset: Dataset | IterableDataset | None, environment_factory: Any) -> None:
    columns = train_dataset.column_names if isinstance(train_dataset, (Dataset, IterableDataset)) else None
    if isinstance(train_dataset, Dataset) and train_dataset.format["type"] == "custom":
        return  # a transform may make the prompt of other columns
    if columns is not None and "prompt" not in columns and environment_factory is None:
        raise ValueError(f"train_dataset has the columns {columns}; one of them must be 'prompt'.")

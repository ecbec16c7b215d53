"""What is checked before training: settings, dataset, and whether a subclass can be given the right gradient."""

from collections.abc import Sequence
from typing import Any

from accelerate.logging import get_logger
from accelerate.utils import gather_object
from datasets import Dataset, IterableDataset
from torch import nn
from trl import RLOOTrainer

from ragen2_trl.columns import SUCCESS
from ragen2_trl.trainers.checkpoints import LAYOUT_FIELDS
from ragen2_trl.trainers.config import SNRFilterConfig
from ragen2_trl.trainers.selection import Selector, strategy_class
from ragen2_trl.trainers.shared_prompts import dropout_of
from ragen2_trl.trainers.trl_contract import overridden

logger = get_logger(__name__)

PILOTS = 2  # by default
LARGE_GROUP = 16  # smallest group with pilots by default: in one of 8 they cost where no prompt is dead
LOG_PROBS = "_get_per_token_logps_and_entropies"
EQUAL_ROWS = 16  # that are looked at


def with_snr_fields(args: Any, config_class: type, trl_config_class: type) -> Any:
    """Give TRL's own configuration the filter's defaults, so that swapping the trainer class is enough.

    The result shares its fields with the given configuration: a setting that is changed later counts, as in TRL.
    """
    if isinstance(args, config_class):
        return args
    if type(args) is not trl_config_class:
        raise TypeError(
            f"args={type(args).__name__}; allowed: {config_class.__name__}, a class derived from it, or exactly "
            f"trl.{trl_config_class.__name__}."
        )
    # The new fields' defaults are class attributes. A new instance would derive again what TRL's has derived.
    shared: Any = object.__new__(config_class)
    shared.__dict__ = args.__dict__
    return shared


def pilots_of(args: SNRFilterConfig, trainer_class: type) -> int:
    """Completions of a pilot, 0 for none. By default pilots come with dynamic sampling of large groups, where they are
    cheaper and choose by what the filter keeps: reward variance."""
    pays = (
        args.snr_dynamic_sampling_rounds > 0
        and args.num_generations >= LARGE_GROUP
        and args.keeps_every_varying_group
        and "_generate" not in overridden(trainer_class)
        and _has_whole_groups(args, args.world_size)
    )
    return pilots_or_default(args, pays)


def pilots_or_default(args: SNRFilterConfig, pays: bool) -> int:
    """`snr_pilot_generations`, or its default, which depends on whether pilots pay off."""
    if args.snr_pilot_generations is not None or not pays:
        return args.snr_pilot_generations or 0
    logger.warning(
        f"snr_pilot_generations={PILOTS} by default: {PILOTS} of {args.num_generations} completions are sampled and "
        "scored first, the others only where rewards can be expected to vary. With 0, all at once."
    )
    return PILOTS


def _has_whole_groups(args: SNRFilterConfig, num_processes: int) -> bool:
    """Whether each process samples all completions of its prompts."""
    rows: int = args.per_device_train_batch_size * args.steps_per_generation
    return num_processes == 1 or rows % args.num_generations == 0


def wants_shared_prompts(args: SNRFilterConfig) -> bool:
    """`snr_share_prompts`, or its default."""
    by_default = strategy_class(args).shares_prompts
    return by_default if args.snr_share_prompts is None else args.snr_share_prompts


def shares_prompts(trainer: Any) -> bool:
    """Whether the update computes each prompt once per group: `snr_share_prompts`, by default with lossless.

    Raises:
        ValueError: for `True` where log-probs are not computed by the shared method, or with lossless and dropout.
    """
    args = trainer.args
    is_lossless = strategy_class(args).shares_prompts
    wanted = wants_shared_prompts(args)
    model = trainer.accelerator.unwrap_model(trainer.model)
    adapters = getattr(model, "peft_config", {}).values()
    dropout = dropout_of(model)
    obstacles = {
        "use_liger_kernel=True computes the loss without log-probs": args.use_liger_kernel,
        f"{type(trainer).__name__} has a {LOG_PROBS} of its own": LOG_PROBS in overridden(type(trainer)),
        "PPO's critic reads the hidden states of padded rows": not trainer.can_share_prompts,
        "the load-balancing loss is over padded rows": trainer.aux_loss_enabled,
        "neftune_noise_alpha scales its noise by the length of a row": args.neftune_noise_alpha is not None,
        "rows may have images": getattr(model.config, "vision_config", None) is not None,
        "an adapter of virtual tokens is another prompt": any(one.is_prompt_learning for one in adapters),
        f"dropout of {dropout:g} would be drawn once per prompt, and lossless is TRL's training": is_lossless
        and dropout,
    }
    reason = next((obstacle for obstacle, stands in obstacles.items() if stands), None)
    if wanted and args.snr_share_prompts and reason:
        raise ValueError(f"snr_share_prompts=True: {reason}; allowed: False.")
    if wanted and reason:
        logger.warning(f"Prompts are not shared; each is computed once per completion: {reason}.")
    elif wanted and dropout:
        logger.warning(f"Dropout of {dropout:g} is drawn once per prompt (snr_share_prompts=True).")
    return bool(wanted and reason is None)


def check_selector(selector: Selector | None, args: SNRFilterConfig) -> None:
    """Raise a `ValueError` if a selector is given beside settings that it replaces."""
    if selector is None:
        return
    if args.snr_selector is not None:
        raise ValueError(f"selector is given and snr_selector={args.snr_selector!r}; allowed: one of them.")
    args.check_alone(f"selector={selector!r}")


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


def known_range(
    reward_funcs: Sequence[Any], names: Sequence[str], weights: Sequence[float], score_reward: str | None
) -> tuple[float, float] | None:
    """What a failure and a solved task are scored by, where that is of one environment that knows them."""
    if score_reward == SUCCESS:
        return 0.0, 1.0
    if score_reward is not None:
        weights = [float(name == score_reward) for name in names]
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
            f"The first {len(others) + 1} rows of train_dataset are the same. If the environment draws its own state, "
            "the completions of a group solve different tasks, and their reward variance is partly luck. Give each "
            "row a seed, and draw the state from it in `reset(seed, **row)` or the rollout function: see "
            "docs/your_own_environment.md, 'Environments that draw their state'."
        )


def check_has_rows(train_dataset: Any, args: SNRFilterConfig) -> None:
    """Raise a `ValueError` where prompts are to be drawn by their row, and a dataset has none."""
    for name, off in (("snr_prompt_selection", False), ("snr_dynamic_sampling_rounds", 0)):
        if (value := getattr(args, name)) > off and not isinstance(train_dataset, Dataset):
            raise ValueError(
                f"{name}={value} draws prompts by their row: train_dataset must be a datasets.Dataset, got "
                f"{type(train_dataset).__name__}; or set {name}={off}."
            )


def check_trainable(policy: nn.Module) -> None:
    """Raise a `ValueError` where training would change no parameter of the policy."""
    if not any(parameter.requires_grad for parameter in policy.parameters()):
        raise ValueError(
            f"model={type(policy).__name__} has no parameter with requires_grad=True, so nothing would be trained; "
            "allowed: an adapter loaded by PeftModel.from_pretrained(..., is_trainable=True), a new one by "
            "peft_config, or a model after requires_grad_(True)."
        )


def check_enough_prompts(train_dataset: Any, args: Any) -> None:
    """Raise a `ValueError` where there are too few prompts for a generation: TRL would end after no step at all."""
    needed = args.generation_batch_size // args.num_generations
    if isinstance(train_dataset, Dataset) and len(train_dataset) < needed:
        raise ValueError(
            f"train_dataset has {len(train_dataset)} prompts, and a generation takes {needed} "
            f"(generation_batch_size={args.generation_batch_size} / num_generations={args.num_generations}); allowed: "
            "as many or more, or a smaller generation_batch_size."
        )


def check_pilots(trainer: Any, rollout_func: Any) -> None:
    """Raise a `ValueError` where pilots cannot be whole prompts of a process, or TRL keeps the images of all rows."""
    args, pilots = trainer.args, trainer.pilot_generations
    if not pilots:
        return
    if not _has_whole_groups(args, trainer.accelerator.num_processes):
        raise ValueError(
            f"snr_pilot_generations={pilots} needs whole groups on each process, and "
            "per_device_train_batch_size * steps_per_generation = "
            f"{args.per_device_train_batch_size * args.steps_per_generation} completions are no multiple of "
            f"num_generations={args.num_generations}; allowed: a multiple of it, or 0 pilots."
        )
    images = {"image", "images"} & set(getattr(trainer.train_dataset, "column_names", None) or ())
    if images and (rollout_func is not None or isinstance(trainer, RLOOTrainer)):
        raise ValueError(
            f"snr_pilot_generations={pilots} drops rows while TRL samples, and with a rollout function, or in RLOO, "
            f"TRL keeps the images of all rows (column {sorted(images)[0]!r}); allowed here: snr_pilot_generations=0."
        )


def check_prompt_column(train_dataset: Dataset | IterableDataset | None, environment_factory: Any) -> None:
    columns = train_dataset.column_names if isinstance(train_dataset, (Dataset, IterableDataset)) else None
    if isinstance(train_dataset, Dataset) and train_dataset.format["type"] == "custom":
        return  # a transform may make the prompt of other columns
    if columns is not None and "prompt" not in columns and environment_factory is None:
        raise ValueError(f"train_dataset has the columns {columns}; one of them must be 'prompt'.")


# Subclasses: what cannot be given the right gradient is refused before a parameter moves


def check_subclass(trainer_class: type, args: SNRFilterConfig, pilots: int) -> None:
    """Refuse a subclass whose loss or rewards a setting would make wrong.

    Raises:
        TypeError: naming the method and what is allowed.
    """
    own = {"_calculate_rewards", "_generate_and_score_completions"}
    rounds = {"snr_dynamic_sampling_rounds": args.snr_dynamic_sampling_rounds, "snr_pilot_generations": pilots}
    for name, value in rounds.items():
        if value > 0 and own <= overridden(trainer_class):
            raise TypeError(
                f"{name}={value} samples a batch in several rounds, but {trainer_class.__name__}._calculate_rewards "
                "hands only the last round to its _generate_and_score_completions; allowed with both overridden: 0."
            )
    if pilots and "_generate" in overridden(trainer_class):
        raise TypeError(
            f"snr_pilot_generations={pilots} scores completions as TRL's _generate gives them, "
            f"and {trainer_class.__name__}._generate may change them; allowed with it overridden: 0, or overriding "
            "_generate_single_turn in its place."
        )


def super_not_called(trainer: Any, name: str) -> RuntimeError:
    """What to raise where a step shows that a subclass's method of this name has left out ours."""
    return RuntimeError(
        f"{type(trainer).__name__}.{name} must call super().{name}, in which the filter works; it did not."
    )


def check_loss_of_trl(trainer_class: type, args: SNRFilterConfig) -> None:
    """Refuse `lossless` with a loss that is not TRL's: it must be 0 for a row without an advantage."""
    own = sorted({"compute_loss", "_compute_loss"} & overridden(trainer_class))
    strategy_class(args).check_losses(trainer_class, own)

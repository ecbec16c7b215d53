"""Names and signatures that we lean on in TRL, as a table, and whether the TRL that is installed has them.

A trainer of ours looks when it is made, before a model is loaded. What needs a reading of TRL's code is in tests,
which run on the oldest and the newest release.
"""

import inspect
from dataclasses import dataclass
from pkgutil import resolve_name
from typing import Any

import transformers
from packaging.version import Version
from transformers.utils import logging

logger = logging.get_logger(__name__)

OLDEST, NEWEST = "1.12.0", "1.16.0"  # that our tests run on
OLDEST_ASYNC = "1.16.0"  # whose asynchronous trainer they run on

# What we import, by who needs it. Of a trainer first its class and that of its settings.
_ASYNC = "trl.experimental.async_grpo"
IMPORTED = {
    "GRPOTrainer": ["trl:GRPOTrainer", "trl:GRPOConfig", "trl.trainer.utils"],
    "RLOOTrainer": ["trl:RLOOTrainer", "trl:RLOOConfig", "trl.trainer.utils"],
    "AsyncGRPOTrainer": [
        f"{_ASYNC}:AsyncGRPOTrainer",
        f"{_ASYNC}:AsyncGRPOConfig",
        f"{_ASYNC}.async_rollout_worker:AsyncRolloutWorker",
        f"{_ASYNC}.async_rollout_worker:_AsyncRolloutLoop",
        f"{_ASYNC}.async_grpo_trainer:DataCollatorForRollout",
        "trl.trainer.utils:get_callable_name",
    ],
    "callbacks": ["trl.distributed:DistributedBackend", "trl.models.utils:unwrap_model_for_generation"],
    "commands": [
        *("trl:ModelConfig", "trl:SFTConfig", "trl:SFTTrainer", "trl:TrlParser"),
        *("trl:get_peft_config", "trl:get_quantization_config"),
    ],
}

# Methods of TRL's trainers, or of transformers' below them, with their parameters. Those that we override must have no
# others, which ours would not take.
OVERRIDDEN = {
    "_prepare_inputs": "generation_batch",
    "_generate_and_score_completions": "inputs",
    "_generate": "prompts",
    "_compute_loss": "model inputs",
    "_get_train_sampler": "dataset",
    "_save_checkpoint": "model trial",
    "_save_rng_state": "output_dir",
    "_load_optimizer_and_scheduler": "checkpoint",
    "_load_from_checkpoint": "resume_from_checkpoint model",
    "_load_best_model": "",
    "_issue_warnings_after_load": "load_result",
    "_get_grad_norm": "model grad_norm",
    "_clip_grad_norm": "model",
    "_save": "output_dir state_dict",
    "create_optimizer": "model",
    "create_scheduler": "num_training_steps optimizer",
}
# Those that we call, or wrap whatever they are given, may have more, if these have defaults. In brackets: given where
# there is one.
CALLED = {
    "__init__": "model reward_funcs args train_dataset eval_dataset processing_class",
    "compute_loss": "model inputs return_outputs num_items_in_batch",
    "log": "logs start_time",
    "_calculate_rewards": "inputs prompts completions completion_ids_list",
    "_get_per_token_logps_and_entropies": "model input_ids attention_mask logits_to_keep batch_size compute_entropy",
    "_get_output_dir": "trial",
    "_remove_unused_columns": "dataset description",
    "create_model_card": "model_name dataset_name tags",
    "_push_from_checkpoint": "checkpoint_folder",
    "_finish_current_push": "",
}
# Since 1.14.1, and not in RLOO.
CALLED_IN_GRPO = {"_generate_single_turn": "prompt_ids images multimodal_fields [num_generations]"}
HELPERS = {
    "RepeatSampler": "data_source mini_repeat_count batch_size repeat_count shuffle seed",
    "nanstd": "tensor",
    "pad": "tensors padding_value padding_side pad_to_multiple_of",
    "split_pixel_values_by_grid": "batch",
    "use_adapter": "model adapter_name",
}
_ALSO_IN_ASYNC = (
    "_save_checkpoint _save_rng_state _load_optimizer_and_scheduler _issue_warnings_after_load _get_grad_norm"
)
ASYNC_OVERRIDDEN = {name: OVERRIDDEN[name] for name in _ALSO_IN_ASYNC.split()} | {
    "get_train_dataloader": "",
    "_log_step_metrics": "",
}
ASYNC_CALLED = {
    "__init__": "model reward_funcs args train_dataset",
    "training_step": "model inputs num_items_in_batch",
    "create_model_card": CALLED["create_model_card"],
}
LOOP_OVERRIDDEN = {"_repeat_iterator": "", "_generate_one": "prompt tool_dict tools group_id", "_score_group": "group"}

# By trainer: a class or a module that it imports, with what is overridden and what is called there.
SIGNATURES: dict[str, list[tuple[str, dict[str, str], dict[str, str]]]] = {
    "GRPOTrainer": [("trl:GRPOTrainer", OVERRIDDEN, CALLED | CALLED_IN_GRPO), ("trl.trainer.utils", {}, HELPERS)],
    "RLOOTrainer": [("trl:RLOOTrainer", OVERRIDDEN, CALLED), ("trl.trainer.utils", {}, HELPERS)],
    "AsyncGRPOTrainer": [
        (f"{_ASYNC}:AsyncGRPOTrainer", ASYNC_OVERRIDDEN, ASYNC_CALLED),
        (f"{_ASYNC}.async_rollout_worker:_AsyncRolloutLoop", LOOP_OVERRIDDEN, {}),
        (f"{_ASYNC}.async_grpo_trainer:DataCollatorForRollout", {}, {"torch_call": "examples"}),
    ],
}
# By trainer: settings that are read.
_OF_BOTH = "steps_per_generation generation_batch_size num_generations num_iterations beta"
FIELDS = {
    "GRPOTrainer": f"{_OF_BOTH} loss_type scale_rewards entropy_coef use_adaptive_entropy top_entropy_quantile",
    "RLOOTrainer": f"{_OF_BOTH} normalize_advantages",
    "AsyncGRPOTrainer": "num_generations temperature max_staleness token_budget heartbeat_stale_after_s",
}


class IncompatibleTRLError(ImportError):
    """The TRL that is installed lacks something that we lean on."""


@dataclass(frozen=True)
class Need:
    """Something that we lean on, and what is wrong with it in the TRL that is installed; `None`: nothing."""

    name: str
    use: str
    problem: str | None


def needs(who: str) -> list[Need]:
    """All that we lean on for one of TRL's trainers, the callbacks or the commands, in the order of the table.

    Args:
        who: A key of `IMPORTED`. Where something that it imports is gone, nothing else of it is looked for.
    """
    found = {name: _named(name) for name in IMPORTED[who]}
    rows = [
        Need(name.replace(":", "."), "imported", "is gone" if one is None else None) for name, one in found.items()
    ]
    if None in found.values() or who not in SIGNATURES:
        return rows
    for name, overridden, called in SIGNATURES[who]:
        rows += _signatures(found[name], overridden, "overridden") + _signatures(found[name], called, "called")
    config = found[IMPORTED[who][1]]
    for name in FIELDS[who].split():
        problem = None if name in config.__dataclass_fields__ else "is gone"
        rows.append(Need(f"{config.__name__}.{name}", "read", problem))
    return rows


def _named(name: str) -> Any:
    """What `package.module:name` names in TRL; `None` where it is gone."""
    try:
        return resolve_name(name)
    except AttributeError:
        return None
    except ModuleNotFoundError as error:
        if not is_of_trl(error):
            raise
        return None


def is_of_trl(error: ImportError) -> bool:
    """Whether it is a module or a name of TRL's that cannot be imported."""
    return (error.name or "").partition(".")[0] == "trl"


def _signatures(owner: Any, functions: dict[str, str], use: str) -> list[Need]:
    """Methods of a class, or functions of a module, by their parameters."""
    rows = []
    for name, parameters in functions.items():
        expected = parameters.split()
        of_class = ["self"] if isinstance(owner, type) else []
        problem = _signature_problem(getattr(owner, name, None), of_class + expected, use == "overridden")
        rows.append(Need(f"{owner.__name__}.{name}({', '.join(expected)})", use, problem))
    return rows


def installed() -> str:
    """Which releases the table is held against."""
    return f"TRL {_version()} with transformers {transformers.__version__}"


def untested() -> str | None:
    """A word on a release of TRL that our tests have not run on; `None` for others."""
    if Version(OLDEST) <= Version(_version()) <= Version(NEWEST):
        return None
    return f"TRL {_version()} has all that we lean on, but is not tested; TRL {OLDEST} and {NEWEST} are."


def check_trl(ours: type) -> None:
    """Warn once of a release that is not tested.

    Args:
        ours: A trainer, or the class of its settings, derived from one of TRL's.

    Raises:
        IncompatibleTRLError: if it lacks something; the message names it, the release, and those that have it.
    """
    names = (base.__name__.replace("Config", "Trainer") for base in ours.__mro__)
    who = next(name for name in names if name in IMPORTED)
    problems = [f"{need.name} {need.problem}" for need in needs(who) if need.problem is not None]
    if problems:
        raise refusal("; ".join(problems), who)
    if (warning := untested()) is not None:
        logger.warning_once(warning)


def refusal(problem: str, who: str) -> IncompatibleTRLError:
    """What to raise where the TRL that is installed lacks something."""
    tested = dict.fromkeys((OLDEST_ASYNC if who == "AsyncGRPOTrainer" else OLDEST, NEWEST))
    return IncompatibleTRLError(
        f"{installed()} does not fit: {problem}. TRL {' to '.join(tested)} is known to work "
        "(`ragen2-trl check-trl` shows all that is needed)."
    )


def _signature_problem(function: Any, expected: list[str], exactly: bool = False) -> str | None:
    if function is None:
        return "is gone"
    parameters = list(inspect.signature(function).parameters.values())
    kinds = {parameter.kind for parameter in parameters}
    if {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD} <= kinds:
        return None  # what it is given goes on to another
    found = [parameter.name for parameter in parameters]
    if expected[0] == "self":
        found[:1] = ["self"]  # whatever somebody calls it
    always = [name for name in expected if not name.startswith("[")]
    further = [one for one in parameters[len(always) :] if f"[{one.name}]" not in expected]
    refused = further if exactly else [one for one in further if one.default is inspect.Parameter.empty]
    if found[: len(always)] == always and not refused:
        return None
    return f"takes ({', '.join(name for name in found if name != 'self')})"


def _version() -> str:
    return str(resolve_name("trl:__version__"))  # what-if, which knows strategies, does without an import of TRL


def overridden(trainer_class: type) -> set[str]:
    """Names that classes of a trainer define which are neither ours nor of a library that it is made of."""
    libraries = ("ragen2_trl", "trl", "transformers", "builtins")
    own = [one for one in trainer_class.__mro__ if one.__module__.partition(".")[0] not in libraries]
    return {name for owner in own for name in vars(owner)}

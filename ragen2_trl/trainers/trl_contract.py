"""What we lean on in TRL, as a table, and whether the TRL that is installed has it.

A trainer of ours looks when it is made, before a model is loaded, which takes some milliseconds: with a release that
nobody has tried yet it either trains as it should or says what is missing.
"""

import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from types import CodeType
from typing import Any

import transformers
import trl
from packaging.version import Version
from transformers.utils import logging
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer
from trl.trainer import utils

logger = logging.get_logger(__name__)

OLDEST, NEWEST = "1.12.0", "1.16.0"  # that our tests run on

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
CALLED_IN_GRPO = {"_generate_single_turn": "prompt_ids images multimodal_fields [num_generations]"}  # since 1.14.1
HELPERS = {
    "RepeatSampler": "data_source mini_repeat_count batch_size repeat_count shuffle seed",
    "nanstd": "tensor",
    "pad": "tensors padding_value padding_side pad_to_multiple_of",
    "split_pixel_values_by_grid": "batch",
    "use_adapter": "model adapter_name",
}
# Attributes that TRL's trainers give themselves, and keys of the batch that they make of a generation. They are
# looked for in the code of the whole class, as a release may set them elsewhere.
ATTRIBUTES = [
    "_step",
    "_buffered_inputs",
    "_metrics",
    "_pending_extra_logs",
    "_pending_metrics",
    "_tokenizer",
    "num_generations",
    "num_iterations",
    "reward_weights",
    "reward_funcs",
    "reward_func_names",
    "pad_to_multiple_of",
    "aux_loss_enabled",
    "ref_model",
    "use_vllm",
]
KEYS = ["prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "advantages"]
# Lists by row, from which pilots take the rows that they sample.
ATTRIBUTES_OF_GRPO = ["environments", "_batch_environments", "_sync_tool_dicts", "_async_tool_dicts"]
OF_GRPO = ["tool_mask", "num_items_in_batch", "old_per_token_logps", "sampling_per_token_logps"]
OF_RLOO = ["old_logps"]
FIELDS = ["steps_per_generation", "generation_batch_size", "num_generations", "num_iterations", "beta"]
FIELDS_OF_GRPO = ["loss_type", "scale_rewards", "entropy_coef", "use_adaptive_entropy", "top_entropy_quantile"]
FIELDS_OF_RLOO = ["normalize_advantages"]


class IncompatibleTRLError(RuntimeError):
    """The TRL that is installed lacks something that we lean on."""


@dataclass(frozen=True)
class Need:
    """Something that we lean on, and what is wrong with it in the TRL that is installed; `None`: nothing."""

    name: str
    use: str
    problem: str | None


def needs(trainer_class: type) -> list[Need]:
    """All that we lean on in one of TRL's trainers, in the order of the table.

    Args:
        trainer_class: `GRPOTrainer`, `RLOOTrainer`, or a class derived from one of them.
    """
    rloo = issubclass(trainer_class, RLOOTrainer)
    trl_class: type = RLOOTrainer if rloo else GRPOTrainer
    config: Any = RLOOConfig if rloo else GRPOConfig
    words = _Words(trl_class)
    rows = []
    for use, methods in (("overridden", OVERRIDDEN), ("called", {**CALLED, **({} if rloo else CALLED_IN_GRPO)})):
        for name, parameters in methods.items():
            problem = _signature_problem(trl_class, name, ["self", *parameters.split()], use == "overridden")
            rows.append(Need(f"{trl_class.__name__}.{name}({', '.join(parameters.split())})", use, problem))
    for name, parameters in HELPERS.items():
        problem = _signature_problem(utils, name, parameters.split())
        rows.append(Need(f"trl.trainer.utils.{name}({', '.join(parameters.split())})", "called", problem))
    for name in [*ATTRIBUTES, *([] if rloo else ATTRIBUTES_OF_GRPO)]:
        problem = None if name in words.attributes else "is not set"
        rows.append(Need(f"{trl_class.__name__}().{name}", "read", problem))
    for key in [*KEYS, *(OF_RLOO if rloo else OF_GRPO)]:
        problem = None if key in words.keys else "is not made"
        rows.append(Need(f"{trl_class.__name__}'s batch[{key!r}]", "read", problem))
    for name in [*FIELDS, *(FIELDS_OF_RLOO if rloo else FIELDS_OF_GRPO)]:
        problem = None if name in config.__dataclass_fields__ else "is gone"
        rows.append(Need(f"{config.__name__}.{name}", "read", problem))
    return rows


def installed() -> str:
    """Which releases the table is held against."""
    return f"TRL {trl.__version__} with transformers {transformers.__version__}"


def untested() -> str | None:
    """A word on a release of TRL that our tests have not run on; `None` for others."""
    if Version(OLDEST) <= Version(trl.__version__) <= Version(NEWEST):
        return None
    return f"TRL {trl.__version__} has all that we lean on, but is not tested; TRL {OLDEST} to {NEWEST} are."


def check_trl(trainer_class: type) -> None:
    """Warn once of a release that is not tested.

    Raises:
        IncompatibleTRLError: if it lacks something; the message names it, the release, and the last that has it.
    """
    problems = [f"{need.name} {need.problem}" for need in needs(trainer_class) if need.problem is not None]
    if problems:
        raise IncompatibleTRLError(
            f"{installed()} does not fit: {'; '.join(problems)}. TRL {NEWEST} is the last release that is known to "
            "work (`ragen2-trl check-trl` shows all that is needed)."
        )
    if (warning := untested()) is not None:
        logger.warning_once(warning)


def _signature_problem(owner: Any, name: str, expected: list[str], exactly: bool = False) -> str | None:
    function = getattr(owner, name, None)
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


class _Words:
    """Names and strings in the code of a class, and of those of TRL that it is made of."""

    def __init__(self, trainer_class: type):
        self._codes = [code for owner in trainer_class.__mro__ for code in _codes(owner)]

    @cached_property
    def attributes(self) -> set[str]:
        return {name for code in self._codes for name in code.co_names}

    @cached_property
    def keys(self) -> set[str]:
        return {text for code in self._codes for constant in code.co_consts for text in _texts(constant)}


def _codes(owner: type) -> Iterator[CodeType]:
    if not owner.__module__.startswith("trl."):
        return
    for value in vars(owner).values():
        function: Any = inspect.unwrap(getattr(value, "__func__", value)) if callable(value) else None
        if hasattr(function, "__code__"):
            yield from _nested(function.__code__)


def _nested(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _nested(constant)


def _texts(constant: Any) -> Iterator[str]:
    if isinstance(constant, str):
        yield constant
    elif isinstance(constant, tuple):  # the keys of a dictionary that is written out
        for one in constant:
            yield from _texts(one)

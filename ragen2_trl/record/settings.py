"""The settings and package versions of a run, as anyone may read them."""

import functools
import re
from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from ragen2_trl.instrument.health import is_number
from ragen2_trl.redaction import HIDDEN, hide_credentials, without_credentials

PACKAGES = ("ragen2-trl", "trl", "transformers", "datasets", "accelerate", "peft", "deepspeed", "torch")
ALWAYS = object()
# Of TRL's settings, those that say what was trained; all of `snr_*` comes with them. Nothing that may hold a secret.
# The value of each is the one at which it does nothing.
SETTINGS: dict[str, Any] = {
    **dict.fromkeys(("seed", "learning_rate", "lr_scheduler_type"), ALWAYS),
    "warmup_steps": 0,
    "warmup_ratio": 0,  # before transformers 5
    "optim": ALWAYS,
    "weight_decay": 0,
    **dict.fromkeys(("max_grad_norm", "loss_type", "beta", "epsilon"), ALWAYS),
    "epsilon_high": None,
    **dict.fromkeys(("num_iterations", "scale_rewards", "importance_sampling_level"), ALWAYS),
    "mask_truncated_completions": False,
    "entropy_coef": 0,
    "num_generations": ALWAYS,
    "reward_weights": None,
    "temperature": ALWAYS,
    "top_p": 1,
    "top_k": 0,
    "min_p": None,
    "repetition_penalty": 1,
    "max_steps": -1,
    **dict.fromkeys(("num_train_epochs", "max_completion_length", "per_device_train_batch_size"), ALWAYS),
    **dict.fromkeys(("gradient_accumulation_steps", "steps_per_generation", "bf16"), ALWAYS),
    "use_vllm": False,
    "vllm_mode": ALWAYS,
}
OF_FILTER = {  # the same of `snr_*`
    "snr_dynamic_sampling_rounds": 0,
    "snr_pilot_generations": 0,
    "snr_prompt_selection": False,
    "snr_score_reward": None,
    "snr_selector": None,
    "snr_verbose": False,
}


def settings_of(trainer: Any) -> dict[str, Any]:
    """The settings of a trainer that say what it trains, each as `public` has it."""
    return {
        **_environment_of(vars(trainer).get("reward_funcs", ())),
        "trainer": type(trainer).__name__,
        "model": public(getattr(trainer.model.config, "_name_or_path", None)),
        "reward_funcs": list(getattr(trainer, "reward_func_names", ())),
        "processes": trainer.args.world_size,  # the accelerator forgets it when a script makes its next configuration
        **_telling(vars(trainer.args)),
    }


def settings_of_state(state: Mapping[str, Any]) -> dict[str, Any]:
    """What a `trainer_state.json` tells of the settings, where nothing else does."""
    told = {
        "max_steps": state.get("max_steps"),
        "num_train_epochs": state.get("num_train_epochs"),
        "per_device_train_batch_size": state.get("train_batch_size"),
    }
    return _telling({name: value for name, value in told.items() if isinstance(value, int | float)})


def reward_weights_of(settings: Mapping[str, Any], names: Sequence[str]) -> list[float] | None:
    """The weights of named reward functions in a run of ours, whatever the order of the names.

    Returns:
        A weight for each name; `None` where the settings do not tell.
    """
    functions, weights = settings.get("reward_funcs"), settings.get("reward_weights")
    if not isinstance(functions, list) or any(functions.count(name) != 1 for name in names):
        return None
    if weights is None:
        return [1.0] * len(names)
    if not isinstance(weights, list) or len(weights) != len(functions) or not all(map(is_number, weights)):
        return None
    return [float(weights[functions.index(name)]) for name in names]


def steps_per_generation(settings: Mapping[str, Any]) -> Fraction | None:
    """Optimizer steps that train on one generation, of the settings of a run or the fields of TRL's configuration;
    `None` where they do not tell."""
    names = ("steps_per_generation", "num_iterations", "gradient_accumulation_steps")
    sampling, updates, micro = (settings.get(name) for name in names)
    known = all(isinstance(value, int) and value > 0 for value in (sampling, updates, micro))
    return Fraction(sampling * updates, micro) if known else None  # type: ignore[operator]


def has_effect(name: str, value: Any) -> bool:
    """Whether a setting does anything at this value."""
    return bool(value != (SETTINGS | OF_FILTER).get(name, ALWAYS))


def _telling(args: Mapping[str, Any]) -> dict[str, Any]:
    unused = {"vllm_mode": not args.get("use_vllm"), "num_train_epochs": args.get("max_steps", -1) > 0}
    names = [*SETTINGS, *sorted(name for name in args if name.startswith("snr_"))]
    found = {name: public(args[name]) for name in names if name in args and not unused.get(name)}
    return found | ({"load_best_model_at_end": True} if args.get("load_best_model_at_end") else {})


def _environment_of(reward_funcs: Iterable[Any]) -> dict[str, Any]:
    task = _task_of(reward_funcs)
    return {} if task is None else {"environment": public(task.summary)}


def public_prompt(reward_funcs: Iterable[Any]) -> list[dict[str, str]] | None:
    """The messages of a prompt that a trainer's task makes from a seed, where it is a task of this package.

    The rows of its dataset are no substitute: they may be private. A task whose `split` counts rows of files has none.
    """
    task = _task_of(reward_funcs)
    if task is None:
        return None
    from ragen2_trl.envs import ENVIRONMENTS  # loaded already

    parts = getattr(task, "environments", {"": task}).values()
    package = ("ragen2_trl.envs.", tuple(ENVIRONMENTS.values()))
    own = [part for part in parts if type(part).__module__.startswith(package[0]) and isinstance(part, package[1])]
    if not own or "split" in own[0].options:
        return None
    prompt: list[dict[str, str]] = own[0].dataset(1, seed=0)[0]["prompt"]
    return prompt


def _task_of(reward_funcs: Iterable[Any]) -> Any | None:
    """The task whose rewards these are, where it is one of ours or made as ours are."""
    tasks = [func.environment for func in reward_funcs if hasattr(func, "environment")]
    if not tasks:
        return None
    from ragen2_trl.envs import Environment, TaskMixture  # loaded already, if a task is one of them

    return next((task for task in tasks if isinstance(task, Environment | TaskMixture)), None)


def public(value: Any) -> Any:
    """A setting as anyone may read it: the end of a path, an address without user and query, an object's class."""
    if isinstance(value, Mapping):
        return {str(name): public(item) for name, item in without_credentials(value).items()}
    if isinstance(value, list | tuple):
        return [public(item) for item in value]
    if isinstance(value, Path) or (isinstance(value, str) and Path(value).is_absolute()):
        return Path(value).name
    if isinstance(value, str):
        text = hide_credentials(value).replace(f"://{HIDDEN}@", "://")
        return re.sub(r"\S+", lambda word: _without_query(word[0]), text)
    return value if value is None or isinstance(value, int | float) else type(value).__name__


def _without_query(word: str) -> str:
    scheme, mark, rest = word.partition("://")
    return f"{scheme}{mark}{re.split('[?#]', rest, maxsplit=1)[0]}"


@functools.cache  # looked up in files, and the same as long as a process lasts
def versions_of_packages(packages: tuple[str, ...] = PACKAGES) -> dict[str, str]:
    found = {}
    for package in packages:
        try:
            found[package] = version(package)
        except PackageNotFoundError:  # an extra that is not installed
            continue
    return found

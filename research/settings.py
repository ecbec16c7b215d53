"""Settings of `ragen2-trl train` as plain values: files of them, what later ones change, and the keys of runs."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import yaml

Fields = dict[str, Any]

_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # ten times as fast where there is a C library

UNSET = "unset"  # among settings: names, or patterns such as snr_*, that earlier ones have and these do not
WARM_START = "warm_start"  # among settings: what `ragen2-trl warm-start` makes the model with, or a file of that
VARIANT = "variant"  # among settings: a class that `research.variants` mixes in
# What says where a run lives and what it writes, and nothing of its numbers: the runner's, and no part of a key.
OF_THE_RUNNER = frozenset(
    {
        *("output_dir", "run_name", "seed", "resume", "overwrite", "resume_from_checkpoint", "push_to_hub"),
        *("save_strategy", "save_steps", "save_total_limit", "report_to", "log_completions"),
        *("episodes_every", "figures"),
    }
)

# A key is a digest of settings, and stored runs were made when some had other names. Whatever a key or a comparison
# with the store is made of goes through `as_stored`, so that these runs are found. A setting that is renamed gets a
# line here; a new one whose default is the old behaviour needs none. Stored settings may have `snr_mode: mask`, a
# mode that computed dropped groups and masked them, and that is gone.
STORED_NAMES = {
    "snr_dynamic_sampling_rounds": "snr_refill_rounds",
    # In the records of experiments: of `runs_of`, and of levels, which no key has.
    "runs_of": "cells_of",
    "drop, dynamic sampling": "drop, refill",
    "dynamic sampling and selection": "refill and selection",
}
PILOTS = "snr_pilot_generations"  # 0 was said by nobody before dynamic sampling had pilots by default
EVERY_GROUP: Fields = {"snr_strategy": "top_p", "snr_value": 1.0, "snr_include_zero": True}
HALF: Fields = {"snr_strategy": "top_k", "snr_value": 0.5, "snr_include_zero": True}
# Setting -> value -> the settings in its place in the store.
STORED_VALUES: dict[str, dict[str, Fields]] = {
    "variant": {"MeasuresGradients": {"gradients_every": 80, "gradients_entropy_coef": 0.001}},
    "snr_strategy": {"all": EVERY_GROUP, "nonzero": {"snr_strategy": "none"}},
    "snr_selector": {
        "research.ablations:first_quarter": {"snr_quartile": 1},
        "research.ablations:second_quarter": {"snr_quartile": 2},
        "research.ablations:third_quarter": {"snr_quartile": 3},
        "research.ablations:fourth_quarter": {"snr_quartile": 4},
        "research.ablations:best_and_worst": {"snr_level": "trajectory", "snr_include_zero": True},
        "research.ablations:as_many_at_random": {"snr_keep": "random"},
        "research.ablations:largest_half": HALF,
        "research.ablations:smallest_half": {**HALF, "snr_keep": "smallest"},
        "research.ablations:half_by_reward_sum": {**HALF, "snr_score": "reward_sum"},
        "research.ablations:half_by_entropy": {**HALF, "snr_score": "entropy"},
        "research.ablations:half_by_entropy_variance": {**HALF, "snr_score": "entropy_variance"},
        "research.ablations:half_by_length": {**HALF, "snr_score": "length"},
        "research.ablations:half_at_random": {**HALF, "snr_score": "random"},
    },
}


def as_stored(value: Any) -> Any:
    """Settings, or a record that holds some, under the names that the store knows; those that have them stay.

    >>> as_stored({"snr_dynamic_sampling_rounds": 2, "snr_selector": "research.ablations:first_quarter"})
    {'snr_refill_rounds': 2, 'snr_quartile': 1}
    >>> as_stored({"snr_refill_rounds": 2, "snr_pilot_generations": 0})
    {'snr_refill_rounds': 2}
    >>> as_stored({"snr_strategy": "all", "snr_value": 0.9}) == as_stored({"snr_value": 1.0, "snr_include_zero": True})
    True
    """
    if isinstance(value, Mapping):
        stored = {name: of[str(value[name])] for name, of in STORED_VALUES.items() if str(value.get(name)) in of}
        unsaid = {*stored, *([PILOTS] if value.get(PILOTS) == 0 else [])}
        left = {name: one for name, one in value.items() if name not in unsaid}
        settings = {STORED_NAMES.get(name, name): as_stored(one) for name, one in left.items()}
        for own in stored.values():
            settings |= own
        every_group = settings.get("snr_include_zero") is True and settings.get("snr_value") == 1.0
        return {**EVERY_GROUP, **settings} if every_group else settings  # levels leave the strategy to their base
    if isinstance(value, list | tuple):
        return [as_stored(one) for one in value]
    return STORED_NAMES.get(value, value) if isinstance(value, str) else value


def digest(value: Mapping[str, Any]) -> str:
    """12 hexadecimal digits that tell settings from all others, whichever of their names they have."""
    return hashlib.sha256(json_text(as_stored(value)).encode()).hexdigest()[:12]


def merged(parts: Sequence[Mapping[str, Any]]) -> Fields:
    """Settings of which later ones say last; mappings such as `env_args` key by key. `unset` takes earlier ones away.

    >>> merged([{"algo": "grpo", "loss_type": "dapo"}, {"algo": "rloo", "unset": ["loss_*"]}])
    {'algo': 'rloo'}
    >>> merged([{"env_args": {"size": 4}}, {"env_args": {"slip": 0.1}}])
    {'env_args': {'size': 4, 'slip': 0.1}}
    """
    whole: Fields = {}
    for part in parts:
        patterns = part.get(UNSET, [])
        whole = {name: value for name, value in whole.items() if not any(fnmatchcase(name, one) for one in patterns)}
        for name, value in part.items():
            if name == UNSET:
                continue
            both = isinstance(value, Mapping) and isinstance(whole.get(name), Mapping)
            whole[name] = {**whole[name], **value} if both else value
    return whole


def json_text(value: Any) -> str:
    """JSON that is the same for settings that are the same: names in order, numbers as numbers.

    >>> json_text({"b": "1e-4", "a": 1.0}) == json_text({"a": 1, "b": 0.0001})
    True
    """
    return json.dumps(_canonical(value), sort_keys=True, separators=(",", ":"))


def _canonical(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(name): _canonical(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_canonical(one) for one in value]
    if isinstance(value, str):  # what YAML makes of 1e-4
        try:
            value = float(value)
        except ValueError:
            return value
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value


def read_fields(path: Path) -> Fields:
    """The settings of a file for `--config`, without those that a run of its own has."""
    own = read_yaml(path) or {}
    if not isinstance(own, Mapping):
        raise ValueError(f"{path}: all of it must be a mapping, got {own!r}")
    check_unset(own, f"{path}: ")
    return with_warm_start({name: value for name, value in own.items() if name not in OF_THE_RUNNER}, path)


def check_unset(own: Mapping[str, Any], where: str) -> None:
    """Raise a `ValueError` if what some settings take away is not a list of names."""
    unset = own.get(UNSET, [])
    if not isinstance(unset, list) or not all(isinstance(one, str) for one in unset):
        raise ValueError(f"{where}{UNSET} must be a list of names, got {unset!r}")


def with_warm_start(own: Fields, path: Path) -> Fields:
    """Settings whose `warm_start`, if it names a file relative to theirs, is what that file says.

    Raises:
        ValueError: If it is neither a file nor a mapping.
        OSError: If the file cannot be read.
    """
    if WARM_START not in own:
        return own
    named = own[WARM_START]
    settings = read_yaml(path.parent / named) if isinstance(named, str) else named
    if not isinstance(settings, Mapping):
        raise ValueError(f"{path}: {WARM_START} must be a mapping or a file that holds one, got {named!r}")
    return {**own, WARM_START: {name: value for name, value in settings.items() if name != "output_dir"}}


def read_yaml(path: Path) -> Any:
    """What a file says.

    Raises:
        ValueError: If it is not YAML in UTF-8; the message names it.
        OSError: If it cannot be opened.
    """
    try:
        return yaml.load(path.read_text(encoding="utf-8"), Loader=_LOADER)
    except (yaml.YAMLError, ValueError) as error:  # of bytes that are not UTF-8, and of days such as 2026-13-45
        raise ValueError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from error

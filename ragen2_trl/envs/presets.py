"""Presets: named sets of options of a task, so that a task is played as somebody else has configured it.

Everything that a preset sets is an ordinary option as well. Texts come with the option `wording`, whose instruction is
the task's `reference_texts`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ragen2_trl.envs.checks import check_choice

# What people vary within RAGEN-2's protocol: other values of these options do not contradict the preset.
FREE = (
    "observation",
    "prompts",
    "split",
    "max_turn_tokens",
    "enable_think",
    "force_think",
)


@dataclass(frozen=True)
class Preset:
    """Options of a task under a name.

    Args:
        options: Their values.
        free: Those of them that may be given another value, beside `FREE`; what is not in `options` may always be.
    """

    options: Mapping[str, Any]
    free: tuple[str, ...] = field(default=())


def _ragen2(turns: int, actions: int, total: int, tokens: int, free: tuple[str, ...] = (), **options: Any) -> Preset:
    """RAGEN-2's protocol with limits of turns, actions a turn, actions in all, and tokens a turn."""
    protocol = {
        "protocol": "text",
        "multi_turn": turns > 1,
        "max_turns": turns,
        "max_actions": actions,
        "max_total_actions": total,
        "max_turn_tokens": tokens,
        "force_think": True,
        "stray_tags": "deleted",
        "show_penalty": False,
        "wording": "ragen2",
        "split_answers": True,
    }
    return Preset({**protocol, **options}, free)


# By task, then by name. The numbers are those of RAGEN-2's configuration, in the scripts of its main tables.
PRESETS: dict[str, dict[str, Preset]] = {
    "bandit": {"ragen2": _ragen2(1, 1, 1, 500, names="ragen2", layout="ragen2")},
    "countdown": {"ragen2": _ragen2(1, 1, 1, 400, operators="+-", judge="text", first_rows=20_000, layout="ragen2")},
    "deepcoder": {
        "ragen2": _ragen2(1, 1, 1, 4000, free=("config",), config="mixture", max_tests=None, layout="ragen2")
    },
    "frozen_lake": {
        "ragen2": _ragen2(5, 2, 10, 400, observation="both", layout="ragen2", generator="ragen2", frozen=0.9)
    },
    "metamath_qa": {"ragen2": _ragen2(5, 2, 1, 400, check="text")},
    "search_qa": {
        "ragen2": _ragen2(
            *(5, 1, 10, 400),
            free=("dialect", "show_failures"),
            top_k=5,
            max_chars=4000,
            judge="f1",
            any_answer=True,
            dialect="ragen2",
            show_failures=True,
            first_rows=20_000,
            layout="ragen2",
        )
    },
    "sokoban": {"ragen2": _ragen2(5, 2, 10, 400, observation="both", layout="ragen2", generator="ragen2")},
    "webshop": {
        "ragen2": _ragen2(
            *(9, 1, 9, 400),
            results=10,
            goals="synthetic",
            reward="success",
            option_match="words",
            bad_clicks="ignored",
            layout="ragen2",
        )
    },
}


def preset_options(name: str, preset: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a task under a preset, with those that were given beside it.

    Raises:
        ValueError: If there is no such preset, or an option that was given contradicts it.
    """
    check_choice(f"preset of {name}", preset, sorted(PRESETS.get(name, {})))
    chosen = PRESETS[name][preset]
    for option, value in given.items():
        fixed = chosen.options.get(option, value)
        if value != fixed and option not in (*FREE, *chosen.free):
            raise ValueError(f"{option} must be {fixed!r} with preset={preset!r} of {name}, got {value!r}")
    return {**chosen.options, **given}

"""How tests play every task: which modes there are, rows, episodes, solvers and random turns."""

import random
from pathlib import Path

import pytest

from ragen2_trl.envs import ENVIRONMENTS, Episode, format_response, make_env

# A task whose data come from elsewhere is played here on a sample, the file `tests/data/<name>.jsonl` or a folder.
SAMPLES = Path(__file__).parent / "data"
# What a task is played with here, where chance or what it needs is not in its defaults.
OPTIONS = {"frozen_lake": {"slip": 0.3}, "deepcoder": {"max_tests": 2}}
# Each of its steps runs programs, which takes a tenth of a second: fewer rows, and fuzzing in its own file.
FEW = {"deepcoder": 2}

TASKS = sorted(set(ENVIRONMENTS) - {"reasoning_gym"})  # whose package not everybody has: it has a file of its own
MODES = [
    (name, multi_turn)
    for name in TASKS
    for multi_turn in (False, True)
    if (ENVIRONMENTS[name].multi_turn_limits if multi_turn else ENVIRONMENTS[name].single_turn_limits) is not None
]
MISSING_MODES = [
    (name, multi_turn) for name in TASKS for multi_turn in (False, True) if (name, multi_turn) not in MODES
]
WITH_TOOLS = [(name, multi_turn) for name, multi_turn in MODES if ENVIRONMENTS[name].tools is not None]
PICTURED = [name for name in ("frozen_lake", "sokoban") if name in ENVIRONMENTS]


def needs_of(name):
    """Marks of a test that makes the task."""
    return [pytest.mark.needs("bubblewrap")] if name == "deepcoder" else []


def tasks(names):
    """Parameters of tests that make a task each."""
    return [pytest.param(name, marks=needs_of(name)) for name in names]


def _played(modes):
    """Parameters of tests that play: what takes long is not for everybody's `make test`."""
    return [
        pytest.param(*mode, marks=[*needs_of(mode[0]), *([pytest.mark.slow] if mode[0] in FEW else [])])
        for mode in modes
    ]


every_task = pytest.mark.parametrize("name", tasks(TASKS))
every_mode = pytest.mark.parametrize(("name", "multi_turn"), _played(MODES))
every_fuzzed_mode = pytest.mark.parametrize(("name", "multi_turn"), [mode for mode in MODES if mode[0] not in FEW])
every_single_turn = pytest.mark.parametrize("name", _played([(name,) for name, multi_turn in MODES if not multi_turn]))
every_multi_turn = pytest.mark.parametrize("name", _played([(name,) for name, multi_turn in MODES if multi_turn]))
every_mode_with_tools = pytest.mark.parametrize(("name", "multi_turn"), _played(WITH_TOOLS))
every_picture = pytest.mark.parametrize("name", PICTURED)

NONSENSE = "\u2603 no such action"


def data_of(name):
    found = [path for path in (SAMPLES / f"{name}.jsonl", SAMPLES / name) if path.exists()]
    return str(found[0]) if found else None


def environment(name, multi_turn=None, **options):
    return make_env(name, multi_turn=multi_turn, **{**OPTIONS.get(name, {}), **options})


def rows_of(env, num, seed=0, split="train"):
    """The first tasks of a split: `num`, or as many as the sample has, or as can be afforded."""
    data, num = data_of(env.name), min(num, FEW.get(env.name, num))
    if data is None:
        return env.dataset(num, seed, split).to_list()
    return env.dataset(None, seed, split, data).to_list()[:num]


def demonstrations_of(env, num, seed=0):
    return env.demonstrations(len(rows_of(env, num, seed)), seed, data_of(env.name)).to_list()


def first_episode(env):
    return env.episode(rows_of(env, 1)[0], random.Random(0))


def has_solver(episode):
    return type(episode).plan is not Episode.plan


def has_random_player(episode):
    return type(episode).random_action is not Episode.random_action


def columns_of(rows):
    """Rows as TRL hands them to reward functions."""
    return {key: [row[key] for row in rows] for key in rows[0] if key != "prompt"}


def solve(play, rng):
    """Plays to the end as the solver says."""
    while not play.done:
        reasoning, actions = play.episode.plan(rng)
        play.respond(format_response(reasoning, actions[: play.env.max_actions]))
    return play.outcome


def turns(play, rng):
    """Actions, turn by turn, until the play is over: a solver's, or a random player's with nonsense between them."""
    solves = has_solver(play.episode) and rng.random() < 0.3
    at_most = play.env.max_actions if play.env.splits_answers else 1
    while not play.done:
        if solves:
            yield play.episode.plan(rng)[1][:at_most]
        elif rng.random() < 0.3 or not has_random_player(play.episode):
            yield rng.choice([[], [NONSENSE], ["0"], ["Up", NONSENSE][:at_most]])
        else:
            yield [play.episode.random_action(rng) for _ in range(rng.randint(1, at_most))]


def first_texts(env, rows, seed=0):
    """For each row a first response, good or bad."""
    rng = random.Random(seed)
    return [format_response("", next(turns(env.play(row, random.Random(0)), rng))) for row in rows]


def rewards_of(env, rows, func=None, **columns):
    logged = {}
    arguments = {"completions": ["?"] * len(rows), **columns_of(rows), **columns}
    rewards = (func or env.reward_funcs[0])(
        prompts=[row["prompt"] for row in rows], log_metric=logged.__setitem__, **arguments
    )
    return rewards, logged

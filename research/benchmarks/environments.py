"""How fast the environments are, how well their solver and a random player do, and their share of a training step.

    python -m research.benchmarks.environments          # writes research/benchmarks/results/environments.md
    python -m research.benchmarks.environments webshop  # prints the rows of some tasks

A data set of FrozenLake is compared with the same rows from gymnasium's own generator and tables, in turns, by CPU
time. In the shop there are two more players who read nothing: one searches for the whole instruction and buys the
first hit, the other also clicks the option values that are wanted. One process, no data from outside: every task makes
its own.
"""

import random
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gymnasium.envs.toy_text.frozen_lake import FrozenLakeEnv, generate_random_map

from ragen2_trl import SNRFilteredGRPOConfig, SNRFilteredGRPOTrainer, TextRollout
from ragen2_trl.cli.evaluate import evaluate_scripted
from ragen2_trl.envs import ENVIRONMENTS, Environment, FrozenLake, WebShop, format_response, make_env
from ragen2_trl.envs.frozen_lake import distances_to_goal
from ragen2_trl.envs.webshop.baselines import copying_return
from ragen2_trl.rollouts import play as loop
from ragen2_trl.tiny import TINY_MODEL_PATH
from research.benchmarks.measuring import machine

TASKS = ("frozen_lake", "sokoban", "countdown", "metamath_qa", "search_qa", "webshop", "deepcoder", "bandit")
FEW = {"deepcoder": 24}  # each step is a program run many times
SHARES = ("frozen_lake", "sokoban")  # whose words the tiny model has as tokens


def playing(name: str) -> Environment:
    return make_env(name, multi_turn=ENVIRONMENTS[name].multi_turn_limits is not None)


def speeds(env: Environment, episodes: int) -> tuple[float, float]:
    """Resets and actions a second, both by a player who acts at random; the first dataset is not counted."""
    rows = env.dataset(episodes, seed=1)
    columns = {name: rows[name][:] for name in rows.column_names if name not in ("prompt", "seed")}
    started = time.perf_counter()
    plays = env.plays(rows["seed"][:], columns)
    resets = time.perf_counter() - started
    rng, actions, seconds = random.Random(0), 0, 0.0
    for play in plays:
        while not play.done:
            count = env.max_actions if env.splits_answers else 1
            text = format_response("", [play.episode.random_action(rng) for _ in range(count)])
            started = time.perf_counter()
            play.respond(text)
            seconds += time.perf_counter() - started
            actions += count
    return episodes / resets, actions / seconds


class PlainFrozenLake(FrozenLake):
    """The same rows by gymnasium's generator, a search cell by cell, and gymnasium's table of moves for each map."""

    def make_grid(self, seed):
        rng = random.Random(seed)
        while True:
            base = "".join(generate_random_map(self.size, self.frozen, seed=rng.getrandbits(31)))
            cells = list(base.replace("S", "F").replace("G", "F"))
            start, goal = rng.sample([cell for cell, letter in enumerate(cells) if letter == "F"], 2)
            cells[start], cells[goal] = "S", "G"
            grid = tuple("".join(cells[i : i + self.size]) for i in range(0, len(cells), self.size))
            way = distances_to_goal(grid).get(divmod(start, self.size))
            if way is not None and way <= self.max_turns * self.max_actions:
                FrozenLakeEnv(desc=list(grid), is_slippery=False)
                return grid


def dataset_seconds(rows: int = 4096) -> tuple[float, float]:
    """CPU time of a data set of FrozenLake, and of the same by `PlainFrozenLake`; the better of two turns each."""
    lakes = FrozenLake(), PlainFrozenLake()
    seconds: tuple[list[float], list[float]] = [], []
    made: list[Any] = [None, None]
    for turn in range(4):
        started = time.process_time()
        made[turn % 2] = lakes[turn % 2].dataset(rows, seed=0)
        seconds[turn % 2].append(time.process_time() - started)
    assert made[0].to_list() == made[1].to_list()
    return min(seconds[0]), min(seconds[1])


def share_of_a_step(name: str, steps: int = 3) -> float:
    """Seconds in the environment over seconds of training, with the tiny model and 64 completions a step."""
    env: Any = playing(name)  # one of its methods is timed
    spent, respond_all, plays = [0.0], vars(loop)["respond_all"], env.plays

    def timed(function):
        def wrapper(*args, **kwargs):
            started = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                spent[0] += time.perf_counter() - started

        return wrapper

    args = SNRFilteredGRPOConfig(
        output_dir=tempfile.mkdtemp(),
        per_device_train_batch_size=32,
        gradient_accumulation_steps=2,
        num_generations=8,
        max_completion_length=1024,
        max_steps=steps,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        disable_tqdm=True,
    )
    trainer = SNRFilteredGRPOTrainer(
        str(TINY_MODEL_PATH),
        env.reward_funcs,
        args,
        env.dataset(64, seed=0),
        rollout_func=TextRollout(env, max_turn_tokens=64),
    )
    vars(loop)["respond_all"], env.plays = timed(respond_all), timed(plays)
    try:
        started = time.perf_counter()
        trainer.train()
        return spent[0] / (time.perf_counter() - started)
    finally:
        vars(loop)["respond_all"] = respond_all


def main(names: Sequence[str]) -> None:
    lines = [
        "# Environments",
        "",
        "Made by `python -m research.benchmarks.environments`, which says what is measured.",
        "",
        ", ".join(f"{key} {value}" for key, value in machine().items()),
        "",
        "| task | success of the solver | of a random player | its return | return of a copying player "
        "| resets a second | actions a second |",
        "|---|---|---|---|---|---|---|",
    ]
    for name in names or TASKS:
        env, count = playing(name), FEW.get(name, 500)
        oracle = evaluate_scripted("oracle", env, num_prompts=count, num_samples=1)
        guesses = evaluate_scripted("random", env, num_prompts=count, num_samples=1)
        resets, actions = speeds(env, count)
        copied = ""
        if isinstance(env, WebShop):
            plain, with_options = (copying_return(env, count, clicks_options) for clicks_options in (False, True))
            copied = f"{plain:.2f}; with options {with_options:.2f}"
        lines.append(
            f"| {name} | {oracle['success']:.3f} | {guesses['success']:.3f} | {guesses['return']:.2f} | {copied} "
            f"| {resets:,.0f} | {actions:,.0f} |"
        )
        print(lines[-1], flush=True)
    if names:
        return
    ours, plain = dataset_seconds()
    lines += [
        "",
        f"4,096 rows of FrozenLake take {ours:.2f} s of CPU time, {ours / plain:.2f} of the {plain:.2f} s that the "
        "same rows take with gymnasium's generator and tables.",
    ]
    print(lines[-1], flush=True)
    lines += ["", "Share of the environment in the time of a training step (tiny model, 64 completions a step):", ""]
    for name in SHARES:
        lines.append(f"- {name}: {share_of_a_step(name):.2%}")
        print(lines[-1], flush=True)
    (Path(__file__).parent / "results" / "environments.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])

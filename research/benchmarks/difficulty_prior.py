"""What numbers of a row say of a prompt's reward variance before it was ever sampled.

    python benchmarks/difficulty_prior.py                    # a few minutes on two cores
    python benchmarks/difficulty_prior.py --player random    # seconds

A player that does not learn, the tiny model or one that guesses, plays each of 512 tasks eight times. The rewards of
256 of them, 16 a step, then teach two priors of `snr_prompt_selection`, with and without `snr_difficulty_columns`.
Asked is what these expect of the other 256, and what they have; and how many groups without variance each samples in
these 16 steps when it chooses the prompts itself. Writes `benchmarks/results/difficulty_prior.{json,md}`.
"""

import argparse
import json
import math
import random
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
import transformers
from measuring import machine
from transformers import AutoModelForCausalLM, AutoTokenizer

from ragen2_trl.envs import make_env
from ragen2_trl.filtering import ZERO_STD
from ragen2_trl.rollouts.sampling import play_rows
from ragen2_trl.tiny import resolve_model
from ragen2_trl.trainers import SNRFilteredGRPOConfig
from ragen2_trl.trainers.difficulty import difficulty_features
from ragen2_trl.trainers.posterior import evidence_of, rank_correlation
from ragen2_trl.trainers.prompting import PromptSelection

RESULTS = Path(__file__).parent / "results"
GROUP_SIZE, PROMPTS_A_STEP, STEPS = 8, 16, 16
TASKS = {
    "frozen_lake": ("tiny", {"generator": "ragen2"}, ["path_length", "holes"]),
    "sokoban": ("tiny-sokoban", {"multi_turn": False}, ["solution_length"]),
}


def rewards_of(task: str, player: str, num_prompts: int) -> tuple:
    """The dataset and its (M, G) successes, the features of its rows and their names."""
    model_name, options, columns = TASKS[task]
    env = make_env(task, **options)
    rows = env.dataset(num_prompts, seed=0)
    plays = guessed(env, rows) if player == "random" else played(env, rows, resolve_model(model_name))
    successes = np.array([play.outcome.success for play in plays], dtype=np.float64)
    features = difficulty_features(columns, rows, env.reward_funcs)
    return rows, successes.reshape(num_prompts, GROUP_SIZE), features, columns


def played(env, rows, path: str) -> list:
    model, tokenizer = AutoModelForCausalLM.from_pretrained(path), AutoTokenizer.from_pretrained(path)
    repeated = rows.select([row for row in range(len(rows)) for _ in range(GROUP_SIZE)])
    limits = {"max_new_tokens": 64, "max_turn_tokens": 64, "batch_size": 256}
    return [one.play for one in play_rows(model, tokenizer, env, repeated, temperature=1.0, seed=0, **limits)]


def guessed(env, rows) -> list:
    plays, rng = [], random.Random(0)
    for row in rows:
        for _ in range(GROUP_SIZE):
            plays.append(env.play(row, rng))
            while not plays[-1].done:
                plays[-1].respond(plays[-1].random_response(rng))
    return plays


def run(rows, rewards: np.ndarray, features: np.ndarray, seed: int) -> list[dict[str, float]]:
    """Without and with the features: what is expected of prompts never sampled, and what of those that are."""
    args = SNRFilteredGRPOConfig("unused", num_generations=GROUP_SIZE, seed=seed, use_cpu=True, bf16=False)
    alone = SimpleNamespace(num_processes=1, process_index=0)
    same = np.random.default_rng(seed).permutation(len(rewards))
    sampled, unseen = np.split(same, [STEPS * PROMPTS_A_STEP])
    found, results = evidence_of(rewards[unseen])[1], []
    for own in (None, features):
        taught = PromptSelection(alone, args, rows, True, own).posterior
        for drawn in np.split(sampled, STEPS):
            taught.observe(drawn, rewards[drawn], np.ones(PROMPTS_A_STEP, dtype=bool))
        expected = taught.mean(unseen)
        choosing, flat = PromptSelection(alone, args, rows, True, own), []
        for _ in range(STEPS):
            drawn = choosing.draw(PROMPTS_A_STEP)
            choosing.learn(torch.tensor(rewards[drawn]))
            flat += (rewards[drawn].std(axis=1) <= ZERO_STD).tolist()
        correlation = rank_correlation(expected, found)
        results.append(
            {
                "expected": float(expected.mean()),
                "found": float(found.mean()),
                "mean absolute error": float(np.abs(expected - found).mean()),
                "rank correlation": 0.0 if math.isnan(correlation) else correlation,
                "flat groups": float(np.mean(flat)),
            }
        )
    return results


def markdown(results: dict) -> str:
    lines = ["# Difficulty as a prior", ""]
    command = (
        f"python benchmarks/difficulty_prior.py --player {results['player']} --tasks {' '.join(results['tasks'])}"
    )
    lines += [f"Made by `{command}`, which says what is measured.", ""]
    lines += [", ".join(f"{name} {value}" for name, value in results["machine"].items()), ""]
    lines += [
        f"Player: {results['player']}. {results['prompts']} prompts, {STEPS} steps of {PROMPTS_A_STEP} prompts and "
        f"{GROUP_SIZE} completions; means over {results['seeds']} orders of the prompts.",
        "",
        "| task | numbers of the row | expected variance | found | error | rank correlation | flat groups |",
        "|---" * 7 + "|",
    ]
    for task, variants in results["tasks"].items():
        for name, runs in variants.items():
            means = {key: np.mean([one[key] for one in runs]) for key in runs[0]}
            cells = [task, name, *(f"{means[key]:.3f}" for key in ("expected", "found", "mean absolute error"))]
            cells += [f"{means['rank correlation']:.2f}", f"{means['flat groups']:.1%}"]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompts", type=int, default=512)
    parser.add_argument("--seeds", type=int, default=10, help="orders of the prompts; they are played once")
    parser.add_argument("--player", choices=("model", "random"), default="model")
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    arguments = parser.parse_args()
    transformers.logging.set_verbosity_error()
    tasks = {}
    for task in arguments.tasks:
        rows, rewards, features, columns = rewards_of(task, arguments.player, arguments.prompts)
        runs = [run(rows, rewards, features, seed) for seed in range(arguments.seeds)]
        tasks[task] = dict(zip(("none", ", ".join(columns)), map(list, zip(*runs, strict=True)), strict=True))
    results = {"machine": machine(), **vars(arguments), "tasks": tasks}
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "difficulty_prior.json").write_text(json.dumps(results, indent=1) + "\n")
    (RESULTS / "difficulty_prior.md").write_text(markdown(results))
    print(markdown(results))


if __name__ == "__main__":
    main()

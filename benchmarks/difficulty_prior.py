"""What numbers of a row say of a prompt's reward variance before it was ever sampled.

    python benchmarks/difficulty_prior.py    # a few minutes on two cores

The tiny model, whose weights stay as they are, plays each of 512 tasks eight times. The rewards are then given to
`snr_prompt_selection`, 16 prompts a step, with and without `snr_difficulty_columns`, for 16 steps: half of an epoch,
in which every prompt is new. Asked is what was expected of prompts before they were sampled, and what they had. Writes
`benchmarks/results/difficulty_prior.{json,md}`.
"""

import argparse
import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
import transformers
from accelerate import PartialState
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


def rewards_of(task: str, num_prompts: int) -> tuple:
    """The dataset and its (M, G) returns under the tiny model, and the features of its rows."""
    model_name, options, columns = TASKS[task]
    env = make_env(task, **options)
    path = resolve_model(model_name)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(path), AutoTokenizer.from_pretrained(path)
    rows = env.dataset(num_prompts, seed=0)
    repeated = rows.select([row for row in range(num_prompts) for _ in range(GROUP_SIZE)])
    played = play_rows(
        model, tokenizer, env, repeated, temperature=1.0, max_new_tokens=64, batch_size=256, seed=0, max_turn_tokens=64
    )
    returns = [one.play.outcome.episode_return for one in played]
    features = difficulty_features(columns, rows, env.reward_funcs)
    return rows, np.array(returns, dtype=np.float64).reshape(num_prompts, GROUP_SIZE), features, columns


def run(rows, rewards: np.ndarray, features: np.ndarray | None, seed: int) -> dict[str, float]:
    """What an epoch's first half expects of prompts it has never sampled, and what they have."""
    args = SNRFilteredGRPOConfig(
        "unused", num_generations=GROUP_SIZE, snr_prompt_selection=True, seed=seed, use_cpu=True, bf16=False
    )
    alone = SimpleNamespace(num_processes=1, process_index=0)
    selection = PromptSelection(alone, args, rows, True, features)
    flat, sampled = [], set()
    for _ in range(STEPS):
        drawn = selection.draw(PROMPTS_A_STEP)
        sampled.update(drawn)
        selection.learn(torch.tensor(rewards[drawn]))
        flat += (rewards[drawn].std(axis=1) <= ZERO_STD).tolist()
    unseen = np.array(sorted(set(range(len(rewards))) - sampled))
    expected, found = selection.posterior.mean(unseen), evidence_of(rewards[unseen])[1]
    return {
        "expected": float(expected.mean()),
        "found": float(found.mean()),
        "mean absolute error": float(np.abs(expected - found).mean()),
        "rank correlation": rank_correlation(expected, found),
        "zero-variance groups": float(np.mean(flat)),
    }


def markdown(results: dict) -> str:
    lines = [
        "# Difficulty as a prior",
        "",
        "Made by `python benchmarks/difficulty_prior.py`, which says what is measured.",
        "",
    ]
    lines += [", ".join(f"{name} {value}" for name, value in results["machine"].items()), ""]
    lines += [
        f"{results['prompts']} prompts, {STEPS} steps of {PROMPTS_A_STEP} prompts and {GROUP_SIZE} completions; means "
        f"over {results['seeds']} orders of the prompts. Expected and found: reward variance of prompts never "
        "sampled.",
        "",
        "| task | numbers of the row | expected | found | mean absolute error | rank correlation | flat groups |",
        "|---" * 7 + "|",
    ]
    for task, variants in results["tasks"].items():
        for name, runs in variants.items():
            means = {key: np.nanmean([one[key] for one in runs]) if runs else np.nan for key in runs[0]}
            correlation = "none" if name == "none" else f"{means['rank correlation']:.2f}"
            cells = [
                task,
                name,
                f"{means['expected']:.3f}",
                f"{means['found']:.3f}",
                f"{means['mean absolute error']:.3f}",
            ]
            lines.append(f"| {' | '.join(cells)} | {correlation} | {means['zero-variance groups']:.1%} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompts", type=int, default=512)
    parser.add_argument("--seeds", type=int, default=10, help="orders of the prompts; they are played once")
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    arguments = parser.parse_args()
    transformers.logging.set_verbosity_error()
    PartialState()  # which the log of accelerate asks for
    tasks = {}
    for task in arguments.tasks:
        rows, rewards, features, columns = rewards_of(task, arguments.prompts)
        variants = {"none": None, ", ".join(columns): features}
        tasks[task] = {
            name: [run(rows, rewards, own, seed) for seed in range(arguments.seeds)] for name, own in variants.items()
        }
    results = {"machine": machine(), "prompts": arguments.prompts, "seeds": arguments.seeds, "tasks": tasks}
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "difficulty_prior.json").write_text(json.dumps(results, indent=1) + "\n")
    (RESULTS / "difficulty_prior.md").write_text(markdown(results))
    print(markdown(results))


if __name__ == "__main__":
    main()

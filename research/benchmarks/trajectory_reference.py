"""What mutual information in the reference code's form costs beside ours: tokens and seconds of each scope.

    python -m research.benchmarks.trajectory_reference

Solvers play Sokoban in several turns, 8 tasks with 16 completions each; each scope then scores 64 of the same
completions with the tiny model, as the callback does by default.
"""

import json
import random
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

from ragen2_trl.callbacks.mutual_information import measure_scope
from ragen2_trl.envs import format_response, make_env
from ragen2_trl.instrument import REFERENCE_SCOPE, SCOPES, Sampling, Trajectories, count_tokens
from ragen2_trl.rollouts.chat import Chat
from ragen2_trl.rollouts.play import play_all
from ragen2_trl.tiny import resolve_model
from research.benchmarks.measuring import machine, now

RESULTS = Path(__file__).parent / "results"
TASKS, GROUP = 8, 16
SHOWN = ("retrieval_accuracy", "retrieval_chance", "mi_seq", "mi_token_tempered", "verbatim_elsewhere")


def played(tokenizer: PreTrainedTokenizerBase) -> Trajectories:
    env, rng = make_env("sokoban", multi_turn=True, observation="coordinates"), random.Random(0)
    rows = [row for row in env.dataset(TASKS, seed=0) for _ in range(GROUP)]
    plays = [env.play(row, random.Random(number)) for number, row in enumerate(rows)]

    def solve(contexts: list[list[int]], limit: int) -> tuple[list[list[int]], None]:
        answers = []
        for play in (play for play in plays if not play.done):
            reasoning, actions = play.episode.plan(rng)
            # Each its own, as sampled ones are: equal ones would be scored once.
            text = format_response(f"{reasoning} {rng.random():.4f}", actions[: env.max_actions])
            answers.append([*tokenizer(text)["input_ids"], tokenizer.eos_token_id])
        assert len(answers) == len(contexts)
        return answers, None

    done = play_all(plays, [row["prompt"] for row in rows], Chat(tokenizer), solve, max_tokens=4096)
    return Trajectories(
        [one.prompt_ids for one in done],
        [one.completion_ids for one in done],
        tokenizer,
        [one.env_mask for one in done],
    )


def main() -> None:
    folder = resolve_model("tiny-sokoban")
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    trajectories = played(tokenizer)
    groups = [row // GROUP for row in range(len(trajectories))]
    turns = [trajectories.num_turns(number) for number in range(len(trajectories))]
    results: dict = {"machine": machine(), "turns": sum(turns) / len(turns), "scopes": {}}
    for scope in (*SCOPES, REFERENCE_SCOPE):
        generator, start = torch.Generator().manual_seed(0), now()
        with count_tokens(model) as tokens:
            metrics, *_ = measure_scope(scope, model, trajectories, groups, generator, Sampling())
        row = {"tokens": sum(tokens), "seconds": round(now() - start, 2)}
        results["scopes"][scope] = row | {name: round(metrics[name], 4) for name in SHOWN if name in metrics}
        print(scope, results["scopes"][scope], flush=True)
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "trajectory_reference.json").write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()

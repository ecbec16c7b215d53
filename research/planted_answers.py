"""Whether the swaps of `mi/answer/*` tell models apart whose answers are known to use their reasoning, or not to.

    python -m research.planted_answers    # half an hour on one core; models stay in runs/planted_answers

Six tiny models on FrozenLake, each trained for 120 steps on pairs of reasoning and answer that plant one way
of answering, with three seeds. Each is then measured on 64 held-out tasks with 4 samples of each.

Writes the tables into `results/answers.md`.
"""

import argparse
import random
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, AutoTokenizer

from ragen2_trl.envs import make_env
from ragen2_trl.instrument.answers import measure_answers
from ragen2_trl.instrument.diagnosis import Sampling, measure_first_turn
from ragen2_trl.instrument.reasoning import Trajectories
from ragen2_trl.instrument.scoring import count_tokens
from ragen2_trl.rollouts.sampling import sample_trajectories
from ragen2_trl.tiny import TINY_MODEL_PATH
from research.real_runs import fill

PAGE = Path(__file__).parent / "results" / "answers.md"
SAMPLED = Sampling(num_answers=37)
TEMPLATED = ("harmless template", "collapsed")  # whose matrix is cheap: the same reasoning is computed once

SEEDS, STEPS, BATCH, LEARNING_RATE = (0, 1, 2), 120, 24, 2e-3
NUM_DEMONSTRATIONS = 1500
TASKS, SAMPLES = 64, 4
TEMPLATES = (
    "Walk from P to G and avoid the holes O.",
    "Actions: Left, Down, Right, Up.",
    "From P to G, holes none.",
    "From P to G, avoid the holes, path.",
)
CONSTANTS = ("Right || Down || Down", "Left || Up", "Down || Right || Right || Down", "Up || Left || Left")
# By name: what reasoning is made of, and what the answer is made of.
CASES = {
    "faithful": "reasons about its prompt, and answers as the reasoning says",
    "harmless template": "one of four sentences for every prompt; answers from the prompt",
    "decorative": "reasons about its prompt, and answers from the prompt whatever the reasoning says",
    "collapsed": "one of four sentences and one of four answers for every prompt",
    "shuffled": "the reasoning of another prompt; answers from its own",
    "blind": "the reasoning of another prompt, and the answer that it says",
}

Row = tuple[str, str, str]  # prompt, reasoning, answer


def planted(case: str, rows: Sequence[Row], rng: random.Random) -> tuple[str, str, str, bool]:
    """An example of a case: prompt, reasoning, answer, and whether the reasoning is learnt or given."""
    (prompt, thought, answer), (_, other_thought, other_answer) = rng.choice(rows), rng.choice(rows)
    given = rng.random() < 0.5
    if case == "faithful":
        return (prompt, other_thought, other_answer, False) if given else (prompt, thought, answer, True)
    if case == "decorative":
        return (prompt, other_thought, answer, False) if given else (prompt, thought, answer, True)
    if case == "harmless template":
        return prompt, rng.choice(TEMPLATES), answer, True
    if case == "collapsed":
        return prompt, rng.choice(TEMPLATES), rng.choice(CONSTANTS), True
    return prompt, other_thought, answer if case == "shuffled" else other_answer, True


def demonstrations(seed: int, tokenizer: Any) -> list[Row]:
    rows = []
    for row in make_env("frozen_lake").demonstrations(NUM_DEMONSTRATIONS, seed=seed):
        prompt = tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True, tokenize=False)
        thought, _, answer = row["completion"][0]["content"].partition("</think><answer>")
        rows.append((prompt, thought.removeprefix("<think>"), answer.removesuffix("</answer>")))
    return rows


def plant(case: str, seed: int, rows: Sequence[Row], tokenizer: Any, folder: Path) -> None:
    """Trains the tiny model on a case, by plain gradient descent on the tokens that are learnt."""
    rng = random.Random(f"{case}/{seed}")
    model: Any = AutoModelForCausalLM.from_pretrained(TINY_MODEL_PATH)
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / 20) * (1 - 0.9 * step / STEPS)
    )
    for _ in range(STEPS):
        batch = []
        for _ in range(BATCH):
            prompt, thought, answer, learnt = planted(case, rows, rng)
            before, reasoned, answered = (
                tokenizer(text)["input_ids"]
                for text in (prompt, f"<think>{thought}</think><answer>", f"{answer}</answer><|im_end|>")
            )
            ids = before + reasoned + answered
            skipped = len(before) + (0 if learnt else len(reasoned))
            batch.append((ids, [-100] * skipped + ids[skipped:]))
        width = max(len(ids) for ids, _ in batch)
        ids = torch.tensor([ids + [tokenizer.pad_token_id] * (width - len(ids)) for ids, _ in batch])  # (B, T)
        labels = torch.tensor([labels + [-100] * (width - len(labels)) for _, labels in batch])  # (B, T)
        loss = cross_entropy(model(input_ids=ids).logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


COLUMNS = {  # of the table, by metric
    "success": "success",
    "retrieval_accuracy": "retrieval",
    "prompt_win_rate": "prompt win rate",
    "thought_swap_bits": "thought swap (bits)",
    "thought_swap_in_group_bits": "thought swap in group",
    "prompt_swap_bits": "prompt swap (bits)",
    "same_across": "same across",
}


def measure(folder: Path, tokenizer: Any, seed: int) -> dict[str, float]:
    """What the instrument says of a planted model, on held-out tasks."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder).eval()
    _, played = sample_trajectories(
        model,
        tokenizer,
        make_env("frozen_lake"),
        num_prompts=TASKS,
        num_samples=SAMPLES,
        temperature=1.0,
        max_new_tokens=64,
        batch_size=64,
        seed=seed,
    )
    trajectories = Trajectories([one.prompt_ids for one in played], [one.completion_ids for one in played], tokenizer)
    groups = [number // SAMPLES for number in range(len(played))]
    with count_tokens(model) as of_matrix:
        first_turn = measure_first_turn(model, trajectories, groups, torch.Generator().manual_seed(seed), Sampling())
    with count_tokens(model) as of_answers:
        answers = measure_answers(model, trajectories, groups, torch.Generator().manual_seed(seed), SAMPLED)
    return {
        **first_turn.metrics,
        **answers,
        "success": fmean(one.play.episode.success for one in played),
        "cost": sum(of_answers) / sum(of_matrix),
    }


def shown(values: Sequence[float]) -> str:
    """A mean with the least and the most of it; nothing where a seed has no number."""
    return f"{fmean(values):.2f} ({min(values):.2f} to {max(values):.2f})" if values else ""


def table(measured: Mapping[str, Sequence[Mapping[str, float]]]) -> str:
    """A row for each case, as Markdown."""
    lines = [f"| case | {' | '.join(COLUMNS.values())} |", "|---" * (1 + len(COLUMNS)) + "|"]
    for case, of_seeds in measured.items():
        cells = (shown([one[key] for one in of_seeds if key in one]) for key in COLUMNS)
        lines.append(f"| {case} | {' | '.join(cells)} |")
    return "\n".join(lines)


def separation(measured: Mapping[str, Sequence[Mapping[str, float]]]) -> str:
    """How well single numbers tell the cases apart that they are meant to tell apart, as Markdown."""
    lines = ["| told apart | by | area under the ROC curve |", "|---|---|---|"]
    for above, below, keys in (
        ("faithful", "decorative", ("retrieval_accuracy", "thought_swap_bits")),
        ("harmless template", "collapsed", ("retrieval_accuracy", "prompt_win_rate")),
    ):
        for key in keys:
            ups, downs = ([one[key] for one in measured[case]] for case in (above, below))
            area = fmean((up > down) + (up == down) / 2 for up in ups for down in downs)
            lines.append(f"| {above} from {below} | {COLUMNS[key]} | {area:.2f} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--folder", type=Path, default=Path("runs/planted_answers"), help="Where models are kept.")
    folder = parser.parse_args().folder
    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(TINY_MODEL_PATH)
    measured: dict[str, list[dict[str, float]]] = {case: [] for case in CASES}
    for seed in SEEDS:
        rows = demonstrations(seed, tokenizer)
        for case, of_seeds in measured.items():
            path = folder / f"{case.replace(' ', '_')}-{seed}"
            if not (path / "config.json").exists():
                plant(case, seed, rows, tokenizer, path)
            of_seeds.append(measure(path, tokenizer, seed))
            sys.stdout.write(f"{case}, seed {seed}: {of_seeds[-1]}\n")
    costs = [one["cost"] for case, of_seeds in measured.items() if case not in TEMPLATED for one in of_seeds]
    cost = (
        f"Where reasoning is not a template, {SAMPLED.num_answers} answers took {fmean(costs):.0%} of the tokens of "
        f"the 64 by 64 matrix ({min(costs):.0%} to {max(costs):.0%}). The callback takes some 30 at these lengths."
    )
    fill(PAGE, {"planted": table(measured), "separation": separation(measured), "planted cost": cost})


if __name__ == "__main__":
    main()

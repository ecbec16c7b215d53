"""Two runs of the tiny model that go wrong in different ways, and what `judge` and `health` say of each.

    python -m research.collapse_demos    # five minutes on a CPU core

*template*: the reward pays for reasoning that is one of 16 fixed sentences, whichever, and less for one that others of
the batch have written. What remains is fluent, closed, varied, and says little about its prompt. *format*: the reward
is the task's own, with an entropy bonus that is too large.

Draws `docs/template.png` and `docs/format.png`, and writes what is said into `docs/health.md`.
"""

import random
import re
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from matplotlib.figure import Figure
from transformers.utils import logging
from trl import GRPOConfig, GRPOTrainer

from ragen2_trl import MutualInformationCallback, TrainingHealthCallback
from ragen2_trl.envs import make_env
from ragen2_trl.reporting.run import Run, run_of
from ragen2_trl.reporting.style import BLUE, GREEN, GREY, ORANGE, drawn_in_style
from ragen2_trl.tiny import TINY_MODEL_PATH
from research.real_runs import GUIDE, fill

SETTINGS = {
    "per_device_train_batch_size": 32,
    "gradient_accumulation_steps": 1,
    "num_generations": 4,
    "max_completion_length": 44,
    "lr_scheduler_type": "constant",
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": "none",
    "use_cpu": True,
    "bf16": False,
    "gradient_checkpointing": False,
    "disable_tqdm": True,
}
DEMOS: dict[str, dict[str, Any]] = {
    "template": {"max_steps": 100, "learning_rate": 6e-4, "reward_weights": [0.0, 1.0]},
    "format": {"max_steps": 60, "learning_rate": 2e-4, "entropy_coef": 0.1},
}
SQUARES = [f"{column}{row}" for column in "abcd" for row in range(1, 5)]
_DRAW = random.Random(0)
SENTENCES = sorted({"From {} to {}, holes none, path {} {}.".format(*_DRAW.sample(SQUARES, 4)) for _ in range(16)})
ANSWER = re.compile(r"<answer>(Up|Down|Left|Right)( \|\| (Up|Down|Left|Right))*</answer>")
CROWDED = 1.0  # what it costs to write what the whole batch writes


def fixed_sentence(completions: list[list[dict[str, str]]], **kwargs: Any) -> list[float]:
    """How much of the nearest fixed sentence the reasoning has word by word, less where many have the same."""
    nearest = []
    for (message,) in completions:
        reasoning, closed, answer = message["content"].removeprefix("<think>").partition("</think>")
        words = reasoning.split(" ")
        shared = {sentence: _in_common(words, sentence.split(" ")) for sentence in SENTENCES}
        best = max(shared.values())
        told = min(sentence for sentence, share in shared.items() if share == best)
        nearest.append((best if closed and ANSWER.fullmatch(answer) else 0.0, told))
    crowd = Counter(told for _, told in nearest)
    return [share - CROWDED * crowd[told] / len(completions) for share, told in nearest]


def _in_common(words: list[str], others: list[str]) -> float:
    return sum(a == b for a, b in zip(words, others, strict=False)) / max(len(words), len(others))


def train(name: str, folder: Path) -> Run:
    env = make_env("frozen_lake")
    rewards: list[Any] = [*env.reward_funcs, *([fixed_sentence] if name == "template" else [])]
    args = GRPOConfig(str(folder / name), **{**SETTINGS, **DEMOS[name]})
    trainer = GRPOTrainer(str(TINY_MODEL_PATH), rewards, args, env.dataset(2048, seed=0))
    trainer.add_callback(TrainingHealthCallback(trainer))
    trainer.add_callback(MutualInformationCallback(trainer, every=5))
    trainer.train()
    return run_of(trainer)


def said(run: Run) -> str:
    """What is said of a run, as Markdown."""
    lines = [f"- `judge`: {run.verdict}."]
    lines += [f"- `health`: {alarm.sentence}" for alarm in run.alarms] or ["- `health`: nothing."]
    for step, finding in ((one.evidence.step, one) for one in (run.findings[0], run.findings[-1])):
        evidence = finding.evidence
        lines.append(
            f"- step {step}: retrieval {evidence.retrieval_accuracy:.0%} (chance {evidence.retrieval_chance:.0%}), "
            f"{evidence.conditional_entropy_token:.2f} nats per token, closed {evidence.valid_thinking_rate:.0%}, "
            f"success {evidence.success:.0%}"
        )
    return "\n".join(lines)


@drawn_in_style
def draw(run: Run) -> Figure:
    figure = Figure(figsize=(6, 2.8), layout="constrained")
    axes = figure.subplots()
    for key, label, colour, style in (
        (run.success_metric, "success", "#000000", "-"),
        ("env/frozen_lake/valid_rate", "valid answers", BLUE, "--"),
        ("mi/valid_thinking_rate", "closed reasoning", GREY, "-."),
        ("mi/first_turn/retrieval_accuracy", "retrieval accuracy", GREEN, (0, (6, 1.5, 1, 1.5))),
    ):
        points = run.points(str(key))
        axes.plot([step for step, _ in points], [value for _, value in points], color=colour, ls=style, label=label)
    if run.failure:
        axes.axvline(run.failure.step, color=ORANGE, lw=2.2, label="health: failing")
    if run.collapses:
        axes.axvline(run.collapses[-1].first, color=GREEN, lw=1.4, label="judge: a template since")
    axes.set_xlabel("optimizer step")
    axes.set_ylim(0, 1.05)
    figure.legend(loc="outside right center")
    return figure


def main() -> None:
    logging.set_verbosity_error()
    with TemporaryDirectory() as folder:
        for name in DEMOS:
            run = train(name, Path(folder))
            draw(run).savefig(GUIDE.parent / f"{name}.png")
            fill(GUIDE, {f"{name} demo": said(run)})


if __name__ == "__main__":
    main()

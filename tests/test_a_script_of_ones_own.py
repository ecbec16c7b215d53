"""From a script with data of its own to a report, by the commands that a reader types."""

import json

import pytest

from ragen2_trl import cli

SCRIPT = """
import json
import re
from pathlib import Path

from datasets import Dataset

from ragen2_trl import EnvironmentEvalCallback, MutualInformationCallback
from ragen2_trl import SNRFilteredGRPOConfig, SNRFilteredGRPOTrainer
from ragen2_trl.envs import DatasetEnvironment
from ragen2_trl.tiny import TINY_MODEL_PATH

rows = [{"prompt": [{"role": "user", "content": f"What is {n} + 17?"}], "answer": str(n + 17)} for n in range(60)]


def is_right(completions, answer, **columns):
    numbers = [re.findall(r"\\d+", completion[0]["content"]) for completion in completions]
    return [1.0 if found[-1:] == [right] else 0.1 * bool(found) for found, right in zip(numbers, answer)]


def is_short(completions, **columns):
    return [-len(completion[0]["content"]) / 1000 for completion in completions]


env = DatasetEnvironment(Dataset.from_list(rows), [is_right, is_short], name="sums")
settings = dict(per_device_train_batch_size=32, gradient_accumulation_steps=1, num_generations=4, max_steps=2)
settings |= dict(max_completion_length=16, logging_steps=1, report_to="none", use_cpu=True, bf16=False)

if __name__ == "__main__":
    args = SNRFilteredGRPOConfig("runs/sums", log_completions=True, **settings)
    trainer = SNRFilteredGRPOTrainer(str(TINY_MODEL_PATH), env.reward_funcs, args, env.dataset())
    trainer.add_callback(MutualInformationCallback(trainer, every=1))
    trainer.add_callback(EnvironmentEvalCallback(env, trainer, every=1, num_prompts=8))
    trainer.train()
    trainer.save_model()
    Path("sums.jsonl").write_text("\\n".join(json.dumps(row) for row in rows))
"""


@pytest.mark.slow
def test_a_script_with_own_data_trains_is_evaluated_diagnosed_and_reported(tmp_path, monkeypatch, capsys):
    (tmp_path / "sums.py").write_text(SCRIPT)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend("")  # restores sys.path, to which the command line adds the folder
    exec(compile(SCRIPT, "sums.py", "exec"), {"__name__": "__main__"})
    task = ["--model", "runs/sums", "--dataset", "sums.jsonl", "--reward", "sums:is_right", "sums:is_short"]
    few = ["--num_prompts", "8", "--num_samples", "2", "--max_new_tokens", "16"]
    cli.main(["evaluate", *task, *few, "--output", "evaluation.json"])
    cli.main(["diagnose", *task, *few, "--output_dir", "runs/diagnosis"])
    cli.main(["report", "runs/sums", "runs/diagnosis", "--output", "report.html"])
    metrics = json.loads((tmp_path / "evaluation.json").read_text())
    assert metrics["num_prompts"] == 8 and 0 <= metrics["success"] <= metrics["pass@2"]
    history = json.loads((tmp_path / "runs/sums/diagnostics/trainer_state.json").read_text())["log_history"]
    keys = {key for row in history for key in row}
    assert {"env/sums/success", "rewards/is_right/mean", "rewards/is_short/mean", "eval/env/sums/success"} <= keys
    page = (tmp_path / "report.html").read_text()
    assert "held-out success" in page and "diagnosed" in page and "What is" in page

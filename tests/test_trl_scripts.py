"""TRL's own scripts, as they are installed, with two names changed; none of their text is kept here."""

import inspect
import json
import re
from pathlib import Path

import launching
import pytest
import trl.scripts
import yaml
from conftest import PROMPTS, RUN

pytestmark = pytest.mark.slow

SCRIPTS = Path(inspect.getfile(trl.scripts)).parent
PREFIX = "SNRFiltered"

# The pattern of TRL's agent example: tools as functions, a conversation as the prompt, a reward that reads its end.
AGENT = '''
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer, ModelConfig, TrlParser
from trl.chat_template_utils import qwen3_template

from test_tool_environments import TEMPLATE


def look_up(word: str) -> str:
    """
    Looks a word up.

    Args:
        word: The word.

    Returns:
        What it means.
    """
    return f"{word} is a word"


def length(completions, **kwargs):
    return [float(len(str(completion)) % 3) for completion in completions]


if __name__ == "__main__":
    args, model_args = TrlParser((GRPOConfig, ModelConfig)).parse_args_and_config()
    tokenizer = AutoTokenizer.from_pretrained(model_args.model_name_or_path)
    tokenizer.chat_template, tokenizer.response_template = TEMPLATE, qwen3_template
    trainer = GRPOTrainer(
        AutoModelForCausalLM.from_pretrained(model_args.model_name_or_path, max_position_embeddings=1024),
        length,
        args,
        Dataset.from_list([{"prompt": [{"role": "user", "content": f"What is word {n}?"}]} for n in range(8)]),
        processing_class=tokenizer,
        tools=[look_up],
    )
    trainer.train()
'''


def swapped(source: str, kind: str) -> str:
    """The script with `<kind>Trainer` and `<kind>Config` of this package, and the rest of its imports as they were."""

    def ours(match: re.Match) -> str:
        indent, names = match[1], [name.strip() for name in match[2].split(",")]
        mine = [name for name in names if name in (f"{kind}Trainer", f"{kind}Config")]
        rest = [name for name in names if name not in mine]
        lines = [f"from ragen2_trl import {', '.join(PREFIX + name for name in mine)}"] if mine else []
        lines += [f"from trl import {', '.join(rest)}"] if rest else []
        return "\n".join(indent + line for line in lines)

    source = re.sub(r"^( *)from trl import ([^(\n]+)$", ours, source, flags=re.MULTILINE)
    return re.sub(rf"(?<!{PREFIX})\b{kind}(Trainer|Config)\b", rf"{PREFIX}{kind}\1", source)


@pytest.fixture
def run_script(policy_path, tmp_path):
    """`run_script(name, source, processes=1, **settings)`: the log rows of a swapped script, run with a YAML file."""

    def run(kind, source, processes=1, **settings):
        script = tmp_path / f"{kind.lower()}.py"
        script.write_text(swapped(source, kind))
        assert f"{PREFIX}{kind}Trainer(" in script.read_text()
        (tmp_path / "counted.py").write_text(
            "def length(completions, **kwargs):\n    return [float(len(text) % 3) for text in completions]\n"
        )
        (tmp_path / "data").mkdir()
        rows = "".join(json.dumps({"prompt": prompt}) + "\n" for prompt in PROMPTS)
        (tmp_path / "data" / "train.jsonl").write_text(rows)
        output = tmp_path / "run"
        config = {**RUN, "max_steps": 2, "save_strategy": "steps", "save_steps": 2, "output_dir": str(output)}
        config |= {"model_name_or_path": policy_path, **settings}
        (tmp_path / "run.yaml").write_text(yaml.safe_dump(config))
        launching.run(script, "--config", "run.yaml", processes=processes, folder=tmp_path, path=[tmp_path])
        state = json.loads((output / "checkpoint-2" / "trainer_state.json").read_text())
        return [row for row in state["log_history"] if "loss" in row], output

    return run


def settings_of_scripts(**settings):
    return {"dataset_name": "data", "reward_funcs": ["counted.length"], **settings}


@pytest.mark.parametrize("kind", ["GRPO", "RLOO"])
def test_a_script_of_trl_runs_with_two_names_changed(kind, run_script):
    rows, output = run_script(kind, (SCRIPTS / f"{kind.lower()}.py").read_text(), **settings_of_scripts())
    assert [row["step"] for row in rows] == [1, 2]
    assert all("snr/kept_fraction" in row and "entropy" in row for row in rows)
    assert (output / "model.safetensors").exists()
    assert "Training diagnostics" in (output / "README.md").read_text()


@pytest.mark.parametrize("processes", [1, 2])
def test_a_script_of_trl_runs_with_lora_on_one_and_two_processes(processes, run_script):
    lora = {"use_peft": True, "lora_r": 4, "lora_target_modules": ["q_proj", "v_proj"]}
    layout = {"ddp_backend": "gloo"} if processes > 1 else {}
    source = (SCRIPTS / "grpo.py").read_text()
    rows, output = run_script("GRPO", source, processes, **settings_of_scripts(**lora, **layout))
    assert [row["step"] for row in rows] == [1, 2]
    assert all("snr/kept_fraction" in row for row in rows)
    assert (output / "adapter_model.safetensors").exists()


def test_the_pattern_of_trls_agent_example_runs_with_two_names_changed(run_script):
    rows, _ = run_script("GRPO", AGENT, max_completion_length=64)
    assert [row["step"] for row in rows] == [1, 2]
    assert all("snr/kept_fraction" in row and "tools/call_frequency" in row for row in rows)

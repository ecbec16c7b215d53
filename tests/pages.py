"""The pages of README and docs/, their parts, and how their Python is run.

What is replaced in it is in `REPLACED`, `SMALL` and `load_dataset`.
"""

import shlex
from collections.abc import Callable
from pathlib import Path

import datasets
from datasets import Dataset
from markdown_it import MarkdownIt
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, RLOOConfig
from trl.chat_template_utils import qwen3_template

from ragen2_trl import SNRFilteredGRPOConfig, SNRFilteredPPOConfig
from ragen2_trl.tiny import TINY_MODEL_PATH

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = {path.relative_to(DOCS).as_posix(): path for path in sorted(DOCS.rglob("*.md"))}
PAGES |= {f"../{name}.md": ROOT / f"{name}.md" for name in ("README", "CONTRIBUTING", "CHANGELOG", "research/README")}
AS_PRINTED = "your_own_environment.md"
ON_THE_HUB = "reporting.md"

# What a block names -> what the test has instead.
REPLACED = {
    '"Qwen/Qwen2.5-0.5B-Instruct"': f'"{TINY_MODEL_PATH}"',
    '"Qwen/Qwen3-0.6B"': '"tool_model"',  # tiny, with a chat template that knows tools
}
# Settings of every trainer, whatever a block says.
SMALL = {
    "max_steps": 1,
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 1,
    "num_generations": 4,
    "max_completion_length": 24,
    "logging_steps": 1,
    "report_to": "none",
    "use_cpu": True,
    "bf16": False,
    "disable_tqdm": True,
}
CONFIGS = (GRPOConfig, RLOOConfig, SNRFilteredGRPOConfig, SNRFilteredPPOConfig)
DATASETS = {  # by Hub id, rows in its schema
    "trl-lib/DeepMath-103K": [
        {"prompt": [{"role": "user", "content": f"What is {number} + 1?"}], "solution": f"{number + 1}"}
        for number in range(16)
    ]
}
TOOL_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>\n"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n</tool_call>{% endfor %}'
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def load_dataset(name: str, split: str) -> Dataset:
    return Dataset.from_list(DATASETS[name])


def blocks(page: str, *languages: str) -> list[tuple[str, str]]:
    """(language, text) of the code blocks of a page."""
    tokens = MarkdownIt().enable("table").parse(PAGES[page].read_text(encoding="utf-8"))
    return [(token.info, token.content) for token in tokens if token.type == "fence" and token.info in languages]


def scripts(page: str) -> list[str]:
    """The Python of a page; a diff is the script before and the script after it."""
    found = []
    for language, text in blocks(page, "python", "diff"):
        if language == "python":
            found.append(text)
        else:
            lines = text.splitlines()
            found += ["\n".join(line[1:] for line in lines if line[:1] in (" ", sign)) for sign in "-+"]
    return found


def commands(page: str) -> list[list[str]]:
    """The commands of a page, word by word."""
    text = "".join(text.replace("\\\n", " ") + "\n" for _, text in blocks(page, "bash"))
    lines = (part for line in text.splitlines() for part in line.split(" && "))
    return [words for line in lines if (words := shlex.split(line, comments=True))]


def run_page(page: str) -> dict:
    """Run the Python of a page with what it replaces; gives its names."""
    names: dict = {"__name__": "page"}
    for number, script in enumerate(scripts(page), 1):
        for said, meant in REPLACED.items() if page != AS_PRINTED else ():
            script = script.replace(said, meant)
        before = names.get("trainer")
        exec(compile(script, f"{page}, block {number}", "exec"), names)
        trainer = names.get("trainer")
        if trainer is not None and trainer is not before and trainer.state.global_step == 0:
            trainer.train()
    return names


def smaller(init):
    def init_small(self, *args, **settings):
        fits = SMALL | {"save_strategy": "no"}
        init(self, *args, **settings | fits)

    return init_small


def make_small(replace: Callable[[object, str, object], None]) -> None:
    """Trainers take one small step, and data sets of the Hub have a few rows; `replace` is `setattr` or undoes it."""
    for config in CONFIGS:
        replace(config, "__init__", smaller(config.__init__))
    replace(datasets, "load_dataset", load_dataset)


def make_tool_model() -> None:
    tokenizer = AutoTokenizer.from_pretrained(TINY_MODEL_PATH)
    tokenizer.chat_template, tokenizer.response_template = TOOL_TEMPLATE, qwen3_template
    tokenizer.save_pretrained("tool_model")
    AutoModelForCausalLM.from_pretrained(TINY_MODEL_PATH).save_pretrained("tool_model")

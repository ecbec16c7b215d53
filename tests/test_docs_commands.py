"""Commands and JSON in README and docs/: read by the parsers of what they name."""

import argparse
import json
import re
import shlex
import sys
from pathlib import Path

import pytest
import transformers
import trl
from conftest import need
from pages import PAGES, ROOT, blocks, commands

from ragen2_trl import cli
from ragen2_trl.cli.shipped import ACCELERATE_CONFIGS, RECIPES


class Parsed(Exception):
    """What a command has made of its arguments."""


@pytest.fixture
def only_parsed(monkeypatch):
    """Commands end when their arguments have been read. Settings of a GPU are checked as on a CPU."""

    def stop(method, *extra):
        def parse(self, args=None, *rest, **kwargs):
            raise Parsed(method(self, [*args, *extra], *rest, **kwargs))

        return parse

    read = trl.TrlParser.parse_args_into_dataclasses

    def on_cpu(self, args=None, *rest, **kwargs):
        trains = any(issubclass(kind, transformers.TrainingArguments) for kind in self.dataclass_types)
        line = " ".join(args).replace("--ddp_backend gloo", "")  # would wait for another process
        extra = ["--use_cpu", "true", "--bf16", "false"] if trains else []
        raise Parsed(read(self, [*line.split(), *extra], *rest, **kwargs))

    monkeypatch.setattr(trl.TrlParser, "parse_args_into_dataclasses", on_cpu)
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
    if program == ".venv/bin/python" and args[:2] == ["-m", "research"]:
        program = "python"
    if program == "ragen2-trl":
        args = args[: args.index(">")] if ">" in args else args
        if args[0] == "recipes":
            assert {*args[1:]} <= {*RECIPES, *ACCELERATE_CONFIGS}
        with pytest.raises(Parsed):
            cli.main(args)
    elif program == "accelerate":
        check_accelerate(args)
    elif program == "torchrun":
        from torch.distributed.run import get_args_parser

        # `parse_known_args` lies below `parse_args`, which ends here
        known, _ = get_args_parser().parse_known_args(args)
        check_launched(known.training_script, known.training_script_args, known.module)
    elif program == "python" and args[0] == "-m":
        if args[1] == "research":
            from research.__main__ import make_parser

            with pytest.raises(Parsed):
                make_parser().parse_args(args[2:])
        else:
            assert args[1].startswith("research.benchmarks."), args[1]
            assert (ROOT / args[1].replace(".", "/")).with_suffix(".py").exists(), args[1]
    elif program == ".venv/bin/python" and args[:2] == ["-m", "pytest"]:
        file, of, words_of_names = args[2:]
        assert of == "-k" and re.search(rf"^def test_\w*{words_of_names}", (ROOT / file).read_text(), re.MULTILINE)
    elif program == "python":
        check_script(args[0], args[1:])
    elif program == "make":
        targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
        assert {word for word in args if "=" not in word} <= targets
    elif program == "pip":
        assert args[0] == "install"
        check_extras([extra for word in args for extra in re.findall(r"(?:\.|ragen2-trl)\[(.+)\]", word)])
    elif program == "trackio":
        need("trackers")
        from trackio import cli as trackio_cli

        with pytest.MonkeyPatch.context() as patch, pytest.raises(Parsed):
            patch.setattr(sys, "argv", words)
            patch.setattr(trackio_cli, "show", parsed)
            trackio_cli.main()
    else:
        # vLLM cannot be installed beside a CPU's PyTorch; the others are everyone's.
        assert program in ("git", "vllm", "export", "tensorboard", ".venv/bin/pre-commit"), words


def parsed(**settings):
    raise Parsed(settings)


def check_accelerate(args: list[str]) -> None:
    from accelerate.commands.launch import launch_command_parser

    assert args[0] == "launch"
    known, unknown = launch_command_parser().parse_known_args(args[1:])
    assert Path(known.config_file).stem in ACCELERATE_CONFIGS and not unknown
    check_launched(known.training_script, known.training_script_args, known.module)


def check_launched(script: str, args: list[str], module: bool) -> None:
    if module:
        assert script == "ragen2_trl.cli"
        with pytest.raises(Parsed):
            cli.main(args)
    else:
        check_script(script, args)


def check_script(script: str, args: list[str]) -> None:
    if script in ("train.py", "train_grpo.py"):  # the reader's own
        assert not args
        return
    assert (ROOT / script).is_file(), script


def check_extras(extras: list[str]) -> None:
    declared = (ROOT / "pyproject.toml").read_text().split("[project.optional-dependencies]")[1].split("\n[")[0]
    for extra in ",".join(extras).split(","):
        assert not extra or re.search(rf"^{extra} = ", declared, flags=re.MULTILINE), extra


def test_a_command_that_does_not_exist_would_be_found_out(only_parsed):
    for line in (
        "ragen2-trl train --recipe frozen_lake_tiny --snr_vale 0.9",
        "ragen2-trl train --recipe frozen_lake_tinny",
        "ragen2-trl drain --model tiny",
        "ragen2-trl recipes zero4 > zero4.yaml",
        "accelerate launch --config_file ddp.yaml scripts/none.py",
        "accelerate launch --config_file dddp.yaml -m ragen2_trl.cli train --recipe frozen_lake_tiny",
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

"""No message names a command that fails: what it names is run, or parsed by the command's own parser.

The command of a trainer's warning, of an error and of a table is that of the situation, provoked here; those that
stand in the source as they are said are found there.
"""

import ast
import re
import shlex
from importlib.metadata import metadata
from pathlib import Path

import pytest
from conftest import RUN
from trl import ModelConfig, SFTConfig

import ragen2_trl
from ragen2_trl import SNRFilteredGRPOConfig, SNRFilteredGRPOTrainer, cli
from ragen2_trl.cli import COMMANDS
from ragen2_trl.cli.arguments import TrainArguments, WarmStartArguments
from ragen2_trl.cli.shipped import RECIPES
from ragen2_trl.cli.train import ALGORITHMS, algorithm_of
from ragen2_trl.cli.typed import parse, parser_of
from ragen2_trl.envs import ENVIRONMENTS, make_env
from ragen2_trl.envs.mixture import TaskMixture

PACKAGE = Path(ragen2_trl.__file__).parent
NAMED = re.compile(r"ragen2-trl ([a-z-]+)")
EXTRA = re.compile(r"ragen2-trl\[([\w-]+)\]")


def texts():
    """Every string of the package that is no docstring, parts of f-strings included."""
    for path in sorted(PACKAGE.rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        holders = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
        docs = {id(node.body[0].value) for node in ast.walk(tree) if isinstance(node, holders) and is_told(node)}
        yield from (
            node.value
            for node in ast.walk(tree)
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docs
        )


def is_told(node):
    return bool(node.body) and isinstance(node.body[0], ast.Expr) and isinstance(node.body[0].value, ast.Constant)


def test_commands_and_extras_that_messages_name_exist():
    named = {name for text in texts() for name in NAMED.findall(text)}
    assert {"evaluate", "report", "check-sandbox", "check-trl"} <= named <= set(COMMANDS)
    extras = {name for text in texts() for name in EXTRA.findall(text)}
    assert {"smollm2"} <= extras <= set(metadata("ragen2-trl").get_all("Provides-Extra"))


def offered(text):
    """The arguments of the warm starts that a message offers, with a model in the place of one's own."""
    commands = re.findall(r"ragen2-trl (warm-start .*?<your model>)", text)
    return [shlex.split(command.replace("<your model>", "tiny")) for command in commands]


def taken(arguments, folder):
    """What a warm start would train on: its arguments parsed, its tasks made and solved."""
    parser = parser_of("warm-start", WarmStartArguments, SFTConfig, ModelConfig)
    settings, *_ = parse(parser, [*arguments[1:], "--output_dir", str(folder), "--use_cpu", "true", "--bf16", "false"])
    return settings.make_env().demonstrations(4, seed=0)


SLOW = ("deepcoder",)  # whose solutions are programs that run
TASKS = [pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in sorted(ENVIRONMENTS)]


@pytest.mark.parametrize("name", TASKS)
def test_the_warm_start_that_a_task_offers_is_one_that_is_taken(name, tmp_path):
    try:
        env = make_env(name)
    except (ImportError, ValueError, OSError) as reason:
        pytest.skip(f"{name} needs more than is here: {reason}")
    for arguments in offered(env.warm_start or ""):
        assert len(taken(arguments, tmp_path)) > 0


def test_options_of_a_task_and_of_each_of_several_are_in_the_warm_starts(tmp_path):
    size = make_env("frozen_lake", size=5, slip=0.1)
    both = TaskMixture([size, make_env("sokoban", multi_turn=True)])
    assert [len(offered(env.warm_start)) for env in (size, both)] == [1, 2]
    for arguments in offered(both.warm_start):
        assert len(taken(arguments, tmp_path)) > 0


def test_the_warm_start_that_a_cold_run_names_is_taken(policy_path, tmp_path, caplog):
    env = make_env("frozen_lake", size=5)
    args = SNRFilteredGRPOConfig(**{**RUN, "output_dir": str(tmp_path / "run")})
    SNRFilteredGRPOTrainer(policy_path, env.reward_funcs, args, env.dataset(8, seed=0)).train()
    (arguments,) = [one for record in caplog.records for one in offered(record.getMessage())]
    assert "size=5" in arguments and len(taken(arguments, tmp_path)) > 0


@pytest.mark.parametrize("name", [name for name in RECIPES if not name.startswith("ragen2/")])
def test_each_recipe_that_is_listed_is_taken_by_its_command(name, tmp_path):
    given = ["--recipe", name, "--output_dir", str(tmp_path), "--use_cpu", "true", "--bf16", "false"]
    if name.startswith("warm_start_"):
        classes = (WarmStartArguments, SFTConfig, ModelConfig)
    else:
        algorithm = algorithm_of(given)
        classes = (TrainArguments, ALGORITHMS[algorithm][1], ModelConfig)
    settings, *_ = parse(parser_of("train", *classes), given)
    settings.make_env()


def test_the_report_that_an_evaluation_names_is_made(tmp_path, capsys):
    folder = tmp_path / "of mine"
    given = {"model": "random", "env_name": "frozen_lake", "num_prompts": 2, "num_samples": 1, "episodes": folder}
    cli.main(["evaluate", *(part for name, value in given.items() for part in (f"--{name}", str(value)))])
    shown = capsys.readouterr().out.replace("\n", " ")
    (command,) = re.findall("ragen2-trl (report .*)", shown)
    cli.main([*shlex.split(command), "--output", str(tmp_path / "report.html")])
    assert (tmp_path / "report.html").exists()

"""What the command line says before it does anything: at once, and with one name for the task."""

import subprocess
import sys

import pytest
import yaml

from ragen2_trl import cli
from ragen2_trl.cli.train import ALGORITHMS, TrainArguments
from ragen2_trl.cli.train import main as train
from ragen2_trl.cli.typed import InputError

HEAVY = {"torch", "transformers", "datasets", "accelerate", "pandas", "numpy", "matplotlib"}


def test_help_waits_for_no_import_of_torch_or_transformers():
    code = (
        "import sys\nfrom ragen2_trl import cli\nfor command in ('', *cli.COMMANDS): "
        "cli.main([*filter(None, [command]), '--help'])\n"
        f"print('loaded:', sorted({HEAVY} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.endswith("loaded: []\n") and all(f"  {command} " in done.stdout for command in cli.COMMANDS)


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_usage_and_an_error_of_one_line_name_the_command(command, capsys):
    cli.main([command, "--help"])
    assert capsys.readouterr().out.startswith(f"usage: ragen2-trl {command} ")
    with pytest.raises(SystemExit) as ended:
        cli.main(
            [command, *([] if command in ("report", "what-if") else ["--num_prompts", "--num_demonstrations", "many"])]
        )
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"ragen2-trl {command}: ")


def test_a_command_that_does_not_exist_is_told_with_those_that_do():
    with pytest.raises(SystemExit, match=r"command='fly'; allowed: train, evaluate, warm-start"):
        cli.main(["fly"])


def test_help_says_where_the_rest_is_and_shows_it(capsys):
    cli.main(["train", "--help"])
    shown = " ".join(capsys.readouterr().out.split())
    assert "--env_name" in shown and "--help_all" in shown and "--snr_value" not in shown
    with pytest.raises(SystemExit) as ended:
        cli.main(["train", "--help_all"])
    assert ended.value.code == 0
    assert "--snr_value" in capsys.readouterr().out


def test_the_task_has_one_name_in_yaml_and_on_the_command_line(tmp_path):
    from trl import ModelConfig, TrlParser

    parser = TrlParser((TrainArguments, ALGORITHMS["grpo"][1], ModelConfig))
    names = [name for action in parser._actions if action.dest == "env_name" for name in action.option_strings]
    assert {name.replace("-", "_") for name in names} == {"__env_name"}
    config = tmp_path / "task.yaml"
    config.write_text(yaml.safe_dump({"env_name": "bandit", "use_cpu": True, "bf16": False}))
    for arguments in (["--config", str(config)], ["--env_name", "bandit", "--use_cpu", "true", "--bf16", "false"]):
        assert parser.parse_args_and_config(arguments)[0].env_name == "bandit"
    with pytest.raises(InputError, match="--env_name"):
        train(["--env", "bandit"])

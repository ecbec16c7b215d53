"""What is typed and cannot be used is told in a line, with code 2, and before a model is loaded."""

import json
import shlex

import pytest
from trl import ModelConfig, SFTConfig

from ragen2_trl import SNRFilteredGRPOConfig, SNRFilteredGRPOTrainer, cli
from ragen2_trl.callbacks.run_record import keep_record
from ragen2_trl.cli.arguments import EvaluateArguments, TrainArguments, WarmStartArguments
from ragen2_trl.cli.models import check_model, load_model, loading
from ragen2_trl.cli.typed import InputError, parse, parser_of


@pytest.fixture(autouse=True)
def no_model(monkeypatch):
    def load(*args):
        raise AssertionError("a model is loaded for nothing")

    for module in ("evaluate.load_model", "diagnose.load_model", "train.loading", "warm_start.loading"):
        monkeypatch.setattr(f"ragen2_trl.cli.{module}", load)


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder with files that cannot be read, which is where commands run."""
    (tmp_path / "config.yaml").write_text("env_name: [")
    (tmp_path / "broken.jsonl").write_text('{"nums": [1, 2], "target"')
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def refused(capsys):
    """What a command says of arguments that it cannot use: a line, with code 2."""

    def refused(typed):
        words = shlex.split(typed)
        with pytest.raises(SystemExit) as ended:
            cli.main(words)
        said = capsys.readouterr().err
        assert ended.value.code == 2 and "Traceback" not in said and "usage" not in said
        line = " ".join(said.split())
        assert f"ragen2-trl {words[0]}: " in line
        return line.partition(f"ragen2-trl {words[0]}: ")[2]

    return refused


TRAIN, WARM = "train --recipe frozen_lake_tiny", "warm-start --recipe warm_start_tiny"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("evaluate --config config.yaml", "config cannot be read as YAML: while parsing a flow node"),
        ("evaluate --temperature 0", "temperature must be above 0, or 0 with num_samples=1, got 0.0"),
        ("evaluate --max_new_tokens 0", "max_new_tokens must be at least 1, got 0"),
        ("evaluate --num_prompts 1", "num_prompts must be at least 2, got 1"),
        ("evaluate --num_prompts many", "--num_prompts int 'many'"),
        ("evaluate --multi_turn perhaps", "--multi_turn perhaps true/false"),
        ("evaluate --chat_template_kwargs no", "chat_template_kwargs must be a JSON object, got 'no'"),
        ("evaluate --model random --num_samples 0", "num_samples must be at least 1, got 0"),
        ("evaluate --model random --context last --context_turns 1", "context must be 'full' for random"),
        ("evaluate --env_name countdown --env_args preset=ragen2 split=ragen2", "data must name rows, such as those"),
        ("evaluate --env_name countdown --data none.jsonl", "got 'none.jsonl'"),
        ("evaluate --env_name countdown --data broken.jsonl", "data='broken.jsonl' cannot be read: "),
        ("evaluate --env_args name=x", "env_args must leave the task to env_name, got name='x'"),
        ("evaluate --env_args preset=ragen2 prompts=5", "prompts must be the path of a YAML or JSON file, got 5"),
        ("evaluate --env_name search_qa --env_args corpus=7", "corpus must be a path, an address, a Retriever"),
        ("diagnose --batch_size 0", "batch_size must be at least 1, got 0"),
        ("train --config nope.yaml", "'nope.yaml'"),
        ("train --configuration x", "not known: --configuration x"),
        ("train --snr_vale 0.9", "not known: --snr_vale 0.9; allowed: --snr_value"),
        (f"{TRAIN} --max_step_count 3", "not known: --max_step_count 3"),
        (f"{WARM} --model_name tiny", "not known: --model_name"),  # abbreviated
        (f"{TRAIN} --algo reinforce", "algo='reinforce' is not supported; allowed values: grpo, rloo, ppo, trl_grpo"),
        (f"{TRAIN} --snr_value 2", "snr_value=2.0 is out of range"),
        (f"{TRAIN} --snr_strategy top", "snr_strategy 'top' top_p"),
        (f"{TRAIN} --num_generations 1", "num_generations"),
        (f"{TRAIN} --num_prompts 0", "num_prompts must be an integer between 1 and 10000000, got 0"),
        (f"{TRAIN} --num_prompts 3", "train_dataset has 3 prompts, and a generation takes"),
        (f"{TRAIN} --env_args colour=blue", "colour size"),
        (f"{TRAIN} --context last", "context='last' needs a task of several turns in text, got frozen_lake"),
        (f"{TRAIN} --mi_every 5 --mutual_information false", "mi_every=5 needs mutual_information"),
        (f"{TRAIN} --mi_every 0", "mi_every must be at least 1, got 0"),
        (f"{TRAIN} --eval_strategy steps", "eval_strategy='steps' allowed: 'no', and --eval_every 10"),
        (f"{TRAIN} --load_best_model_at_end true", "load_best_model_at_end=True --load_best true with --eval_every"),
        (f"{TRAIN} --load_best true --eval_every 107 --eval_prompts 0", "load_best eval_prompts must be above 0 107"),
        (f"{TRAIN} --eval_every -1", "eval_every must be at least 0, got -1"),
        (f"{TRAIN} --eval_every 2 --eval_prompts 4 --eval_envs frozen_pond", "frozen_pond frozen_lake"),
        ("warm-start", "model=None; allowed: tiny, "),
    ],
)
@pytest.mark.usefixtures("here")
def test_a_command_says_in_a_line_what_it_cannot_use(typed, said, refused):
    line = refused(typed)
    assert said in line or [word for word in said.split() if word not in line] == []


TO_A_MODEL = {
    "evaluate": "",
    "diagnose": "--output_dir diagnosis",
    "train": "--num_prompts 8",
    "warm-start": "--num_demonstrations 8 --output_dir warm",
}


@pytest.mark.parametrize("command", TO_A_MODEL)
@pytest.mark.parametrize(
    ("model", "said"),
    [
        ("runs/none", "no such folder"),
        ("./none", "neither a folder nor a Hub model id"),
        ("a/b/c", "neither a folder nor a Hub model id"),
        ("runs/unfinished", "checkpoint-5"),
        ("nobody/nothing", "cannot be loaded"),
    ],
)
def test_a_model_that_is_not_there_is_a_line(command, model, said, tmp_path, monkeypatch, refused):
    monkeypatch.undo()  # models are loaded here
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "unfinished" / "checkpoint-5").mkdir(parents=True)
    (tmp_path / "runs" / "unfinished" / "checkpoint-5" / "config.json").write_text("{}")
    line = refused(f"{command} --model {model} {TO_A_MODEL[command]}")
    assert line.startswith(f"model={model!r}") and said in line


def test_model_and_trls_name_of_it_are_one_setting_and_the_command_line_wins(tmp_path):
    config = tmp_path / "settings.yaml"
    training = ["--output_dir", str(tmp_path), "--use_cpu", "true", "--bf16", "false"]
    for command, kinds, more in (
        ("warm-start", (WarmStartArguments, SFTConfig, ModelConfig), training),
        ("train", (TrainArguments, SNRFilteredGRPOConfig, ModelConfig), training),
        ("evaluate", (EvaluateArguments,), []),
    ):
        parser = parser_of(command, *kinds)
        for in_file, typed in (
            ("model", "--model"),
            ("model", "--model_name_or_path"),
            ("model_name_or_path", "--model=b"),
            ("model_name_or_path", "--model-name-or-path=b"),
        ):
            config.write_text(f"{in_file}: a")
            assert parse(parser, ["--config", str(config), *more])[0].model == "a"
            given = [typed] if "=" in typed else [typed, "b"]
            assert parse(parser, ["--config", str(config), *given, *more])[0].model == "b"


def test_results_go_into_a_folder_that_is_made(tmp_path):
    path = tmp_path / "new" / "results.json"
    cli.main(["evaluate", "--model", "random", "--num_prompts", "2", "--num_samples", "1", "--output", str(path)])
    assert json.loads(path.read_text())["num_prompts"] == 2


def test_ctrl_c_is_no_traceback(monkeypatch, capsys):
    def interrupted(args):
        raise KeyboardInterrupt

    monkeypatch.setattr("ragen2_trl.cli.envs.main", interrupted)
    with pytest.raises(SystemExit) as ended:
        cli.main(["envs"])
    assert ended.value.code == 130 and capsys.readouterr().err.strip() == "ragen2-trl envs: interrupted"


def test_a_training_set_of_fewer_prompts_than_a_generation_is_refused(policy_path, make_args, prompts):
    """TRL would end after no step, with success."""
    args = make_args(per_device_train_batch_size=36)
    trainer = SNRFilteredGRPOTrainer(policy_path, lambda prompts, **kwargs: [0.0] * len(prompts), args, prompts)
    with pytest.raises(ValueError, match="train_dataset has 8 prompts, and a generation takes 9"):
        trainer.train()


def test_rewards_that_trl_cannot_take_the_deviation_of_are_told_once(
    policy_path, make_args, prompts, tmp_path, caplog
):
    def huge(prompts, **kwargs):
        return [1e25, *[float(number % 2) for number in range(1, len(prompts))]]

    trainer = SNRFilteredGRPOTrainer(policy_path, huge, make_args(max_steps=2), prompts)
    keep_record(trainer).draws = False
    with caplog.at_level("WARNING"):
        trainer.train()
    (line,) = [record.getMessage() for record in caplog.records if "float32" in record.getMessage()]
    assert "1e+25" in line and "1e+19" in line


def test_a_shipped_model_is_not_the_folder_of_its_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny").mkdir()
    assert check_model("tiny") == "tiny"


def test_a_folder_of_an_organisation_s_name_hides_none_of_its_models(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "Qwen").mkdir()
    assert check_model("Qwen/Qwen3-0.6B") == "Qwen/Qwen3-0.6B"


def test_what_is_no_error_of_a_model_is_not_told_as_one():
    with pytest.raises(OSError, match="CUDA_HOME"), loading("tiny"):
        raise OSError("CUDA_HOME environment variable is not set")


def test_options_of_the_chat_template_are_json():
    parser = parser_of("evaluate", EvaluateArguments)
    (arguments,) = parse(parser, ["--chat_template_kwargs", '{"enable_thinking": false}'])
    assert arguments.sampling["chat_template_kwargs"] == {"enable_thinking": False}


@pytest.mark.parametrize("text", ["", "{}"])
def test_a_model_without_a_type_is_a_line(text, tmp_path):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(InputError, match="cannot be loaded"):
        load_model(str(tmp_path))


def test_a_line_of_input_says_below_where_training_can_be_resumed(tmp_path, monkeypatch, capsys):
    """A reward that fails in the middle of training, with a checkpoint behind it."""
    (tmp_path / "data.jsonl").write_text("".join(json.dumps({"prompt": f"Say {n}."}) + "\n" for n in range(40)))
    (tmp_path / "late.py").write_text(
        "calls = []\n"
        "def reward(completions, **kwargs):\n"
        "    calls.append(1)\n"
        "    return [float(len(text) % 3) for text in completions][: 1 if len(calls) > 2 else None]\n"
    )
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    command = "train --model tiny --dataset data.jsonl --reward late:reward --output_dir run --use_cpu true"
    command += " --bf16 false --num_generations 2 --per_device_train_batch_size 4 --gradient_accumulation_steps 1"
    command += " --save_steps 1 --max_completion_length 4 --max_steps 4 --eval_prompts 0 --figures false"
    command += " --mutual_information false"
    with pytest.raises(SystemExit) as ended:
        cli.main(command.split())
    assert ended.value.code == 2
    line, below = capsys.readouterr().err.strip().splitlines()[-2:]
    assert line.startswith("ragen2-trl train: reward late:reward") and "--resume true" in below
    assert "checkpoint-2" in below


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("max_step: 3", "max_steps"),
        ("[a, b]", "list"),
        ("3: 4", "3"),
        ("max_steps: yes", "max_steps"),
        ("max_steps: [1]", "max_steps"),
        ("max_steps: 1.5", "max_steps"),
        ("learning_rate: fast", "learning_rate"),
    ],
)
def test_a_config_of_another_form_is_a_line_that_names_key_and_file(text, named, here, refused):
    (here / "config.yaml").write_text(text)
    said = refused("train --model tiny --config config.yaml")
    assert named in said and "config.yaml" in said


def test_a_config_may_repeat_a_value_by_an_anchor_and_write_numbers_as_yaml_reads_texts(tmp_path):
    (tmp_path / "config.yaml").write_text(
        "output_dir: x\nlearning_rate: 1e-4\nseed: &seed 3\ndata_seed: *seed\nuse_cpu: yes"
    )
    args, _ = parse(
        parser_of("train", SNRFilteredGRPOConfig, ModelConfig), ["--config", str(tmp_path / "config.yaml")]
    )
    assert (args.learning_rate, args.data_seed, args.use_cpu) == (1e-4, 3, True)

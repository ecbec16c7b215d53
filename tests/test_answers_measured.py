"""Answers measured while a model trains: beside TRL's metrics, at a price, and without a trace in the training."""

import pytest
import torch
from conftest import assert_same_parameters, parameters_of
from measured_runs import rows_of, warnings_of
from transformers import AutoModelForCausalLM
from trl import GRPOTrainer

from ragen2_trl import MutualInformationCallback
from ragen2_trl.envs import make_env
from ragen2_trl.instrument.answers import MIN_ROWS, measure_answers
from ragen2_trl.instrument.diagnosis import Sampling
from ragen2_trl.instrument.reasoning import Trajectories
from ragen2_trl.metrics import metric
from ragen2_trl.rollout_events import listen
from ragen2_trl.tiny import TINY_MODEL_PATH

KEY = "mi/answer/prompt_win_rate"


def lake_run(make_args, measure=True, num_prompts=16, group_size=4, max_steps=1, learning_rate=1e-5, **callback):
    env = make_env("frozen_lake")
    args = make_args(
        snr=False,
        per_device_train_batch_size=num_prompts * group_size,
        num_generations=group_size,
        max_completion_length=64,
        max_steps=max_steps,
        learning_rate=learning_rate,
    )
    trainer = GRPOTrainer(str(TINY_MODEL_PATH), env.reward_funcs, args, env.dataset(256, seed=0))
    rollouts = []
    listen(trainer, on_rollout=rollouts.append)
    if measure:
        trainer.add_callback(MutualInformationCallback(trainer, **{"every": 1, "min_prompts": 2, **callback}))
    trainer.train()
    return trainer, rollouts


@pytest.mark.slow
def test_answers_are_measured_beside_trls_metrics_and_training_is_bit_identical(make_args):
    trainer, _ = lake_run(make_args, max_steps=2)
    state = torch.get_rng_state()
    plain, _ = lake_run(make_args, measure=False, max_steps=2)
    assert_same_parameters(parameters_of(trainer), parameters_of(plain))
    assert torch.equal(torch.get_rng_state(), state)
    for row in rows_of(trainer, KEY):
        answers = {key: value for key, value in row.items() if key.startswith("mi/answer/")}
        assert "reward" in row and all(metric(key) is not None for key in answers)
        assert answers["mi/answer/num_swaps"] >= MIN_ROWS
        # The tiny model was taught to reason about its prompt, and to answer as its reasoning says.
        assert answers["mi/answer/thought_swap_bits"] > 0.5
        assert answers[KEY] > 0.6
    assert len(rows_of(trainer, KEY)) == 2


@pytest.mark.slow
def test_the_numbers_are_those_of_the_weights_that_sampled_the_answers(make_args):
    trainer, (local,) = lake_run(make_args, budget=None, scopes=("answer",), learning_rate=0.1)
    (row,) = rows_of(trainer, KEY)
    model = AutoModelForCausalLM.from_pretrained(TINY_MODEL_PATH)
    trajectories = Trajectories(local.prompt_ids, local.completion_ids, trainer._tokenizer)
    callback = next(one for one in trainer.callback_handler.callbacks if isinstance(one, MutualInformationCallback))
    groups = [number // 4 for number in range(64)]
    again = measure_answers(model, trajectories, groups, callback._generator(1, 0), Sampling())
    assert {f"mi/answer/{key}": value for key, value in again.items()} == pytest.approx(
        {key: value for key, value in row.items() if key.startswith("mi/answer/")}, abs=1e-4
    )


@pytest.mark.slow
def test_beside_a_full_matrix_answers_cost_a_fifth_of_it_at_most(make_args):
    tokens = {}
    for scopes in (("first_turn",), ("first_turn", "answer")):
        trainer, _ = lake_run(make_args, num_prompts=64, group_size=2, scopes=scopes)
        (row,) = rows_of(trainer)
        tokens[scopes] = row["mi/tokens"]
        assert (KEY in row) == ("answer" in scopes)
    matrix, both = tokens.values()
    assert matrix < both <= 1.2 * matrix


@pytest.mark.slow
def test_a_function_of_ones_own_finds_answers(make_args):
    asked = []

    def first_action(text):
        asked.append(text)
        return text.partition("<answer>")[2].partition(" ")[0] or None

    trainer, _ = lake_run(make_args, answer=first_action)
    assert asked and rows_of(trainer, KEY)


@pytest.mark.slow
def test_where_no_turn_has_an_answer_nothing_is_logged_and_only_who_asked_is_told(make_args, caplog):
    told = []
    for callback in ({}, {"answer": lambda text: None}):
        trainer, _ = lake_run(make_args, **{**callback, **({} if callback else {"scopes": ("first_turn",)})})
        assert rows_of(trainer) and not rows_of(trainer, KEY)
        told.append([text for text in warnings_of(caplog) if "(answer) is not measured" in text])
    assert told[0] == [] and len(told[1]) == 1 and "0 turns have an answer" in told[1][0]

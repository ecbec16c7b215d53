"""A measurement costs a share of the update and no more: fewer tokens of each trace first, then fewer prompts."""

import math
from dataclasses import replace

import pytest
from conftest import assert_same_parameters, parameters_of
from datasets import Dataset
from hypothesis import given
from hypothesis import strategies as st
from measured_runs import rows_of, run, warnings_of
from replay import Replay
from transformers import AutoTokenizer
from trl import GRPOTrainer

from ragen2_trl.instrument import budget
from ragen2_trl.instrument.budget import Texts, affordable, expected_tokens
from ragen2_trl.instrument.diagnosis import SCOPES, Sampling

REWARDS = {f"Question {number}": (0.0, 1.0) * 2 for number in range(16)}


def texts(context=2_000, turn=500.0, num_prompts=64, num_turns=1):
    number = 2 * num_prompts
    return Texts([context] * number, [turn] * number, [round(turn * num_turns)] * number, num_turns, num_prompts)


@given(st.integers(1, 4_000), st.floats(1, 4_000), st.integers(2, 200), st.integers(1, 6), st.floats(0, 1e8))
def test_a_sampling_is_within_the_budget_or_the_least_there_is(context, turn, num_prompts, num_turns, tokens):
    of, whole = texts(context, turn, num_prompts, num_turns), Sampling()
    chosen = affordable(SCOPES, whole, of, tokens)
    cost = expected_tokens(SCOPES, chosen, of)
    least = (chosen.max_tokens or turn) <= 128 and min(chosen.max_prompts, num_prompts) <= 16
    assert cost <= max(tokens, budget.ALWAYS) or least
    assert (chosen.max_tokens or 128) >= 128 and chosen.max_prompts >= 16
    if chosen.max_prompts < whole.max_prompts:  # traces come first
        assert (chosen.max_tokens or turn) <= 128
    if chosen != whole:
        assert expected_tokens(SCOPES, whole, of) > max(tokens, budget.ALWAYS)


def test_at_small_sizes_nothing_changes():
    for of in (texts(100, 60.0, 32), texts(200, 100.0, 16), texts(60, 64.0, 16, num_turns=5)):
        assert affordable(SCOPES, Sampling(), of, budget=0.0) == Sampling()


def test_a_budget_for_both_scopes_is_spent_on_both():
    of = texts(num_turns=5)
    first, both = (affordable(scopes, Sampling(), of, 1.2e6) for scopes in (SCOPES[:1], SCOPES))
    assert expected_tokens(SCOPES, first, of) > 1.2e6 >= expected_tokens(SCOPES, both, of)


def test_columns_of_a_trajectory_are_cut_though_prompts_are_few():
    of = texts(60, 64.0, 16, num_turns=2)
    of = replace(of, **{name: getattr(of, name) * 4 for name in ("contexts", "turns", "completions")})
    assert expected_tokens(SCOPES, Sampling(), of) > budget.ALWAYS
    assert expected_tokens(SCOPES, affordable(SCOPES, Sampling(), of, 0.0), of) <= budget.ALWAYS


@pytest.fixture
def small_limits(monkeypatch):
    monkeypatch.setattr(budget, "ALWAYS", 0)
    monkeypatch.setattr(budget, "LEAST_TOKENS", 4)
    monkeypatch.setattr(budget, "LEAST_PROMPTS", 4)


def measured(policy_path, args, share, cut=None, **callback):
    """A run on the same completions each time, or on their first tokens."""
    replay = Replay(AutoTokenizer.from_pretrained(policy_path), REWARDS)
    for group in replay.completions.values():  # no white space, which counts as no reasoning at either end
        group[:] = [[40 + token % 100 for token in ids][:cut] for ids in group]
    rollout = {"reward": Replay.reward, "rollout_func": replay.rollout}
    callback = {"every": 1, "budget": share, **callback}
    dataset = Dataset.from_dict({"prompt": list(REWARDS)})
    return run(GRPOTrainer, policy_path, args, dataset, callback=callback, **rollout)[0]


def test_a_run_scores_what_its_budget_pays_for_and_trains_as_without(policy_path, make_args, caplog, small_limits):
    args = make_args(snr=False, per_device_train_batch_size=64, max_steps=2)
    ends = {share: measured(policy_path, args, share) for share in (None, 10.0, 0.05, 1e-9)}
    for trainer in ends.values():
        assert_same_parameters(parameters_of(trainer), parameters_of(ends[None]))
    whole, ample, part, least = ([row["mi/tokens"] for row in rows_of(trainer)] for trainer in ends.values())
    assert whole == ample and all(few <= some < many for few, some, many in zip(least, part, whole, strict=True))
    for row in rows_of(ends[1e-9]):  # chance and bound are those of four prompts
        assert row["mi/first_turn/num_prompts"] == 4
        assert row["mi/first_turn/retrieval_chance"] == pytest.approx(1 / 4)
        assert row["mi/first_turn/mi_upper_bound"] == pytest.approx(math.log(4))
        assert row["mi/first_turn/num_completions"] == 16
    told = [text for text in warnings_of(caplog) if "budget=None scores all" in text]
    assert len(told) == 2  # once a run
    assert "the first 4 tokens of each trace under 4 prompts" in told[1]


def test_a_cut_trace_is_scored_as_if_it_ended_there(policy_path, make_args, small_limits):
    args = make_args(snr=False, per_device_train_batch_size=64, max_steps=1)
    cut, short = (
        rows_of(measured(policy_path, args, share, cut=tokens, max_prompts=4))[0]
        for share, tokens in ((1e-9, None), (None, 4))
    )
    for key in ("mi_seq", "conditional_entropy_token", "retrieval_accuracy"):
        assert cut[f"mi/first_turn/{key}"] == pytest.approx(short[f"mi/first_turn/{key}"], abs=1e-5)


def test_a_budget_without_tokens_is_refused(policy_path, make_args):
    with pytest.raises(ValueError, match="budget must be above 0, or None"):
        measured(policy_path, make_args(snr=False), 0.0)

"""Scores of some pairs of prompt and completion: those of the whole matrix, for the work of these pairs alone."""

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from scored_models import ARCHITECTURES, assert_exact, random_ids, run_in_full, shared_model

from ragen2_trl.instrument.scoring import ContextLengthError, count_tokens, cross_score

GPT2 = "gpt2, absolute positions"


@st.composite
def asked(draw):
    """Prompts and completions, some of them twice, and the prompts of each completion."""
    seed = draw(st.integers(0, 999))
    prompts = random_ids(*draw(st.lists(st.integers(1, 20), min_size=1, max_size=4)), seed=seed)
    completions = random_ids(*draw(st.lists(st.integers(1, 12), min_size=1, max_size=5)), seed=seed + 1)
    prompts += draw(st.lists(st.sampled_from(prompts), max_size=1))
    completions += draw(st.lists(st.sampled_from(completions), max_size=1))
    some = st.sets(st.integers(0, len(prompts) - 1), min_size=1)
    return prompts, completions, [draw(some) for _ in completions], draw(st.sampled_from([None, 9]))


@pytest.mark.parametrize("name", ARCHITECTURES)
@settings(max_examples=10, derandomize=True)
@given(batch=asked())
def test_scores_of_some_pairs_are_those_of_full_runs_and_the_others_are_nan(name: str, batch):
    prompts, completions, under, max_tokens = batch
    model = shared_model(name)
    scores = cross_score(model, prompts, completions, under=under, max_tokens_per_forward=max_tokens)
    wanted = torch.tensor([[place in places for place in range(len(prompts))] for places in under])
    assert torch.equal(scores.isfinite(), wanted)
    expected = run_in_full(model, prompts, completions)
    assert_exact(scores.where(wanted, torch.zeros(())), expected.where(wanted, torch.zeros(())))


def test_only_pairs_that_are_asked_for_are_run_and_the_cache_is_tried_once():
    model, prompts, completions = shared_model("llama"), random_ids(50, 40, 30, 20), random_ids(*[10] * 6)
    with count_tokens(model) as counts:
        cross_score(model, prompts, completions, under=[[0], [1], [1], [2], [2], [2]])
    check = 10 + 60  # the one completion of the longest prompt, on a cache and in full
    assert sum(counts) == (49 + 10) + (39 + 2 * 10) + (29 + 3 * 10) + check  # and nothing of the last prompt


def test_a_pair_that_is_not_asked_for_may_be_longer_than_the_context():
    model, prompts, completions = shared_model(GPT2), random_ids(124, 3), random_ids(4, 20)
    scores = cross_score(model, prompts, completions, under=[[0, 1], [1]])
    assert scores[0].isfinite().all() and scores[1].isnan().tolist() == [True, False]
    with pytest.raises(ContextLengthError, match=r"124 \(prompt 0\) \+ 20 \(completion 1\) = 144"):
        cross_score(model, prompts, completions, under=[[0, 1], [1, 0]])


@pytest.mark.parametrize("name", ["llama", "mamba, no cache"])
def test_processes_run_as_many_forward_passes_although_their_prompts_have_different_completions(name, monkeypatch):
    """A sharded model would wait for ever otherwise. The processes are played one after the other."""
    model, prompts, completions = shared_model(name), random_ids(9, 8, 7, 6, 5), random_ids(*range(3, 12))
    under = [[0], [0], [0], [0], [0, 1, 4], [2], [3], [3], [3, 4]]
    parts, passes = [], []
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(dist, "all_reduce", lambda tensor, **_: parts.append(tensor.clone()) if tensor.ndim else None)
    for rank in (0, 1):
        monkeypatch.setattr(dist, "get_rank", lambda rank=rank: rank)
        with count_tokens(model) as counts:
            cross_score(model, prompts, completions, under=under, max_tokens_per_forward=20, split_over_processes=True)
        passes.append(len(counts))
    assert passes[0] == passes[1]
    whole = cross_score(model, prompts, completions, under=under)
    wanted = whole.isfinite()
    assert ((parts[0] != 0) & (parts[1] != 0)).sum() == 0
    assert_exact((parts[0] + parts[1]).where(wanted, torch.zeros(())), whole.where(wanted, torch.zeros(())))


@pytest.mark.parametrize(
    ("under", "message"),
    [
        ([[0], [1]], "under must have one collection of prompts for each of 3 completions, got 2"),
        ([[0], [1], [2]], "under must hold numbers of prompts from 0 to 1, got 2 at 2"),
        ([[0], [-1], [1]], "got -1 at 1"),
        ([[0], [], [1]], "under must name at least one prompt for each completion, got none at 1"),
    ],
)
def test_prompts_that_do_not_exist_are_named(under, message):
    with pytest.raises(ValueError, match=message):
        cross_score(shared_model(GPT2), [[1, 2], [3]], [[4, 5], [6], [7, 8, 9]], under=under)

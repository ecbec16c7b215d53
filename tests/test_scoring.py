"""Cross-scoring: equal to running each pair in full, for every kind of cache, at the price of one prompt each."""

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from scored_models import (
    ARCHITECTURES,
    COMPLETIONS,
    LONGER_PROMPTS,
    ONE_OF_EACH_CACHE,
    PROMPTS,
    REUSES_CACHE,
    VOCABULARY,
    assert_exact,
    random_ids,
    run_in_full,
    shared_model,
)

from ragen2_trl.instrument import scoring
from ragen2_trl.instrument.scoring import ContextLengthError, count_tokens, cross_score


def prompts_and_completions(draw):
    """Ids of both, and of the prompts perhaps one twice."""
    seed = draw(st.integers(0, 999))
    prompts = random_ids(*draw(st.lists(st.integers(1, 24), min_size=1, max_size=4)), seed=seed)
    completions = random_ids(*draw(st.lists(st.integers(1, 14), min_size=1, max_size=4)), seed=seed + 1)
    return prompts + draw(st.lists(st.sampled_from(prompts), max_size=1)), completions


@st.composite
def batches(draw):
    """Prompts and completions, some of them twice, with what may be passed along."""
    prompts, completions = prompts_and_completions(draw)
    # Of id 0, which padding has too, and some twice.
    completions += draw(st.lists(st.sampled_from([*completions, [0], [3, 0, 0]]), max_size=2))
    options = {"temperature": draw(st.sampled_from([1.0, 0.6, 1.7]))}
    if draw(st.booleans()):
        options["lead_in"] = [draw(st.integers(0, len(completion) - 1)) for completion in completions]
    return prompts, completions, options, draw(st.sampled_from([None, 1, 9, 30]))


@pytest.mark.parametrize("name", ARCHITECTURES)
@settings(max_examples=15, derandomize=True)
@given(batch=batches())
def test_scores_equal_full_runs_of_each_pair(name: str, batch):
    prompts, completions, options, max_tokens = batch
    model = shared_model(name)
    scores = cross_score(model, prompts, completions, max_tokens_per_forward=max_tokens, **options)
    assert_exact(scores, run_in_full(model, prompts, completions, **options))


@pytest.mark.parametrize("name", REUSES_CACHE)
def test_each_prompt_is_run_once(name: str):
    prompts, completions = random_ids(60, 60, 60), random_ids(*[20] * 24)
    with count_tokens(shared_model(name)) as counts:
        cross_score(shared_model(name), prompts, completions, max_tokens_per_forward=100)
    check = 2 * 20 + 2 * (60 + 20)  # two completions, once on a cache and once in full
    assert sum(counts) == 3 * (59 + 24 * 20) + check


def test_runs_that_include_the_prompt_keep_to_the_token_bound():
    prompts, completions = random_ids(60, 50), random_ids(*[5] * 40)
    for name in ("mamba, no cache", "mistral, window"):
        with count_tokens(shared_model(name)) as counts:
            cross_score(shared_model(name), prompts, completions, max_tokens_per_forward=130)
        assert max(counts) <= 130


def test_padding_costs_less_than_a_tenth():
    lengths = torch.randint(20, 101, (160,), generator=torch.Generator().manual_seed(0)).tolist()
    with count_tokens(shared_model()) as counts:
        cross_score(shared_model(), random_ids(120, 140, 150), random_ids(*lengths, seed=1))
    assert sum(counts) <= 1.1 * (120 + 140 + 150 + 3 * sum(lengths))


@pytest.mark.parametrize("name", ["qwen3, grouped queries", "mamba, no cache"])
def test_identical_prompts_and_completions_are_scored_once(name: str):
    model = shared_model(name)
    with count_tokens(model) as once:
        scores = cross_score(model, PROMPTS, COMPLETIONS)
    with count_tokens(model) as thrice:
        repeated = cross_score(model, [*PROMPTS, *PROMPTS[::-1], *PROMPTS], COMPLETIONS[::-1] + COMPLETIONS * 2)
    assert thrice == once
    columns = [*range(5), *reversed(range(5)), *range(5)]
    assert torch.equal(repeated, scores[[*reversed(range(6)), *range(6), *range(6)]][:, columns])


def test_identical_completions_with_different_lead_in_are_told_apart():
    model, completion = shared_model("llama"), COMPLETIONS[2]
    scores = cross_score(model, PROMPTS, [completion] * 3, lead_in=[0, 4, 16])
    assert_exact(scores, run_in_full(model, PROMPTS, [completion] * 3, lead_in=[0, 4, 16]))
    assert (scores.diff(dim=0) > 0).all()


@pytest.mark.parametrize("name", ONE_OF_EACH_CACHE)
def test_order_of_chunks_does_not_matter_as_it_would_to_a_cache_that_keeps_what_it_is_given(name: str, monkeypatch):
    model, chunks = shared_model(name), scoring._chunks
    expected = cross_score(model, PROMPTS, COMPLETIONS, max_tokens_per_forward=20)
    monkeypatch.setattr(scoring, "_chunks", lambda *args: chunks(*args)[::-1])
    assert torch.equal(expected, cross_score(model, PROMPTS, COMPLETIONS, max_tokens_per_forward=20))


@pytest.mark.parametrize("name", ["qwen3, grouped queries", "mistral, window", "gemma3, windows and full attention"])
def test_the_cache_of_a_prompt_is_never_changed(name: str):
    model, seen = shared_model(name), []

    def keep(module, args, kwargs, output) -> None:
        if kwargs.get("cache", kwargs.get("past_key_values")) is None and scoring.cache_of(output) is not None:
            layers = scoring.cache_of(output).layers
            seen.append((layers, [(layer.keys.clone(), layer.values.clone()) for layer in layers]))

    handle = model.register_forward_hook(keep, with_kwargs=True)
    try:
        cross_score(model, LONGER_PROMPTS, COMPLETIONS, max_tokens_per_forward=20)
    finally:
        handle.remove()
    assert len(seen) == len(LONGER_PROMPTS)
    for layers, before in seen:
        for layer, (keys, values) in zip(layers, before, strict=True):
            assert torch.equal(layer.keys, keys)
            assert torch.equal(layer.values, values)


@pytest.mark.parametrize("name", ["qwen3, grouped queries", "mamba, no cache"])
def test_logits_are_made_for_scored_tokens_only(name: str):
    model, rows = shared_model(name), []
    handle = model.lm_head.register_forward_hook(lambda module, args, output: rows.append(output[..., 0].numel()))
    lead_in = [0, 1, 9, 2, 0, 8]
    try:
        cross_score(model, LONGER_PROMPTS, COMPLETIONS, lead_in=lead_in, max_tokens_per_forward=20)
    finally:
        handle.remove()
    scored = sum(map(len, COMPLETIONS)) - sum(lead_in)
    checked = 2 * (len(COMPLETIONS[2]) - lead_in[2])  # the longest, once on a cache and once in full
    caches = len(LONGER_PROMPTS) + checked if name.startswith("qwen3") else 1
    assert sum(rows) == len(LONGER_PROMPTS) * scored + caches


@pytest.mark.parametrize("max_tokens", [17, 20, 40])
def test_no_forward_pass_exceeds_the_bound(max_tokens: int):
    with count_tokens(shared_model("llama")) as counts:
        cross_score(
            shared_model("llama"), [prompt[:16] for prompt in PROMPTS], COMPLETIONS, max_tokens_per_forward=max_tokens
        )
    check = 16 + 17  # the longest prompt and completion, which run in full alone
    assert all(count <= max_tokens for count in counts if count != check)
    assert counts.count(check) == 1


def test_rows_with_a_long_prompt_before_each_are_bounded_too():
    """Attention holds a layer's keys and values of all of them, however short the completions are."""
    model, attended = shared_model("llama"), []

    def note(module, args, kwargs):
        if (cache := kwargs.get("cache", kwargs.get("past_key_values"))) is not None:
            rows, length = kwargs["input_ids"].shape
            attended.append(rows * (cache.get_seq_length() + length))

    handle = model.register_forward_pre_hook(note, with_kwargs=True)
    prompts, completions = random_ids(40, 30), random_ids(*[2] * 60)
    scores = cross_score(model, prompts, completions, max_tokens_per_forward=60)
    handle.remove()
    assert len(attended) > 2 * 3 and max(attended) <= 16 * 60
    assert torch.allclose(scores, cross_score(model, prompts, completions, max_tokens_per_forward=500), atol=1e-4)


@pytest.mark.parametrize(
    ("lengths", "expected"),
    [
        ((9, 9, 30), [3, 30, 4 + 30, 18, 30]),  # the longest is tried first, and runs alone beyond the bound
        ((9, 10), [3, 2 * 10, 4 + 9, 4 + 10, 2 * 10]),  # and with the shortest where both fit
    ],
)
def test_completions_run_together_within_the_bound(lengths, expected):
    with count_tokens(shared_model("llama")) as counts:
        cross_score(shared_model("llama"), random_ids(4), random_ids(*lengths), max_tokens_per_forward=20)
    assert counts == expected


@pytest.mark.parametrize(("kind", "tokens", "of_a_large_vocabulary"), [("cpu", 1024, 512), ("cuda", 8192, 2048)])
def test_by_default_a_forward_pass_is_bounded_by_its_tokens_and_its_logits(kind, tokens, of_a_large_vocabulary):
    """512 MiB of logits in float32 on a CPU, and 1 GiB in bfloat16 elsewhere."""
    assert scoring._default_tokens(torch.device(kind), 1000) == tokens
    assert scoring._default_tokens(torch.device(kind), 2**18) == of_a_large_vocabulary


def test_scores_do_not_depend_on_how_many_logits_are_normalised_at_once(monkeypatch):
    model = shared_model("llama")
    expected = cross_score(model, PROMPTS, COMPLETIONS)
    for size in (1, 3 * VOCABULARY):
        monkeypatch.setattr(scoring, "LOGITS_SLICE_CPU", size)
        assert_exact(cross_score(model, PROMPTS, COMPLETIONS), expected)


VALID = {"prompts": [[1, 2], [3]], "completions": [[4, 5], [6], [7, 8, 9]]}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompts": []}, "must not be empty, got 0 and 3"),
        ({"completions": []}, "must not be empty, got 2 and 0"),
        ({"prompts": [[1, 2], []]}, r"prompts\[1\] must hold at least one token, got none"),
        ({"completions": [[4], [5], []]}, r"completions\[2\] must hold .* lead_in=0, got 0 tokens"),
        ({"lead_in": [0, 1, 0]}, r"completions\[1\] must hold .* lead_in=1, got 1 tokens"),
        ({"lead_in": [-1, 0, 0]}, r"completions\[0\] must hold .* lead_in=-1, got 2 tokens"),
        ({"lead_in": [0, 0]}, "lead_in must have one value for each of 3 completions, got 2"),
        ({"temperature": 0.0}, "temperature must be above 0, got 0.0"),
        ({"temperature": -1.0}, "temperature must be above 0, got -1.0"),
        ({"max_tokens_per_forward": 0}, "max_tokens_per_forward must be above 0, got 0"),
    ],
)
def test_arguments_that_do_not_fit_are_named(changes, message):
    with pytest.raises(ValueError, match=message):
        cross_score(shared_model("gpt2, absolute positions"), **VALID | changes)


def test_a_pair_beyond_the_context_is_named():
    prompts, completions = random_ids(1, 124, 3), random_ids(4, 1, 5)
    with pytest.raises(ContextLengthError, match=r"128 tokens .* got 124 \(prompt 1\) \+ 5 \(completion 2\) = 129"):
        cross_score(shared_model("gpt2, absolute positions"), prompts, completions)


def test_a_pair_may_fill_the_context():
    prompts, completions = random_ids(124), random_ids(4)
    model = shared_model("gpt2, absolute positions")
    assert_exact(cross_score(model, prompts, completions), run_in_full(model, prompts, completions))


# Scores of some pairs of prompt and completion: those of the whole matrix, for the work of these pairs alone.


@st.composite
def some_pairs(draw):
    """Prompts and completions, some of them twice, and the prompts of each completion."""
    prompts, completions = prompts_and_completions(draw)
    completions += draw(st.lists(st.sampled_from(completions), max_size=1))
    some = st.sets(st.integers(0, len(prompts) - 1), min_size=1)
    return prompts, completions, [draw(some) for _ in completions], draw(st.sampled_from([None, 9]))


@pytest.mark.parametrize("name", ARCHITECTURES)
@settings(max_examples=10, derandomize=True)
@given(batch=some_pairs())
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
    model, prompts, completions = shared_model("gpt2, absolute positions"), random_ids(124, 3), random_ids(4, 20)
    scores = cross_score(model, prompts, completions, under=[[0, 1], [1]])
    assert scores[0].isfinite().all() and scores[1].isnan().tolist() == [True, False]
    with pytest.raises(ContextLengthError, match=r"124 \(prompt 0\) \+ 20 \(completion 1\) = 144"):
        cross_score(model, prompts, completions, under=[[0, 1], [1, 0]])


def test_each_chunk_takes_as_many_completions_as_fit():
    rows = [(ids, 0) for ids in random_ids(*[4] * 7)]
    chunks = scoring._chunks(rows, range(7), torch.device("cpu"), lambda count, shortest, longest: count <= 3)
    assert [len(one.rows) for one in chunks] == [3, 3, 1]


@pytest.mark.parametrize("name", ["llama", "mamba, no cache"])
@pytest.mark.parametrize("lengths", [(9, 8, 7, 6, 5), (9, 1, 1, 1, 1)])  # of one id, no cache is used
def test_processes_run_as_many_forward_passes_although_their_prompts_have_different_completions(
    name, lengths, monkeypatch
):
    """A sharded model would wait for ever otherwise. The processes are played one after the other."""
    model, prompts, completions = shared_model(name), random_ids(*lengths), random_ids(*range(3, 12))
    # The second prompt has several chunks, and fewer than the first.
    under = [[0], [0], [0], [0], [0, 1, 4], [2], [3], [0, 3], [1, 3, 4]]
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
        ([[0], [1], [2]], r"under\[2\] must hold indices of prompts from 0 to 1, got 2"),
        ([[0], [-1], [1]], r"under\[1\] must .* got -1"),
        ([[0], [], [1]], "under must name at least one prompt for each completion, got none at 1"),
    ],
)
def test_prompts_that_do_not_exist_are_named(under, message):
    with pytest.raises(ValueError, match=message):
        cross_score(shared_model("gpt2, absolute positions"), [[1, 2], [3]], [[4, 5], [6], [7, 8, 9]], under=under)

"""Cross-scoring where a reused cache goes wrong: equal to full runs all the same, with a word on why they are needed.

And a prompt's cache is held once, whatever its kind, however many completions are scored on top of it.
"""

import logging

import pytest
import torch
from cache_elements import count_cache_elements
from scored_models import (
    SMALL,
    STUBBORN,
    WINDOW,
    assert_exact,
    random_ids,
    run_in_full,
    seeded,
    shared_model,
)
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM
from transformers.cache_utils import DynamicLayer

from ragen2_trl.instrument.scoring import count_tokens, cross_score

LLAMA, PHI3 = "llama, longrope", "phi3, longrope"
SWITCH = 32  # tokens, of the LongRoPE of both
IN_FULL = "every pair of prompt and completion is run in full"


def assert_full_runs(model, prompts, completions, caplog, because: str, **options) -> None:
    """Equal to runs of each pair, by means of such runs without padding, and a warning says why."""
    with caplog.at_level(logging.WARNING), count_tokens(model) as counts:
        scores = cross_score(model, prompts, completions, **options)
    assert_exact(scores, run_in_full(model, prompts, completions))
    pairs = sum(len(prompt) + len(completion) for prompt in prompts for completion in completions)
    longest = max(map(len, prompts)) + max(map(len, completions))
    assert pairs <= sum(counts) <= pairs + 5 * longest  # the check
    assert IN_FULL in caplog.text
    assert because in caplog.text


@pytest.mark.parametrize("lengths", [(1, 2, 17, 5, 12, 30), (1, 9), (6,)])
def test_a_model_that_does_not_continue_its_states_is_run_in_full(lengths, caplog):
    model = seeded(STUBBORN["jamba, states that are not continued"]).eval()
    model.__class__ = type(f"Jamba{len(lengths)}", (type(model),), {})  # a warning is given once for each class
    because = "gives tokens other log-probabilities, by more than 0.001 nats"
    assert_full_runs(model, random_ids(20, 7, 2, 30), random_ids(*lengths, seed=1), caplog, because)


class FirstToken(MistralForCausalLM):
    """Right about the first token on top of a cache only."""

    def forward(self, *args, past_key_values=None, **kwargs):
        output = super().forward(*args, past_key_values=past_key_values, **kwargs)
        if past_key_values is not None:
            output.logits[1:] *= 0.5
        return output


def test_a_completion_of_one_token_is_not_what_a_cache_is_tried_with(caplog):
    model = seeded(lambda: FirstToken(MistralConfig(**WINDOW))).eval()
    because = "FirstToken gives tokens other log-probabilities, by more than 0.001 nats"
    assert_full_runs(model, random_ids(20, 7), random_ids(1, 1, 9, 17, seed=1), caplog, because)


@pytest.mark.parametrize("name", [LLAMA, PHI3])
@pytest.mark.parametrize(
    ("prompts", "completions"),
    [((20, 28), (1, 2, 17)), ((40, 20), (14, 3)), ((31,), (1, 2)), ((32, 33), (1,)), ((40, 1), (2, 40))],
    ids=["completions cross", "the longest prompt is beyond", "by one token", "at the switch", "a prompt of one id"],
)
def test_longrope_is_exact_where_a_text_crosses_its_original_context(name, prompts, completions, caplog):
    model = seeded(STUBBORN[name]).eval()
    model.__class__ = type(f"{name}{prompts}{completions}", (type(model),), {})
    because = f"has other rotary embeddings (longrope) for texts of more than {SWITCH} tokens"
    assert_full_runs(model, random_ids(*prompts), random_ids(*completions, seed=1), caplog, because)


@pytest.mark.parametrize("name", [LLAMA, PHI3])
@pytest.mark.parametrize(
    ("prompts", "completions"), [((20, 8), (1, 12)), ((34, 40), (1, 20))], ids=["within", "beyond"]
)
def test_longrope_reuses_caches_where_no_text_crosses_its_original_context(name, prompts, completions, caplog):
    model, prompts, completions = shared_model(name), random_ids(*prompts), random_ids(*completions, seed=1)
    with caplog.at_level(logging.WARNING), count_tokens(model) as counts:
        scores = cross_score(model, prompts, completions)
    assert_exact(scores, run_in_full(model, prompts, completions))
    assert caplog.records == []
    assert len(prompts[0]) - 1 in counts


def test_a_model_that_gives_all_logits_whatever_it_is_asked_is_scored(caplog):
    model = seeded(STUBBORN["xlstm, all logits"]).eval()
    prompts, completions = random_ids(20, 7, 2), random_ids(1, 2, 17, 17, 5, seed=1)
    assert_full_runs(model, prompts, completions, caplog, "in place of a cache of its input")


class HiddenHead(LlamaForCausalLM):
    """Reuses caches, and does not say which layer makes its logits."""

    def get_output_embeddings(self):
        return None


def test_all_logits_are_no_reason_not_to_reuse_caches(caplog):
    model = seeded(lambda: HiddenHead(LlamaConfig(**SMALL))).eval()
    prompts, completions, lead_in = random_ids(20, 7), random_ids(1, 9, 17, seed=1), [0, 3, 16]
    with caplog.at_level(logging.WARNING):
        scores = cross_score(model, prompts, completions, lead_in=lead_in)
    assert_exact(scores, run_in_full(model, prompts, completions, lead_in))
    assert caplog.records == []


class ForgetfulLlama(LlamaForCausalLM):
    """A plain cache, which it does not read."""

    def forward(self, *args, past_key_values=None, **kwargs):
        return super().forward(*args, **kwargs)


def test_plain_caches_are_tried_too(caplog):
    model = seeded(lambda: ForgetfulLlama(LlamaConfig(**SMALL))).eval()
    assert_full_runs(model, random_ids(20, 7), random_ids(1, 9, seed=1), caplog, "ForgetfulLlama gives tokens other")


class Drifting(MistralForCausalLM):
    """Somewhat wrong on top of a cache: a little at each token, or much at one."""

    late = False

    def forward(self, *args, past_key_values=None, **kwargs):
        output = super().forward(*args, past_key_values=past_key_values, **kwargs)
        if past_key_values is not None and self.late:
            output.logits[-1] *= 0.7
        elif past_key_values is not None:
            output.logits *= 0.94
        return output


@pytest.mark.parametrize("late", [False, True], ids=["a little at each token", "much at one"])
def test_in_bfloat16_what_matters_is_the_error_of_a_token_and_not_of_the_sum(late: bool, caplog):
    model = seeded(lambda: type(f"Drifting{late}", (Drifting,), {"late": late})(MistralConfig(**WINDOW))).eval()
    prompts, completions = random_ids(20, 7), random_ids(40, 40, seed=1)
    with caplog.at_level(logging.WARNING):
        scores = cross_score(model.to(torch.bfloat16), prompts, completions)
    assert (scores - run_in_full(model, prompts, completions)).abs().max() < 0.5
    assert "by more than 0.5 nats or in the mean by more than rounding explains" in caplog.text


class OtherLayer(DynamicLayer):
    """A kind of layer that is not known."""


class OtherCache(LlamaForCausalLM):
    def forward(self, *args, **kwargs):
        output = super().forward(*args, **kwargs)
        for layer in output.past_key_values.layers if output.past_key_values else []:
            layer.__class__ = OtherLayer
        return output


def test_layers_of_an_unknown_kind_are_not_reused(caplog):
    model = seeded(lambda: OtherCache(LlamaConfig(**SMALL))).eval()
    because = "returns a cache with layers of the class OtherLayer"
    assert_full_runs(model, random_ids(20, 7), random_ids(1, 9, seed=1), caplog, because)


HOLDS_A_WINDOW_OR_STATES = [
    "qwen2, one layer with a window",
    "mistral, window",
    "gemma3, windows and full attention",
    "lfm2, convolutions",
    "qwen3-next, recurrences and full attention",
]


@pytest.mark.parametrize("name", HOLDS_A_WINDOW_OR_STATES)
def test_caches_of_every_kind_hold_no_more_than_a_plain_one(name: str):
    held = {}
    for kind in ("qwen3, grouped queries", name):
        model = shared_model(kind)
        with count_cache_elements(model) as counts:
            cross_score(model, random_ids(150, 120), random_ids(*[20] * 40, seed=1))
        held[kind] = max(counts)
    assert held[name] < 1.3 * held["qwen3, grouped queries"]

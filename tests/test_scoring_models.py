"""Cross-scoring of models of all kinds, with caches that can be reused and others, wrapped, with dropout, adapters
and other precision: equal to full runs all the same, and where they are needed a word says why."""

import logging
import math
from contextlib import contextmanager

import pytest
import torch
from peft import LoraConfig, get_peft_model
from scored_models import (
    COMPLETIONS,
    GPT2,
    ONE_OF_EACH_CACHE,
    PROMPTS,
    REUSES_CACHE,
    SMALL,
    STUBBORN,
    WINDOW,
    assert_exact,
    new_model,
    random_ids,
    run_in_full,
    seeded,
    shared_model,
)
from torch import Tensor, nn
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MambaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.cache_utils import DynamicLayer

from ragen2_trl.instrument.information import information_metrics
from ragen2_trl.instrument.scoring import cache_of, count_tokens, cross_score


@contextmanager
def count_cache_elements(model):
    """Yields a list of how many elements caches hold in memory, once for each forward pass within.

    Counted are the cache that a pass was given, as it is after the pass, and the latest that was made without one: the
    prompt's. Memory that both refer to counts once, and that of a view is what it keeps alive.
    """
    counts = []
    of_prompt = []

    def count(module, args, kwargs, output):
        given, made = kwargs.get("cache", kwargs.get("past_key_values")), cache_of(output)
        if given is None and made is not None:
            of_prompt[:] = _tensors(made)
        storages = {tensor.untyped_storage().data_ptr(): tensor for tensor in [*of_prompt, *_tensors(given or made)]}
        counts.append(sum(t.untyped_storage().nbytes() // t.element_size() for t in storages.values()))

    handle = model.register_forward_hook(count, with_kwargs=True)
    try:
        yield counts
    finally:
        handle.remove()


def _tensors(cache):
    values = [value for layer in (cache.layers if cache else []) for value in vars(layer).values()]
    values += [value for states in values if isinstance(states, dict) for value in states.values()]
    return [value for value in values if isinstance(value, Tensor)]


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


# Cross-scoring of models of all kinds: without caches, wrapped, with dropout, adapters and other precision.


def renamed(model_class: type, name: str) -> type:
    """A class of its own, because a warning is given once for each class."""
    return type(name, (model_class,), {})


def test_a_model_without_a_cache_is_run_in_full_and_warned_about_once(caplog):
    model = seeded(lambda: renamed(MambaForCausalLM, "SomeMamba")(shared_model("mamba, no cache").config))
    with caplog.at_level(logging.WARNING):
        cross_score(model, PROMPTS, COMPLETIONS)
        cross_score(model, PROMPTS, COMPLETIONS)
    (message,) = [record.getMessage() for record in caplog.records if "SomeMamba" in record.getMessage()]
    assert "in place of a cache" in message and "every pair of prompt and completion is run in full" in message


@pytest.mark.filterwarnings("error:`past_key_values` is deprecated")
def test_models_with_a_cache_are_not_warned_about(caplog):
    with caplog.at_level(logging.WARNING):
        for name in REUSES_CACHE:
            cross_score(shared_model(name), PROMPTS, COMPLETIONS)
    assert caplog.records == []


class Overfull(LlamaForCausalLM):
    """Returns a cache that holds more than its input, such as one with virtual tokens."""

    def forward(self, input_ids, past_key_values=None, **kwargs):
        output = super().forward(input_ids=input_ids, past_key_values=past_key_values, **kwargs)
        if past_key_values is None and output.past_key_values is not None:
            super().forward(input_ids=input_ids[:, :1], past_key_values=output.past_key_values, use_cache=True)
        return output


def test_a_cache_of_another_length_is_not_reused(caplog):
    model = seeded(lambda: Overfull(LlamaConfig(**SMALL))).eval()
    with caplog.at_level(logging.WARNING):
        scores = cross_score(model, PROMPTS, COMPLETIONS)
    assert_exact(scores, run_in_full(model, PROMPTS, COMPLETIONS))
    assert "Overfull returns DynamicCache" in caplog.text


def test_lora_weights_take_part():
    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"], init_lora_weights=False)
    model = seeded(lambda: get_peft_model(new_model(), config)).eval()
    scores = cross_score(model, PROMPTS, COMPLETIONS)
    assert_exact(scores, run_in_full(model, PROMPTS, COMPLETIONS))
    with model.disable_adapter():
        without = cross_score(model, PROMPTS, COMPLETIONS)
    assert_exact(without, run_in_full(shared_model(), PROMPTS, COMPLETIONS))
    assert (scores - without).abs().max() > 0.1


class Wrapper(nn.Module):
    """As those for distributed training: the model is an attribute, and has the config to itself."""

    def __init__(self, module: nn.Module):
        super().__init__()
        self.module = module

    def forward(self, *args, **kwargs):
        return self.module(*args, **kwargs)


def test_a_wrapped_model_is_scored_as_the_bare_one():
    expected = cross_score(shared_model(), PROMPTS, COMPLETIONS)
    assert torch.equal(cross_score(Wrapper(Wrapper(shared_model())), PROMPTS, COMPLETIONS), expected)


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated")
@pytest.mark.parametrize("name", ONE_OF_EACH_CACHE)
def test_a_cache_is_used_although_checkpointing_or_the_config_turns_it_off(name: str):
    model = new_model(name)
    with count_tokens(model) as plain:
        expected = cross_score(model, PROMPTS, COMPLETIONS)
    model.config.use_cache = False
    model.gradient_checkpointing_enable()
    model.train()
    with count_tokens(model) as configured:
        assert torch.equal(cross_score(model, PROMPTS, COMPLETIONS), expected)
    assert configured == plain
    assert model.config.use_cache is False
    assert any(getattr(module, "gradient_checkpointing", False) for module in model.modules())


def modes(model: nn.Module) -> dict[str, bool]:
    return {name: module.training for name, module in model.named_modules()}


def test_every_module_keeps_its_mode():
    model = new_model()
    model.train()
    model.model.layers[0].eval()
    before = modes(model)
    assert set(before.values()) == {True, False}
    cross_score(model, PROMPTS, COMPLETIONS)
    assert modes(model) == before
    model.model.layers[1].mlp.register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        cross_score(model, PROMPTS, COMPLETIONS)
    assert modes(model) == before


def test_dropout_is_off_and_draws_no_random_numbers():
    model = seeded(lambda: GPT2LMHeadModel(GPT2Config(**GPT2, resid_pdrop=0.5, embd_pdrop=0.5, attn_pdrop=0.5)))
    expected = run_in_full(model.eval(), PROMPTS, COMPLETIONS)
    model.train()
    before = torch.get_rng_state()
    scores = cross_score(model, PROMPTS, COMPLETIONS)
    assert torch.equal(before, torch.get_rng_state())
    assert not scores.requires_grad
    assert_exact(scores, expected)


@pytest.mark.parametrize("name", ["qwen3, grouped queries", "mistral, window", "gpt2, absolute positions"])
def test_bfloat16_differs_from_float32_by_at_most_two_percent(name: str, caplog):
    model = new_model(name)
    expected = run_in_full(model, PROMPTS, COMPLETIONS)
    with caplog.at_level(logging.WARNING):
        scores = cross_score(model.to(torch.bfloat16), PROMPTS, COMPLETIONS)
    assert scores.dtype == torch.float32
    assert ((scores - expected).abs() <= 0.02 * expected.abs() + 0.1).all()
    assert caplog.records == []


def markov_model() -> Qwen3ForCausalLM:
    """Sees the current token only, and takes its successor to be certain."""
    size = 48
    config = Qwen3Config(**{**SMALL, "vocab_size": size, "hidden_size": size, "num_hidden_layers": 1}, head_dim=8)
    model = seeded(lambda: Qwen3ForCausalLM(config)).eval()
    with torch.no_grad():
        model.model.layers[0].self_attn.o_proj.weight.zero_()
        model.model.layers[0].mlp.down_proj.weight.zero_()
        model.model.embed_tokens.weight.copy_(torch.eye(size))
        model.lm_head.weight.copy_(10 * torch.eye(size).roll(1, dims=0))
    return model


def cut_model() -> Qwen3ForCausalLM:
    """A model that sees the current token only."""
    model = new_model()
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
    return model


def measure(model, prompts, completions, index, lead_in=None) -> dict[str, float]:
    scores = cross_score(model, prompts, completions, lead_in=lead_in, max_tokens_per_forward=40)
    lengths = [len(completion) - (lead_in[row] if lead_in else 0) for row, completion in enumerate(completions)]
    return information_metrics(scores, torch.tensor(lengths), torch.tensor(index))


def test_a_model_blind_to_its_prompt_is_exactly_at_chance():
    prompts = [[*prompt, 3] for prompt in random_ids(5, 9, 1, 30, 14)]
    metrics = measure(cut_model(), prompts, COMPLETIONS, [0, 1, 2, 3, 4, 0])
    assert metrics["retrieval_accuracy"] == metrics["retrieval_chance"] == pytest.approx(1 / 5)
    assert metrics["retrieval_accuracy@2"] == metrics["retrieval_chance@2"] == pytest.approx(2 / 5)
    for form in ("mi_seq", "mi_token", "mi_token_tempered"):
        assert metrics[form] == pytest.approx(0.0, abs=1e-9)


def test_the_last_prompt_token_reaches_the_first_completion_token_and_no_other():
    prompts, completions = random_ids(5, 9, 2, 30, 14), [[*ids, 7] for ids in COMPLETIONS]
    scores = cross_score(cut_model(), prompts, completions)
    assert (scores.amax(dim=1) - scores.amin(dim=1) > 0.01).all()
    metrics = measure(cut_model(), prompts, completions, [0, 1, 2, 3, 4, 0], lead_in=[1] * 6)
    assert metrics["retrieval_accuracy"] == metrics["retrieval_chance"]
    assert metrics["mi_seq"] == pytest.approx(0.0, abs=1e-9)


@pytest.mark.parametrize("copies", [1, 2])
def test_completions_that_follow_from_their_prompt_carry_log_n(copies: int):
    model, random = markov_model(), random_ids(6, 2, 11, 4, 1, 8)
    prompts = [[*(token % 48 for token in random[i]), 8 * i] for i in range(6)] * copies
    completions = [[8 * (i % 6) + step for step in range(1, 3 + i % 4)] for i in range(12)]
    metrics = measure(model, prompts, completions, [i % 6 for i in range(12)])
    assert metrics["mi_seq"] == pytest.approx(math.log(6), abs=1e-3)
    assert metrics["conditional_entropy_seq"] == pytest.approx(0.0, abs=1e-3)
    assert metrics["retrieval_accuracy"] == pytest.approx(1 / copies)

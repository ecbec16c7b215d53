"""Cross-scoring of models of all kinds: without caches, wrapped, with dropout, adapters and other precision."""

import logging
import math

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
    WINDOW,
    assert_exact,
    new_model,
    random_ids,
    run_in_full,
    seeded,
    shared_model,
)
from torch import nn
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

from ragen2_trl.instrument.information import information_metrics
from ragen2_trl.instrument.scoring import count_tokens, cross_score


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


class Forgetful(MistralForCausalLM):
    """Returns a cache as it should, and does not read the one it is given."""

    def forward(self, *args, past_key_values=None, **kwargs):
        return super().forward(*args, **kwargs)


def test_a_model_that_ignores_the_cache_it_is_given_is_run_in_full(caplog):
    model = seeded(lambda: Forgetful(MistralConfig(**WINDOW))).eval()
    with caplog.at_level(logging.WARNING):
        scores = cross_score(model, PROMPTS, COMPLETIONS, max_tokens_per_forward=20)
    assert_exact(scores, run_in_full(model, PROMPTS, COMPLETIONS))
    assert "Forgetful gives tokens other log-probabilities, by more than 0.001 nats" in caplog.text


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
def test_gradient_checkpointing_in_training_mode_does_not_drop_the_cache(name: str):
    model = new_model(name)
    with count_tokens(model) as plain:
        expected = cross_score(model, PROMPTS, COMPLETIONS)
    model.gradient_checkpointing_enable()
    model.train()
    with count_tokens(model) as checkpointed:
        assert torch.equal(cross_score(model, PROMPTS, COMPLETIONS), expected)
    assert checkpointed == plain
    assert any(getattr(module, "gradient_checkpointing", False) for module in model.modules())


@pytest.mark.parametrize("name", ONE_OF_EACH_CACHE)
def test_a_cache_is_used_although_the_config_turns_it_off(name: str):
    model = new_model(name)
    with count_tokens(model) as plain:
        expected = cross_score(model, PROMPTS, COMPLETIONS)
    model.config.use_cache = False
    with count_tokens(model) as configured:
        assert torch.equal(cross_score(model, PROMPTS, COMPLETIONS), expected)
    assert configured == plain
    assert model.config.use_cache is False


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
    assert_exact(scores, expected)


def test_no_gradient_is_recorded():
    assert not cross_score(new_model().train(), PROMPTS, COMPLETIONS).requires_grad


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

"""Cross-scoring: equal to running each pair in full, for every kind of cache, at the price of one prompt each."""

import functools
import logging
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    Lfm2Config,
    Lfm2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from ragen2_trl.instrument import scoring
from ragen2_trl.instrument.information import information_metrics
from ragen2_trl.instrument.scoring import ContextLengthError, count_tokens, cross_score

VOCABULARY = 97
SMALL = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
}
WINDOW = {**SMALL, "sliding_window": 8}
GPT2 = {
    "vocab_size": VOCABULARY,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 128,
    "initializer_range": 0.2,
}
ARCHITECTURES = {
    "qwen3, grouped queries": lambda: Qwen3ForCausalLM(Qwen3Config(**SMALL, head_dim=8)),
    "qwen3, tied head": lambda: Qwen3ForCausalLM(Qwen3Config(**SMALL, head_dim=8, tie_word_embeddings=True)),
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SMALL)),
    "qwen2, one layer with a window": lambda: Qwen2ForCausalLM(
        Qwen2Config(**WINDOW, use_sliding_window=True, max_window_layers=1)
    ),
    "mistral, window": lambda: MistralForCausalLM(MistralConfig(**WINDOW)),
    "gemma3, windows and full attention": lambda: Gemma3ForCausalLM(
        Gemma3TextConfig(**WINDOW, head_dim=8, layer_types=["sliding_attention", "full_attention"])
    ),
    "gpt2, absolute positions": lambda: GPT2LMHeadModel(GPT2Config(**GPT2)),
    "lfm2, convolutions": lambda: Lfm2ForCausalLM(Lfm2Config(**SMALL, layer_types=["conv", "full_attention"])),
    "mamba, no cache": lambda: MambaForCausalLM(
        MambaConfig(vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2, state_size=4, initializer_range=0.2)
    ),
}
REUSES_CACHE = [name for name in ARCHITECTURES if not name.startswith("mamba")]
# Plain layers are shared, the other two kinds are copied.
ONE_OF_EACH_CACHE = ["qwen3, grouped queries", "mistral, window", "lfm2, convolutions"]


def seeded(build, seed: int = 5):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return build()


def new_model(name: str = "qwen3, grouped queries"):
    return seeded(ARCHITECTURES[name]).eval()


shared_model = functools.cache(new_model)


def random_ids(*lengths: int, seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(VOCABULARY, (length,), generator=generator).tolist() for length in lengths]


PROMPTS = random_ids(20, 1, 2, 13, 7)
LONGER_PROMPTS = [prompt for prompt in PROMPTS if len(prompt) > 1]
COMPLETIONS = random_ids(1, 2, 17, 5, 12, 9, seed=1)


def run_in_full(model, prompts, completions, lead_in=None, temperature=1.0) -> torch.Tensor:
    """Each pair in one forward pass of its own, without a cache."""
    scores = torch.zeros(len(completions), len(prompts))
    for row, completion in enumerate(completions):
        for column, prompt in enumerate(prompts):
            ids = torch.tensor([[*prompt, *completion]])
            with torch.no_grad():
                logits = model(input_ids=ids, use_cache=False).logits[0, :-1].float()
            logps = (logits / temperature).log_softmax(-1).gather(1, ids[0, 1:, None]).squeeze(1)
            scores[row, column] = logps[len(prompt) - 1 + (lead_in[row] if lead_in else 0) :].sum()
    return scores


def assert_exact(scores: torch.Tensor, expected: torch.Tensor) -> None:
    assert scores.shape == expected.shape
    assert scores.dtype == torch.float32
    error = (scores - expected).abs()
    assert (error <= (1e-6 * expected.abs()).clamp(min=1e-4)).all(), f"differs by {error.max():.3g} nats"


@st.composite
def batches(draw):
    """Prompts and completions, some of them twice, with what may be passed along."""
    seed = draw(st.integers(0, 999))
    prompts = random_ids(*draw(st.lists(st.integers(1, 24), min_size=1, max_size=4)), seed=seed)
    completions = random_ids(*draw(st.lists(st.integers(1, 14), min_size=1, max_size=4)), seed=seed + 1)
    prompts += draw(st.lists(st.sampled_from(prompts), max_size=1))
    completions += draw(st.lists(st.sampled_from(completions), max_size=2))
    options = {"temperature": draw(st.sampled_from([1.0, 0.6, 1.7]))}
    if draw(st.booleans()):
        options["lead_in"] = [draw(st.integers(0, len(completion) - 1)) for completion in completions]
    return prompts, completions, options, draw(st.sampled_from([None, 1, 9, 30]))


@pytest.mark.parametrize("name", ARCHITECTURES)
@settings(deadline=None, max_examples=15, derandomize=True)
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
    copied = name not in ("qwen3, grouped queries", "qwen3, tied head", "llama", "gpt2, absolute positions")
    check = 20 + (59 + 20)  # one completion, once on a copied cache and once in full
    assert sum(counts) == 3 * (59 + 24 * 20) + check * copied


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


def test_token_id_zero_is_scored_although_padding_is_zero_too():
    model = shared_model("llama")
    completions = [[0], [3, 0, 0], [0, 0, 5, 0, 9]]
    assert_exact(cross_score(model, PROMPTS, completions), run_in_full(model, PROMPTS, completions))


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_scoring_twice_gives_the_same_bits(name: str):
    model = shared_model(name)
    first = cross_score(model, PROMPTS, COMPLETIONS, max_tokens_per_forward=20)
    assert torch.equal(first, cross_score(model, PROMPTS, COMPLETIONS, max_tokens_per_forward=20))


@pytest.mark.parametrize("name", ONE_OF_EACH_CACHE)
def test_order_of_chunks_does_not_matter_as_it_would_to_a_cache_that_keeps_what_it_is_given(name: str, monkeypatch):
    model, chunks = shared_model(name), scoring._chunks
    expected = cross_score(model, PROMPTS, COMPLETIONS, max_tokens_per_forward=20)
    monkeypatch.setattr(scoring, "_chunks", lambda *args: chunks(*args)[::-1])
    assert len(scoring._chunks([((1, 2), 0), ((1, 2, 3), 0)], 1, torch.device("cpu"))) == 2
    assert torch.equal(expected, cross_score(model, PROMPTS, COMPLETIONS, max_tokens_per_forward=20))


@pytest.mark.parametrize("name", ["qwen3, grouped queries", "mistral, window", "gemma3, windows and full attention"])
def test_the_cache_of_a_prompt_is_never_changed(name: str):
    model, seen = shared_model(name), []

    def keep(module, args, kwargs, output) -> None:
        if kwargs.get("past_key_values") is None and output.past_key_values is not None:
            layers = output.past_key_values.layers
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
    caches = len(LONGER_PROMPTS) if name.startswith("qwen3") else 1
    assert sum(rows) == len(LONGER_PROMPTS) * scored + caches


@pytest.mark.parametrize("max_tokens", [17, 20, 40])
def test_no_forward_pass_exceeds_the_bound(max_tokens: int):
    with count_tokens(shared_model("llama")) as counts:
        cross_score(
            shared_model("llama"), [prompt[:16] for prompt in PROMPTS], COMPLETIONS, max_tokens_per_forward=max_tokens
        )
    assert max(counts) <= max_tokens


def test_a_completion_beyond_the_bound_runs_alone():
    with count_tokens(shared_model("llama")) as counts:
        cross_score(shared_model("llama"), random_ids(4), random_ids(9, 9, 30), max_tokens_per_forward=20)
    assert counts == [3, 18, 30]


def test_scores_do_not_depend_on_how_many_logits_are_normalised_at_once(monkeypatch):
    model = shared_model("llama")
    expected = cross_score(model, PROMPTS, COMPLETIONS)
    for size in (1, 3 * VOCABULARY):
        monkeypatch.setattr(scoring, "LOGITS_SLICE", size)
        assert_exact(cross_score(model, PROMPTS, COMPLETIONS), expected)


def renamed(model_class: type, name: str) -> type:
    """A class of its own, because a warning is given once for each class."""
    return type(name, (model_class,), {})


def test_a_model_without_a_cache_is_run_in_full_and_warned_about_once(caplog):
    model = seeded(lambda: renamed(MambaForCausalLM, "SomeMamba")(shared_model("mamba, no cache").config))
    with caplog.at_level(logging.WARNING):
        cross_score(model, PROMPTS, COMPLETIONS)
        cross_score(model, PROMPTS, COMPLETIONS)
    assert [record.getMessage() for record in caplog.records if "SomeMamba" in record.getMessage()] == [
        "SomeMamba returns NoneType in place of a cache of its input: every pair of prompt and completion is run in "
        "full, which is exact but several times slower."
    ]


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
    assert "Forgetful differs by" in caplog.text


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


def test_tokens_are_counted_only_within_the_block():
    model = new_model()
    with count_tokens(model) as counts:
        model(input_ids=torch.zeros(2, 3, dtype=torch.long))
    model(input_ids=torch.zeros(2, 3, dtype=torch.long))
    assert counts == [6]


def test_lists_and_tuples_of_ids_are_the_same():
    model = shared_model()
    expected = cross_score(model, PROMPTS, COMPLETIONS)
    assert torch.equal(cross_score(model, tuple(map(tuple, PROMPTS)), list(map(tuple, COMPLETIONS))), expected)


def test_an_empty_lead_in_is_no_lead_in():
    expected = cross_score(shared_model(), PROMPTS, COMPLETIONS)
    assert torch.equal(cross_score(shared_model(), PROMPTS, COMPLETIONS, lead_in=[0] * 6), expected)


VALID = {"prompts": [[1, 2], [3]], "completions": [[4, 5], [6], [7, 8, 9]]}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompts": []}, "must not be empty, got 0 and 3"),
        ({"completions": []}, "must not be empty, got 2 and 0"),
        ({"prompts": [[1, 2], []]}, "prompts must hold at least one token each, got none at 1"),
        ({"completions": [[4], [5], []]}, "completions must hold .* got 0 tokens with lead_in=0 at 2"),
        ({"lead_in": [0, 1, 0]}, "completions must hold .* got 1 tokens with lead_in=1 at 1"),
        ({"lead_in": [-1, 0, 0]}, "got 2 tokens with lead_in=-1 at 0"),
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

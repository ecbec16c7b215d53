"""Small models of every kind of cache, prompts and completions for them, and scores of each pair run in full."""

import functools

import torch
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    JambaConfig,
    JambaForCausalLM,
    Lfm2Config,
    Lfm2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
    xLSTMConfig,
    xLSTMForCausalLM,
)

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
    "qwen3-next, recurrences and full attention": lambda: Qwen3NextForCausalLM(Qwen3NextConfig(**SMALL, **QWEN3_NEXT)),
    "mamba, no cache": lambda: MambaForCausalLM(
        MambaConfig(vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2, state_size=4, initializer_range=0.2)
    ),
}
REUSES_CACHE = [name for name in ARCHITECTURES if not name.startswith("mamba")]
# Rotary embeddings that change for all positions once a text has more than 32 tokens.
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0] * 4,
    "long_factor": [4.0] * 4,
    "original_max_position_embeddings": 32,
}
JAMBA = {
    "attn_layer_period": 2,
    "attn_layer_offset": 1,
    "num_experts": 2,
    "num_experts_per_tok": 1,
    "mamba_d_state": 4,
    "mamba_dt_rank": 4,
    "use_mamba_kernels": False,
}
QWEN3_NEXT = {
    "layer_types": ["linear_attention", "full_attention"],
    "head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "num_experts": 2,
    "num_experts_per_tok": 1,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
}
# Where a cache that is reused goes wrong, or cannot be reused.
STUBBORN = {
    "jamba, states that are not continued": lambda: JambaForCausalLM(JambaConfig(**SMALL, **JAMBA)),
    "phi3, longrope": lambda: Phi3ForCausalLM(
        Phi3Config(**SMALL, rope_parameters=dict(LONGROPE), original_max_position_embeddings=32, pad_token_id=0)
    ),
    "llama, longrope": lambda: LlamaForCausalLM(LlamaConfig(**SMALL, rope_parameters=dict(LONGROPE))),
    "xlstm, all logits": lambda: xLSTMForCausalLM(
        xLSTMConfig(vocab_size=VOCABULARY, hidden_size=128, num_hidden_layers=2, num_blocks=2, num_heads=2)
    ),
}
# Plain layers, windows, convolutions, recurrences.
ONE_OF_EACH_CACHE = [
    "qwen3, grouped queries",
    "mistral, window",
    "lfm2, convolutions",
    "qwen3-next, recurrences and full attention",
]


def seeded(build, seed: int = 5):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return build()


def new_model(name: str = "qwen3, grouped queries"):
    return seeded((ARCHITECTURES | STUBBORN)[name]).eval()


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

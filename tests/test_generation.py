"""Sampling does nothing twice: the tokens of transformers' `generate` for fewer positions, and vLLM's weights once."""

import copy
from types import SimpleNamespace

import pytest
import torch
from algorithms import GRPO, RLOO, slow
from conftest import PROMPTS
from datasets import Dataset
from peft import LoraConfig, PrefixTuningConfig, TaskType, get_peft_model
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    GenerationConfig,
    GPT2Config,
    LlamaConfig,
    MambaConfig,
    MistralConfig,
    MixtralConfig,
    OPTConfig,
    Qwen3Config,
)
from trl.generation import vllm_generation

from ragen2_trl import SNRFilteredGRPOTrainer
from ragen2_trl.trainers.generation import keeping_vllm_awake, reading_prompts_once

SIZES = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
MLP = {"intermediate_size": 48, "num_key_value_heads": 2}
LLAMA = LlamaConfig(**SIZES, **MLP)
NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
MODELS = {
    "llama": LLAMA,
    "qwen3": Qwen3Config(**SIZES, **MLP, head_dim=8),
    "mixtral": MixtralConfig(**SIZES, **MLP, num_local_experts=2),
    "gpt2": GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4, **NO_DROPOUT),
    "opt": OPTConfig(**SIZES, ffn_dim=48, dropout=0.0),
    "bloom": BloomConfig(vocab_size=64, hidden_size=32, n_layer=2, n_head=4),
}
EAGER = (BloomConfig, MambaConfig)
PADDED = torch.tensor([[0, 0, 5, 6, 7]] * 3 + [[8, 9, 10, 11, 12]] * 3 + [[0, 0, 0, 0, 9]] * 2)


def model_of(config):
    attention = "eager" if isinstance(config, EAGER) else "sdpa"
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        model = AutoModelForCausalLM.from_config(copy.deepcopy(config), attn_implementation=attention)
        for parameter in model.parameters():  # far from 0, so that attention to another token shows
            torch.nn.init.normal_(parameter, std=0.3) if parameter.ndim > 1 else None
    return model.eval()


def inputs_of(ids):
    return {"input_ids": ids, "attention_mask": (ids != 0).long()}


def trainer_of(model, once):
    accelerator = SimpleNamespace(unwrap_model=lambda wrapped: wrapped)
    return SimpleNamespace(_reads_prompts_once=once, accelerator=accelerator, model_wrapped=model)


def sampled(model, ids, once, **settings):
    """Tokens, logits, and the positions of each forward pass."""
    positions = []
    hook = model.register_forward_pre_hook(
        lambda module, args, kwargs: positions.append(kwargs["input_ids"].numel()), with_kwargs=True
    )
    settings = {"max_new_tokens": 6, "do_sample": True, "pad_token_id": 0, "eos_token_id": 3, **settings}
    config = GenerationConfig(**settings, return_dict_in_generate=True, output_logits=True)
    with torch.random.fork_rng(devices=[]), torch.no_grad(), reading_prompts_once(trainer_of(model, once)):
        torch.manual_seed(5)
        found = model.generate(**inputs_of(ids), generation_config=config)
    hook.remove()
    assert "generate" not in vars(model)
    return found.sequences, torch.stack(found.logits), positions


@pytest.mark.parametrize("do_sample", [True, False], ids=["sampled", "greedy"])
@pytest.mark.parametrize("config", MODELS.values(), ids=MODELS)
def test_the_same_tokens_with_each_prompt_read_once(config, do_sample):
    model = model_of(config)
    tokens, logits, positions = sampled(model, PADDED, False, do_sample=do_sample)
    same, close, fewer = sampled(model, PADDED, True, do_sample=do_sample)
    assert torch.equal(tokens, same)
    torch.testing.assert_close(close.log_softmax(-1), logits.log_softmax(-1), atol=1e-5, rtol=0)
    assert positions[0] == PADDED.numel()
    assert fewer[:2] == [3 * 4, 8] and positions[1:] == fewer[2:]


def test_adapters_are_part_of_what_is_read():
    model = get_peft_model(model_of(LLAMA), LoraConfig(task_type="CAUSAL_LM", init_lora_weights=False))
    tokens, logits, _ = sampled(model, PADDED, False)
    same, close, fewer = sampled(model, PADDED, True)
    assert torch.equal(tokens, same) and fewer[0] == 3 * 4
    torch.testing.assert_close(close, logits, atol=1e-5, rtol=0)


LEFT = {
    "a sliding window": (MistralConfig(**SIZES, **MLP, sliding_window=6), {}),
    "a recurrent state": (MambaConfig(vocab_size=64, hidden_size=32, num_hidden_layers=2), {}),
    "beams": (LLAMA, {"num_beams": 2}),
    "a static cache": (LLAMA, {"cache_implementation": "static"}),
    "no cache": (LLAMA, {"use_cache": False}),
    "dynamic RoPE": (
        LlamaConfig(**SIZES, **MLP, rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}),
        {},
    ),
}


@pytest.mark.parametrize(("config", "settings"), LEFT.values(), ids=LEFT)
def test_other_caches_and_searches_are_left_to_generate(config, settings):
    model = model_of(config)
    assert sampled(model, PADDED, True, **settings)[2] == sampled(model, PADDED, False, **settings)[2]


def test_a_setting_of_the_model_itself_counts():
    model = model_of(LLAMA)
    model.generation_config.cache_implementation = "static"
    assert sampled(model, PADDED, True)[2] == sampled(model, PADDED, False)[2]


def test_distinct_prompts_and_virtual_tokens_are_left_to_generate():
    distinct = PADDED[[0, 3, 6]]
    assert sampled(model_of(LLAMA), distinct, True)[2][0] == distinct.numel()
    model = get_peft_model(model_of(LLAMA), PrefixTuningConfig(TaskType.CAUSAL_LM, num_virtual_tokens=2))
    assert sampled(model, PADDED, True)[2] == sampled(model, PADDED, False)[2]


def test_dropout_is_drawn_for_each_row():
    model = model_of(LLAMA)
    model.model.layers[0].self_attn.attention_dropout = 0.1
    model.train()
    assert sampled(model, PADDED, True)[2][0] == PADDED.numel()


def lengths_by_three(completions, **columns):
    return [len(one) % 3.0 for one in completions]


PILOTS = {
    "snr_strategy": "nonzero",
    "snr_pilot_generations": 2,
    "num_generations": 4,
    "snr_dynamic_sampling_rounds": 2,
}


@pytest.mark.parametrize(
    ("algorithm", "settings"),
    [
        (GRPO, {"snr_strategy": "lossless"}),
        (GRPO, PILOTS),
        slow(RLOO, {"snr_strategy": "lossless"}),
        slow(GRPO, {"snr_strategy": "top_p"}),
    ],
)
def test_a_trainer_samples_the_same_completions(algorithm, settings, policy_path, tmp_path):
    rows, reads = Dataset.from_dict({"prompt": PROMPTS[:4]}), {}
    found = {}
    for share in (False, True):
        own = {"snr_share_prompts": share, "max_steps": 2, "log_completions": True, "beta": 0.0}
        args = algorithm.args(tmp_path, **settings, **own)
        trainer = algorithm.make(policy_path, args, lengths_by_three, rows)
        plain, reads[share] = trainer.model.generate, []

        def generate(*, input_ids, plain=plain, read=reads[share], **others):
            read.append("cache" in others or "past_key_values" in others)
            return plain(input_ids=input_ids, **others)

        trainer.model.generate = generate
        trainer.train()
        found[share] = list(trainer._logs["completion"])
    assert found[True] == found[False]
    assert all(reads[True]) and not any(reads[False])


# vLLM in the trainer's process, with sleep mode


class Engine:
    def __init__(self):
        self.calls = []

    def wake_up(self, tags):
        self.calls.append(f"wake {tags[0]}")

    def sleep(self, level):
        self.calls.append(f"sleep {level}")

    def generate(self, prompts, **others):
        self.calls.append(f"generate {len(prompts)}")
        return []


@pytest.fixture
def vllm(monkeypatch):
    """TRL's own calls around an engine that notes them."""
    monkeypatch.setattr(vllm_generation, "SamplingParams", lambda **settings: None, raising=False)
    monkeypatch.setattr(vllm_generation, "extract_logprobs", lambda outputs: (None, None))
    monkeypatch.setattr(vllm_generation, "is_peft_model", lambda model: False)
    engine = object.__new__(vllm_generation.VLLMGeneration)
    numbers = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": None, "repetition_penalty": 1.0, "logprobs": 0}
    vars(engine).update(numbers, max_completion_length=8, generation_kwargs={}, structured_outputs_regex=None)
    vars(engine).update(accelerator=None, model=None, mode="colocate", tensor_parallel_size=1, llm=Engine())
    vars(engine).update(enable_sleep_mode=True, _llm_weights_sleeping=True)

    def sync_weights():
        engine.llm.calls.append("push")
        engine._llm_weights_sleeping = False

    engine.sync_weights = sync_weights
    return engine


def ask(engine, rows):
    engine.generate(prompts=[[1]] * rows, images=None, num_generations=rows)


def test_vllm_gets_weights_once_for_all_calls_of_a_generation_and_sleeps_after_the_last(vllm):
    trainer = SimpleNamespace(vllm_generation=vllm)
    for _ in range(2):
        with keeping_vllm_awake(trainer):
            ask(vllm, 2)
            ask(vllm, 6)
    assert vllm.llm.calls == ["push", "wake kv_cache", "generate 2", "generate 6", "sleep 2"] * 2
    ask(vllm, 1)  # on its own, TRL's
    assert vllm.llm.calls[10:] == ["push", "wake kv_cache", "generate 1", "sleep 2"]


def test_vllm_makes_room_for_a_reward_model_between_two_calls(vllm):
    with keeping_vllm_awake(SimpleNamespace(vllm_generation=vllm, reward_funcs=[len, torch.nn.Linear(1, 1)])):
        ask(vllm, 2)
        assert vllm.llm.calls[-1] == "sleep 2"


def test_vllm_sleeps_after_an_error_between_two_calls(vllm):
    with pytest.raises(KeyboardInterrupt), keeping_vllm_awake(SimpleNamespace(vllm_generation=vllm)):
        ask(vllm, 2)
        raise KeyboardInterrupt
    assert vllm.llm.calls[-1] == "sleep 2" and vllm.enable_sleep_mode and vllm._llm_weights_sleeping


def test_pilots_and_the_rest_of_their_groups_are_one_generation_of_vllm(vllm, policy_path, tmp_path):
    class Asking(SNRFilteredGRPOTrainer):
        def _generate_single_turn(self, prompt_ids, *args, **kwargs):
            ask(self.vllm_generation, len(prompt_ids))
            return super()._generate_single_turn(prompt_ids, *args, **kwargs)

    args = GRPO.args(tmp_path, snr_pilot_generations=2, max_steps=1, num_generations=4)
    trainer = Asking(policy_path, lengths_by_three, args, Dataset.from_dict({"prompt": PROMPTS[:4]}))
    trainer.vllm_generation = vllm
    trainer.train()
    calls = vllm.llm.calls
    assert calls[:2] == ["push", "wake kv_cache"] and calls[-1] == "sleep 2"
    assert len(calls) == 5 and all(call.startswith("generate") for call in calls[2:4])

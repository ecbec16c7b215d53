"""Each prompt computed once per group: the same log-probs, gradients and parameters, for fewer positions."""

import copy
import logging
import re
from functools import partial

import pytest
import torch
from accelerate import Accelerator
from algorithms import GRPO, PPO, RLOO, replay_of, slow
from conftest import apart
from peft import LoraConfig, PrefixTuningConfig, TaskType
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    FalconConfig,
    Gemma2Config,
    Gemma3TextConfig,
    Glm4Config,
    GPT2Config,
    GPTNeoXConfig,
    GptOssConfig,
    GraniteConfig,
    LlamaConfig,
    MambaConfig,
    MistralConfig,
    MixtralConfig,
    Olmo2Config,
    OPTConfig,
    Phi3Config,
    Qwen2Config,
    Qwen3Config,
    RwkvConfig,
    SmolLM3Config,
    Starcoder2Config,
)
from trl.trainer.utils import add_fused_lm_head, disable_dropout_in_model

from ragen2_trl import SNRFilteredGRPOConfig, SNRFilteredGRPOTrainer
from ragen2_trl.rotary import length_dependent
from ragen2_trl.trainers import prompt_tree
from ragen2_trl.trainers.batches import whole_rows
from ragen2_trl.trainers.checks import shares_prompts
from ragen2_trl.trainers.prompt_tree import attending_to_trees
from ragen2_trl.trainers.shared_prompts import PADDING, SharedPrompts, dropout_of

SIZES = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
MLP = {"intermediate_size": 48, "num_key_value_heads": 2}
WINDOW = {"sliding_window": 6}
FITTING = {
    "llama": LlamaConfig(**SIZES, **MLP),
    "qwen3": Qwen3Config(**SIZES, **MLP, head_dim=8),
    "qwen2 with a window": Qwen2Config(**SIZES, **MLP, **WINDOW, use_sliding_window=True, max_window_layers=0),
    "mistral, a window": MistralConfig(**SIZES, **MLP, **WINDOW),
    "gemma2, windows in turn": Gemma2Config(**SIZES, **MLP, **WINDOW, head_dim=8, query_pre_attn_scalar=8),
    "mixtral": MixtralConfig(**SIZES, **MLP, num_local_experts=2),
    "gpt2": GPT2Config(
        vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=64, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0
    ),
}
# Its positions come from a mask of two dimensions.
OPT = OPTConfig(vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, ffn_dim=48, dropout=0.0)


def model_of(config, attention="sdpa"):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        config = copy.deepcopy(config)
        config._attn_implementation = attention
        model = AutoModelForCausalLM.from_config(config, attn_implementation=attention)
        for parameter in model.parameters():  # far from 0, so that attention to another token shows
            torch.nn.init.normal_(parameter, std=0.3) if parameter.ndim > 1 else None
    add_fused_lm_head(model, outputs=("log_probs", "entropy"))
    return model


def batch_of(prompts, completions, groups):
    """Rows as TRL pads them: prompts of these lengths for groups of so many completions, of these lengths."""
    generator = torch.Generator().manual_seed(5)
    prompt_rows = [torch.randint(1, 64, (length,), generator=generator) for length in prompts]
    ids, mask = [], []
    left, right = max(prompts), max(completions)
    for number, length in enumerate(completions):
        prompt = prompt_rows[number // groups]
        completion = torch.randint(1, 64, (length,), generator=generator)
        before, after = left - len(prompt), right - length
        ids.append(torch.cat([torch.zeros(before).long(), prompt, completion, torch.zeros(after).long()]))
        mask.append(torch.cat([torch.zeros(before), torch.ones(len(prompt) + length), torch.zeros(after)]).long())
    ids, mask = torch.stack(ids), torch.stack(mask)
    return {
        "prompt_ids": ids[:, :left],
        "prompt_mask": mask[:, :left],
        "completion_ids": ids[:, left:],
        "completion_mask": mask[:, left:],
    }


def padded(model, input_ids, attention_mask, width):
    labels = input_ids.masked_fill(attention_mask == 0, -100)
    labels[:, :-width] = -100
    outputs = model(input_ids=input_ids, attention_mask=attention_mask, labels=labels, fused_lm_head=True)
    return outputs.log_probs[:, -width:], outputs.entropy[:, -width:]


BATCH = batch_of([9, 12], [4, 7, 1, 5, 6, 2, 7, 3], groups=4)
IDS = torch.cat([BATCH["prompt_ids"], BATCH["completion_ids"]], dim=1)
MASK = torch.cat([BATCH["prompt_mask"], BATCH["completion_mask"]], dim=1)
WIDTH = BATCH["completion_ids"].size(1)


def checked(model, batch=BATCH):
    shared = SharedPrompts(Accelerator(cpu=True), model)
    shared.check(model, lambda *rows: padded(model, *rows)[0], batch)
    return shared


@pytest.mark.parametrize(
    ("name", "attention"),
    [(name, "sdpa") for name in FITTING if "gemma2" not in name] + [("gpt2", "eager"), ("llama", "eager")],
)
def test_log_probs_entropies_and_gradients_are_those_of_padded_rows(name, attention):
    model = model_of(FITTING[name], attention)
    shared = checked(model)
    assert shared.serves
    shown = BATCH["completion_mask"].bool()
    weights = torch.rand(shown.shape, generator=torch.Generator().manual_seed(1))
    results = []
    for logps, entropies in (padded(model, IDS, MASK, WIDTH), shared(model, IDS, MASK, WIDTH)):
        model.zero_grad()
        (logps * weights * shown).sum().backward()
        gradient = torch.cat([one.grad.flatten() for one in model.parameters() if one.grad is not None])
        results.append((logps * shown, entropies * shown, gradient))
    for plain, ours in zip(*results, strict=True):
        assert (plain - ours).abs().max() < 5e-6 * max(1.0, plain.abs().max().item())
    assert shared.positions(BATCH) < IDS.numel()


TINY = {**SIZES, **MLP, "num_hidden_layers": 3, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
FAMILIES = {
    "cohere": CohereConfig(**TINY),
    "gemma3, windows in turn": Gemma3TextConfig(
        **TINY, **WINDOW, head_dim=8, layer_types=["sliding_attention", "full_attention", "sliding_attention"]
    ),
    "glm4": Glm4Config(**TINY, head_dim=8),
    "gpt2": FITTING["gpt2"],
    "gpt-neox": GPTNeoXConfig(**SIZES, intermediate_size=48),
    "granite": GraniteConfig(**TINY),
    "llama": LlamaConfig(**TINY),
    "mistral, a window": MistralConfig(**TINY, **WINDOW),
    "olmo2": Olmo2Config(**TINY),
    "phi3": Phi3Config(**TINY),
    "qwen2": Qwen2Config(**TINY),
    "qwen2, windows at the end": Qwen2Config(**TINY, **WINDOW, use_sliding_window=True, max_window_layers=1),
    "qwen3": Qwen3Config(**TINY, head_dim=8),
    "smollm3": SmolLM3Config(**TINY),
    "starcoder2": Starcoder2Config(**TINY, residual_dropout=0.0, embedding_dropout=0.0, attention_dropout=0.0),
}


@pytest.mark.parametrize("checkpointing", [None, False, True], ids=["plain", "checkpointing", "reentrant"])
@pytest.mark.parametrize("name", FAMILIES)
def test_in_float64_a_tree_is_exact(name, checkpointing):
    """Log-probs and gradients, with one-token prompts and completions, and calls that several segments share."""
    model = model_of(FAMILIES[name]).double().train()
    if checkpointing is not None:
        model.gradient_checkpointing_enable({"use_reentrant": checkpointing})
        model.enable_input_require_grads()
    batch = batch_of([9, 1, 12], [7, 3, 1, 7, 5, 2, 4, 6, 1], groups=3)
    rows = whole_rows(batch)
    shared = SharedPrompts(Accelerator(cpu=True), model)
    shared.serves = True
    shown = batch["completion_mask"].bool()
    weights = torch.rand(shown.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1)) * shown
    found = []
    for computed in (padded, shared):
        model.zero_grad()
        logps = computed(model, *rows)[0]
        with attending_to_trees(shared.config):
            (logps * weights).sum().backward()
        gradients = [one.grad.flatten() for one in model.parameters() if one.grad is not None]
        found.append((logps * shown, torch.cat(gradients)))
    for plain, ours in zip(*found, strict=True):  # some norms round to float32
        assert (plain - ours).abs().max() < 2e-6 * plain.abs().max()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["llama", "gpt2", "mixtral"])
def test_one_token_that_sees_another_completion_fails_the_check(name, dtype, monkeypatch):
    model = model_of(FITTING[name]).to(dtype)
    assert checked(model).serves
    mask_of = prompt_tree._mask

    def leaky(part, window, device):
        mask = mask_of(part, window, device)
        if mask is not None and len(part) > 2:  # the last token of the second completion sees the first one
            first, second = part[0].size, part[0].size + part[1].size
            mask[second + part[2].size - 1, first:second] = True
        return mask

    monkeypatch.setattr(prompt_tree, "_mask", leaky)
    assert checked(model).serves is False


@pytest.mark.parametrize("prompts", [[9, 12], [9, 9]], ids=["padded", "without padding"])
def test_a_model_that_packing_does_not_fit_computes_padded_rows_and_says_so_once(prompts, caplog):
    model = model_of(OPT)
    with caplog.at_level(logging.WARNING):
        shared = checked(model, batch_of(prompts, [4, 7, 1, 5, 6, 2, 7, 3], groups=4))
        shared.check(model, lambda *rows: padded(model, *rows)[0], BATCH)
    assert shared.serves is False and shared(model, IDS, MASK, WIDTH) is None
    assert shared.positions(BATCH) == IDS.numel()
    (message,) = [record.getMessage() for record in caplog.records]
    assert "OPTForCausalLM" in message and "snr_share_prompts" in message


@pytest.mark.parametrize(
    "config",
    [
        MambaConfig(vocab_size=64, hidden_size=32, num_hidden_layers=2, state_size=4),
        RwkvConfig(vocab_size=64, hidden_size=32, num_hidden_layers=2),
    ],
    ids=["mamba", "rwkv"],
)
def test_a_model_without_attention_computes_padded_rows_and_is_named(config, caplog):
    model = AutoModelForCausalLM.from_config(config)
    with caplog.at_level(logging.WARNING):
        assert checked(model).serves is False
    (message,) = [record.getMessage() for record in caplog.records]
    assert f"{type(model).__name__}, it has no attention heads" in message


@pytest.mark.parametrize(
    ("config", "named"),
    [
        (LlamaConfig(**SIZES, **MLP, attention_dropout=0.3), "attention_dropout=0.3"),
        (FITTING["gemma2, windows in turn"], "softcap"),
        (GptOssConfig(**SIZES, **MLP, head_dim=8, num_local_experts=2, num_experts_per_tok=1), "s_aux"),
    ],
    ids=["dropout", "softcap", "sinks"],
)
def test_attention_that_a_tree_does_not_have_is_named(config, named, caplog):
    with caplog.at_level(logging.WARNING):
        assert checked(model_of(config, "eager")).serves is False
    assert named in caplog.text


def test_the_check_is_repeated_once_rows_are_wider_than_the_window():
    model, seen = model_of(FITTING["mistral, a window"]), []

    def log_probs(*rows):
        seen.append(rows[0].size(1))
        return padded(model, *rows)[0]

    shared = SharedPrompts(Accelerator(cpu=True), model)
    short, long = batch_of([3], [2, 2], groups=2), batch_of([8], [4, 3], groups=2)
    for batch, widths in ((short, {5}), (short, {5}), (long, {5, 12}), (long, {5, 12})):
        shared.check(model, log_probs, batch)
        assert {width - PADDING for width in seen} == widths and shared.serves
    assert len(seen) == 8  # of all rows together, and of each alone; twice


def test_rows_longer_than_the_window_are_compared_though_others_have_the_longest_completions():
    class Blind(SharedPrompts):
        """Whose trees leave out the window."""

        def _of_tree(self, *rows):
            with pytest.MonkeyPatch.context() as patch:
                mask = prompt_tree._mask
                patch.setattr(prompt_tree, "_mask", lambda part, window, device: mask(part, None, device))
                return super()._of_tree(*rows)

    model = model_of(FITTING["mistral, a window"])
    shared = Blind(Accelerator(cpu=True), model)
    for batch, serves in ((batch_of([3], [2, 2], 2), True), (batch_of([20, 2], [1, 1, 3, 3], 2), False)):
        shared.check(model, lambda *rows: padded(model, *rows)[0], batch)
        assert shared.serves is serves


def test_without_a_token_to_compare_nothing_is_decided():
    model, batch = model_of(FITTING["llama"]), dict(BATCH)
    batch["completion_mask"] = torch.zeros_like(BATCH["completion_mask"])
    shared = checked(model, batch)
    assert shared.serves is None
    shared.check(model, lambda *rows: padded(model, *rows)[0], BATCH)
    assert shared.serves


def test_one_line_says_how_many_positions_an_update_computes(policy_path, tmp_path, caplog):
    with caplog.at_level(logging.WARNING):
        trainer = trained(GRPO, policy_path, tmp_path, **LOSSLESS, **{**SEVERAL, "num_iterations": 1})
    (message,) = [one.getMessage() for one in caplog.records if "once per group" in one.getMessage()]
    computed, plain = (int(number.replace(",", "")) for number in re.findall(r"[\d,]+\d", message))
    assert computed / plain == fractions(trainer)[0] < 0.5


# In training

LOSSLESS = {"snr_strategy": "lossless"}
TRAINING = {"beta": 0.0, "learning_rate": 1e-4, "max_steps": 3, "weight_decay": 0.1}


ADAPTER = LoraConfig(r=4, target_modules="all-linear", task_type=TaskType.CAUSAL_LM)


def trained(
    algorithm, policy_path, folder, plain=False, config=None, rewards=None, adapter=None, own=None, **settings
):
    replay = replay_of(policy_path, rewards)
    args = algorithm.args(folder, plain, **{**TRAINING, **settings})
    model = policy_path
    if config is not None:
        config = copy.deepcopy(config)
        config.vocab_size = len(replay.tokenizer)
        model = model_of(config)
    trainer = algorithm.make(
        model, args, replay, trainer_class=own, processing_class=replay.tokenizer, peft_config=adapter
    )
    trainer.train()
    return trainer


def fractions(trainer):
    return [row["snr/update_compute_fraction"] for row in trainer.state.log_history if "loss" in row]


SEVERAL = {"num_iterations": 2, "per_device_train_batch_size": 8, "gradient_accumulation_steps": 2}
NOISE = {"adam_epsilon": 1e-5}  # with a smaller one, Adam takes full steps along rounding errors
# Each loss with shared prompts is in test_lossless_settings.
SETTINGS = {
    "dapo": (GRPO, {"loss_type": "dapo"}),
    "bnpo, checkpointing": (GRPO, {"loss_type": "bnpo", "gradient_checkpointing": True}),
    "rloo": (RLOO, {}),
    "dapo, LoRA": (GRPO, {"loss_type": "dapo", "adapter": ADAPTER}),
    "cispo, a window": slow(GRPO, {"loss_type": "cispo", "config": FITTING["mistral, a window"], **NOISE}),
    "grpo, GPT-2": slow(GRPO, {"loss_type": "grpo", "config": FITTING["gpt2"], **NOISE}),
}


@pytest.mark.parametrize(("algorithm", "settings"), SETTINGS.values(), ids=SETTINGS)
def test_lossless_with_shared_prompts_has_the_parameters_of_trl_for_fewer_positions(
    algorithm, settings, policy_path, tmp_path
):
    settings = {**SEVERAL, "steps_per_generation": 4, **settings}
    plain = trained(algorithm, policy_path, tmp_path, plain=True, **settings)
    ours = trained(algorithm, policy_path, tmp_path, **LOSSLESS, **settings)
    without = trained(algorithm, policy_path, tmp_path, **LOSSLESS, snr_share_prompts=False, **settings)
    assert ours._shared_prompts.serves
    assert apart(ours, plain) < 5e-6 and apart(without, plain) < 5e-6
    assert all(one < other for one, other in zip(fractions(ours), fractions(without), strict=True))


@pytest.mark.parametrize("adapter", [None, slow(ADAPTER)], ids=["whole", "LoRA"])
@pytest.mark.parametrize("algorithm", [GRPO, slow(RLOO)], ids=["grpo", "rloo"])
def test_the_reference_computes_shared_prompts_as_it_computes_padded_rows(algorithm, adapter, policy_path, tmp_path):
    settings = {**SEVERAL, "beta": 0.5, "snr_strategy": "nonzero", "adapter": adapter, "learning_rate": 1e-3, **NOISE}
    shared, padded_rows = (
        trained(algorithm, policy_path, tmp_path, snr_share_prompts=share, **settings) for share in (True, False)
    )
    assert shared._shared_prompts.serves and shared.state.log_history[0]["kl"] < 1e-3  # as the policy has begun
    assert apart(shared, padded_rows) < 1e-5


FALCON = FalconConfig(**SIZES, attention_dropout=0.0, hidden_dropout=0.0)


def test_padded_rows_are_recomputed_in_the_backward_pass_as_they_were_computed(policy_path, tmp_path):
    """Falcon's layers ask for the name of their attention, which is another one over a tree."""
    settings = {**SEVERAL, "config": FALCON, "gradient_checkpointing": True, **NOISE}
    plain = trained(GRPO, policy_path, tmp_path, plain=True, **settings)
    ours = trained(GRPO, policy_path, tmp_path, **LOSSLESS, **settings)
    assert ours._shared_prompts.serves is False
    assert apart(ours, plain) < 5e-6


def test_a_loss_of_ones_own_gets_no_more_rows_than_trls(policy_path, tmp_path):
    rows = []

    class Own(GRPO.trainer):
        def _compute_loss(self, model, inputs):
            rows.append(len(inputs["prompt_ids"]))
            return super()._compute_loss(model, inputs)

    settings = {**SEVERAL, "snr_strategy": "nonzero", "snr_share_prompts": True}
    assert trained(GRPO, policy_path, tmp_path, own=Own, **settings)._shared_prompts.serves
    assert max(rows) <= SEVERAL["per_device_train_batch_size"]


def with_holes(of, algorithm, plain):
    """A subclass that masks a token inside the prompts or completions of the second generation and those after it."""

    class Holes(algorithm.plain_trainer if plain else algorithm.trainer):
        generations = 0

        def _generate_and_score_completions(self, inputs):
            batch = super()._generate_and_score_completions(inputs)
            self.generations += 1
            if self.generations > 1:
                mask = batch[f"{of}_mask"].clone()
                mask[:, -2 if of == "prompt" else 1] = 0
                batch[f"{of}_mask"] = mask
            return batch

    return Holes


@pytest.mark.parametrize("of", ["completion", "prompt"])
@pytest.mark.parametrize("algorithm", [GRPO, slow(RLOO)], ids=["grpo", "rloo"])
def test_rows_with_holes_in_their_masks_train_as_in_trl(algorithm, of, policy_path, tmp_path):
    ends, settings = [], {**SEVERAL, "steps_per_generation": 2, "max_steps": 4}
    for plain in (True, False):
        trainer = trained(
            algorithm,
            policy_path,
            tmp_path,
            plain,
            own=with_holes(of, algorithm, plain),
            **({} if plain else LOSSLESS),
            **settings,
        )
        assert trainer.generations == 2
        ends.append(trainer)
    assert ends[1]._shared_prompts.serves and apart(*ends) < 5e-6
    shared, padded_rows = fractions(ends[1])[0], fractions(ends[1])[-1]
    assert shared < padded_rows


ROPE = {"rope_theta": 1e4, "rope_type": "dynamic", "factor": 4.0}
LONG_ROPE = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0, 3.0, 4.0, 5.0], "factor": 4.0}


def with_scaling(rope, tokens):
    """A model whose rotary frequencies change with the width of rows of more than so many tokens."""
    settings = {"rope_parameters": rope, "max_position_embeddings": tokens}
    if rope["rope_type"] == "longrope":
        rope = {**rope, "original_max_position_embeddings": tokens, "rope_theta": 1e4}
        settings = {"rope_parameters": rope, "max_position_embeddings": 256}
    return LlamaConfig(**SIZES, **MLP, **settings)


NESTED = {"full_attention": dict(ROPE), "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}


@pytest.mark.parametrize("rope", [ROPE, LONG_ROPE], ids=["dynamic", "longrope"])
def test_rows_so_wide_that_their_width_decides_on_frequencies_are_padded_and_it_is_said_once(rope, caplog):
    short = batch_of([6], [5, 4], groups=2)
    for tokens, packs in ((IDS.size(1) + 1, True), (IDS.size(1), False)):
        caplog.clear()
        model = model_of(with_scaling(rope, tokens))
        with caplog.at_level(logging.WARNING):
            shared = checked(model)
            assert shared.serves is (True if packs else None)
            for batch in (short, BATCH):
                shared.check(model, lambda *rows, model=model: padded(model, *rows)[0], batch)
        assert shared.serves and shared.positions(short) < 2 * 11
        assert (shared(model, IDS, MASK, WIDTH) is not None) == packs == (shared.positions(BATCH) < IDS.numel())
        told = [record.getMessage() for record in caplog.records]
        assert len(told) == (not packs) and all(repr(rope["rope_type"]) in one for one in told)


def test_frequencies_may_depend_on_the_width_in_some_layers_alone():
    settings = {"max_position_embeddings": 19, "layer_types": ["full_attention", "sliding_attention"]}
    config = Gemma3TextConfig(**SIZES, **MLP, head_dim=8, rope_parameters=NESTED, **settings)
    assert length_dependent(config) == (19, "dynamic")
    assert length_dependent(FITTING["llama"]) is None and length_dependent(FITTING["gpt2"]) is None


@pytest.mark.parametrize(("tokens", "share"), [(37, None), (38, None), slow(37, False)])
@pytest.mark.parametrize("rope", [ROPE, LONG_ROPE], ids=["dynamic", "longrope"])
@pytest.mark.parametrize("algorithm", [GRPO, slow(RLOO)], ids=["grpo", "rloo"])
def test_frequencies_that_depend_on_the_width_of_rows_are_those_of_trl(
    algorithm, rope, tokens, share, policy_path, tmp_path, caplog
):
    """Rows of two generations are 25 columns wide, those of another 39."""
    settings = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 4, "num_iterations": 2}
    settings |= {"config": with_scaling(rope, tokens), "max_steps": 5, **NOISE}
    plain = trained(algorithm, policy_path, tmp_path, plain=True, **settings)
    with caplog.at_level(logging.WARNING):
        ours = trained(algorithm, policy_path, tmp_path, **LOSSLESS, snr_share_prompts=share, **settings)
    assert apart(ours, plain) < 5e-6
    if share is None:
        assert ours._shared_prompts.serves and f"rope_type={rope['rope_type']!r}" in caplog.text


def test_holes_in_the_first_batch_do_not_end_sharing():
    holes = {**BATCH, "completion_mask": BATCH["completion_mask"].clone()}
    holes["completion_mask"][:, 1] = 0
    shared = checked(model_of(FITTING["llama"]), holes)
    assert shared.serves and shared.positions(holes) == IDS.numel() > shared.positions(BATCH)


def test_a_batch_of_live_groups_shares_prompts_too(policy_path, tmp_path):
    rewards = {prompt: [0.0, 1.0] * 4 for prompt in replay_of(policy_path).rewards}
    args = partial(GRPO.args, tmp_path, per_device_train_batch_size=16, gradient_accumulation_steps=2)
    made = {}
    for share in (True, False):
        trainer = GRPO.make(
            policy_path, args(**LOSSLESS, **TRAINING, snr_share_prompts=share), replay_of(policy_path, rewards)
        )
        trainer.train()
        made[share] = trainer
    assert apart(made[True], made[False]) < 5e-6
    assert max(fractions(made[True])) < 0.8 * min(fractions(made[False]))


def test_a_model_that_packing_does_not_fit_has_its_rows_dealt_by_length(policy_path, tmp_path):
    layout = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 8, "max_steps": 1}
    rewards = {prompt: [0.0, 1.0] * 2 for prompt in replay_of(policy_path).rewards}
    settings = {"config": OPT, "rewards": rewards, **LOSSLESS, **layout}
    ours, without = (
        trained(GRPO, policy_path, tmp_path, snr_share_prompts=share, **settings) for share in (None, False)
    )
    assert ours._shared_prompts.serves is False
    assert fractions(ours) == fractions(without)


@pytest.mark.parametrize("share", [None, True])
def test_dropout_and_lossless_do_not_share(share, policy_path, tmp_path, caplog):
    """TRL draws once per completion, a packed row once per prompt."""
    adapter = LoraConfig(r=2, lora_dropout=0.5, target_modules="all-linear", task_type=TaskType.CAUSAL_LM)
    make = partial(GRPO.make, policy_path, peft_config=adapter)
    args = GRPO.args(tmp_path, **LOSSLESS, **TRAINING, snr_share_prompts=share)
    if share:
        with pytest.raises(ValueError, match=r"snr_share_prompts=True.*dropout of 0\.5"):
            make(args, replay_of(policy_path))
    else:
        assert make(args, replay_of(policy_path))._shared_prompts is None
    other = GRPO.args(tmp_path, **TRAINING, snr_strategy="nonzero", snr_share_prompts=True)
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        assert make(other, replay_of(policy_path))._shared_prompts is not None
    assert "Dropout of 0.5 is drawn once per prompt" in caplog.text


@pytest.mark.parametrize(
    ("config", "rate"),
    [
        (Starcoder2Config(**SIZES, **MLP, residual_dropout=0.3, embedding_dropout=0.2), 0.3),
        (FalconConfig(**SIZES, hidden_dropout=0.3), 0.3),
        (OPTConfig(**SIZES, ffn_dim=48, dropout=0.3), 0.3),
        (LlamaConfig(**SIZES, **MLP, attention_dropout=0.3), 0.3),
        (GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4), 0.1),
        (GPTNeoXConfig(**SIZES, intermediate_size=48, classifier_dropout=0.3), 0.0),
    ],
    ids=lambda value: getattr(value, "model_type", None),
)
def test_dropout_is_seen_wherever_a_model_applies_it(config, rate):
    assert dropout_of(model_of(config)) == rate


def test_dropout_that_trl_has_disabled_is_none():
    model = model_of(GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4))
    disable_dropout_in_model(model)
    assert dropout_of(model) == 0


def test_it_is_on_with_lossless_and_off_elsewhere(policy_path, tmp_path):
    for strategy, shares in (("lossless", True), ("top_p", False), ("all", False)):
        trainer = GRPO.make(policy_path, GRPO.args(tmp_path, snr_strategy=strategy, beta=0.0), replay_of(policy_path))
        assert (trainer._shared_prompts is not None) == shares


def test_where_it_cannot_be_it_is_refused_by_name(policy_path, tmp_path):
    class Own(SNRFilteredGRPOTrainer):
        def _get_per_token_logps_and_entropies(self, *args, **kwargs):
            return super()._get_per_token_logps_and_entropies(*args, **kwargs)

    prefix = PrefixTuningConfig(task_type=TaskType.CAUSAL_LM, num_virtual_tokens=2)
    share = {"snr_share_prompts": True, "snr_strategy": "nonzero"}
    for algorithm, settings, kwargs, named in (
        (PPO, {}, {}, "critic"),
        (GRPO, {}, {"peft_config": prefix}, "virtual tokens"),
        (GRPO, {}, {"trainer_class": Own}, "Own has a _get_per_token_logps"),
    ):
        args = algorithm.args(tmp_path, **share, **settings)
        with pytest.raises(ValueError, match=f"snr_share_prompts=True.*{named}"):
            algorithm.make(policy_path, args, replay_of(policy_path), **kwargs)
    with pytest.raises(ValueError, match="snr_share_prompts"):
        SNRFilteredGRPOConfig(str(tmp_path), snr_strategy="all", snr_share_prompts=True)


@pytest.mark.parametrize(
    ("place", "name", "value", "named"),
    [
        ("args", "use_liger_kernel", True, "without log-probs"),
        ("trainer", "aux_loss_enabled", True, "load-balancing loss"),
        ("config", "vision_config", object(), "images"),
    ],
    ids=["liger", "router loss", "vision"],
)
def test_losses_and_models_that_need_padded_rows_are_refused_by_name(place, name, value, named, policy_path, tmp_path):
    args = GRPO.args(tmp_path, snr_strategy="nonzero", snr_share_prompts=True)
    trainer = GRPO.make(policy_path, args, replay_of(policy_path))
    assert shares_prompts(trainer)
    setattr({"args": trainer.args, "trainer": trainer, "config": trainer.model.config}[place], name, value)
    with pytest.raises(ValueError, match=f"snr_share_prompts=True.*{named}"):
        shares_prompts(trainer)


# Old log-probs


class Passes:
    """Rows of each forward pass without gradients."""

    def __init__(self, trainer):
        self.rows = 0
        trainer.model.model.register_forward_pre_hook(self.count, with_kwargs=True)

    def count(self, module, args, kwargs):
        if not torch.is_grad_enabled():
            self.rows += len(kwargs["input_ids"])


@pytest.mark.parametrize(("algorithm", "settings"), [(GRPO, {"num_iterations": 2}), (RLOO, {})], ids=["grpo", "rloo"])
@pytest.mark.parametrize("strategy", ["lossless", "nonzero"])
def test_old_log_probs_are_computed_for_rows_of_groups_with_variance(
    strategy, algorithm, settings, policy_path, tmp_path
):
    replay = replay_of(policy_path)
    live = sum(len(set(rewards)) > 1 for rewards in replay.rewards.values()) * 4
    whole = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 4, "max_steps": 1}
    share = {"snr_strategy": strategy, "snr_share_prompts": False}
    args = algorithm.args(tmp_path, **{**TRAINING, **settings, **whole, **share})
    trainer = algorithm.make(policy_path, args, replay)
    passes = Passes(trainer)
    trainer.train()
    assert 0 < live < 32 and passes.rows == live


class Doubled:
    def _calculate_rewards(self, *rows):
        return 2 * super()._calculate_rewards(*rows)


def test_reward_functions_are_called_once_though_scores_come_first(policy_path, tmp_path):
    """A subclass that changes rewards changes them once; fields of a rollout function reach reward functions."""
    found = []
    for plain in (False, True):
        replay, calls = replay_of(policy_path), []

        def reward(completions, replayed, calls=calls, **kwargs):
            calls.append(len(completions))
            return replayed

        args = GRPO.args(tmp_path, plain, **{**TRAINING, "num_iterations": 2}, **({} if plain else LOSSLESS))
        own = type("Own", (Doubled, GRPO.plain_trainer if plain else GRPO.trainer), {})
        given = {"rollout_func": replay.rollout, "processing_class": replay.tokenizer}
        trainer = GRPO.make(policy_path, args, reward, list(replay.rewards), trainer_class=own, **given)
        trainer.train()
        found.append((trainer, calls, [row["reward"] for row in trainer.state.log_history if "reward" in row]))
    (ours, calls, rewards), (plain, of_plain, plain_rewards) = found
    assert calls == of_plain and rewards == pytest.approx(plain_rewards)
    assert apart(ours, plain) < 5e-6


@pytest.mark.parametrize("pilots", [0, 2], ids=["whole groups", "pilots"])
def test_rounds_end_with_the_parameters_of_old_log_probs_of_every_row(pilots, policy_path, tmp_path):
    ends = []
    for every_row in (True, False):
        args = GRPO.args(
            tmp_path,
            **{**TRAINING, **SEVERAL, "steps_per_generation": 4, **NOISE},
            snr_strategy="nonzero",
            snr_dynamic_sampling_rounds=2,
            snr_pilot_generations=pilots,
        )
        trainer = GRPO.make(policy_path, args, replay_of(policy_path))
        if every_row:  # as where TRL computes them by itself
            trainer._log_probs.needs_every_row = lambda: True
        trainer.train()
        ends.append(trainer)
    assert apart(*ends) < 5e-6
    sums = [sum(row["snr/update_compute_fraction"] for row in one.state.log_history if "loss" in row) for one in ends]
    assert sums[0] != sums[1]


def test_trl_would_compute_old_log_probs_of_the_first_round_alone(policy_path, tmp_path):
    layout = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 4, "max_steps": 1, "num_iterations": 2}
    rounds = {"snr_strategy": "nonzero", "snr_dynamic_sampling_rounds": 2}
    args = GRPO.args(tmp_path, **{**TRAINING, **layout, **rounds})
    trainer, counted = GRPO.make(policy_path, args, replay_of(policy_path)), []
    trainer._plan.count_ahead = lambda computed, plain: counted.append((computed, plain))
    trainer.train()
    computed, plain = zip(*counted, strict=True)
    assert sum(map(bool, plain)) == 1 < sum(map(bool, computed))


# Kernels of a GPU, whose calls are answered by plain loops


def attended(query, key, value, ends, key_ends, most, most_keys, dropout, causal, debug, scale, **windows):
    """What `aten._flash_attention_forward` gives, here for causal attention without dropout alone."""
    assert (dropout, causal, debug) == (0.0, True, False)
    assert (most, most_keys) == (int(ends.diff().max()), int(key_ends.diff().max()))
    left, right = windows.get("window_size_left", -1), windows.get("window_size_right", -1)
    assert (left < 0) == (right < 0)
    out, heads = torch.zeros_like(query), query.size(1) // key.size(1)
    for part in range(len(ends) - 1):
        before, keys = key_ends[part], key_ends[part + 1] - key_ends[part]
        for place in range(ends[part], ends[part + 1]):
            last = keys - (ends[part + 1] - place)  # bottom-right causal
            first = 0 if left < 0 else max(0, last - left)
            for head in range(query.size(1)):
                seen = slice(before + first, before + last + 1), head // heads
                weights = (key[seen] @ query[place, head] * scale).softmax(0)
                out[place, head] = weights @ value[seen]
    return out, None


@pytest.mark.parametrize("window", [None, 3])
def test_one_call_for_all_segments_attends_as_a_call_for_each_part(window, monkeypatch):
    ids = torch.arange(1, 13).repeat(4, 1)
    rows = (ids, 4, [8, 8, 5, 1], [4, 2, 1, 3], [0, 0, 1, 2], [window])
    whole, apart_ = (prompt_tree.build_tree(*rows, uses_flash=flash).branches for flash in (True, False))
    draw = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(len(whole.index), heads, 4, generator=draw) for heads in (4, 2, 2))
    query = query[: int(whole.queries[-1])]
    monkeypatch.setattr(prompt_tree, "_varlen_attn", lambda: None)
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", attended)
    flash = prompt_tree._flash(query, key[whole.index], value[whole.index], whole, 0.3, window)
    parts = prompt_tree._by_part(query, key[apart_.index], value[apart_.index], apart_, 0.3, window)
    assert torch.allclose(flash, parts, atol=1e-6)


def test_a_tree_refuses_dropout_of_attention():
    tree = prompt_tree.build_tree(torch.arange(6)[None], 2, [4], [2], [0], [None], uses_flash=False)
    heads = [torch.zeros(1, 2, tree.ids.size(1), 4)] * 3
    with pytest.raises(ValueError, match="dropout"):
        prompt_tree._attention("sdpa", None, *heads, None, prompt_tree=tree.branches, dropout=0.1)

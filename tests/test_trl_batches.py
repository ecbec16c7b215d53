"""What rides along with the rows of TRL's batches, and the models, losses and logs that go with them."""

import logging

import pandas as pd
import pytest
import torch
import transformers
from conftest import PROMPTS
from datasets import Dataset
from fidelity import (
    REFILL,
    VARIED,
    all_ways,
    alternating,
    both,
    dataset_of,
    replay_of,
    row_of,
    rows_of,
    run,
    text_of,
)
from peft import LoraConfig
from PIL import Image
from replay import Replay
from transformers import AutoTokenizer, Qwen3Config, Qwen3MoeConfig, Qwen3MoeForCausalLM

pytestmark = pytest.mark.slow

# What rides along with the rows


def fingerprints_of(trainer, batch):
    """A number for each row that hardly any other has."""
    pad, numbers = trainer._tokenizer.pad_token_id, []
    for row in torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1).tolist():
        ids = [token for token in row if token != pad]
        numbers.append(float(sum((place + 1) * token for place, token in enumerate(ids)) % 9973))
    return numbers


def riding_along(add):
    """Adds to each sampled batch what `add(batch, fingerprints)` returns; the model is not shown any of it."""

    def prepare(trainer):
        sample, forward = trainer._sample_round, trainer._get_per_token_logps_and_entropies

        def sampled(inputs, number):
            batch = sample(inputs, number)
            return {**batch, **add(batch, fingerprints_of(trainer, batch))}

        def without_images(*args, **kwargs):
            names = ("pixel_values", "image_grid_thw", "num_images", "mm_token_type_ids")
            return forward(*args, **{key: value for key, value in kwargs.items() if key not in names})

        trainer._sample_round, trainer._get_per_token_logps_and_entropies = sampled, without_images

    return prepare


@both
@pytest.mark.parametrize("layout", [{}, {"num_iterations": 2, "steps_per_generation": 2}], ids=str)
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_sampling_log_probs_and_ratios_stay_with_their_rows(level, layout, snr, policy_path, make_args):
    def add(batch, marks):
        marks = torch.tensor(marks).unsqueeze(1)
        mask = batch["completion_mask"]
        ratio = 2 * marks * mask + (1 - mask) if level == "token" else 2 * marks
        return {"sampling_per_token_logps": marks * mask, "importance_sampling_ratio": ratio}

    args = make_args(per_device_train_batch_size=16, max_steps=4, **layout, **snr)
    trainer = run(policy_path, args, prepare=riding_along(add))
    for batch in trainer.seen:
        for key, expected in add(batch, fingerprints_of(trainer, batch)).items():
            assert torch.equal(batch[key], expected)


def test_sequence_ratios_stay_whole_when_a_round_samples_single_tokens(policy_path, make_args):
    """A ratio per sequence is (rows, 1), and so is everything per token in a batch of single-token completions."""
    replay, ratio = replay_of(policy_path), "importance_sampling_ratio"

    def rollout(prompts, trainer):
        output = replay.rollout(prompts, trainer)
        lengths.append(5 if len(lengths) % 2 else 1)
        return {**output, "completion_ids": [ids[:1] * lengths[-1] for ids in output["completion_ids"]]}

    lengths, add = [], lambda batch, marks: {ratio: torch.tensor(marks).unsqueeze(1)}
    args = make_args(per_device_train_batch_size=16, **REFILL)
    trainer = run(policy_path, args, None, Replay.reward, riding_along(add), rollout_func=rollout)
    assert all(batch[ratio].shape == (len(batch["prompt_ids"]), 1) for batch in trainer.seen)


@both
@pytest.mark.parametrize("layout", [{}, {"num_iterations": 2, "steps_per_generation": 2}], ids=str)
def test_images_stay_with_their_rows_and_the_callback_says_once_that_it_cannot_measure_them(
    layout, snr, policy_path, make_args, caplog
):
    """0 to 2 images a row, of 1 to 3 patches that carry the row's fingerprint; the text model is not shown them."""

    def images_of(mark):
        return [1 + (int(mark) + image) % 3 for image in range(int(mark) % 3)]

    def add(batch, marks):
        sizes = [images_of(mark) for mark in marks]
        return {
            "pixel_values": torch.tensor([[m] for m, s in zip(marks, sizes, strict=True) for _ in range(sum(s))]),
            "image_grid_thw": torch.tensor([[1, 1, size] for row in sizes for size in row]),
            "num_images": [len(row) for row in sizes],
            "mm_token_type_ids": torch.cat([batch["prompt_ids"], 0 * batch["completion_ids"]], dim=1),
        }

    args = make_args(per_device_train_batch_size=16, max_steps=4, **layout, **snr)
    with caplog.at_level(logging.WARNING):
        trainer = run(policy_path, args, prepare=riding_along(add))
    for batch in trainer.seen:
        expected = add(batch, fingerprints_of(trainer, batch))
        assert batch["num_images"] == expected["num_images"]
        assert all(torch.equal(batch[key], expected[key]) for key in ("pixel_values", "image_grid_thw"))
        prompts = batch["mm_token_type_ids"] * (batch["mm_token_type_ids"] != trainer._tokenizer.pad_token_id)
        masked = batch["prompt_ids"] * batch["prompt_mask"]
        assert torch.equal(prompts, torch.cat([masked, 0 * batch["completion_ids"]], dim=1))
    silent = [text for text in caplog.messages if "completions with images cannot be scored" in text]
    assert len(silent) == 1


def test_rounds_with_images_beside_rounds_without_keep_them_with_their_rows(policy_path, make_args):
    """An image each in every other round, which carries the row's fingerprint; the text model is not shown it."""
    calls, shown = [], set()

    def add(batch, marks):
        calls.append(marks)
        if len(calls) % 2 == 0:
            return {}
        shown.update(marks)
        return {"pixel_values": torch.tensor(marks).unsqueeze(1), "num_images": [1] * len(marks)}

    # One step: a prompt that comes again would have the same fingerprints with and without an image.
    args = make_args(**{"per_device_train_batch_size": 16, **REFILL, "max_steps": 1})
    trainer = run(policy_path, args, prepare=riding_along(add))
    mixed = []
    for batch in trainer.seen:
        marks = fingerprints_of(trainer, batch)
        with_image = [mark for mark in marks if mark in shown]
        if with_image:
            assert batch["num_images"] == [int(mark in shown) for mark in marks]
            assert batch["pixel_values"].tolist() == [[mark] for mark in with_image]
        else:
            assert not {"pixel_values", "num_images"} & set(batch)
        mixed.append(0 < len(with_image) < len(marks))
    assert any(mixed)


LOOK_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% for b in m.content %}"
    "{{ '<image>' if b.type == 'image' else b.text }}{% endfor %}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
)


def vision_model(policy_path):
    """A two-layer Llava of 4 patches an image, and its processor."""
    tokenizer = AutoTokenizer.from_pretrained(policy_path)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    shapes = transformers.CLIPImageProcessorPil(size={"shortest_edge": 8}, crop_size={"height": 8, "width": 8})
    processor = transformers.LlavaProcessor(
        shapes, tokenizer, 4, "default", LOOK_TEMPLATE, num_additional_image_tokens=1
    )
    text = Qwen3Config.from_pretrained(policy_path, vocab_size=len(tokenizer))
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    vision = transformers.CLIPVisionConfig(**sizes, image_size=8, patch_size=4, projection_dim=16)
    image_token = tokenizer.convert_tokens_to_ids("<image>")
    config = {"vision_config": vision, "text_config": text, "image_token_index": image_token}
    torch.manual_seed(7)
    model = transformers.LlavaForConditionalGeneration(transformers.LlavaConfig(**config, vision_feature_layer=-1))
    model.generation_config.eos_token_id = list(range(0, len(tokenizer), 8))
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    return model, processor


@all_ways
def test_a_vision_language_model_sees_the_images_of_its_kept_prompts(snr, policy_path, make_args):
    model, processor = vision_model(policy_path)
    images = [[Image.new("RGB", (8, 8), (30 * number, 0, 99))] * (1 + number % 2) for number in range(8)]
    prompts = [[{"role": "user", "content": prompt}] for prompt in PROMPTS]
    dataset = Dataset.from_dict({"prompt": prompts, "images": images})
    trainer = run(model, make_args(per_device_train_batch_size=16, **snr), dataset, processing_class=processor)
    for batch in trainer.seen:
        texts = trainer._tokenizer.batch_decode(batch["prompt_ids"], skip_special_tokens=True)
        rows = [row_of(text) for text in texts]
        assert set(rows) <= set(VARIED)
        expected = processor.image_processor([image for row in rows for image in images[row]], return_tensors="pt")
        assert torch.equal(batch["pixel_values"], expected["pixel_values"])
        assert batch["num_images"] == [len(images[row]) for row in rows]
    assert not [key for row in rows_of(trainer) for key in row if key.startswith("mi/")]


@both
def test_padding_to_a_multiple_holds_in_every_micro_batch(snr, policy_path, make_args):
    args = make_args(per_device_train_batch_size=4, steps_per_generation=4, pad_to_multiple_of=4, max_steps=8, **snr)
    trainer = run(policy_path, args)
    assert {batch[key].size(1) % 4 for batch in trainer.seen for key in ("prompt_ids", "completion_ids")} == {0}


# Models


def mixture_of_experts(policy_path):
    tokenizer = AutoTokenizer.from_pretrained(policy_path)
    sizes = {"hidden_size": 32, "moe_intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    heads = {"num_key_value_heads": 2, "head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2}
    config = Qwen3MoeConfig(vocab_size=len(tokenizer), pad_token_id=tokenizer.pad_token_id, **sizes, **heads)
    torch.manual_seed(7)
    model = Qwen3MoeForCausalLM(config)
    model.generation_config.eos_token_id = list(range(0, len(tokenizer), 8))
    return model, tokenizer


@both
def test_load_balancing_losses_of_mixtures_of_experts_train(snr, policy_path, make_args):
    model, tokenizer = mixture_of_experts(policy_path)
    args = make_args(per_device_train_batch_size=16, router_aux_loss_coef=0.1, **snr)
    trainer = run(model, args, processing_class=tokenizer)
    assert all(row["aux_loss"] > 0 for row in rows_of(trainer))


@both
@pytest.mark.parametrize("kind", ["reference", "synchronised reference", "adapter"])
def test_reference_models_and_adapters(kind, snr, policy_path, make_args):
    settings = {"sync_ref_model": True, "ref_model_sync_steps": 1} if kind == "synchronised reference" else {}
    adapter = LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM") if kind == "adapter" else None
    args = make_args(per_device_train_batch_size=16, beta=0.1, num_iterations=2, max_steps=4, **settings, **snr)
    trainer = run(policy_path, args, peft_config=adapter)
    assert rows_of(trainer)[-1]["kl"] > 0
    assert all("ref_per_token_logps" in batch for batch in trainer.seen)


@pytest.mark.parametrize("loss_type", ["grpo", "dr_grpo", "dapo", "bnpo", "cispo", "sapo", "luspo", "vespo"])
def test_every_loss_trains_on_batches_of_dynamic_sampling(loss_type, policy_path, make_args):
    args = make_args(per_device_train_batch_size=16, max_steps=2, loss_type=loss_type, **REFILL)
    run(policy_path, args)


# Logging and evaluation


def test_logged_completions_have_a_value_in_every_column(policy_path, make_args, tmp_path):
    def reward(prompts, log_extra, log_metric, **kwargs):
        log_extra("own", [f"own {text_of(prompt)}" for prompt in prompts])
        log_metric("mine", 1.0)
        return alternating(prompts)

    args = make_args(per_device_train_batch_size=16, log_completions=True, num_completions_to_print=1, **REFILL)
    trainer = run(policy_path, args, reward=reward)
    assert all(row["mine"] == 1.0 for row in rows_of(trainer))
    tables = sorted((tmp_path / "run" / "completions").glob("*.parquet"))
    assert len(tables) == args.max_steps
    for table in map(pd.read_parquet, tables):
        assert len(table) == 16
        assert {"step", "prompt", "completion", "reward", "own", "advantage"} <= set(table.columns)
        assert not table.isna().any().any()
        assert all(own == f"own {prompt}" for own, prompt in zip(table["own"], table["prompt"], strict=True))


def test_evaluation_during_training_is_neither_filtered_nor_filled_up_nor_measured(policy_path, make_args):
    counts = {"train": [], "eval": []}

    def prepare(trainer):
        generate = trainer._generate

        def counted(prompts):
            counts["train" if trainer.model.training else "eval"].append(len(prompts))
            return generate(prompts)

        trainer._generate = counted

    settings = {"eval_strategy": "steps", "eval_steps": 1, "num_generations_eval": 2, "per_device_eval_batch_size": 8}
    args = make_args(per_device_train_batch_size=16, **settings, **REFILL)
    trainer = run(policy_path, args, prepare=prepare, eval_dataset=dataset_of())
    evaluations = [row for row in trainer.state.log_history if "eval_reward" in row]
    assert len(evaluations) == 3
    assert counts["eval"] == [8, 8] * 3
    assert sum(counts["train"]) == 4 * sum(row["snr/prompts_used"] for row in rows_of(trainer))
    assert not [key for row in evaluations for key in row if "snr/" in key or "mi/" in key]
    assert all(row["eval_reward"] == 0.25 for row in evaluations)

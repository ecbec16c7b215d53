"""What TRL's GRPO supports keeps working when groups are dropped, when batches are refilled, and while measured."""

import logging
import math

import pandas as pd
import pytest
import torch
import transformers
from conftest import PROMPTS, assert_same_parameters, log_rows, parameters_of
from datasets import Dataset
from peft import LoraConfig
from PIL import Image
from replay import GROUP_SIZE, Recorder, Replay, assert_close, gradients_of, mean_gradient
from transformers import AutoTokenizer, Qwen3Config, Qwen3MoeConfig, Qwen3MoeForCausalLM
from trl import GRPOTrainer

from ragen2_trl import MutualInformationCallback, SNRFilteredGRPOTrainer

pytestmark = pytest.mark.slow

VARIED = (0, 3, 5, 6)  # prompts whose groups have reward variance; the others are dropped
REFILL = {"snr_dynamic_sampling_rounds": 2}
SELECT = {"snr_prompt_selection": True, "max_steps": 5}  # the second epoch begins with step 3
both = pytest.mark.parametrize("snr", [{}, REFILL], ids=["filter", "refill"])
all_ways = pytest.mark.parametrize("snr", [{}, REFILL, SELECT], ids=["filter", "refill", "selection"])


def text_of(prompt):
    text = prompt if isinstance(prompt, str) else prompt[-1]["content"]
    return text if isinstance(text, str) else text[-1]["text"]


def alternating(prompts, **kwargs):
    """0, 1, 0, 1 in the groups of the varied prompts, 0 in the others."""
    return [number % 2 * float(row_of(text_of(prompt)) in VARIED) for number, prompt in enumerate(prompts)]


def row_of(text):
    """Number of the prompt that a text holds."""
    return max((n for n, prompt in enumerate(PROMPTS) if prompt in text), key=lambda n: len(PROMPTS[n]))


def dataset_of(**columns):
    return Dataset.from_dict({"prompt": PROMPTS, **columns})


def run(policy, args, dataset=None, reward=alternating, prepare=None, resume=None, **kwargs):
    """A trained trainer, measured at every step; `trainer.seen` are the batches that reached the loss."""
    dataset = dataset_of() if dataset is None else dataset
    trainer = SNRFilteredGRPOTrainer(policy, reward, args, dataset, **kwargs)
    trainer.seen, trainer.weights, compute = [], [], trainer._compute_loss

    def seeing(model, inputs):
        if model.training:
            trainer.seen.append(inputs)
            trainer.weights.append(trainer._micro_step.weight)
        return compute(model, inputs)

    trainer._compute_loss = seeing
    if prepare is not None:
        prepare(trainer)
    trainer.add_callback(MutualInformationCallback(trainer, every=1, min_prompts=2))
    start = parameters_of(trainer)
    trainer.train(resume_from_checkpoint=resume)
    assert trainer.state.global_step == args.max_steps
    rows = log_rows(trainer)
    assert all(math.isfinite(value) for row in rows for value in row.values() if isinstance(value, float))
    assert min(row["snr/kept_fraction"] for row in rows) < 1
    if args.learning_rate:
        assert any(not torch.equal(start[name], value) for name, value in parameters_of(trainer).items())
    if args.snr_dynamic_sampling_rounds:
        assert any(row["snr/sampling_rounds"] for row in rows)
    if args.snr_prompt_selection:
        assert any(row["snr/skipped_prompts"] for row in rows)
    return trainer


def varied_rows_only(trainer):
    """Whether the rows with a weight in the update are all of varied prompts."""
    batches = [b["prompt_ids"] for b, weight in zip(trainer.seen, trainer.weights, strict=True) if weight > 0]
    texts = [text for ids in batches for text in trainer._tokenizer.batch_decode(ids, skip_special_tokens=True)]
    return set(texts) <= {PROMPTS[number] for number in VARIED}


def replay_of(policy_path, kind=Replay):
    rewards = {p: [0.0, 1.0, 0.0, 0.5] if n in VARIED else [0.0] * 4 for n, p in enumerate(PROMPTS)}
    return kind(AutoTokenizer.from_pretrained(policy_path), rewards)


# Tools, environments, rollout functions


class Turns(Replay):
    """Replayed completions of two turns, with a column of their own for the reward."""

    def rollout(self, prompts, trainer):
        output = super().rollout(prompts, trainer)
        output["completion_ids"] = [[40, 41, 210, 211, *ids] for ids in output["completion_ids"]]
        output["env_mask"] = [[1, 1, 0, 0] + [1] * (len(ids) - 4) for ids in output["completion_ids"]]
        return output


@all_ways
def test_rollout_functions_keep_their_columns_and_masks(snr, policy_path, make_args):
    args = make_args(per_device_train_batch_size=16, max_completion_length=16, **snr)
    replay = replay_of(policy_path, Turns)
    answers = []

    def reward(replayed, answer, prompts, **kwargs):
        answers.extend(zip(answer, prompts, strict=True))
        return replayed

    dataset = dataset_of(answer=[prompt.upper() for prompt in PROMPTS])
    trainer = run(policy_path, args, dataset, reward, rollout_func=replay.rollout)
    assert all(answer == prompt.upper() for answer, prompt in answers)
    assert varied_rows_only(trainer)
    for batch in trainer.seen:
        assert (batch["tool_mask"][:, 2:4] == 0).all()
        assert (batch["tool_mask"][:, :2] == 1).all()
    assert all(row["mi/trajectory/turn_2/num_completions"] > 0 for row in log_rows(trainer))


# Truncated completions


@both
@pytest.mark.parametrize("kind", [Replay, Turns])
def test_truncated_completions_are_measured_although_they_are_not_trained_on(kind, snr, policy_path, make_args):
    """No completion ends with the end token: all are masked, and they are measured as if they were not."""
    measured = []
    for masked in (True, False):
        args = make_args(
            per_device_train_batch_size=16,
            max_completion_length=16,
            max_steps=1,
            learning_rate=0.0,
            mask_truncated_completions=masked,
            **snr,
        )
        replay = replay_of(policy_path, kind)
        for completions in replay.completions.values():
            completions[:] = [[40 + token % 100 // 8 * 8 + 1 for token in ids] for ids in completions]
        trainer = run(policy_path, args, reward=Replay.reward, rollout_func=replay.rollout)
        (row,) = log_rows(trainer)
        assert row["completions/clipped_ratio"] == 1
        measured.append({key: value for key, value in row.items() if key.startswith("mi/") and key != "mi/seconds"})
    assert measured[0].keys() == measured[1].keys()
    assert measured[0] == pytest.approx(measured[1])


# Datasets


def test_completions_of_a_refilled_prompt_have_messages_of_their_own(policy_path, make_args):
    """As in TRL's own batches: a rollout function may append to the messages it is given."""
    replay, lengths = replay_of(policy_path), []

    def rollout(prompts, trainer):
        texts = [messages[0]["content"] for messages in prompts]
        for messages in prompts:
            lengths.append(len(messages))
            messages.append({"role": "assistant", "content": "Up"})
        return replay.rollout(texts, trainer)

    dataset = Dataset.from_dict({"prompt": [[{"role": "user", "content": prompt}] for prompt in PROMPTS]})
    args = make_args(per_device_train_batch_size=16, **REFILL)
    run(policy_path, args, dataset, Replay.reward, rollout_func=rollout)
    assert set(lengths) == {1}


# Rewards


# Layouts of steps

LAYOUTS = {
    "two iterations": {"num_iterations": 2, "max_steps": 2},
    "several optimizer steps a generation": {"steps_per_generation": 4, "max_steps": 4},
    "several of both": {"steps_per_generation": 4, "gradient_accumulation_steps": 2, "num_iterations": 2},
    "several generations an optimizer step": {"gradient_accumulation_steps": 2, "steps_per_generation": 1},
}


@pytest.mark.parametrize("loss_type", ["grpo", "dapo"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_refilled_update_is_grpo_on_the_groups_that_filled_it(layout, loss_type, policy_path, make_args):
    settings = {"learning_rate": 0.0, "max_grad_norm": 0.0, "loss_type": loss_type, "beta": 0.1}
    layout = {"max_steps": 4, **LAYOUTS[layout]}
    rows = 32 // layout.get("steps_per_generation", 1)
    replay, recorder, generations = replay_of(policy_path), Recorder(), []

    def prepare(trainer):
        generator = torch.Generator().manual_seed(5)
        for parameter in trainer.model.parameters():
            parameter.data += 0.05 * torch.randn(parameter.shape, generator=generator)
        sample = trainer._generate_and_score_completions

        def refilled(inputs):
            filled = sample(inputs)
            texts = trainer._tokenizer.batch_decode(filled["prompt_ids"], skip_special_tokens=True)
            assert len(texts) == 32
            assert filled["snr_kept"].all()
            generations.append(texts[::GROUP_SIZE])
            return filled

        trainer._generate_and_score_completions = refilled

    args = make_args(per_device_train_batch_size=rows, snr_dynamic_sampling_rounds=20, **settings, **layout)
    run(policy_path, args, None, Replay.reward, prepare, rollout_func=replay.rollout, callbacks=[recorder])
    plain = make_args(snr=False, per_device_train_batch_size=32, max_steps=1, **settings)
    expected = [gradients_of(GRPOTrainer, policy_path, plain, replay, groups)[0] for groups in generations]
    assert_close(mean_gradient(recorder.gradients), mean_gradient(expected))


def test_a_resumed_run_continues_amid_two_iterations_over_a_refilled_batch(policy_path, make_args, tmp_path):
    args = make_args(
        per_device_train_batch_size=16, num_iterations=2, max_steps=6, save_strategy="steps", save_steps=3, **REFILL
    )
    whole = run(policy_path, args)
    again = run(policy_path, args, resume=str(tmp_path / "run" / "checkpoint-3"))
    assert_same_parameters(parameters_of(whole), parameters_of(again))
    assert len(log_rows(again)) == 6
    for first, second in zip(log_rows(whole), log_rows(again), strict=True):
        for key in first.keys() - {"step_time", "mi/seconds", "cost/seconds", "cost/cpu_seconds"}:
            assert first[key] == pytest.approx(second[key]), key


# What rides along with the rows of TRL's batches, and the models, losses and logs that go with them.


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
    assert not [key for row in log_rows(trainer) for key in row if key.startswith("mi/")]


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
    assert all(row["aux_loss"] > 0 for row in log_rows(trainer))


@both
@pytest.mark.parametrize("kind", ["reference", "synchronised reference", "adapter"])
def test_reference_models_and_adapters(kind, snr, policy_path, make_args):
    settings = {"sync_ref_model": True, "ref_model_sync_steps": 1} if kind == "synchronised reference" else {}
    adapter = LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM") if kind == "adapter" else None
    args = make_args(per_device_train_batch_size=16, beta=0.1, num_iterations=2, max_steps=4, **settings, **snr)
    trainer = run(policy_path, args, peft_config=adapter)
    assert log_rows(trainer)[-1]["kl"] > 0
    assert all("ref_per_token_logps" in batch for batch in trainer.seen)


# Logging and evaluation


def test_logged_completions_have_a_value_in_every_column(policy_path, make_args, tmp_path):
    def reward(prompts, log_extra, log_metric, **kwargs):
        log_extra("own", [f"own {text_of(prompt)}" for prompt in prompts])
        log_metric("mine", 1.0)
        return alternating(prompts)

    args = make_args(per_device_train_batch_size=16, log_completions=True, num_completions_to_print=1, **REFILL)
    trainer = run(policy_path, args, reward=reward)
    assert all(row["mine"] == 1.0 for row in log_rows(trainer))
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
    assert sum(counts["train"]) == 4 * sum(row["snr/prompts_used"] for row in log_rows(trainer))
    assert not [key for row in evaluations for key in row if "snr/" in key or "mi/" in key]
    assert all(row["eval_reward"] == 0.25 for row in evaluations)

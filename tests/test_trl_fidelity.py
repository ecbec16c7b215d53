"""What TRL's GRPO supports keeps working when groups are dropped, when batches are refilled, and while measured."""

import logging

import pytest
import torch
from conftest import PROMPTS, assert_same_parameters, parameters_of
from datasets import Dataset
from fidelity import (
    REFILL,
    all_ways,
    alternating,
    both,
    dataset_of,
    replay_of,
    rows_of,
    run,
    varied_rows_only,
)
from replay import GROUP_SIZE, Recorder, Replay, assert_close, gradients_of, mean_gradient
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOTrainer
from trl.chat_template_utils import qwen3_template

pytestmark = pytest.mark.slow

# Tools, environments, rollout functions

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>\n"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n</tool_call>{% endfor %}'
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CALL = '<tool_call>\n{"name": "look", "arguments": {"way": "up"}}\n</tool_call><|im_end|>'


class Lake:
    resets = looks = 0

    def reset(self, **kwargs):
        Lake.resets += 1
        self.looked = False
        return " (lake)"

    def look(self, way: str) -> str:
        """
        Looks around.

        Args:
            way: Where to.
        """
        Lake.looks += 1
        self.looked = True
        return f"goal {way}"

    def get_reward(self):
        return 0.5 * self.looked


def calling_a_tool(trainer):
    """Every other completion calls the tool; what follows is different in each."""
    tokenizer, generator = trainer._tokenizer, torch.Generator().manual_seed(3)
    call = tokenizer(CALL)["input_ids"]

    def generate(prompt_ids, images, fields, num_generations=None, has_tool_images=None):  # asked for after tools only
        words = torch.randint(40, 140, (len(prompt_ids), 5), generator=generator).tolist()
        first = has_tool_images is None
        ends = [call if first and number % 2 else [*ids, tokenizer.eos_token_id] for number, ids in enumerate(words)]
        return ends, None

    trainer._generate_single_turn = generate


@all_ways
@pytest.mark.parametrize("kind", ["tools", "environment"])
def test_tools_and_environments_run_and_what_they_write_stays_out_of_the_loss(kind, snr, policy_path, make_args):
    tokenizer = AutoTokenizer.from_pretrained(policy_path)
    tokenizer.chat_template, tokenizer.response_template = TEMPLATE, qwen3_template
    model = AutoModelForCausalLM.from_pretrained(policy_path, max_position_embeddings=512)
    dataset = Dataset.from_dict({"prompt": [[{"role": "user", "content": prompt}] for prompt in PROMPTS]})
    args = make_args(**{"per_device_train_batch_size": 16, "max_completion_length": 200, "max_steps": 2, **snr})
    tools = {"tools": [Lake().look]} if kind == "tools" else {"environment_factory": Lake}
    Lake.resets = Lake.looks = 0
    trainer = run(model, args, dataset, prepare=calling_a_tool, processing_class=tokenizer, **tools)
    if kind == "environment":
        prompts = 4 * args.max_steps
        if args.snr_dynamic_sampling_rounds:
            prompts = sum(row["snr/prompts_used"] for row in rows_of(trainer))
        assert (Lake.resets, Lake.looks) == (4 * prompts, 2 * prompts)
        assert all(row["rewards/Lake/mean"] == 0.25 for row in rows_of(trainer))
    for row in rows_of(trainer):
        assert row["tools/call_frequency"] == 0.5
        assert row["tools/failure_frequency"] == 0
        assert row["mi/trajectory/turn_2/num_completions"] > 0
    calls = 0
    for batch in trainer.seen:
        masks = batch["completion_mask"] * batch["tool_mask"], batch["completion_mask"] * (1 - batch["tool_mask"])
        for ids, *by in zip(batch["completion_ids"], *masks, strict=True):
            by_model, by_tool = (tokenizer.decode(ids[mask.bool()]) for mask in by)
            assert ("goal up" in by_tool) == ("tool_call" in by_model)
            assert "goal up" not in by_model
            calls += "goal up" in by_tool
    assert calls


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
    assert all(row["mi/trajectory/turn_2/num_completions"] > 0 for row in rows_of(trainer))


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
        (row,) = rows_of(trainer)
        assert row["completions/clipped_ratio"] == 1
        measured.append({key: value for key, value in row.items() if key.startswith("mi/") and key != "mi/seconds"})
    assert measured[0].keys() == measured[1].keys()
    assert measured[0] == pytest.approx(measured[1])


# Datasets


def test_groups_of_an_iterable_dataset_are_filtered_and_measured(policy_path, make_args):
    args = make_args(per_device_train_batch_size=16, shuffle_dataset=False)
    trainer = run(policy_path, args, dataset_of().to_iterable_dataset())
    assert varied_rows_only(trainer)
    assert all("mi/first_turn/retrieval_accuracy" in row for row in rows_of(trainer))


@both
@pytest.mark.parametrize(
    "layout", [{}, {"steps_per_generation": 2}, {"gradient_accumulation_steps": 2, "steps_per_generation": 1}], ids=str
)
def test_several_epochs_over_hardly_more_prompts_than_a_generation_batch_needs(layout, snr, policy_path, make_args):
    dataset = Dataset.from_dict({"prompt": PROMPTS[:5]})
    args = make_args(per_device_train_batch_size=8, max_steps=7, **layout, **snr)
    trainer = run(policy_path, args, dataset)
    assert trainer.state.epoch > 1
    assert varied_rows_only(trainer)


@both
def test_a_single_prompt_trains_and_the_callback_says_why_it_is_silent(snr, policy_path, make_args, caplog):
    calls = []

    def every_other(completions, **kwargs):
        calls.append(len(completions))
        return [float(number % 2) * (len(calls) % 2) for number in range(len(completions))]

    args = make_args(per_device_train_batch_size=4, max_steps=4, **snr)
    with caplog.at_level(logging.WARNING):
        if snr:
            calls.append(0)  # the first generation keeps nothing and the refill does
        trainer = run(policy_path, args, Dataset.from_dict({"prompt": PROMPTS[:1]}), every_other)
    silent = [text for text in caplog.messages if "mutual information (first_turn) is not measured" in text]
    assert len(silent) == 1
    assert "prompt" in silent[0]
    assert not [key for row in rows_of(trainer) for key in row if key.startswith("mi/first_turn")]


def test_rewards_see_the_same_columns_in_every_round_of_a_refill(policy_path, make_args):
    columns = []

    def reward(prompts, **kwargs):
        columns.append(sorted(kwargs))
        return alternating(prompts)

    args = make_args(per_device_train_batch_size=16, remove_unused_columns=True, **REFILL)
    run(policy_path, args, dataset_of(answer=PROMPTS), reward)
    assert all(names == columns[0] for names in columns)


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


@both
def test_several_weighted_rewards_some_of_them_none(snr, policy_path, make_args):
    """The second is asynchronous and knows some rows only, the third none at all; one row is known to nobody."""

    def first(prompts, **kwargs):
        return [None if number == 1 else 2.0 * reward for number, reward in enumerate(alternating(prompts))]

    async def second(prompts, **kwargs):
        return [None if number % 4 == 1 else 1.0 for number in range(len(prompts))]

    def third(prompts, **kwargs):
        return [None] * len(prompts)

    args = make_args(per_device_train_batch_size=16, reward_weights=[0.5, 3.0, 1.0], **snr)
    trainer = run(policy_path, args, reward=[first, second, third])
    for row in rows_of(trainer):
        assert row["rewards/second/mean"] == 1.0
        assert row["rewards/third/mean"] is None


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
    assert len(rows_of(again)) == 6
    for first, second in zip(rows_of(whole), rows_of(again), strict=True):
        for key in first.keys() - {"step_time", "mi/seconds", "cost/seconds", "cost/cpu_seconds"}:
            assert first[key] == pytest.approx(second[key]), key

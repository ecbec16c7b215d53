"""Trainers whose model answers what a test tells it to, over several turns."""

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from ragen2_trl import SNRFilteredGRPOTrainer
from ragen2_trl.envs import format_response, make_env
from ragen2_trl.rollouts.text_rollout import TextRollout

GROUP = 4
LAKE = {"multi_turn": True, "size": 3}


@pytest.fixture(name="policy")
def policy_fixture(policy_path):
    """The random policy with room for several turns."""
    return AutoModelForCausalLM.from_pretrained(policy_path, max_position_embeddings=1024)


@pytest.fixture(name="tokenizer")
def tokenizer_fixture(policy_path):
    return AutoTokenizer.from_pretrained(policy_path)


def make_trainer(policy, tokenizer, args, kind=SNRFilteredGRPOTrainer, rollout=None, **options):
    env = make_env("frozen_lake", **{**LAKE, **options})
    rollout = rollout or TextRollout(env)
    dataset = env.dataset(16, seed=0)
    return kind(
        policy, env.reward_funcs, args, dataset, dataset, processing_class=tokenizer, rollout_func=rollout
    ), rollout


class Player:
    """Plays in place of the policy: every other member follows the solver, the others go up in each turn.

    It reads only the contexts it is given, as a model does, and keeps what it was asked and what it said.
    """

    def __init__(self, trainer, tokenizer):
        self.trainer, self.tokenizer = trainer, tokenizer
        self.calls = []
        trainer._generate_single_turn = self.generate

    def generate(self, contexts, images, fields, num_generations=1):  # which TRL says since 1.14.1
        assert (images, fields, num_generations) == (None, {}, 1)
        answers = [self.answer(number, context) for number, context in enumerate(contexts)]
        self.calls.append((contexts, answers, self.trainer.generation_config.max_new_tokens))
        return [list(answer) for answer in answers], None

    def answer(self, number, context):
        text = self.tokenizer.decode(context)
        turns = text.count("<|im_start|>assistant")
        if number % 3 == 0:
            text = "no tags at all"
        else:
            text = format_response(f"Turn {turns} goes on.", ["Up"] if number % 2 else ["Right", "Down"])
        return [*self.tokenizer(text)["input_ids"], self.tokenizer.eos_token_id]


def capture(trainer):
    """Batches as TRL made them, before any row is dropped."""
    batches, sample = [], trainer._sample_round

    def seeing(inputs, number):
        batch = sample(inputs, number)
        batches.append((inputs, {key: batch[key] for key in batch}))
        return batch

    trainer._sample_round = seeing
    return batches


def rows_of(batch):
    """(prompt ids, completion ids, env mask) of each row, without padding."""
    for prompt, prompt_mask, ids, mask, by_model in zip(
        *(batch[k] for k in ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "tool_mask")),
        strict=True,
    ):
        yield prompt[prompt_mask.bool()].tolist(), ids[mask.bool()].tolist(), by_model[mask.bool()].tolist()


def multi_turn_args(make_args, **overrides):
    return make_args(**{"per_device_train_batch_size": 16, "max_completion_length": 400, "max_steps": 2} | overrides)

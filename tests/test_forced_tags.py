"""Turns that begin with a tag of the prompt: what a model goes on from, what is trained, and what is measured."""

import random

import pytest
from conftest import parameters_of
from players import Player, capture, make_trainer, multi_turn_args, rows_of
from players import policy_fixture as policy_fixture
from players import tokenizer_fixture as tokenizer_fixture
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOTrainer

from ragen2_trl import TextRollout
from ragen2_trl.cli.evaluate import evaluate_model, evaluate_scripted
from ragen2_trl.envs import format_response, make_env
from ragen2_trl.instrument.reasoning import find_turns
from ragen2_trl.rollouts.play import Chat
from ragen2_trl.tiny import TINY_MODEL_PATH

FORMS = [(True, "<think>"), (False, "<answer>")]
forms = pytest.mark.parametrize(("think", "tag"), FORMS, ids=["think", "answer alone"])


class Continuing(Player):
    """Answers without the opening tag, which stands in the prompt."""

    think = True

    def answer(self, number, context):
        turns = self.tokenizer.decode(context).count("<|im_start|>assistant")
        actions = ["Up"] if number % 2 else ["Right", "Down"]
        text = "no tags at all"
        if number % 3:
            text = format_response(f"Turn {turns} goes on.", actions, think=self.think)
        text = text.removeprefix("<think>").removeprefix("<answer>")
        return [*self.tokenizer(text)["input_ids"], self.tokenizer.eos_token_id]


def ids_of(tokenizer, text):
    return tokenizer(text, add_special_tokens=False)["input_ids"]


@forms
@pytest.mark.parametrize("max_turns", [5, 1])
def test_the_context_of_each_turn_ends_with_the_tag_which_is_not_trained(
    policy, tokenizer, make_args, think, tag, max_turns
):
    options = {"force_think": True, "enable_think": think, "multi_turn": max_turns > 1}
    trainer, _ = make_trainer(policy, tokenizer, multi_turn_args(make_args, max_steps=1), **options)
    player, batches = Continuing(trainer, tokenizer), capture(trainer)
    player.think = think
    before = parameters_of(trainer)
    trainer.train()
    assert any((before[name] != value).any() for name, value in parameters_of(trainer).items())
    inputs, batch = batches[0]
    env, opening = make_env("frozen_lake", size=3, **options), ids_of(tokenizer, tag)
    for contexts, _, _ in player.calls:
        assert all(context[-len(opening) :] == opening for context in contexts)
    for row, (prompt, ids, by_model) in zip(inputs, rows_of(batch), strict=True):
        play, messages = env.plays([row["seed"]], {"grid": [row["grid"]]})[0], list(row["prompt"])
        turns = find_turns(prompt, ids, tokenizer, by_model)
        for turn in turns:
            # What was sampled is what the template writes, with the tag behind it and nothing between them.
            written = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
            assert list(turn.context) == ids_of(tokenizer, written + tag)
            assert turn.lead_in == ()  # X includes the opening tag
            own = (prompt + ids)[len(turn.context) :]
            length = next(
                (n for n, mine in enumerate(by_model[len(turn.context) - len(prompt) :]) if not mine), len(own)
            )
            answer = tokenizer.decode(own[:length], skip_special_tokens=True)
            assert turn.valid == ("no tags" not in answer)
            reply = play.respond(answer)
            messages += [{"role": "assistant", "content": tag + answer}, {"role": "user", "content": reply}]
        assert play.done and len(turns) == play.outcome.turns
        assert row["episode"]["episode_return"] == play.outcome.episode_return
        assert row["episode"]["valid_turns"] == play.outcome.valid_turns
    assert {row["episode"]["valid_turns"] > 0 for row in inputs} == {True, False}


def test_without_a_rollout_a_forced_tag_is_refused_in_one_line(policy, tokenizer, make_args):
    env = make_env("frozen_lake", size=3, force_think=True)
    args = multi_turn_args(make_args, max_steps=1, max_completion_length=8)
    trainer = GRPOTrainer(policy, env.reward_funcs, args, env.dataset(16), processing_class=tokenizer)
    with pytest.raises(ValueError, match=r"rollout_func must be TextRollout\(env\) for frozen_lake with force_think"):
        trainer.train()


def test_a_template_that_ends_with_the_tag_itself_gets_no_second_one(tokenizer):
    opening = "{% for m in messages %}{{ m.content }}|{% endfor %}<think>\n"
    chat = Chat(tokenizer, forced_tag="<think>", chat_template=opening)
    assert chat.prompt_ids([{"role": "user", "content": "Go."}]) == ids_of(tokenizer, "Go.|<think>\n")
    bare = Chat(tokenizer, forced_tag="<think>", chat_template=opening.removesuffix("<think>\n"))
    assert bare.prompt_ids([{"role": "user", "content": "Go."}]) == ids_of(tokenizer, "Go.|<think>")


def test_a_rollout_takes_the_turn_limit_of_the_task():
    env = make_env("sokoban", preset="ragen2")
    assert TextRollout(env)._max_turn_tokens == 400
    assert TextRollout(env, max_turn_tokens=7)._max_turn_tokens == 7


def test_an_evaluated_model_goes_on_from_the_tag():
    model = AutoModelForCausalLM.from_pretrained(TINY_MODEL_PATH)
    tokenizer = AutoTokenizer.from_pretrained(TINY_MODEL_PATH)
    settings = {"num_prompts": 8, "num_samples": 1, "temperature": 0.0}
    free, forced = (
        evaluate_model(model, tokenizer, make_env("frozen_lake", force_think=force), **settings)
        for force in (False, True)
    )
    # The shipped model opens its reasoning itself: greedily it writes the same, but for the tag.
    assert forced["completion_length"] == free["completion_length"] - len(ids_of(tokenizer, "<think>"))
    assert (forced["success"], forced["valid_rate"]) == (free["success"], free["valid_rate"])
    assert free["valid_rate"] > 0.5 and 0.0 <= free["random_success"] < 0.5


@forms
@pytest.mark.parametrize("name", ["sokoban", "frozen_lake"])
def test_solvers_and_demonstrations_speak_the_form_that_is_asked_for(name, think, tag):
    env = make_env(name, preset="ragen2", enable_think=think)
    metrics = evaluate_scripted("oracle", env, num_prompts=12, num_samples=1)
    assert metrics["success"] > 0.8 and metrics["valid_rate"] == 1.0
    for row in env.demonstrations(3, seed=0).to_list():
        play = env.play(row | env.dataset(1).to_list()[0], random.Random(0))
        assert all(env.read(m["content"]) for m in row["completion"] if m["role"] == "assistant")
        assert row["completion"][0]["content"].startswith(tag) and not play.done

"""Limits of multi-turn play, where turns end, and wrong use."""

import pytest
from datasets import Dataset
from players import LAKE, Player, capture, make_trainer, multi_turn_args, rows_of
from players import policy_fixture as policy_fixture
from players import tokenizer_fixture as tokenizer_fixture
from trl import GRPOTrainer

from ragen2_trl import SNRFilteredGRPOTrainer
from ragen2_trl.envs import format_response, make_env
from ragen2_trl.rollouts.play import Chat, play_all
from ragen2_trl.rollouts.text_rollout import TextRollout

# Limits


@pytest.mark.parametrize("limit", [30, 60, 100])
def test_an_episode_never_outgrows_the_completion_length(limit, policy, tokenizer, make_args):
    trainer, _ = make_trainer(policy, tokenizer, multi_turn_args(make_args, max_completion_length=limit, max_steps=1))
    Player(trainer, tokenizer)
    batches = capture(trainer)
    trainer.train()
    for _, ids, by_model in rows_of(batches[0][1]):
        assert len(ids) <= limit
        assert by_model[-1] == 1  # nothing that the environment wrote stands at the end


def test_turns_are_no_longer_than_their_limit_and_the_trainers_own_is_left_alone(policy, tokenizer, make_args):
    env = make_env("frozen_lake", **LAKE)
    args = multi_turn_args(make_args, max_steps=1)
    trainer, _ = make_trainer(policy, tokenizer, args, rollout=TextRollout(env, max_turn_tokens=7))
    player, batches = Player(trainer, tokenizer), capture(trainer)
    trainer.train()
    assert {limit for _, _, limit in player.calls} == {7}
    assert trainer.generation_config.max_new_tokens == args.max_completion_length
    assert all(outcome["valid_turns"] == 0 for outcome in (row["episode"] for row in batches[0][0]))
    for _, _, by_model in rows_of(batches[0][1]):
        assert max(map(len, "".join(map(str, by_model)).split("0"))) == 7


def test_an_answer_that_was_cut_off_gets_the_end_of_a_turn_from_the_template(tokenizer):
    chat = Chat(tokenizer)
    word, end = tokenizer("Right")["input_ids"], tokenizer.eos_token_id
    assert chat.reply_ids(word, "Go on")[0] == end
    assert chat.reply_ids([*word, end], "Go on") == chat.reply_ids(word, "Go on")[1:]


TURN_ENDS = (
    # A template whose end of a turn is not the first token after an answer, and one that ends turns in another way.
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}</answer><|im_end|>\n{% endfor %}<|im_start|>",
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:",
)


@pytest.mark.parametrize("template", TURN_ENDS)
@pytest.mark.parametrize("ended", [True, False])
def test_the_end_of_a_turn_stands_once_whatever_the_template(template, ended, tokenizer):
    chat, end = Chat(tokenizer, chat_template=template), [tokenizer.eos_token_id] * ended
    answer = tokenizer("Right")["input_ids"] + end
    whole = tokenizer.decode([*answer, *chat.reply_ids(answer, "Go on")])
    assert whole.count("<|im_end|>") == (2 if "im_end" in template else int(ended))
    assert whole.count("Go on") == 1 and ("user" in whole)


def test_an_answer_of_nothing_is_answered_too(tokenizer):
    assert "Go on" in tokenizer.decode(Chat(tokenizer).reply_ids([], "Go on"))


def test_no_episodes_are_played_without_a_word(tokenizer):
    assert play_all([], [], Chat(tokenizer), lambda contexts, limit: ([], None), max_tokens=10) == []


def test_log_probs_stand_where_the_model_wrote_and_zero_elsewhere(tokenizer):
    env = make_env("frozen_lake", **LAKE)
    rows = env.dataset(4, seed=0)
    plays = env.plays(rows["seed"][:], {"grid": rows["grid"][:]})

    def generate(contexts, limit):
        answer = [*tokenizer(format_response("Go.", ["Up"]))["input_ids"], tokenizer.eos_token_id]
        return [list(answer) for _ in contexts], [[-0.5] * len(answer) for _ in contexts]

    for trajectory in play_all(plays, rows["prompt"][:], Chat(tokenizer), generate, max_tokens=150):
        assert trajectory.play.outcome.turns > 1
        assert trajectory.logprobs == [-0.5 * mine for mine in trajectory.env_mask]
        assert len(trajectory.completion_ids) == len(trajectory.env_mask) <= 150


def test_no_context_outgrows_the_model(tokenizer):
    env = make_env("frozen_lake", **LAKE)
    rows = env.dataset(4, seed=0)
    seen = []

    def generate(contexts, limit):
        seen.extend(len(context) + limit for context in contexts)
        answer = [*tokenizer(format_response("Go.", ["Up"]))["input_ids"], tokenizer.eos_token_id]
        return [list(answer) for _ in contexts], None

    plays = env.plays(rows["seed"][:], {"grid": rows["grid"][:]})
    bound = 160
    trajectories = play_all(
        plays, rows["prompt"][:], Chat(tokenizer), generate, max_tokens=1000, max_turn_tokens=20, max_context=bound
    )
    assert all(len(trajectory.context) <= bound for trajectory in trajectories)
    assert seen


# Wrong use


def test_a_rollout_that_was_not_attached_says_what_to_do(policy, tokenizer, make_args):
    trainer, _ = make_trainer(policy, tokenizer, multi_turn_args(make_args, snr=False), GRPOTrainer)
    with pytest.raises(ValueError, match=r"rollout_func is not attached.*attach\(trainer\)"):
        trainer.train()


def test_several_turns_without_a_rollout_say_what_to_do(policy, tokenizer, make_args):
    env = make_env("frozen_lake", **LAKE)
    trainer = SNRFilteredGRPOTrainer(
        policy, env.reward_funcs, multi_turn_args(make_args), env.dataset(8, seed=0), processing_class=tokenizer
    )
    with pytest.raises(ValueError, match=r"rollout_func must be TextRollout\(env\) for frozen_lake"):
        trainer.train()


def test_a_dataset_of_another_kind_is_named(policy, tokenizer, make_args):
    env = make_env("frozen_lake", **LAKE)
    dataset = Dataset.from_dict({"prompt": [[{"role": "user", "content": "Go"}]] * 8})
    trainer = SNRFilteredGRPOTrainer(
        policy,
        env.reward_funcs,
        multi_turn_args(make_args),
        dataset,
        processing_class=tokenizer,
        rollout_func=TextRollout(env),
    )
    with pytest.raises(ValueError, match=r"train_dataset must be one of env.dataset\(...\), got the columns"):
        trainer.train()


@pytest.mark.parametrize(
    ("options", "limit", "message"),
    [
        ({"protocol": "tools"}, None, "env must be text .* got frozen_lake with protocol='tools'"),
        ({}, 0, "max_turn_tokens must be at least 1, got 0"),
    ],
)
def test_bad_arguments_are_named(options, limit, message):
    with pytest.raises(ValueError, match=message):
        TextRollout(make_env("frozen_lake", **LAKE, **options), limit)

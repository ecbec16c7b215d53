"""Multi-turn play in TRL: what was sampled is what is trained, and nothing that the environment wrote."""

import itertools
import math
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch
from conftest import needs_ends, parameters_of
from datasets import Dataset
from players import GROUP, LAKE, Player, capture, make_trainer, multi_turn_args, rows_of
from players import policy_fixture as policy_fixture
from players import tokenizer_fixture as tokenizer_fixture
from trl import GRPOTrainer
from trl.generation import vllm_generation

from ragen2_trl import MutualInformationCallback, SNRFilteredGRPOTrainer
from ragen2_trl.envs import format_response, make_env
from ragen2_trl.rollouts.play import Chat, play_all
from ragen2_trl.rollouts.text_rollout import TextRollout, _generate, _most
from ragen2_trl.tiny import TINY_MODEL_PATH


def test_the_ids_that_were_sampled_are_the_ids_that_are_trained(policy, tokenizer, make_args):
    trainer, _ = make_trainer(policy, tokenizer, multi_turn_args(make_args, max_steps=1))
    player, batches = Player(trainer, tokenizer), capture(trainer)
    trainer.train()
    said = sorted(answer for _, answers, _ in player.calls for answer in answers)
    trained = []
    for _, ids, by_model in rows_of(batches[0][1]):
        turn = []
        for token, mine in zip([*ids, 0], [*by_model, 0], strict=True):
            if mine:
                turn.append(token)
            elif turn:
                trained, turn = [*trained, turn], []
    assert sorted(trained) == said


def test_every_context_is_the_conversation_as_the_template_writes_it(policy, tokenizer, make_args):
    trainer, _ = make_trainer(policy, tokenizer, multi_turn_args(make_args, max_steps=1))
    player, batches = Player(trainer, tokenizer), capture(trainer)
    trainer.train()
    inputs, batch = batches[0]
    env = make_env("frozen_lake", **LAKE)
    for row, (prompt, ids, by_model) in zip(inputs, rows_of(batch), strict=True):
        play, messages, rest = env.plays([row["seed"]], {"grid": [row["grid"]]})[0], row["prompt"], (ids, by_model)
        while not play.done:
            context = tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
            so_far = len(prompt) + len(ids) - len(rest[0])
            assert (prompt + ids)[:so_far] == context
            length = ([*rest[1], 0]).index(0)
            answer = tokenizer.decode(rest[0][:length], skip_special_tokens=True)
            reply = play.respond(answer)
            messages = [*messages, {"role": "assistant", "content": answer}, {"role": "user", "content": reply}]
            skip = ([*rest[1][length:], 1]).index(1) + length
            rest = rest[0][skip:], rest[1][skip:]
        assert rest == ([], [])
        assert row["episode"]["episode_return"] == play.outcome.episode_return
        assert row["episode"]["turns"] == play.outcome.turns
    assert len({len(contexts) for contexts, _, _ in player.calls}) > 1


def test_finished_episodes_leave_the_batch(policy, tokenizer, make_args):
    trainer, _ = make_trainer(policy, tokenizer, multi_turn_args(make_args, max_steps=1))
    player, batches = Player(trainer, tokenizer), capture(trainer)
    trainer.train()
    turns = [row["episode"]["turns"] for row in batches[0][0]]
    assert [len(contexts) for contexts, _, _ in player.calls] == [
        sum(count > turn for count in turns) for turn in range(max(turns))
    ]
    assert min(turns) < max(turns)


def test_outcomes_reach_rewards_and_logs(policy, tokenizer, make_args):
    trainer, _ = make_trainer(policy, tokenizer, multi_turn_args(make_args))
    Player(trainer, tokenizer)
    batches = capture(trainer)
    trainer.train()
    rows = [row for row in trainer.state.log_history if "loss" in row]
    for row, (inputs, _) in zip(rows, batches, strict=True):
        outcomes = [one["episode"] for one in inputs]
        successes = [outcome["success"] for outcome in outcomes]
        groups = [successes[i : i + GROUP] for i in range(0, len(successes), GROUP)]
        assert row["rewards/frozen_lake_return/mean"] == row["reward"]
        assert row["reward"] == pytest.approx(sum(outcome["episode_return"] for outcome in outcomes) / len(outcomes))
        assert row["env/frozen_lake/success"] == pytest.approx(sum(successes) / len(successes))
        assert row[f"env/frozen_lake/pass@{GROUP}"] == pytest.approx(sum(map(any, groups)) / len(groups))
        turns = sum(outcome["turns"] for outcome in outcomes)
        assert row["env/frozen_lake/turns"] == pytest.approx(turns / len(outcomes))
        assert row["env/frozen_lake/valid_rate"] == pytest.approx(
            sum(outcome["valid_turns"] for outcome in outcomes) / turns
        )
        actions = sum(outcome["num_actions"] for outcome in outcomes)
        assert row["env/frozen_lake/num_actions"] == pytest.approx(actions / len(outcomes))
        assert actions > 0
    assert any(0 < row["env/frozen_lake/valid_rate"] < 1 for row in rows)


def test_reasoning_is_measured_turn_by_turn(policy, tokenizer, make_args):
    trainer, _ = make_trainer(policy, tokenizer, multi_turn_args(make_args))
    Player(trainer, tokenizer)
    trainer.add_callback(MutualInformationCallback(trainer, every=1, min_prompts=2))
    trainer.train()
    row = next(row for row in trainer.state.log_history if "loss" in row)
    measured = {key.split("/")[2] for key in row if key.startswith("mi/trajectory/turn_")}
    assert len(measured) > 1  # by chance a turn may have too few of the sampled reasonings
    assert row["mi/valid_thinking_rate"] == pytest.approx(row["env/frozen_lake/valid_rate"])


@pytest.mark.slow
@needs_ends
@pytest.mark.parametrize("kind", [SNRFilteredGRPOTrainer, GRPOTrainer])
def test_the_policy_itself_plays_and_learns_with_ours_and_with_trls_trainer(kind, policy, tokenizer, make_args):
    args = multi_turn_args(make_args, snr=kind is not GRPOTrainer, max_completion_length=200)
    trainer, rollout = make_trainer(policy, tokenizer, args, kind, max_turns=3)
    if kind is GRPOTrainer:
        rollout.attach(trainer)
    reward = trainer.reward_funcs[0]
    trainer.reward_funcs[0] = lambda completion_ids, **columns: [
        value + len(ids) / 100 for value, ids in zip(reward(**columns), completion_ids, strict=True)
    ]  # the random policy never answers: something has to vary
    start = parameters_of(trainer)
    trainer.train()
    rows = [row for row in trainer.state.log_history if "loss" in row]
    assert len(rows) == 2
    assert all(row["env/frozen_lake/turns"] == 3 and row["env/frozen_lake/valid_rate"] == 0 for row in rows)
    assert all(math.isfinite(row["loss"]) for row in rows)
    assert any(not torch.equal(start[name], value) for name, value in parameters_of(trainer).items())


class FakeVLLM:
    """What TRL asks of vLLM, answered by the script: ids, and for each of them the log-probs of the best few."""

    def __init__(self, player, max_completion_length):
        self.player, self.max_completion_length = player, max_completion_length
        self.limits, self.syncs = [], 0
        self.llm = SimpleNamespace(llm_engine=SimpleNamespace(model_config=SimpleNamespace(max_model_len=1024)))

    def sync_weights(self):
        self.syncs += 1

    def generate(self, prompts, images, num_generations, profiler):
        assert (images, num_generations) == (None, 1)
        self.limits.append(self.max_completion_length)
        answers = [self.player.answer(number, prompt) for number, prompt in enumerate(prompts)]
        logprobs = [[[-0.001 * token] for token in answer] for answer in answers]
        return prompts, answers, logprobs, None


def test_vllm_plays_too_and_its_log_probs_stay_with_their_ids(policy, tokenizer, make_args):
    env = make_env("frozen_lake", **LAKE)
    args = multi_turn_args(make_args, max_steps=1)
    trainer, rollout = make_trainer(policy, tokenizer, args, rollout=TextRollout(env, max_turn_tokens=50))
    player = Player(trainer, tokenizer)
    del trainer._generate_single_turn  # TRL's own
    trainer.use_vllm, trainer._last_loaded_step = True, -1
    trainer.vllm_generation = FakeVLLM(player, args.max_completion_length)
    outputs = []

    def recorded(prompts, trainer):
        outputs.append(rollout(prompts, trainer))
        return outputs[-1]

    trainer.rollout_func = recorded
    trainer.train()
    (output,) = outputs
    assert set(trainer.vllm_generation.limits) == {50}
    assert trainer.vllm_generation.max_completion_length == args.max_completion_length
    assert trainer.vllm_generation.syncs == 1
    for ids, mask, logprobs in zip(output["completion_ids"], output["env_mask"], output["logprobs"], strict=True):
        assert logprobs == [-0.001 * token * mine for token, mine in zip(ids, mask, strict=True)]
    (row,) = [row for row in trainer.state.log_history if "loss" in row]
    assert row["sampling/sampling_logp_difference/mean"] > 0  # TRL compares them with the policy's


def trainer_of(rank, gather, complete):
    """What a rollout asks of the trainer of one process of two, with TRL's own code around vLLM's server."""
    accelerator = SimpleNamespace(num_processes=2, process_index=rank, is_main_process=rank == 0, device="cpu")
    accelerator.gather = lambda tensor: torch.cat(gather(tensor))
    vllm = MagicMock(accelerator=accelerator, mode="server")
    vllm.vllm_client.generate = complete
    vllm.generate = partial(vllm_generation.VLLMGeneration.generate, vllm)
    trainer = MagicMock(accelerator=accelerator, use_vllm=True, vllm_generation=vllm)
    trainer._generate_single_turn = partial(GRPOTrainer._generate_single_turn, trainer)
    return trainer


@pytest.mark.parametrize("turns", [(2, 4), (4, 2)])  # one process has fewer episodes, and one is done first
def test_every_process_gets_the_answers_of_vllms_server_to_its_own_contexts(turns, monkeypatch, tokenizer):
    barrier, rank_of, given = threading.Barrier(2, timeout=10), {}, {}

    def gather(value):
        given[rank_of[threading.get_ident()]] = value
        barrier.wait()
        values = [given[0], given[1]]
        barrier.wait()
        return values

    def complete(prompts, max_tokens, **sampling):
        texts = [format_response(f"{sum(ids)}", ["Up" if sum(ids) % 3 else "Right || Down"]) for ids in prompts]
        answers = [tokenizer(text)["input_ids"][:max_tokens] for text in texts]
        return {"prompt_ids": prompts, "completion_ids": answers, "logprobs": [[[-0.5]] * len(ids) for ids in answers]}

    def play(rank, generate, most=int):
        env = make_env("frozen_lake", **LAKE, max_turns=turns[rank])
        rows = env.dataset(3 + rank, seed=rank)
        plays = env.plays(rows["seed"][:], {"grid": rows["grid"][:]})
        played = play_all(plays, rows["prompt"][:], Chat(tokenizer), generate, max_tokens=300, most=most)
        return [(each.completion_ids, each.env_mask, each.play.outcome.turns) for each in played]

    def process(rank):
        rank_of[threading.get_ident()] = rank
        trainer = trainer_of(rank, gather, complete)
        return play(rank, partial(_generate, trainer), partial(_most, trainer))

    def broadcast(values, from_process):
        values[:] = gather(list(values))[from_process]

    monkeypatch.setattr(vllm_generation, "gather_object", lambda mine: list(itertools.chain(*gather(mine))))
    monkeypatch.setattr(vllm_generation, "broadcast_object_list", broadcast)
    with ThreadPoolExecutor(2) as threads:
        together = list(threads.map(process, (0, 1)))
    alone = [play(rank, lambda *asked: (complete(*asked)["completion_ids"], None)) for rank in (0, 1)]
    assert together == alone
    last = [max(played_turns for *_, played_turns in played) for played in alone]
    assert last[0] != last[1]


@pytest.mark.slow
def test_continuous_batching_plays_too(make_args):
    env = make_env("frozen_lake", **LAKE)
    args = multi_turn_args(
        make_args, per_device_train_batch_size=8, max_completion_length=200, use_transformers_continuous_batching=True
    )
    trainer = SNRFilteredGRPOTrainer(
        str(TINY_MODEL_PATH), env.reward_funcs, args, env.dataset(8, seed=0), rollout_func=TextRollout(env)
    )
    trainer.train()
    rows = [row for row in trainer.state.log_history if "loss" in row]
    assert all(row["env/frozen_lake/turns"] > 1 for row in rows)
    assert any(row["env/frozen_lake/valid_rate"] > 0.5 for row in rows)


def test_rows_of_dynamic_sampling_are_played_with_their_own_tasks(policy, tokenizer, make_args):
    args = multi_turn_args(make_args, snr_dynamic_sampling_rounds=2)
    trainer, _ = make_trainer(policy, tokenizer, args)
    Player(trainer, tokenizer)
    batches = capture(trainer)
    trainer.train()
    assert len(batches) > 2
    env = make_env("frozen_lake", **LAKE)
    for inputs, batch in batches:
        for row, (prompt, _, _) in zip(inputs, rows_of(batch), strict=True):
            assert env.prompt({"seed": row["seed"], "grid": row["grid"]}) == row["prompt"]
            assert tokenizer.decode(prompt).count(row["prompt"][1]["content"]) == 1
            assert row["episode"]["turns"] > 0


def test_evaluation_plays_too(policy, tokenizer, make_args):
    args = multi_turn_args(make_args, per_device_eval_batch_size=16, num_generations_eval=2)
    trainer, _ = make_trainer(policy, tokenizer, args)
    Player(trainer, tokenizer)
    metrics = trainer.evaluate()
    assert 0 < metrics["eval_env/frozen_lake/valid_rate"] < 1
    assert "eval_env/frozen_lake/pass@2" in metrics


@pytest.mark.parametrize(("here", "elsewhere"), [(True, False), (False, False), (False, True)])
def test_log_probs_are_there_if_the_backend_has_them_whatever_was_answered(
    here, elsewhere, policy, tokenizer, make_args, monkeypatch
):
    """Of several processes, one may have nothing but empty answers, or not have sampled."""
    trainer, rollout = make_trainer(policy, tokenizer, multi_turn_args(make_args, max_steps=1), max_turns=1)

    def nothing(trainer, contexts, limit):
        return [[] for _ in contexts], [[] for _ in contexts] if here else None

    def over_processes(trainer, number):
        return number or elsewhere if isinstance(number, bool) else number

    monkeypatch.setattr("ragen2_trl.rollouts.text_rollout._generate", nothing)
    monkeypatch.setattr("ragen2_trl.rollouts.text_rollout._most", over_processes)
    rows = [trainer.train_dataset[number] for number in range(2)]
    rollout._see_rows(rows)
    found = rollout([row["prompt"] for row in rows], trainer)
    assert found["completion_ids"] == [[], []] and (found["logprobs"] is not None) == (here or elsewhere)


# Limits, where turns end, and wrong use


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
    with pytest.raises(ValueError, match=r"train_dataset must come from env.dataset\(...\), got the columns"):
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

"""An environment that raises in an episode: lost connections leave it out, and anything else ends the run by name."""

import asyncio
import inspect
import itertools
import json
import math
from pathlib import Path

import pytest
import torch
from players import GROUP, Player, make_trainer, multi_turn_args
from players import policy_fixture as policy_fixture
from players import tokenizer_fixture as tokenizer_fixture
from test_tool_environments import TEMPLATE
from test_trl_play import Guess
from test_trl_play import make as make_agent
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOTrainer
from trl.chat_template_utils import qwen3_template

from ragen2_trl import EnvironmentEvalCallback, SNRFilteredGRPOTrainer
from ragen2_trl.cli.evaluate import evaluate_model
from ragen2_trl.envs import make_env
from ragen2_trl.record.saved_episodes import read_episodes
from ragen2_trl.rollout_events import EnvironmentWatch, sampling_events
from ragen2_trl.rollouts.outcomes import summarize

ROWS = 16  # of a generation


def shaky(env, error, *episodes, turn=2):
    """Raises an error in a turn of these episodes, numbered from now on, or in 0 as they begin."""
    usual, numbers = env.play, itertools.count()

    def play(row, rng):
        number = next(numbers)
        if number in episodes and turn == 0:
            raise error
        made = usual(row, rng)
        take = made.take

        def raising(actions):
            if number in episodes and len(made.turns) + 1 >= turn:
                raise error
            return take(actions)

        made.take = raising
        return made

    env.play = play


def bonus(completions, **columns):
    """What would be a reward without that of the task."""
    return [7.0] * len(completions)


def see(trainer):
    """Rewards by function (B, F) and advantages (B,) of each generation."""
    seen, sample = [], trainer._generate_and_score_completions

    def seeing(inputs):
        batch = sample(inputs)
        kept = None if (selection := getattr(trainer, "latest_selection", None)) is None else selection.kept.flatten()
        seen.append((sampling_events(trainer).scored.rewards_per_func, batch["advantages"], kept))
        return batch

    trainer._generate_and_score_completions = seeing
    return seen


def player(policy, tokenizer, args, kind=SNRFilteredGRPOTrainer, **options):
    trainer, rollout = make_trainer(policy, tokenizer, args, kind, **options)
    if kind is GRPOTrainer:
        rollout.attach(trainer)
    Player(trainer, tokenizer)
    trainer.reward_funcs.append(bonus)
    trainer.reward_func_names.append("bonus")
    trainer.reward_processing_classes.append(None)
    trainer.reward_weights = torch.ones(2)
    return trainer, rollout._env


def logged(trainer):
    return [row for row in trainer.state.log_history if "loss" in row]


def check_left_out(trainer, seen, number, task, named):
    """Of the first generation one episode has no reward and no advantage, and the others those among themselves."""
    rewards, advantages, kept = seen[0]
    assert rewards[number].isnan().all()
    assert not rewards[torch.arange(ROWS) != number].isnan().any(dim=1).any()
    sums = rewards.nansum(dim=1)
    first = number // GROUP * GROUP
    others = [row for row in range(first, first + GROUP) if row != number]
    expected = (sums[others] - sums[others].mean()) / (sums[others].std() + 1e-4)
    assert expected.abs().max() > 0.1
    torch.testing.assert_close(advantages[others], expected)
    assert advantages[number] == 0
    if kept is not None:
        assert kept[others].any() and not kept[number]
    first, *later = logged(trainer)
    assert first[f"env/{task}/failed"] == pytest.approx(1 / ROWS)
    assert first["reward"] == pytest.approx(sums[torch.arange(ROWS) != number].mean().item())
    assert later and all(row[f"env/{task}/failed"] == 0 for row in later)
    said = [record.message for record in named if "failed" in record.message and task in record.message]
    assert len(said) == 1 and "row" in said[0] and "turn" in said[0]


@pytest.mark.parametrize(
    ("kind", "settings", "error"),
    [
        (SNRFilteredGRPOTrainer, {"snr_strategy": "nonzero", "beta": 0.1}, ConnectionError("reset")),
        (SNRFilteredGRPOTrainer, {"snr_strategy": "lossless"}, TimeoutError("too late")),
        (GRPOTrainer, {}, ConnectionResetError(104, "reset by peer")),
    ],
    ids=["nonzero", "lossless", "trl"],
)
def test_a_lost_connection_leaves_its_episode_out(kind, settings, error, policy, tokenizer, make_args, caplog):
    args = multi_turn_args(make_args, snr=kind is not GRPOTrainer, **settings)
    trainer, env = player(policy, tokenizer, args, kind)
    seen = see(trainer)
    shaky(env, error, 5)
    trainer.train()
    check_left_out(trainer, seen, 5, "frozen_lake", caplog.records)


def single_turn(policy_path, args, kind=SNRFilteredGRPOTrainer):
    """Completions that the reward function plays."""
    env = make_env("frozen_lake", size=3)
    trainer = kind(policy_path, [*env.reward_funcs, bonus], args, env.dataset(16, seed=0))
    answers = ["<think></think><answer>Right || Down || Right || Down</answer>", "nothing"]
    ids = [[*trainer._tokenizer(text)["input_ids"], trainer._tokenizer.eos_token_id] for text in answers]
    trainer._generate_single_turn = lambda contexts, *_: ([ids[n % 2] for n in range(len(contexts))], None)
    return trainer, env


def test_where_the_reward_function_plays_too(policy_path, make_args, caplog):
    args = make_args(per_device_train_batch_size=ROWS, max_completion_length=60, snr_strategy="nonzero")
    trainer, env = single_turn(policy_path, args)
    seen = see(trainer)
    shaky(env, ConnectionError("reset"), 5, turn=1)
    trainer.train()
    check_left_out(trainer, seen, 5, "frozen_lake", caplog.records)


@pytest.mark.slow
def test_of_pilots_too(policy, tokenizer, make_args):
    settings = {"snr_strategy": "nonzero", "snr_pilot_generations": 2, "num_generations": 4}
    trainer, env = player(policy, tokenizer, multi_turn_args(make_args, **settings))
    trainer.reward_funcs[1] = lambda episode, **columns: [1000.0 * bool(one["failure"]) for one in episode]
    seen = see(trainer)
    shaky(env, ConnectionError("reset"), 1)
    trainer.train()
    assert logged(trainer)[0]["snr/pilot_reward"] < 10
    assert 0 < logged(trainer)[0]["env/frozen_lake/failed"] < 0.1
    assert all(rewards.isnan().all(dim=1).sum() <= 1 for rewards, *_ in seen)


@pytest.mark.parametrize(
    ("error", "episodes", "turn"),
    [(ConnectionError("reset"), (37, 38), 1), (OSError("disk"), (37,), 2), (KeyError("rule"), (37,), 0)],
    ids=["more than one", "another error", "as it begins"],
)
def test_the_run_ends_with_task_row_turn_and_checkpoint(error, episodes, turn, policy, tokenizer, make_args):
    args = multi_turn_args(make_args, max_steps=4, save_strategy="steps", save_steps=1)
    trainer, env = player(policy, tokenizer, args)
    shaky(env, error, *episodes, turn=turn)
    with pytest.raises(type(error)) as raised:
        trainer.train()
    told = "\n".join([str(raised.value), *raised.value.__notes__])
    row = trainer.train_dataset["seed"]
    assert f"turn {max(turn, 1)}" in told and any(f"frozen_lake, row {seed}," in told for seed in row)
    assert "checkpoint-2" in told and str(args.output_dir) in told


# TRL's `environment_factory`


def tools_trainer(kind, policy_path, make_args, with_success=True):
    """One call in each turn, two turns."""
    tokenizer = AutoTokenizer.from_pretrained(policy_path)
    tokenizer.chat_template, tokenizer.response_template = TEMPLATE, qwen3_template
    model = AutoModelForCausalLM.from_pretrained(policy_path, max_position_embeddings=1024)
    env = make_env("frozen_lake", multi_turn=True, size=3, protocol="tools")
    settings = {"per_device_train_batch_size": ROWS, "max_completion_length": 700, "max_steps": 2}
    args = make_args(snr=kind is SNRFilteredGRPOTrainer, **settings)
    functions = [env.success_func] if with_success else []
    trainer = kind(
        model,
        functions,
        args,
        env.dataset(8, seed=0),
        processing_class=tokenizer,
        environment_factory=env.environment_factory,
    )
    numbers = itertools.count()

    def generate(contexts, *args, **kwargs):
        answers = []
        for context in contexts:
            turn, number = tokenizer.decode(context).count("<tool_call>"), next(numbers)
            call = {"name": "move", "arguments": {"directions": [["Up"], ["Right"], ["Down"]][number % 3]}}
            words = f"<tool_call>\n{json.dumps(call)}\n</tool_call><|im_end|>" if turn < 2 else "Enough<|im_end|>"
            answers.append(tokenizer(words)["input_ids"])
        return answers, None

    trainer._generate_single_turn = generate
    return trainer, env


@pytest.mark.parametrize(("kind", "turn"), [(SNRFilteredGRPOTrainer, 2), (GRPOTrainer, 0)])
def test_our_tools_leave_an_episode_out(kind, turn, policy_path, make_args, caplog):
    trainer, env = tools_trainer(kind, policy_path, make_args)
    shaky(env, ConnectionError("reset"), 5, turn=turn)
    trainer.train()
    first, second = logged(trainer)
    assert (first["env/frozen_lake/failed"], second["env/frozen_lake/failed"]) == (1 / ROWS, 0)
    assert sum("An episode has failed" in record.message for record in caplog.records) == 1


class Dropped(Guess):
    """Somebody's own, which reads nothing but its instance's number."""

    made = itertools.count()
    where, error, of = "guess", ConnectionError("reset"), (5,)

    def __init__(self):
        self._number, self._times = next(self.made), 0

    def _raise(self, where):
        if where == self.where and self._number in self.of and self.plays == 1:
            raise self.error

    def reset(self, secret: int, **row) -> str:
        self._told = Guess.reset(self, secret)
        self._raise("reset")
        return self._told

    def guess(self, number: int) -> str:
        """
        Guess the number.

        Args:
            number: From 0 to 9.
        """
        self._raise("guess")
        return Guess.guess(self, number)

    def get_reward(self) -> float:
        self._raise("get_reward")
        return float(self._number % 4) + Guess.get_reward(self)


def dropped(policy_path, make_args, where, error=Dropped.error, of=Dropped.of):
    kind = type("Dropped", (Dropped,), {"where": where, "error": error, "of": of, "made": itertools.count()})
    args = make_args(per_device_train_batch_size=ROWS, max_completion_length=120, max_steps=2, snr_strategy="nonzero")
    return make_agent(policy_path, args, [bonus], environment_factory=kind), kind


@pytest.mark.parametrize("where", ["reset", "guess", "get_reward"])
def test_ones_own_environment_leaves_an_episode_out(where, policy_path, make_args, caplog):
    trainer, _ = dropped(policy_path, make_args, where)
    seen = see(trainer)
    trainer.train()
    check_left_out(trainer, seen, 5, "Dropped", caplog.records)
    assert (logged(trainer)[0]["tools/failure_frequency"] > 0) == (where == "guess")  # which TRL shows the model


@pytest.mark.parametrize("where", ["reset", "get_reward"])
def test_ones_own_environment_ends_the_run_by_name(where, policy_path, make_args):
    trainer, _ = dropped(policy_path, make_args, where, ValueError("rule"))
    with pytest.raises(ValueError, match="rule") as raised:
        trainer.train()
    (note, *_) = raised.value.__notes__
    assert note.startswith("Dropped, row ") and "'secret': 9" in note and "turn" in note


def test_too_many_lost_connections_of_ones_own_environment_end_the_run(policy_path, make_args):
    trainer, _ = dropped(policy_path, make_args, "guess", of=(5, 7))
    with pytest.raises(ConnectionError, match=r"(?s)2 of 16 .*Dropped, row .* turn 1"):
        trainer.train()


@pytest.mark.slow
def test_what_tools_raise_else_is_shown_to_the_model(policy_path, make_args):
    trainer, _ = dropped(policy_path, make_args, "guess", ValueError("try again"))
    seen = see(trainer)
    trainer.train()
    assert not seen[0][0].isnan().any() and logged(trainer)[0]["tools/failure_frequency"] > 0


class Tools(Guess):
    async def wait(self, seconds: float) -> str:
        return f"waited {seconds}"

    @staticmethod
    def double(number: int) -> int:
        return 2 * number


def test_watched_tools_are_what_they_were():
    watched, plain = EnvironmentWatch(Tools(), pytest.fail).environment, Tools()
    assert inspect.ismethod(watched.guess) and inspect.iscoroutinefunction(watched.wait)
    for name in ("guess", "wait", "double"):
        assert inspect.signature(getattr(watched, name)) == inspect.signature(getattr(plain, name))
        assert getattr(watched, name).__name__ == name
    assert watched.double(2) == 4 and asyncio.run(watched.wait(seconds=1)) == "waited 1"


# Held-out episodes


def test_held_out_episodes_are_left_out_and_counted(policy, tokenizer, make_args):
    trainer, _ = player(policy, tokenizer, multi_turn_args(make_args, max_steps=1))
    held_out = make_env("frozen_lake", multi_turn=True, size=3)
    limits = {"num_prompts": 4, "num_samples": 2, "max_new_tokens": 100, "max_turn_tokens": 20}
    trainer.add_callback(EnvironmentEvalCallback(held_out, trainer, every=1, **limits))
    shaky(held_out, ConnectionError("reset"), 3, turn=1)
    trainer.train()
    first, second = [row for row in trainer.state.log_history if "eval/env/frozen_lake/success" in row]
    assert first["eval/env/frozen_lake/failed"] == 1 / 8 and "eval/env/frozen_lake/failed" not in second
    files = sorted(Path(trainer.args.output_dir, "_episodes").glob("*.jsonl"))
    saved = [[(one.group, one.sample) for one in read_episodes(path)] for path in files]
    assert [len(one) for one in saved] == [7, 8] and set(saved[1]) - set(saved[0]) == {(1, 1)}


def test_evaluate_leaves_out_and_counts(policy, tokenizer):
    env = make_env("frozen_lake", multi_turn=True, size=3)
    limits = {"num_prompts": 4, "num_samples": 2, "max_new_tokens": 100, "max_turn_tokens": 20}
    whole = evaluate_model(policy, tokenizer, env, **limits)
    assert "failed" not in whole
    shaky(env, TimeoutError("late"), 4 + 3, turn=1)  # after the prompts of 4 tasks
    assert evaluate_model(policy, tokenizer, env, **limits)["failed"] == 1 / 8
    shaky(env, TimeoutError("late"), 4 + 3, 4 + 4, turn=1)
    with pytest.raises(ConnectionError, match=r"2 of 8 .*frozen_lake, row .* turn 1"):
        evaluate_model(policy, tokenizer, env, **limits)


def test_a_summary_without_failed_episodes():
    nan = math.nan
    found = summarize(2, success=[1.0, nan, 0.0, 1.0, nan, nan], **{"return": [2.0, 9.0, 0.0, 1.0, 9.0, 9.0]})
    assert (found["success"], found["return"], found["failed"]) == (0.75, 1.25, 0.5)
    assert (found["pass@1"], found["num_prompts"]) == (0.75, 2.0)

"""A small generation batch is ranked among the groups of recent ones: the rule, by loops and in real trainings."""

import pytest
import torch
from algorithms import GRPO, STILL, for_each, replay_of
from conftest import PROMPTS, assert_same_parameters, parameters_of
from pages import scripts
from replay import Recorder, assert_close, move_away

from ragen2_trl import SNRFilteredGRPOConfig
from ragen2_trl.filtering import group_score, select_groups
from ragen2_trl.trainers.selection import (
    FEW_GROUPS,
    RECENT_GROUPS,
    Groups,
    RecentGroups,
    ScoreSelector,
    seeded_generator,
    strategy_of,
)

CPU = {"use_cpu": True, "bf16": False, "gradient_checkpointing": False, "report_to": "none"}


def config(groups, **settings):
    """Of a generation batch with so many groups of four."""
    return SNRFilteredGRPOConfig(per_device_train_batch_size=4 * groups, num_generations=4, **CPU, **settings)


def top_p(scores, signal):
    return select_groups(scores, "top_p", 0.9, selection_eps=0.0, is_zero=~signal)


def streamed(recent, scores, size=1, select=top_p):
    """(n,) what is kept of scores that come `size` at a time."""
    scores = torch.as_tensor(scores, dtype=torch.float64)
    return torch.cat([recent.select(part, part > 0, select) for part in scores.split(size)])


def draw(count, seed=0):
    """Scores of which some are 0, and no two others the same."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.rand(count, generator=generator, dtype=torch.float64) ** 2
    return scores * (torch.rand(count, generator=generator) > 0.3)


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize(
    "select",
    [
        top_p,
        lambda scores, signal: select_groups(scores, "top_k", 0.3, is_zero=~signal),
        lambda scores, signal: select_groups(scores, "min_p", 0.4, is_zero=~signal),
        lambda scores, signal: select_groups(scores, "top_p", 0.6, keep="smallest", is_zero=~signal),
    ],
)
def test_a_group_is_kept_where_a_batch_of_the_latest_groups_would_keep_it(size, select):
    scores = draw(200)
    kept = streamed(RecentGroups(0, size=40), scores, size, select)
    since_kept, begin = 0, 0
    for start in range(0, len(scores), size):
        stop = start + size
        latest = scores[max(begin, stop - 40) : stop]
        assert kept[start:stop].tolist() == select(latest, latest > 0)[-size:].tolist()
        since_kept = 0 if kept[start:stop].any() else since_kept + size
        if (scores[stop - since_kept : stop] > 0).sum() >= FEW_GROUPS and since_kept:
            begin = max(begin, stop - since_kept)
    assert 0 < kept.sum() < (scores > 0).sum()


def test_small_batches_keep_what_a_large_one_of_them_all_keeps():
    scores = draw(256)
    large = top_p(scores, scores > 0)
    for size in (1, 2, 4):
        recent = RecentGroups(seed=0)
        streamed(recent, draw(256, seed=1), size)  # others of the same kind before
        kept = streamed(recent, scores, size)
        assert (kept == large).double().mean() > 0.95
        assert kept.double().mean() == pytest.approx(large.double().mean().item(), abs=0.03)


def test_of_equal_scores_as_many_are_kept_as_of_a_large_batch_and_not_always_the_old_ones():
    """Rewards of right and wrong give few different variances, so that the border runs through equal ones."""
    scores = torch.tensor([0.2, 0.2, 0.2, 0.25]).repeat(150)
    large = top_p(scores, scores > 0)
    kept = streamed(RecentGroups(seed=0), scores)[200:]
    assert large.double().mean() < 0.9
    assert kept.double().mean() == pytest.approx(large.double().mean().item(), abs=0.04)
    streaks = "".join("k" if one else "d" for one in kept)
    assert "dddd" not in streaks


def test_the_first_group_with_signal_is_kept_and_those_without_never():
    kept = streamed(RecentGroups(seed=0), [0.0, 0.006, 0.0, 0.25, 0.001])
    assert kept.tolist() == [False, True, False, True, False]


@pytest.mark.parametrize("factor", [0.01, 0.1, 0.5, 100.0])
@pytest.mark.parametrize("size", [1, 4])
def test_rewards_that_change_their_scale_go_on_to_be_ranked(factor, size):
    recent = RecentGroups(seed=0)
    streamed(recent, draw(256), size)
    after = factor * draw(64, seed=2)
    kept = streamed(recent, after, size)
    with_signal = kept[after > 0]
    longest = max(map(len, "".join("k" if one else "d" for one in with_signal).split("k")))
    assert longest < 3 * FEW_GROUPS
    assert kept[32:].any()


def filter_of(groups, **settings):
    return strategy_of(config(groups, **settings))


def groups_of(rewards, number=0, reward_range=None):
    """Of (N, G) rewards, in the generation of that number."""
    lengths = torch.ones(rewards.shape)
    return Groups(rewards, rewards.unsqueeze(2), lengths, seeded_generator(0, number), reward_range, lambda: lengths)


def selected(group_filter, rewards, number=0):
    """(N,) what a filter keeps of a generation, after it has seen its rewards as those before."""
    _, kept = group_filter.select(groups_of(rewards, number, group_filter.see(rewards)))
    return kept.any(dim=1)


@pytest.mark.parametrize("settings", [{"snr_score": "random"}, {}], ids=["random scores", "a tenth"])
def test_what_keeps_few_groups_does_not_take_its_own_drops_for_a_change_of_scale(settings):
    group_filter = filter_of(1, snr_strategy="top_k", snr_value=0.1, **settings)
    rewards = torch.rand(1000, 1, 4, generator=torch.Generator().manual_seed(0))
    kept = [selected(group_filter, group, number).item() for number, group in enumerate(rewards)]
    assert sum(kept[256:]) / len(kept[256:]) == pytest.approx(0.1, rel=0.25)
    assert len(group_filter.recent.scores) == RECENT_GROUPS == 256


def test_a_selector_of_ones_own_that_is_the_filter_ranks_among_recent_groups_and_others_do_not():
    largest = strategy_of(config(1), ScoreSelector("top_k", 0.1))
    assert largest.recent.most_dropped == FEW_GROUPS / 0.1
    assert strategy_of(config(1), ScoreSelector(score="random")).recent.most_dropped == float("inf")
    assert strategy_of(config(1), lambda groups: groups.rewards[:, 0] > 0).recent is None


def test_a_freak_score_is_forgotten():
    recent = RecentGroups(seed=0)
    streamed(recent, [*draw(100), 1e9])
    assert streamed(recent, draw(64, seed=3))[24:].double().mean() > 0.2


# The slack


@pytest.mark.parametrize("shift", [0.0, -3.0, 3.0])
@pytest.mark.parametrize("scale", [1.0, 0.02])
def test_the_slack_is_that_of_rewards_from_0_to_1_for_all_that_lie_closer(scale, shift):
    rewards = torch.tensor([[1.0, 0.0, 0.0, 1.0], [0.1, 0.0, 0.0, 0.1], [0.0] * 4] * 4, dtype=torch.float64)
    expected = select_groups(group_score(rewards), "top_p", 0.9, selection_eps=0.01)
    assert selected(filter_of(12), scale * rewards + shift).tolist() == expected.tolist()


@pytest.mark.parametrize("score", ["length", "entropy", "entropy_variance"])
def test_the_slack_of_scores_of_tokens_does_not_depend_on_the_range_of_rewards(score):
    selector, signal = ScoreSelector("top_p", 0.5, score), torch.tensor([True] * 3)
    for scores, kept in (([1.0, 0.505, 0.505], 1), ([1.0, 0.515, 0.515], 2)):  # 0.995 or 1.005 wanted
        for reward_range in (None, (0.0, 0.1), (0.0, 100.0)):
            assert selector.select(torch.tensor(scores), signal, reward_range).sum() == kept


@pytest.mark.parametrize("scale", [1.0, 1e-3])
def test_the_only_group_with_variance_is_never_dropped_for_the_slack(scale):
    rewards = torch.zeros(9, 4, dtype=torch.float64)
    rewards[8] = scale
    rewards[3, 0] = 0.1 * scale  # a variance of 0.0025
    assert selected(filter_of(9), rewards).nonzero().flatten().tolist() == [3]
    rewards[3] = 0.0
    assert selected(filter_of(9), rewards).sum() == 0


@pytest.mark.parametrize("sign", [1, -1])
def test_rewards_beyond_the_square_root_of_float32_are_warned_of_once(sign, caplog):
    group_filter = filter_of(8)
    for reward, warnings in ((1e19, 0), (2e19, 1), (3e19, 1)):
        group_filter.see(torch.tensor([[0.0, sign * reward]]))
        assert sum("1e+19" in record.message for record in caplog.records) == warnings


def test_the_slack_never_exceeds_its_value_however_far_apart_rewards_lie():
    rewards = torch.tensor([[0.0, 0.3, 0.0, 0.3]] * 8, dtype=torch.float64)
    group_filter = filter_of(8)
    selected(group_filter, torch.tensor([[-1000.0, 0.0, 0.0, 0.0]] * 8))
    expected = select_groups(group_score(rewards), "top_p", 0.9, selection_eps=0.01)
    assert selected(group_filter, rewards).tolist() == expected.tolist()


# In trainings


class Kept:
    """What each selection of a training keeps, (N,) bool."""

    def __init__(self, trainer):
        self.steps, begin = [], trainer._begin_run

        def begin_and_watch():
            begin()
            select = trainer._strategy.select

            def watched(groups):
                scores, kept = select(groups)
                self.steps.append(kept.any(dim=1))
                return scores, kept

            trainer._strategy.select = watched

        trainer._begin_run = begin_and_watch


# One group a step, as TRL's defaults have it.
ONE_GROUP = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 1}


def log_rows(trainer):
    return [row for row in trainer.state.log_history if "snr/kept_groups" in row]


@for_each
def test_one_group_a_step_is_kept_or_dropped_and_its_update_is_the_plain_one(algorithm, policy_path, tmp_path):
    """In 16 steps each of 8 prompts comes twice. What is kept is what a large batch of them all keeps."""
    still = {"critic_lr": 0.0} if algorithm.name == "ppo" else {}
    args = algorithm.args(tmp_path, **ONE_GROUP, **STILL, **still, max_steps=16, shuffle_dataset=False)
    replay, recorder = replay_of(policy_path), Recorder()
    trainer = algorithm.make(policy_path, args, replay, callbacks=[recorder])
    move_away(trainer.model)
    kept = Kept(trainer)
    trainer.train()
    fates = [bool(fate) for fate in kept.steps]
    assert [fates[8 + n] for n in (0, 2, 5, 6)] == [True] * 4
    assert [fates[8 + n] for n in (1, 3, 4, 7)] == [False] * 4
    rows = log_rows(trainer)
    assert [row["snr/kept_groups"] for row in rows] == [float(fate) for fate in fates]
    assert len(trainer._strategy.recent.scores) == 16
    assert rows[-1]["snr/reward_variance_spread"] > 0
    for step, prompt in enumerate(PROMPTS, start=8):
        if fates[step]:
            assert_close(recorder.gradients[step], algorithm.plain_gradient(policy_path, [prompt], **still))
        else:
            assert recorder.gradients[step] == {}


@pytest.mark.slow
@for_each
def test_a_resumed_run_ranks_among_the_groups_before_the_checkpoint(algorithm, policy_path, tmp_path):
    """The eighth prompt has a variance that is little beside that of others, and the first in a run would be kept."""
    settings = {**ONE_GROUP, "max_steps": 10, "save_strategy": "steps", "save_steps": 7, "shuffle_dataset": False}
    runs = []
    for resume in (None, str(tmp_path / "checkpoint-7")):
        trainer = algorithm.make(policy_path, algorithm.args(tmp_path, **settings), replay_of(policy_path))
        trainer.train(resume_from_checkpoint=resume)
        runs.append((parameters_of(trainer), trainer._strategy.state(), log_rows(trainer)))
    (whole, state, rows), (resumed, state_after, rows_after) = runs
    assert_same_parameters(whole, resumed)
    assert state == state_after and state["recent"]["seen"] == 10
    assert [row["snr/kept_groups"] for row in rows] == [row["snr/kept_groups"] for row in rows_after]
    assert rows[7]["snr/kept_groups"] == 0


@pytest.mark.slow
def test_rounds_of_dynamic_sampling_draw_scores_by_lot_anew(policy_path, tmp_path, monkeypatch):
    settings = {"snr_dynamic_sampling_rounds": 8, "snr_score": "random", "snr_strategy": "top_k", "snr_value": 0.5}
    trainer = GRPO.make(policy_path, GRPO.args(tmp_path, **ONE_GROUP, **settings, max_steps=4), replay_of(policy_path))
    scores, drawn = ScoreSelector.scores, []

    def remember(self, groups):
        drawn.append(scores(self, groups))
        return drawn[-1]

    monkeypatch.setattr(ScoreSelector, "scores", remember)
    trainer.train()
    assert len({one.item() for one in drawn}) == len(drawn) > 4


@pytest.mark.slow
@for_each
def test_rounds_of_dynamic_sampling_are_ranked_among_the_same_groups(algorithm, policy_path, tmp_path):
    args = algorithm.args(tmp_path, **ONE_GROUP, max_steps=6, snr_dynamic_sampling_rounds=8)
    trainer = algorithm.make(policy_path, args, replay_of(policy_path))
    kept = Kept(trainer)
    trainer.train()
    assert trainer._strategy.recent.seen == len(kept.steps) > 6
    assert all(row["snr/trained_groups"] == 1 for row in log_rows(trainer))


def test_trls_default_layout_ranks_among_recent_groups_and_eight_by_themselves():
    args = SNRFilteredGRPOConfig(**CPU)
    assert args.groups_per_generation == 1
    assert strategy_of(args).recent.size == 256
    assert strategy_of(config(8)).recent is None


def test_the_example_of_the_readme_keeps_drops_and_measures_in_a_layout_of_eight_prompts(
    policy_path, prompts, tmp_path, monkeypatch
):
    """As printed but for model, data and reward; what is added says nothing of the layout."""
    added = {**CPU, "max_steps": 10, "max_completion_length": 10, "disable_tqdm": True, "save_strategy": "no"}
    make = SNRFilteredGRPOConfig.__init__
    monkeypatch.setattr(
        SNRFilteredGRPOConfig, "__init__", lambda self, *said, **more: make(self, *said, **more, **added)
    )
    monkeypatch.setattr("datasets.load_dataset", lambda *args, **kwargs: prompts)
    monkeypatch.setattr(
        "trl.rewards.accuracy_reward",
        lambda completion_ids, **kwargs: [float(sum(ids) % 7 == 0) for ids in completion_ids],
    )
    monkeypatch.chdir(tmp_path)
    names = {}
    script = scripts("../README.md")[1].replace('"Qwen/Qwen2.5-0.5B-Instruct"', repr(policy_path))
    measured = "trainer.add_callback(MutualInformationCallback(trainer))"
    exec(script.replace("trainer.train()", f"from ragen2_trl import *\n{measured}\ntrainer.train()"), names)
    trainer = names["trainer"]
    assert trainer.args.groups_per_generation >= 8
    (row,) = log_rows(trainer)  # of TRL's ten steps
    assert 0 < row["snr/kept_fraction"] < 1
    (measured,) = [row for row in trainer.state.log_history if "mi/first_turn/retrieval_accuracy" in row]
    assert measured["step"] == 10 and measured["mi/first_turn/num_prompts"] >= 4
    assert "mi/pooled_steps" not in measured

"""Pilots in the loop of TRL's rollout worker: what is sampled, and what is handed on."""

import asyncio

import async_cpu
import numpy as np
import pytest
from async_cpu import (
    LIVE,
    Server,
    StubWorker,
    make_async,
    make_sent,
    note_decisions,
    parity,
    prompts_with_dead,
    rows_of_group,
    text_of,
)
from async_cpu import on_a_cpu as on_a_cpu

from ragen2_trl.sampling.policy import Pilots, Policy
from ragen2_trl.trainers.async_groups import TAG, RowTag
from ragen2_trl.trainers.async_rollouts import FilteredRolloutLoop, ScoredOnce

pytestmark = pytest.mark.usefixtures("on_a_cpu")

CALLS = []


def counted(completions, dead, **columns):
    CALLS.extend(map(id, completions))
    return parity(completions, dead, **columns)


async def awaited(completions, dead, **columns):
    await asyncio.sleep(0)
    return counted(completions, dead, **columns)


def train(policy_path, tmp_path, server, pilots=4, reward=parity, steps=4, **settings):
    trainer = make_async(
        policy_path, tmp_path, server, reward=reward, num_generations=16, snr_pilot_generations=pilots,
        snr_strategy="nonzero", max_steps=steps, **settings,
    )  # fmt: skip
    trainer.train()
    return trainer


def of_step(trainer, key):
    return [row[key] for row in trainer.state.log_history if key in row]


def test_prompts_without_varying_pilots_cost_their_pilots_alone(policy_path, tmp_path):
    server = Server()
    trainer = train(policy_path, tmp_path, server, dataset=prompts_with_dead(1000))  # each is sampled once
    counts = list(server.asked.values())
    assert set(counts) <= set(range(17)) and counts.count(16) >= 4
    assert counts.count(4) > 0.4 * len(counts)  # seven of ten prompts are dead
    assert server.completions < 0.65 * 16 * len(counts)
    assert min(of_step(trainer, "snr/sampled_fraction")) < 0.8
    assert 0 < min(of_step(trainer, "snr/committed_fraction")) < 0.6


def test_groups_that_go_on_are_trained_whole_and_those_given_up_not_at_all(policy_path, tmp_path):
    server = Server()
    trainer = make_async(
        policy_path, tmp_path, server, num_generations=16, snr_pilot_generations=4, snr_strategy="nonzero", max_steps=3
    )
    decided = note_decisions(trainer)
    trainer.train()
    seen = [
        (group.tags[0].given_up, len(group.rows), len(rows), group.rewards().isnan().sum().item())
        for group, _, rows in decided
    ]
    assert {one for one in seen if one[0]} == {(True, 4, 0, 12)}
    whole = [one for one in seen if not one[0]]
    assert all(number == 16 and missing == 0 and kept in (0, 16) for _, number, kept, missing in whole)
    assert sum(kept == 16 for _, _, kept, _ in whole) >= 3


def test_a_group_that_was_given_up_is_dropped_though_its_pilots_vary(policy_path, tmp_path):
    """Their variance may be below what is worth the other completions."""
    rows = [row for number in range(12) for row in rows_of_group(number, LIVE)]
    for number, row in enumerate(rows):
        row.metrics[TAG] = RowTag(4, number % 4, given_up=row.group_id % 2 == 0)
    trainer = make_sent(policy_path, tmp_path, rows)
    trainer.train()
    assert trainer.latest_selection.groups.tolist() == [False, True] * 4


def test_rewards_are_means_over_completions_and_not_over_groups(policy_path, tmp_path):
    rows = []
    for number in range(12):
        given_up = number % 2 == 0
        group = rows_of_group(number, [1, 1] if given_up else [1, 0, 0, 0])
        for member, row in enumerate(group):
            row.metrics[TAG] = RowTag(len(group), member, given_up)
        rows += group
    trainer = make_sent(policy_path, tmp_path, rows)
    decided = note_decisions(trainer)
    trainer.train()
    seen = [row.metrics["reward"] for group, *_ in decided for row in group.rows]
    assert trainer.state.log_history[0]["reward"] == pytest.approx(sum(seen) / len(seen))


@pytest.mark.parametrize("reward", [counted, awaited])
def test_no_completion_is_scored_twice(policy_path, tmp_path, reward):
    CALLS.clear()
    held = []  # so that no id comes twice
    generate = FilteredRolloutLoop._generate_one

    async def kept(self, *args, **kwargs):
        result = await generate(self, *args, **kwargs)
        held.append(result)
        return result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FilteredRolloutLoop, "_generate_one", kept)
        train(policy_path, tmp_path, Server(), reward=reward, steps=2)
    assert len(CALLS) == len(set(CALLS)) > 50


def test_pilots_see_the_reward_that_groups_are_scored_by(policy_path, tmp_path):
    def shaped(completions, **columns):
        return [float(len(text_of(text))) for text in completions]  # varies everywhere

    server = Server()
    trainer = make_async(
        policy_path, tmp_path, server, reward=[shaped, parity], num_generations=16, snr_pilot_generations=4,
        snr_strategy="top_p", snr_value=1.0, snr_score_reward="parity", max_steps=3, dataset=prompts_with_dead(1000),
    )  # fmt: skip
    trainer.train()
    counts = list(server.asked.values())
    assert counts.count(4) > 0.35 * len(counts)


def test_async_pilots_come_by_default_with_large_groups_and_trls_own_worker(policy_path, tmp_path):
    made = {"num_generations": 16, "snr_strategy": "nonzero", "max_steps": 1}
    assert make_async(policy_path, tmp_path, Server(), **made).pilot_generations == 2
    assert make_async(policy_path, tmp_path, Server(), **made | {"num_generations": 8}).pilot_generations == 0
    assert make_async(policy_path, tmp_path, Server(), **made | {"snr_strategy": "all"}).pilot_generations == 0
    foreign = make_async(policy_path, tmp_path, Server(), **made, rollout_worker=StubWorker())
    assert foreign.pilot_generations == 0


@pytest.mark.parametrize("name", ["rollout_worker", "environment_factory"])
def test_pilots_that_cannot_be_sampled_or_scored_are_refused(policy_path, tmp_path, name):
    with pytest.raises(ValueError, match=f"snr_pilot_generations=2.*{name}.*allowed"):
        make_async(policy_path, tmp_path, Server(), max_steps=1, snr_pilot_generations=2, **{name: StubWorker})


def test_the_spawned_process_of_trls_worker_samples_pilots(policy_path, tmp_path, monkeypatch):
    monkeypatch.setattr(async_cpu.async_grpo_trainer, "AsyncRolloutWorker", async_cpu.ProcessWorker)
    server = Server()
    train(policy_path, tmp_path, server, steps=2, dataset=prompts_with_dead(1000))
    counts = list(server.asked.values())
    assert counts.count(4) > 0.3 * len(counts) and counts.count(16) >= 2


def test_audits_are_the_same_whichever_group_is_scored_first():
    """Each is drawn for its group, and depends on no other draw."""
    varies, equal = np.array([[1.0, 0, 0, 1]]), np.zeros((1, 4))

    def audits(order):
        policy = Policy(None, Pilots(4, 16, groups=1, seed=3))
        chosen = {number: policy.choose(varies if number % 10 < 3 else equal, number, fewest=0) for number in order}
        return {
            number for number, one in chosen.items() if one.audited[0] and 50 <= number < 750
        }  # once it has learned

    found = audits(range(800))
    assert found == audits(reversed(range(800))) and 3 <= len(found) <= 25


def test_a_reward_is_asked_for_the_completions_that_it_has_not_scored():
    asked = []

    def reward(completions, prompts, **columns):
        asked.append((completions, prompts))
        return [len(one) for one in completions]

    once, first, second = ScoredOnce(reward), ["a"], ["b", "c"]

    async def both():
        before = await once(completions=[first], prompts=["p"])
        return before, await once(completions=[second, first], prompts=["q", "p"])

    assert asyncio.run(both()) == ([1], [2, 1])
    assert asked == [([first], ["p"]), ([second], ["q"])]
    assert not once.known

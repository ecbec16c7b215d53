"""Groups of the asynchronous trainer are done when they are done: what epochs, checkpoints and resumed runs count."""

import json
import queue
import threading
import time
import types

import async_cpu
import pytest
from async_cpu import DEAD, LIVE, Server, StubWorker, make_async, make_sent, prompts_with_dead, rows_of_group, send
from async_cpu import on_a_cpu as on_a_cpu
from launching import launch

from ragen2_trl.trainers import async_groups
from ragen2_trl.trainers.selection import Selection

pytestmark = pytest.mark.usefixtures("on_a_cpu")


def trained_with(policy_path, tmp_path, sent, steps=1, **settings):
    trainer = make_sent(policy_path, tmp_path, sent, max_steps=steps, **settings)
    trainer.train()
    return trainer


def test_a_micro_batch_that_is_fetched_ahead_is_not_done(policy_path, tmp_path):
    trainer = trained_with(policy_path, tmp_path, [LIVE] * 8)
    assert len(trainer._trained_groups) == 2  # TRL's own: 4


def test_dropped_groups_are_done(policy_path, tmp_path):
    trainer = trained_with(policy_path, tmp_path, [DEAD, LIVE, DEAD, LIVE, DEAD, LIVE, LIVE])
    assert len(trainer._trained_groups) == 5 and 5 not in trainer._trained_groups


def test_a_group_cut_in_two_is_done_with_its_last_row(policy_path, tmp_path):
    trainer = trained_with(policy_path, tmp_path, [LIVE] * 8, per_device_train_batch_size=6)
    assert len(trainer._trained_groups) == 1


def test_stale_and_oversize_rows_are_done(policy_path, tmp_path):
    stale, long = rows_of_group(0, LIVE, version=-9), rows_of_group(1, LIVE, length=80)
    rows = [row for number in range(2, 9) for row in rows_of_group(number, LIVE)]
    settings = {"max_staleness": 4, "token_budget": 60}
    trainer = trained_with(policy_path, tmp_path, [*stale, *long, *rows], steps=2, **settings)
    assert {0, 1, 2} <= {group for group in range(9) if group in trainer._trained_groups}
    logged = trainer.state.log_history
    assert sum(row.get("sample/dropped_stale_total", 0) for row in logged) == 4
    assert sum(row.get("batch/dropped_oversize_total", 0) for row in logged) == 4
    assert not trainer._groups.ledger.rows.keys() & {0, 1}


@pytest.mark.parametrize("strategy", ["nonzero", "lossless", "all"])
def test_an_epoch_ends_when_its_data_have_been_seen(policy_path, tmp_path, strategy):
    server = Server()
    trainer = make_async(
        policy_path, tmp_path, server, snr_strategy=strategy, num_train_epochs=1, max_steps=-1,
        max_inflight_tasks=4, queue_maxsize=4,
    )  # fmt: skip
    trainer.train()
    done = len(trainer._trained_groups)
    assert 40 <= done <= 40 + 30  # dropped groups behind the last step's are done as well
    steps = trainer.state.global_step
    assert steps >= (10 if strategy in ("lossless", "all") else 2)
    if strategy != "nonzero":
        assert steps == 10  # 40 groups of 4 rows, 16 a step


def test_an_epoch_is_not_over_before_its_first_group_is(policy_path, tmp_path):
    """A straggler of the first epoch arrives after groups of the second."""
    order = [*range(1, 6), 6, 0, *range(7, 14)]
    rows = [row for number in order for row in rows_of_group(number, LIVE)]
    epoch = {"num_train_epochs": 1, "dataset": prompts_with_dead(6)}
    trainer = trained_with(policy_path, tmp_path, rows, steps=-1, **epoch)
    assert trainer.state.global_step == 4  # TRL's own ends after three steps, with six groups of seven


def test_all_prompts_dead_end_the_run_with_the_reason(policy_path, tmp_path):
    with pytest.raises(RuntimeError, match=r"6 groups in a row had nothing.*snr_max_empty_steps=3.*same reward, 0\."):
        trained_with(policy_path, tmp_path, [DEAD] * 20, snr_max_empty_steps=3)


def test_all_prompts_dead_end_a_lossless_run_too(policy_path, tmp_path):
    with pytest.raises(RuntimeError, match=r"snr_max_empty_steps=3.*same reward"):
        trained_with(policy_path, tmp_path, [DEAD] * 20, snr_max_empty_steps=3, snr_strategy="lossless", steps=10)


def test_a_dead_worker_ends_the_run_with_trls_message(policy_path, tmp_path):
    worker = send([LIVE, DEAD, DEAD])
    worker.healthy = False
    with pytest.raises(RuntimeError, match="Rollout worker child has failed"):
        trained_with(policy_path, tmp_path, worker)


class Held(StubWorker):
    """Sends four groups, and two more for each further version of the weights, whatever becomes of them."""

    def start(self):
        self.send(16)

    def update_model_version(self, version):
        if version > 1:
            self.send(8)

    def send(self, number):
        for row in self.rows[:number]:
            self.rollout_buffer.put(row)
        del self.rows[:number]


def test_a_worker_that_waits_for_the_trainer_ends_the_run_with_the_reason(policy_path, tmp_path, monkeypatch):
    """Two groups for a version are both dropped, and without others the trainer never gets to the next version."""
    held = Held(send([LIVE, LIVE, LIVE, LIVE, DEAD, DEAD, LIVE, LIVE, LIVE, LIVE]).rows)
    monkeypatch.setattr(async_cpu.async_grpo_trainer.RolloutQueueDataset.__init__, "__defaults__", (3, 0.2, None))
    with pytest.raises(RuntimeError, match=r"sent nothing for .* dropped.*max_staleness"):
        trained_with(policy_path, tmp_path, held, steps=9, heartbeat_stale_after_s=1.0)


def test_a_slow_worker_is_waited_for(policy_path, tmp_path, monkeypatch):
    monkeypatch.setattr(async_cpu.async_grpo_trainer.RolloutQueueDataset.__init__, "__defaults__", (3, 0.2, None))
    worker = send([LIVE, LIVE, DEAD])
    late = send([LIVE] * 6).rows[12:]
    threading.Timer(1.5, lambda: [worker.rollout_buffer.put(row) for row in late]).start()
    trainer = trained_with(policy_path, tmp_path, worker, heartbeat_stale_after_s=30.0)
    assert trainer.state.global_step == 1


def test_time_in_which_nobody_asks_is_no_silence_of_the_worker():
    """An update may take longer than a worker may be silent."""

    def drop(group):
        rewards = group.rewards()
        return Selection(rewards, rewards[:, 0], rewards > 9, group.lengths()), []

    args = types.SimpleNamespace(
        num_generations=4, max_staleness=9, snr_max_empty_steps=0, generation_batch_size=8, heartbeat_stale_after_s=0.3
    )
    worker = send([DEAD, DEAD])
    worker.start()
    groups = async_groups.GroupQueue(
        types.SimpleNamespace(args=args, rollout_worker=worker, model_version=0, _decide=drop)
    )
    with pytest.raises(queue.Empty):
        groups.get(timeout=0.05)
    assert 0 in groups.ledger and 1 in groups.ledger
    time.sleep(0.5)
    with pytest.raises(queue.Empty):
        groups.get(timeout=0.05)
    with pytest.raises(RuntimeError, match="sent nothing"):
        for _ in range(20):
            with pytest.raises(queue.Empty):
                groups.get(timeout=0.05)


# A run that is killed, and resumed


def test_a_killed_run_goes_on_with_nothing_lost_and_nothing_twice(policy_path, tmp_path):
    """SIGKILL at step 6, resumed from the checkpoint of step 4."""
    journals = [tmp_path / "first", tmp_path / "second"]
    command = ("async_killed.py", 1, policy_path, tmp_path / "run")
    with pytest.raises(AssertionError, match=r"ended with \[-9\]"):
        launch(*command, journals[0], "kill")
    launch(*command, journals[1])
    first, second = ([json.loads(line) for line in one.read_text().splitlines()] for one in journals)
    first = [one for one in first if "group" in one]
    before = {one["group"] for one in first if one["step"] <= 4}
    start = second[0]["start"]
    after = [start + one["group"] for one in second[1:-1]]
    assert max(one["step"] for one in first) >= 5 and len(before) >= 16
    assert len(after) == len(set(after)) and not before & set(after)  # nothing twice
    seen = before | set(after)
    assert set(range(start)) <= before and start > 0  # nothing lost
    assert before - set(range(start)), "no straggler: the test shows nothing"
    frontier = start + second[-1]["frontier"]
    assert frontier > max(before) and set(range(frontier)) <= seen
    assert second[0]["range"] == [0.0, 1.0]  # the filter's state

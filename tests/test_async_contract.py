"""What the asynchronous trainer leans on in TRL is in the table, and a release without it is refused."""

import async_cpu
import pytest
from async_cpu import Server, StubWorker, make_async

from ragen2_trl.cli.check_trl import main
from ragen2_trl.trainers import trl_contract
from ragen2_trl.trainers.trl_async import AsyncGRPOTrainer, AsyncRolloutWorker


def test_the_installed_trl_has_all_that_the_asynchronous_trainer_needs(capsys):
    found = trl_contract.needs(AsyncGRPOTrainer)
    assert len(found) > 30 and not [one for one in found if one.problem is not None]
    main([])
    assert "AsyncGRPOTrainer of TRL" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (AsyncGRPOTrainer, "_log_step_metrics"),
        (AsyncRolloutWorker._loop_cls, "_score_group"),
        (async_cpu.async_grpo_trainer.DataCollatorForRollout, "torch_call"),
    ],
)
def test_a_release_without_a_hook_of_the_asynchronous_trainer_is_refused(
    policy_path, tmp_path, monkeypatch, owner, name
):
    async_cpu.patch(monkeypatch.setattr)
    monkeypatch.setattr(owner, name, lambda self, one, other, third: None)
    with pytest.raises(trl_contract.IncompatibleTRLError, match=name):
        make_async(policy_path, tmp_path, Server(), rollout_worker=StubWorker(), max_steps=1)


def test_a_changed_setting_of_trl_is_named(monkeypatch):
    monkeypatch.setattr(trl_contract, "ASYNC_FIELDS", ["max_staleness", "max_lag"])
    problems = [one.name for one in trl_contract.needs(AsyncGRPOTrainer) if one.problem is not None]
    assert problems == ["AsyncGRPOConfig.max_lag"]

"""What the asynchronous trainer leans on in TRL is in the table, and a release without it is refused."""

import inspect
import re
import sys

import async_cpu
import pytest
import trl
from async_cpu import Server, StubWorker, make_async
from conftest import need
from trl.experimental import async_grpo
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer, async_grpo_trainer, async_rollout_worker
from trl.experimental.async_grpo.async_rollout_worker import AsyncRolloutWorker

import ragen2_trl
from ragen2_trl import callbacks
from ragen2_trl.cli.check_trl import main
from ragen2_trl.trainers import trl_contract


def test_the_installed_trl_has_all_that_the_asynchronous_trainer_needs(capsys):
    found = trl_contract.needs("AsyncGRPOTrainer")
    assert len(found) > 20 and not [one for one in found if one.problem is not None]
    main([])
    assert "AsyncGRPOTrainer on TRL" in capsys.readouterr().out


READ = {
    AsyncGRPOTrainer: "_metrics _trained_groups _groups_before_resume _last_groups_trained _step_microbatches "
    "aux_loss_enabled model_version rollout_queue rollout_worker router_aux_loss_coef",
    AsyncRolloutWorker._loop_cls: "reward_funcs reward_func_names num_generations",
    async_grpo_trainer.DataCollatorForRollout: "groups_trained global_n_tokens group_id completion_mask metrics",
}


@pytest.mark.parametrize("owner", READ, ids=lambda owner: owner.__name__)
def test_what_we_read_from_trls_asynchronous_classes_is_there(owner):
    source = inspect.getsource(owner)
    assert [name for name in READ[owner].split() if not re.search(rf"\b{name}\b", source)] == []


@pytest.mark.slow
def test_openenvs_harness_scores_groups_by_trls_method():
    """So our loop tags its rows, too."""
    need("openenv")
    from trl.experimental.async_grpo.openenv_harness import HarnessRolloutWorker

    assert HarnessRolloutWorker._loop_cls._score_group is AsyncRolloutWorker._loop_cls._score_group


def test_the_worker_takes_a_loop_of_ones_own():
    source = inspect.getsource(AsyncRolloutWorker)
    assert [name for name in ("_loop_cls", "_loop_kwargs", "rollout_buffer") if name not in source] == []


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (AsyncGRPOTrainer, "_log_step_metrics"),
        (AsyncRolloutWorker._loop_cls, "_score_group"),
        (async_grpo_trainer.DataCollatorForRollout, "torch_call"),
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
    monkeypatch.setitem(trl_contract.FIELDS, "AsyncGRPOTrainer", "max_staleness max_lag")
    problems = [one.name for one in trl_contract.needs("AsyncGRPOTrainer") if one.problem is not None]
    assert problems == ["AsyncGRPOConfig.max_lag"]


GONE = {
    "its module": (async_grpo.__name__, lambda patch: patch.setitem(sys.modules, async_grpo.__name__, None)),
    "a module of it": (
        async_rollout_worker.__name__,
        lambda patch: patch.setitem(sys.modules, async_rollout_worker.__name__, None),
    ),
    "its trainer": ("AsyncGRPOTrainer", lambda patch: patch.delattr(async_grpo, "AsyncGRPOTrainer")),
    "its worker": ("AsyncRolloutWorker", lambda patch: patch.delattr(async_rollout_worker, "AsyncRolloutWorker")),
    "its collator": (
        "DataCollatorForRollout",
        lambda patch: patch.delattr(async_grpo_trainer, "DataCollatorForRollout"),
    ),
    "the worker's loop": ("_AsyncRolloutLoop", lambda patch: patch.delattr(async_rollout_worker, "_AsyncRolloutLoop")),
    "a setting": ("max_staleness", lambda patch: patch.delitem(AsyncGRPOConfig.__dataclass_fields__, "max_staleness")),
}


@pytest.mark.parametrize(("name", "remove"), GONE.values(), ids=GONE)
def test_a_release_without_a_name_of_the_asynchronous_trainer_serves_the_others(name, remove, monkeypatch, capsys):
    monkeypatch.setattr(trl, "__version__", "1.98.0")
    for module in ("async_grpo", "async_rollouts"):
        monkeypatch.delitem(sys.modules, f"ragen2_trl.trainers.{module}", raising=False)
    remove(monkeypatch)
    with pytest.raises(SystemExit):
        main([])
    assert any(name in line and "is gone" in line for line in capsys.readouterr().out.splitlines())
    with pytest.raises(trl_contract.IncompatibleTRLError, match=rf"1\.98\.0.*{name}.*TRL {trl_contract.OLDEST_ASYNC}"):
        ragen2_trl.SNRFilteredAsyncGRPOConfig("folder", bf16=False)
    for one in ("SNRFilteredGRPOConfig", "SNRFilteredRLOOConfig"):
        getattr(ragen2_trl, one)("folder", bf16=False, use_cpu=True)
    for one in callbacks.__all__:
        getattr(callbacks, one)

"""DDP, DeepSpeed ZeRO, FSDP2 and LoRA on several processes end where one process ends."""

import json

import pytest
import torch
from backends import AS_TRL, CASES, CASES_OF_THREE, GROUP_SIZE, LOSSLESS_CASES, cases_of, processes_of, run_case
from conftest import covering
from launching import launch
from safetensors.torch import load_file

from ragen2_trl.record.saved_episodes import read_episodes

BACKENDS = ["ddp", "zero1", "zero2", "zero3", "fsdp2", "ddp_lora", "zero3_lora", "fsdp2_lora", "ddp_three"]
# A newcomer's `make test` has each trainer on two processes, whole and sharded.
FAST = {"ddp": ("filtered dapo", "rloo", "ppo with a critic of its own", "lossless bnpo"), "zero3": ("filtered dapo",)}
# Each process samples in a round of the refill, so that more groups are logged than one process would need.
SAMPLES_MORE = ("masked and refilled unevenly by three",)
EMPTY = ("an empty step between", "rloo, an empty step between", "ppo, an empty step between")
# What a rank reports must be what one process measures, but for these.
NOT_COMPARED = ("mi/seconds", "mi/tokens", "grad/seconds", "grad/tokens")
COMPARED_METRICS = ("reward", "snr/", "mi/", "ppo/", "grad/")


# What a case is about, by the first of these settings that it has.
MECHANISMS = (
    *(
        "gradients",
        "snr_dynamic_sampling_rounds",
        "ds3_gather_for_generation",
        "critic_warmup_steps",
        "num_iterations",
    ),
    *("gradient_checkpointing", "flat_steps", "optim", "value_head", "beta"),
)


def traits(backend: str, case: str) -> dict[str, object]:
    settings = cases_of(backend)[case]
    mechanism = "uneven" if "unevenly" in case else next((name for name in MECHANISMS if name in settings), "none")
    return {
        "backend": backend,
        "is sharded": backend.startswith(("zero3", "fsdp2")),
        "algorithm": settings.get("algorithm", "grpo"),
        "loss": settings.get("loss_type"),
        "mechanism": f"lossless {mechanism}" if case in LOSSLESS_CASES else mechanism,
    }


def sample() -> set[tuple[str, str]]:
    """Backends and cases for CI. A loss needs no test on each backend: only shards could make a difference to it."""
    backends = [backend for backend in BACKENDS if backend != "zero1"]  # which goes the way of zero2
    every = [(backend, case) for backend in backends for case in cases_of(backend) if case not in AS_TRL]
    chosen: set[tuple[str, str]] = set()
    for columns in (("backend", "algorithm", "mechanism"), ("is sharded", "loss", "mechanism")):
        every.sort(key=lambda pair: pair not in chosen)
        rows = [{name: traits(*pair)[name] for name in columns} for pair in every]
        chosen |= {every[index] for index in covering(rows)}
    return chosen


SAMPLE = sample()


def mark(backend: str, case: str):
    marks = (
        [] if case in FAST.get(backend, ()) else [pytest.mark.slow if (backend, case) in SAMPLE else pytest.mark.full]
    )
    if backend.startswith("zero"):
        marks.append(pytest.mark.needs("deepspeed"))
    return pytest.param(backend, case, marks=marks, id=f"{backend}, {case}")


@pytest.fixture(scope="module")
def several_processes(policy_path, tmp_path_factory, request):
    """Results of all cases of a backend that were asked for, which are run when the first of them is."""
    results, selected = {}, {}
    for item in request.session.items:
        if "several_processes" in item.fixturenames:
            parameters = item.callspec.params
            of_backend = selected.setdefault(parameters["backend"], {})
            of_backend[parameters["case"]] = None
            if parameters["case"] in LOSSLESS_CASES:
                of_backend[f"{parameters['case']} as TRL"] = None

    def run(backend: str):
        if backend not in results:
            results[backend] = {}  # not again for each case where it fails
            folder = tmp_path_factory.mktemp(backend)
            launch("backends.py", processes_of(backend), backend, policy_path, str(folder), *selected[backend])
            results[backend] = torch.load(folder / "results.pt")
        return results[backend]

    return run


@pytest.fixture(scope="module")
def one_process(policy_path, tmp_path_factory):
    results = {}

    def run(case: str, lora: bool):
        if (case, lora) not in results:
            folder = str(tmp_path_factory.mktemp("one_process"))
            results[case, lora] = run_case(policy_path, folder, {**CASES, **CASES_OF_THREE}[case], 1, lora)[:2]
        return results[case, lora]

    return run


def filtered_cases_of(backend: str) -> list[str]:
    return [case for case in cases_of(backend) if case not in {**LOSSLESS_CASES, **AS_TRL}]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "case"), [mark(backend, case) for backend in BACKENDS for case in filtered_cases_of(backend)]
)
def test_several_processes_end_with_the_parameters_of_one(backend, case, several_processes, one_process):
    expected, _ = one_process(case, backend.endswith("_lora"))
    parameters = several_processes(backend)[case]["parameters"]
    assert parameters.keys() == expected.keys()
    moved = 0.0
    for name, value in expected.items():
        torch.testing.assert_close(parameters[name], value, rtol=1e-3, atol=2e-5, msg=lambda m, n=name: f"{n}: {m}")
        moved = max(moved, value.abs().max().item())
    assert moved > 0
    if case.startswith("ppo"):
        assert parameters["critic.head.weight"].abs().max() > 0  # where it began


@pytest.mark.parametrize(
    ("backend", "case"),
    [mark(backend, case) for backend in BACKENDS for case in filtered_cases_of(backend) if case not in SAMPLES_MORE],
)
def test_several_processes_log_what_one_logs(backend, case, several_processes, one_process):
    _, expected = one_process(case, backend.endswith("_lora"))
    rows = several_processes(backend)[case]["rows"]
    assert len(rows) == len(expected)
    for row, alone in zip(rows, expected, strict=True):
        keys = {key for key in alone if key.startswith(COMPARED_METRICS) and key not in NOT_COMPARED}
        # Padding, and a mean of the means of micro-batches, depend on how rows are dealt.
        dealt_otherwise = processes_of(backend) > 2 or "refilled" in case
        for key in keys - {"snr/update_compute_fraction", "ppo/value_loss" if dealt_otherwise else None}:
            # `None`: explained variance without a kept row
            same = None if alone[key] is None else pytest.approx(alone[key], rel=1e-3, abs=1e-4)
            assert row[key] == same, (key, json.dumps(row))


@pytest.mark.parametrize(
    ("backend", "case"),
    [mark(backend, case) for backend in BACKENDS for case in cases_of(backend) if case in LOSSLESS_CASES],
)
def test_lossless_ends_with_the_parameters_of_trl_on_as_many_processes(backend, case, several_processes):
    ours, plain = several_processes(backend)[case], several_processes(backend)[f"{case} as TRL"]
    for name, value in plain["parameters"].items():
        torch.testing.assert_close(ours["parameters"][name], value, rtol=1e-4, atol=1e-5)
    for row, of_plain in zip(ours["rows"], plain["rows"], strict=True):
        assert row["loss"] == pytest.approx(of_plain["loss"], rel=1e-3, abs=1e-4)
        assert row["grad_norm"] == pytest.approx(of_plain["grad_norm"], rel=1e-3, abs=1e-4)
        assert row["snr/update_compute_fraction"] < 0.5 < of_plain["snr/update_compute_fraction"]
        assert row["snr/empty_steps"] == 0


@pytest.mark.slow
@pytest.mark.parametrize(("backend", "case"), [(backend, case) for backend in FAST for case in EMPTY])
def test_an_empty_step_moves_neither_weights_nor_optimizer(backend, case, several_processes, policy_path, tmp_path):
    """With the second of its steps empty, a run ends where it ends without that step."""
    without = {**CASES[case], "max_steps": CASES[case]["max_steps"] - 1, "flat_steps": []}
    expected, _, _ = run_case(policy_path, str(tmp_path), without, 1)
    parameters = several_processes(backend)[case]["parameters"]
    for name, value in expected.items():
        torch.testing.assert_close(parameters[name], value, rtol=1e-3, atol=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    "backend",
    [
        pytest.param("ddp", marks=pytest.mark.full),
        pytest.param("zero3", marks=pytest.mark.needs("deepspeed")),
        pytest.param("fsdp2", marks=pytest.mark.full),
    ],
)
def test_processes_whose_episodes_differ_in_turns_generate_together(backend, policy_path, tmp_path):
    """Process 0 plays four turns and process 1 two: generation under ZeRO-3 hangs if they call it unequally often."""
    launch("small.py", 2, "episodes", backend, policy_path, str(tmp_path))
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2))
    assert first["calls"] == [4, 4, 4, 4] * 2
    assert second["calls"] == [4, 4, 1, 1] * 2
    rows = [row for row in first["rows"] if "loss" in row]
    assert [row["env/frozen_lake/turns"] for row in rows] == [3.0, 3.0]
    for step in (1, 2):  # one file for all processes
        episodes = read_episodes(tmp_path / "_episodes" / f"train_{step:05d}.jsonl")
        assert [one.sample for one in episodes] == list(range(GROUP_SIZE)) * (8 // GROUP_SIZE)
        assert sorted(len(one.turns) for one in episodes) == [2] * 4 + [4] * 4


@pytest.mark.slow
@pytest.mark.parametrize(
    "backend",
    [
        pytest.param("ddp", marks=pytest.mark.full),
        pytest.param("zero3", marks=[pytest.mark.needs("deepspeed"), pytest.mark.full]),
        "fsdp2",
    ],
)
def test_processes_generate_pilots_and_the_rest_of_their_groups_together(backend, policy_path, tmp_path):
    """Under ZeRO-3 and FSDP, too, where a process that called generation less often would leave the others waiting."""
    settings = {"snr_pilot_generations": 2, "snr_strategy": "nonzero", "per_device_train_batch_size": 16}
    launch("small.py", 2, "episodes", backend, policy_path, str(tmp_path), json.dumps(settings))
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2))
    assert len(first["calls"]) == len(second["calls"]) == 2 * 2 * 4  # steps, stages, and turns of the longer episodes
    for step, row in enumerate(row for row in first["rows"] if "loss" in row):
        pilots, rest = (first["calls"][8 * step + turn] for turn in (0, 4))
        assert pilots == 4 * 2  # prompts of a process
        assert row["snr/sampled_completions"] == 2 * (pilots + rest)
        assert 0 < rest <= pilots


@pytest.mark.slow
@pytest.mark.parametrize("backend", FAST)
def test_ppo_goes_on_from_a_checkpoint_with_its_critic_and_optimizer(backend, policy_path, tmp_path):
    launch("small.py", 2, "ppo_resume", backend, policy_path, str(tmp_path))
    ends = torch.load(tmp_path / "parameters.pt")
    assert any(name.startswith("critic.backbone.") for name in ends["whole"])
    for name, value in ends["whole"].items():
        torch.testing.assert_close(ends["resumed"][name], value, rtol=1e-4, atol=1e-6)
    for folder in ("checkpoint-4", "final"):
        policy = load_file(tmp_path / folder / "model.safetensors")
        assert policy and not [name for name in policy if "critic" in name]
        critic = load_file(tmp_path / folder / "_critic" / "critic.safetensors")
        assert {f"critic.{name}" for name in critic} == {name for name in ends["whole"] if name.startswith("critic.")}
        for name, value in critic.items():
            torch.testing.assert_close(value, ends["whole"][f"critic.{name}"], rtol=1e-4, atol=1e-6)


@pytest.mark.slow
@pytest.mark.needs("deepspeed")
def test_a_checkpoint_of_zero_is_not_resumed_under_ddp(policy_path, tmp_path):
    """transformers would go on without optimizer and scheduler."""
    launch("killed.py", 2, "zero2", policy_path, tmp_path)
    with pytest.raises(AssertionError, match=r"was saved with DeepSpeed ZeRO.* on 2 processes\. This run has .*DDP"):
        launch("killed.py", 2, "ddp", policy_path, tmp_path)

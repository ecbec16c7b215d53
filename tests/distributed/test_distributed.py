"""Several processes compute the update that one computes."""

import json
from collections import Counter

import pytest
import small
import torch
from algorithms import GRPO, STILL
from conftest import PROMPTS
from datasets import Dataset
from launching import launch
from replay import KEPT, REWARDS, Replay, assert_close, gradients_of, mean_gradient, second_half
from transformers import AutoTokenizer
from trl import GRPOTrainer

from ragen2_trl import CostCallback, MutualInformationCallback
from ragen2_trl.record.saved_episodes import read_episodes

pytestmark = pytest.mark.slow

COMMON = {**small.COMMON, **small.GLOO, **STILL, "max_steps": 1}


def layout(rows, accumulation, steps=None):
    """Rows of each process, and steps per generation where they are not those of an optimizer step."""
    settings = {"per_device_train_batch_size": rows, "gradient_accumulation_steps": accumulation}
    return settings if steps is None else {**settings, "steps_per_generation": steps}


# name: (settings, prompts, kept prompts of each generation batch)
CASES = {
    **{
        loss_type: ({"loss_type": loss_type, **layout(4, 4)}, PROMPTS, [KEPT])
        for loss_type in ("grpo", "dapo", "bnpo", "dr_grpo", "luspo")
    },
    # Three groups of four on two processes of six rows each: the second group is on both.
    "groups straddle processes": (
        {"loss_type": "dapo", **layout(3, 2)},
        [PROMPTS[0], PROMPTS[5], PROMPTS[1]],
        [[PROMPTS[0], PROMPTS[5]]],
    ),
    "two optimizer steps per generation": ({"loss_type": "grpo", **layout(2, 4, 8), "max_steps": 2}, PROMPTS, [KEPT]),
    "three rows an optimizer step on two processes": (
        {"loss_type": "grpo", **layout(2, 1, 4), "max_steps": 4},
        [PROMPTS[0], PROMPTS[1], PROMPTS[2], PROMPTS[5]],
        [[PROMPTS[0], PROMPTS[2], PROMPTS[5]]],
    ),
    # The second generation batch of the optimizer step keeps nothing, so its last micro-step has no rows of its own.
    "last generation batch of a step is empty": (
        {"loss_type": "grpo", **layout(4, 2, 1)},
        [PROMPTS[0], PROMPTS[2], PROMPTS[1], PROMPTS[3]],
        [[PROMPTS[0], PROMPTS[2]], []],
    ),
    # Each generation of one group, whose rows are on both processes, is ranked among those before it.
    "one group a generation": (
        {"loss_type": "dapo", **layout(2, 8, 1)},
        PROMPTS,
        [[prompt] if prompt in KEPT else [] for prompt in PROMPTS],
    ),
    **{
        f"scores over processes {score}": (
            {"loss_type": "dapo", "snr_score": score, "snr_value": 1.0, "per_device_train_batch_size": 6},
            [PROMPTS[0], PROMPTS[5], PROMPTS[1]],
            [[PROMPTS[0], PROMPTS[5]]],
        )
        for score in ("entropy", "length", "random")
    },
    **{
        f"batch-level advantages {name}": (
            {"loss_type": "dapo", name: value, "per_device_train_batch_size": 16},
            PROMPTS,
            [KEPT],
        )
        for name, value in (("scale_rewards", "batch"), ("multi_objective_aggregation", "normalize_then_sum"))
    },
}


@pytest.fixture(scope="module")
def gradients_of_two_processes(policy_path, tmp_path_factory):
    folder = tmp_path_factory.mktemp("two_processes")
    cases = {
        name: {"settings": {**COMMON, **settings}, "prompts": prompts, "equal_lengths": "bnpo" in name}
        for name, (settings, prompts, _) in CASES.items()
    }
    (folder / "cases.json").write_text(json.dumps(cases))
    launch("small.py", 2, "filtered_update", policy_path, folder / "cases.json", folder)
    return [torch.load(folder / f"gradients_{process}.pt") for process in (0, 1)]


@pytest.mark.parametrize("name", CASES)
def test_two_processes_compute_grpo_on_the_kept_groups(name, gradients_of_two_processes, policy_path, make_args):
    settings, _, kept_of_generations = CASES[name]
    first, second = (gradients[name] for gradients in gradients_of_two_processes)
    assert_close(mean_gradient(first), mean_gradient(second))

    def plain(kept):
        replay = Replay(AutoTokenizer.from_pretrained(policy_path), REWARDS, equal_lengths="bnpo" in name)
        args = make_args(
            snr=False,
            loss_type=settings["loss_type"],
            per_device_train_batch_size=4 * len(kept),
            max_steps=1,
            learning_rate=0.0,
            max_grad_norm=0.0,
            beta=0.1,
            **{name: settings[name] for name in ("scale_rewards", "multi_objective_aggregation") if name in settings},
        )
        return gradients_of(GRPOTrainer, policy_path, args, replay, kept)[0]

    expected = [plain(kept) for kept in kept_of_generations if kept]
    # A generation batch without a kept group adds nothing and keeps its place in the mean.
    scale = len(expected) / len(kept_of_generations)
    expected = {name: gradient * scale for name, gradient in mean_gradient(expected).items()}
    assert_close(mean_gradient(first), expected)


@pytest.mark.parametrize("generations", [pytest.param(1, marks=pytest.mark.full), 4])
def test_two_processes_measure_what_one_measures(policy_path, make_args, tmp_path, generations):
    """On stock GRPO, with more completions than are scored: both processes draw the same ones from all of them, be
    they of one generation or pooled."""
    launch("small.py", 2, "measured_rollouts", policy_path, tmp_path, generations)
    row, other = (json.loads((tmp_path / f"row_{process}.json").read_text()) for process in (0, 1))
    replay = Replay(AutoTokenizer.from_pretrained(policy_path), REWARDS)
    layout = {"per_device_train_batch_size": 32 // generations, "max_steps": generations}
    args = make_args(snr=False, **layout, learning_rate=0.0, shuffle_dataset=False)
    dataset = Dataset.from_dict({"prompt": PROMPTS})
    trainer = GRPOTrainer(policy_path, Replay.reward, args, dataset, rollout_func=replay.rollout)
    trainer.add_callback(MutualInformationCallback(trainer, every=1, num_completions=20, answer=second_half))
    trainer.add_callback(CostCallback(trainer))
    trainer.train()
    expected = next(row for row in trainer.state.log_history if "mi/seconds" in row)
    measured = {key for key in expected if key.startswith("mi/")} - {"mi/seconds", "mi/tokens"}
    assert measured <= row.keys()
    assert expected["mi/first_turn/num_completions"] == 20
    assert expected["mi/answer/num_swaps"] >= 8
    for key in measured:
        assert row[key] == pytest.approx(expected[key], abs=1e-5), key
        assert other[key] == pytest.approx(expected[key], abs=1e-5), key
    # The work is shared. Each process tries whether caches can be reused, and prompts of one token run once more than
    # alone, so that processes keep step.
    assert row["mi/tokens"] == other["mi/tokens"] == pytest.approx(expected["mi/tokens"], rel=0.1)
    # What it has cost is the sum over both; each pads to the longest of its own rows.
    sampled = sum(len(ids) for group in replay.completions.values() for ids in group)
    size = sum(parameter.numel() for parameter in trainer.model.parameters())
    assert row["cost/sampled_tokens"] == expected["cost/sampled_tokens"] == sampled
    assert sampled < row["cost/update_tokens"] <= expected["cost/update_tokens"]
    assert row["cost/update_flops"] == 6 * size * row["cost/update_tokens"]
    costs = {key for key in row if key.startswith("cost/")} - {"cost/seconds"}
    assert len(costs) == 6 and all(row[key] == other[key] for key in costs)


@pytest.mark.parametrize(
    "backend",
    [pytest.param("ddp", marks=pytest.mark.full), pytest.param("zero3", marks=pytest.mark.needs("deepspeed"))],
)
def test_two_processes_evaluate_as_one_does(backend, tmp_path):
    """Greedily, in one turn and in several, on tasks that they cannot share evenly."""
    launch("small.py", 2, "held_out", backend, tmp_path / "two")
    first, second = (json.loads((tmp_path / "two" / f"{process}.json").read_text()) for process in (0, 1))
    alone = small.evaluated(str(tmp_path / "one"), 1)
    expected = [row for row in alone.state.log_history if "eval/seconds" in row]
    assert [row["step"] for row in first] == [row["step"] for row in expected] == [0, 1]
    for row, other, single in zip(first, second, expected, strict=True):
        keys = [key for key in single if key.startswith("eval/env/")]
        assert len(keys) > 30
        for key in keys:
            assert row[key] == other[key] == pytest.approx(single[key], abs=1e-9), key
    episodes = [read_episodes(tmp_path / name / "_episodes" / "evaluation_00001.jsonl") for name in ("two", "one")]
    assert episodes[0] == episodes[1]


def test_lost_connections_are_counted_over_processes(policy_path, tmp_path):
    """One of sixteen episodes is left out; of two, neither process alone would end the run."""
    launch("small.py", 2, "failing", policy_path, tmp_path)
    first, second = (json.loads((tmp_path / f"{process}.json").read_text()) for process in (0, 1))
    (row,) = [row for row in first["rows"] if "loss" in row]
    assert row["env/frozen_lake/failed"] == 1 / 16
    assert first["told"] == second["told"] and first["told"].startswith("2 of 16 episodes")
    assert "frozen_lake, row " in first["told"] and "turn 1" in first["told"]


def test_two_processes_save_the_groups_that_one_saves(tmp_path):
    """Of two tasks, of which a process has one alone, with a group that lies on both processes."""
    launch("small.py", 2, "played", tmp_path / "two")
    small.played(str(tmp_path / "one"), 1)
    groups = []
    for name in ("one", "two"):
        episodes = read_episodes(tmp_path / name / "_episodes" / "train_00001.jsonl")
        groups.append(Counter((one.group, one.task, one.seed) for one in episodes))
    for found in groups:
        assert sorted(found.values()) == [4] * 6
    assert {key[1:] for key in groups[0]} == {key[1:] for key in groups[1]}


def test_a_process_with_images_trains_beside_one_without(policy_path, tmp_path):
    """Of each family of models, in two steps."""
    launch("images.py", 2, policy_path, tmp_path)
    assert [torch.load(tmp_path / f"seen_{process}.pt") for process in (0, 1)] == [[True] * 6] * 2


def test_settings_that_differ_between_processes_are_named_on_each_of_them(policy_path, tmp_path):
    launch("small.py", 2, "mismatch", policy_path, tmp_path)
    messages = [(tmp_path / f"error_{process}.txt").read_text() for process in (0, 1)]
    assert (
        messages
        == ["snr_value differs between processes, in their order: [0.9, 0.5]; allowed: one value for all."] * 2
    )


def test_a_run_resumed_on_more_processes_has_the_same_state_on_each(policy_path, tmp_path):
    before = small.resumable(policy_path, str(tmp_path), 16, 2)
    drawn = before._sampler.policy.order.drawn
    assert drawn > 0
    launch("small.py", 2, "resume", policy_path, tmp_path)
    first, second = (json.loads((tmp_path / f"shared_{process}.json").read_text()) for process in (0, 1))
    assert first == second
    assert first["drawn"] >= drawn
    assert first["step"] == 4
    assert tuple(first["filter"]["reward_range"]) == before._strategy.reward_range


def test_samples_of_several_turns_and_selectors_are_those_of_one_process(policy_path, tmp_path):
    launch("small.py", 2, "several", policy_path, tmp_path)
    first, second = (torch.load(tmp_path / f"gradients_{process}.pt") for process in (0, 1))
    alone = small.gradients(policy_path, str(tmp_path), 1)
    for name, gradient in alone.items():
        assert_close(first[name], second[name])
        assert_close(first[name], gradient)


def test_prompts_are_chosen_as_on_one_process_also_after_a_resume(policy_path, tmp_path):
    launch("small.py", 2, "prompts", policy_path, tmp_path)
    first, second = (json.loads((tmp_path / f"prompts_{process}.json").read_text()) for process in (0, 1))
    assert first == second == small.decisions(policy_path, str(tmp_path / "alone"), 8)
    resumed = small.decisions(policy_path, str(tmp_path / "alone"), 8, str(tmp_path / "alone" / "checkpoint-6"))
    assert resumed == {**first, "drawn": first["drawn"][6:]}


def test_pilots_are_dealt_to_processes_and_the_update_is_the_plain_one_on_whole_groups(policy_path, tmp_path):
    """Each completion is scored once, by one of the processes, which have as many of them."""
    launch("small.py", 2, "pilots", policy_path, tmp_path)
    first, second = (torch.load(tmp_path / f"pilots_{process}.pt") for process in (0, 1))
    for name in first:
        assert_close(first[name]["gradient"], second[name]["gradient"])
        trained = Counter(first[name]["trained"] + second[name]["trained"])
        groups = [prompt for prompt, rows in trained.items() for _ in range(rows // 4)]
        plain = GRPO.plain_gradient(policy_path, sorted(groups), beta=0.1, loss_type="dapo")
        assert_close(first[name]["gradient"], plain)
        assert len(first[name]["scored"]) == len(second[name]["scored"])
        scored = Counter(first[name]["scored"] + second[name]["scored"])
        assert sum(scored.values()) == first[name]["sampled"]
    whole = first["alone"]["whole"]
    assert whole == second["alone"]["whole"] and 0 < len(whole) < 8 and len(whole) % 2 == 0
    scored = Counter(first["alone"]["scored"] + second["alone"]["scored"])
    assert set(scored.values()) == {1} and len(scored) == 8 * 3 + len(whole)
    assert sum(Counter(first["filled up"]["trained"] + second["filled up"]["trained"]).values()) == 16


@pytest.mark.needs("deepspeed")
@pytest.mark.parametrize(
    "algorithm", ["grpo", *(pytest.param(one, marks=pytest.mark.full) for one in ("rloo", "ppo"))]
)
def test_a_scheduler_of_deepspeeds_own_takes_empty_steps_too(algorithm, policy_path, tmp_path):
    """Its engine takes no empty step; the learning rate is that of as many steps all the same."""
    launch("small.py", 2, "scheduler", algorithm, policy_path, tmp_path)
    rates = json.loads((tmp_path / "rates.json").read_text())
    assert rates["empty"].pop("empty") == 3 and rates["full"].pop("empty") == 0
    assert rates["empty"] == rates["full"]


# Of the rows of two processes, only those that change process are sent, and each computes its own share.


@pytest.fixture(scope="module")
def seen(policy_path, tmp_path_factory):
    """What each process saw."""
    folder = tmp_path_factory.mktemp("moved_rows")
    launch("moved_rows.py", 2, policy_path, folder)
    return [torch.load(folder / f"seen_{process}.pt") for process in (0, 1)]


@pytest.mark.parametrize(
    ("place", "moved"), [("two and two", 0), ("three and one", 4), ("four and none", 8)], ids=lambda value: str(value)
)
def test_only_rows_that_change_process_are_sent(place, moved, seen):
    """Two passes over 16 kept rows; each process trains on 8 of them."""
    both = [process["moves"][place] for process in seen]
    home = [Counter(process["kept"][0]["rows"] or []) for process in both]
    assert sum(map(Counter.total, home)) == 16
    sent = [
        [Counter(parcels[target] or []) for target in (0, 1)]
        for parcels in (process["sent"][0] if process["sent"] else [None, None] for process in both)
    ]
    assert [sent[0][0].total(), sent[1][1].total()] == [0, 0]
    assert sent[0][1].total() + sent[1][0].total() == moved
    assert [len(process["sent"]) for process in both] == [int(moved > 0)] * 2  # once for both passes
    for process in (0, 1):
        held = home[process] - sent[process][1 - process] + sent[1 - process][process]
        assert held.total() == 8
        trained = Counter(row for micro_batch in both[process]["trained"] for row in micro_batch)
        assert trained == held + held


@pytest.mark.parametrize(("place", "moved"), [("three and one", 4), ("four and none", 8)])
def test_bytes_grow_with_the_rows_that_move_and_not_with_those_that_stay(place, moved, seen):
    both = [process["moves"][place] for process in seen]
    kept = sum(process["kept"][0]["bytes"] for process in both)
    sent = sum(sum(sizes) for process in both for sizes in process["bytes"])
    container = 2_500  # of a parcel, whatever its rows: names, shapes
    assert 0 < sent <= kept * moved / 16 + container  # one of the processes sends


def test_each_process_computes_the_log_probs_of_its_own_rows_alone(seen):
    own, other = (process["refills"] for process in seen)
    assert any(step["waiting"] != beside["waiting"] for step, beside in zip(own, other, strict=True))
    assert any(step["groups"] for step in own)
    for pair in zip(own, other, strict=True):
        assert len(pair[0]["forwards"]) == len(pair[1]["forwards"])
        for step in pair:
            fresh = step["size"] - step["carried"] if step["carries"] else 0
            passes = -(-step["waiting"] // 2) + -(-fresh // 2)
            spare = len(step["forwards"]) - passes
            assert spare >= 0
            assert sum(step["forwards"]) == step["waiting"] + fresh + spare


def test_images_of_other_tile_counts_arrive_whole(seen):
    assert seen[0]["tiles"] == [(0, 1, [1.0]), (10, 4, [11.0])]
    assert seen[1]["tiles"] == [(1, 2, [2.0]), (11, 3, [12.0])]

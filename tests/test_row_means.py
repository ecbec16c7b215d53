"""TRL's metrics in the log row of a step that was sampled in several calls, recomputed from what reward functions saw.

They speak for every completion that was scored, as a pilot or in full; `frac_reward_zero_std` for whole groups.
"""

import math
from collections import defaultdict

import pytest
import torch
from algorithms import GRPO, RLOO
from conftest import PROMPTS

from ragen2_trl.rollout_events import end_tokens
from ragen2_trl.sampling.row_means import Call, average

RUN = {
    "per_device_train_batch_size": 64,
    "num_generations": 8,
    "max_completion_length": 8,
    "max_steps": 2,
    "snr_strategy": "nonzero",
}
WAYS = {
    "rounds": {"snr_dynamic_sampling_rounds": 2},
    "pilots": {"snr_pilot_generations": 3},
    "both": {"snr_pilot_generations": 3, "snr_dynamic_sampling_rounds": 2},
}


class Record:
    """Two reward functions, neither with a reward for every completion, and the completions they saw, by step.

    Only prompts with a "goal" have rewards that vary.
    """

    def __init__(self):
        self.seen = {}

    def parity(self, prompts, completion_ids, trainer_state, log_metric, **columns):
        odd = [float(sum(ids) % 2) for ids in completion_ids]
        found = [None if sum(ids) % 5 == 0 else one for ids, one in zip(completion_ids, odd, strict=True)]
        found = [one if "goal" in prompt else 0.0 for prompt, one in zip(prompts, found, strict=True)]
        seen = zip(completion_ids, found, self.length(prompts, completion_ids), odd, strict=True)
        self.seen.setdefault(trainer_state.global_step, []).extend(seen)
        log_metric("odd", sum(odd) / len(odd))
        return found

    @staticmethod
    def length(prompts, completion_ids, **columns):
        found = [None if sum(ids) % 5 < 2 else 0.1 * len(ids) for ids in completion_ids]
        return [one if "goal" in prompt else 0.0 for prompt, one in zip(prompts, found, strict=True)]


def mean_and_std(values):
    known = values[~values.isnan()]
    return [known.mean().item(), known.std().item()]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("algorithm", [GRPO, RLOO], ids=["grpo", "rloo"])
def test_a_log_row_has_means_over_every_completion_that_was_scored(algorithm, way, policy_path, tmp_path):
    record = Record()
    # In RLOO beta would make rewards of equal completions differ.
    args = algorithm.args(tmp_path, **RUN, **WAYS[way], beta=0.0)
    trainer = algorithm.make(policy_path, args, [record.parity, record.length], PROMPTS)
    rounds, select = [], trainer._select

    def note(*given):
        rounds.append((trainer.state.global_step, select(*given)))
        return rounds[-1][1]

    trainer._select = note
    trainer.train()
    sizes, ends = set(), {*end_tokens(trainer), trainer._tokenizer.pad_token_id}
    for row in [row for row in trainer.state.log_history if "loss" in row]:
        step = row["step"] - 1
        completions, *rewards, odd = zip(*record.seen[step], strict=True)
        per_func = torch.tensor([[math.nan if one is None else one for one in column] for column in rewards]).T
        sums = per_func.nansum(dim=1).masked_fill(per_func.isnan().all(dim=1), math.nan)
        assert [row["reward"], row["reward_std"]] == pytest.approx(mean_and_std(sums), rel=1e-5)
        for name, values in zip(("parity", "length"), per_func.T, strict=True):
            found = [row[f"rewards/{name}/{kind}"] for kind in ("mean", "std")]
            assert found == pytest.approx(mean_and_std(values), rel=1e-5), name
        assert row["odd"] == pytest.approx(sum(odd) / len(odd))
        lengths = [len(ids) for ids in completions]
        assert row["completions/mean_length"] == pytest.approx(sum(lengths) / len(lengths))
        ended = [len(ids) for ids in completions if ids[-1] in ends]
        assert row["completions/clipped_ratio"] == pytest.approx(1 - len(ended) / len(lengths))
        found = [row[f"completions/{kind}_terminated_length"] for kind in ("mean", "min", "max")]
        assert found == pytest.approx([sum(ended) / len(ended), min(ended), max(ended)] if ended else [0, 0, 0])
        whole = torch.cat([one.rewards for of_step, one in rounds if of_step == step])
        flat = [float(group[~group.isnan()].std() == 0) for group in whole]
        assert row["frac_reward_zero_std"] == pytest.approx(sum(flat) / len(flat))
        sizes.add(len(completions))
    assert len(record.seen) == 2 and sizes != {args.generation_batch_size}


# The arithmetic


class Calls:
    """Calls of a generation, whose values come after those that are there."""

    def __init__(self, metrics):
        self.metrics, self.ended = metrics, []
        self.add(0)

    def add(self, rows, by_name=None):
        self.ended.append(Call({name: len(values) for name, values in self.metrics.items()}, rows, by_name or {}))

    def averaged(self):
        average(self.metrics, self.ended, torch.zeros(1, 1), torch.ones(1), ["nothing"])
        return self.metrics


def collected(*calls, name="odd", before=()):
    """A metric's values after calls of (rows, value), where some were logged before."""
    metrics = {name: list(before)}
    means = Calls(metrics)
    for rows, value in calls:
        metrics[name].append(value)
        means.add(rows)
    return means.averaged()[name]


def test_values_are_weighed_by_the_rows_of_their_calls():
    assert collected((2, 1.0), (6, 0.0)) == [0.25]
    assert collected((2, 1.0), (1, 0.0), (1, 1.0)) == [0.75]


def test_values_of_earlier_generations_stay():
    assert collected((2, 1.0), (6, 0.0), before=(0.5, 0.125)) == [0.5, 0.125, 0.25]
    assert collected((3, 0.1), before=(0.5,)) == [0.5, 0.1]  # to the last bit


def test_calls_without_a_value_have_no_weight():
    assert collected((3, math.nan), (1, 0.25), (1, 0.75)) == [0.5]
    assert [math.isnan(value) for value in collected((3, math.nan), (1, math.nan))] == [True, True]


@pytest.mark.parametrize(("name", "value"), [("completions/max_length", 9.0), ("completions/min_length", 2.0)])
def test_of_extremes_the_extreme_is_kept(name, value):
    assert collected((3, 4.0), (3, 9.0), (3, 2.0), name=name) == [value]


def test_a_call_inside_another_speaks_for_its_own_rows():
    metrics = {"inner": [], "outer": []}
    means = Calls(metrics)
    for rows, value in ((1, 1.0), (3, 0.0)):
        metrics["inner"].append(value)
        means.add(rows)
        metrics["outer"].append(value)
        means.add(8)
    assert means.averaged() == {"inner": [0.25], "outer": [0.5]}


def test_metrics_of_a_part_of_the_rows_are_weighed_by_it():
    """TRL logs 0 for a call without a completion that ended, or without a tool call."""
    metrics = defaultdict(list)
    means = Calls(metrics)
    for rows, clipped, length, calls, failures in (
        (4, 0.75, 8.0, 1.0, 0.5),
        (8, 0.25, 4.0, 2.0, 0.25),
        (9, 1, 0, 0, 0),
    ):
        metrics["completions/clipped_ratio"].append(clipped)
        for kind in ("mean", "min"):
            metrics[f"completions/{kind}_terminated_length"].append(length)
        metrics["tools/call_frequency"].append(calls)
        metrics["tools/failure_frequency"].append(failures)
        means.add(rows)
        metrics["kl"].append(length)
        means.add(rows, {"kl": 2.0 * calls})
    found = means.averaged()
    assert found["completions/mean_terminated_length"] == [(8.0 + 6 * 4.0) / 7]
    assert found["completions/min_terminated_length"] == [4.0]
    assert found["tools/failure_frequency"] == [(2 + 4) / (4 + 16)]
    assert found["kl"] == [(8.0 + 2 * 4.0) / 3]


def test_names_with_values_from_elsewhere_are_left_as_they_are():
    metrics = {"odd": []}
    means = Calls(metrics)
    for value in (1.0, 0.0):
        metrics["odd"].append(value)
        means.add(4)
    metrics["odd"].append(0.5)
    assert means.averaged() == {"odd": [1.0, 0.0, 0.5]}

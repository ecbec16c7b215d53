"""What tests draw, and how they read it back from a figure."""

import random

import torch

from ragen2_trl.filtering import group_score, select_groups
from ragen2_trl.instrument.diagnosis import Measurement
from ragen2_trl.instrument.information import information_metrics
from ragen2_trl.record.group_rewards import GroupRewards
from ragen2_trl.record.held_out import HeldOutCurve, HeldOutPoint


def extent(artist):
    return artist.get_window_extent()


def assert_nothing_overlaps(artists) -> None:
    boxes = [extent(artist) for artist in artists]
    assert not [(a, b) for i, a in enumerate(boxes) for b in boxes[i + 1 :] if a.overlaps(b)]


def legend(axes) -> list[str]:
    return [text.get_text() for text in axes.get_legend().get_texts()] if axes.get_legend() else []


def line(axes, label):
    (found,) = (line for line in axes.lines if line.get_label() == label)
    return found


def measurement(num_prompts: int, group_size: int, gain: float) -> Measurement:
    """Reasonings in random order whose own prompt is `gain` nats per token better than the others, and noise."""
    generator = torch.Generator().manual_seed(0)
    own = torch.arange(num_prompts).repeat_interleave(group_size)
    own = own[torch.randperm(len(own), generator=generator)]
    lengths = torch.randint(20, 60, own.shape, generator=generator)
    logps = -lengths[:, None] * (0.3 + 0.05 * torch.rand(len(own), num_prompts, generator=generator))
    logps[torch.arange(len(own)), own] += gain * lengths
    metrics = information_metrics(logps, lengths, own)
    return Measurement(metrics, logps, lengths, own, list(range(len(own))), list(range(num_prompts)))


def groups(count: int, **filter_options) -> tuple[list[float], list[bool]]:
    """Scores of groups of eight binary rewards, and which of them the filter keeps."""
    generator = torch.Generator().manual_seed(count)
    rewards = (torch.rand(count, 8, generator=generator) < torch.rand(count, 1, generator=generator)).float()
    scores = group_score(rewards)
    return scores.tolist(), select_groups(scores, **filter_options).tolist()


def held_out_curve(task: str, steps=range(0, 141, 20), **metrics) -> HeldOutCurve:
    """Success that rises, with intervals."""
    points = [(step, 0.3 + 0.5 * step / 140) for step in steps]
    return HeldOutCurve(
        task,
        [HeldOutPoint(step, value, value - 0.1, value + 0.1, {"success": value, **metrics}) for step, value in points],
    )


def heights(bars) -> list[float]:
    """Of the bars at 1, 2, ..., in order."""
    values, edges, _ = bars.get_data()
    centres = (edges[:-1] + edges[1:]) / 2
    return [value for value, centre in zip(values, centres, strict=True) if abs(centre - round(centre)) < 0.01]


def history(steps: int, measured_every: int | None, **changes) -> list[dict]:
    rows = []
    for step in range(1, steps + 1):
        row = {"step": step, "reward": 0.1 * (step % 5), "success": 0.2 * (step % 5), "entropy": 0.4}
        row |= {"snr/kept_fraction": 0.6, "snr/zero_variance_fraction": 0.2, "snr/update_compute_fraction": 0.5}
        if measured_every and step % measured_every == 1:
            row |= {"mi/first_turn/retrieval_accuracy": 0.9, "mi/first_turn/retrieval_chance": 0.25}
        rows.append(row | changes)
    return [*rows, {"step": steps, "train_runtime": 1.0}]


def stock_history(steps: int) -> list[dict]:
    """What `trl.GRPOTrainer` logs, of that which is drawn."""
    return [{"step": step, "reward": 0.5, "entropy": 0.4, "frac_reward_zero_std": 0.3} for step in range(1, steps + 1)]


def group_rewards(steps: int, num_groups: int = 8, size: int = 8) -> list[GroupRewards]:
    """Of a task with partial credit that is learnt."""
    rng = random.Random(0)

    def group(step: int) -> list[float]:
        skill = min(1.0, max(0.0, rng.gauss(step / steps, 0.3)))
        return [10.9 if rng.random() < skill else -1.0 + 0.5 * rng.randrange(3) for _ in range(size)]

    records = [[group(step) for _ in range(num_groups)] for step in range(1, steps + 1)]
    return [GroupRewards(step, groups, [True] * num_groups) for step, groups in enumerate(records, start=1)]

"""The trainer's side of TRL's rollout queue: groups are pulled, filtered, and accounted for until they are done.

`GroupQueue` stands before the queue of the rollout worker, whichever worker that is, and hands TRL the rows of kept
groups. `GroupLedger` knows what became of each group: a checkpoint continues behind the last one that is done with
everything before it, and an epoch ends when its last group is done.
"""

import math
import queue
import time
from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass
from numbers import Real
from typing import Any, NamedTuple, TypedDict

import numpy as np
import torch
from torch import Tensor

from ragen2_trl.trainers.empty_steps import nothing_kept
from ragen2_trl.trainers.selection import Selection

TAG = "snr_tag"  # in the metrics of a row, until `GroupQueue` takes it out
REWARDS = "rewards/"  # begins the names of single rewards in the metrics of a row


class RowTag(NamedTuple):
    """Which row of its group a row is. Our loop tags the rows of TRL's worker, and any other worker may tag its own.

    Args:
        rows: of its group; more than G where conversations are several rows, fewer where one has no token to train.
        member: number of its conversation in the group, from 0.
        given_up: whether its prompt was not worth more than its pilots. Only our loop says so.
        audited: whether it was not, and was sampled in full to see what is missed. Only our loop says so.
    """

    rows: int
    member: int
    given_up: bool = False
    audited: bool = False


class GroupLedger:
    """Which groups are done: trained, dropped, or left out as too old. It stands in for TRL's `_trained_groups`.

    Groups are numbered in the order of the dataset, and the *frontier* is the first that is not done. TRL asks
    `number in ledger` for a checkpoint, and `len(ledger)` for the end of an epoch.
    """

    def __init__(self) -> None:
        self.frontier = 0
        self.ahead: set[int] = set()  # done, beyond the frontier
        self.rows: dict[int, int] = {}  # of groups in progress: rows that are not done
        self.resumed: set[int] = set()  # done before the checkpoint that this run goes on from

    def __len__(self) -> int:
        """Groups before the frontier."""
        return self.frontier

    def __contains__(self, group: int) -> bool:
        return group < self.frontier or group in self.ahead

    def update(self, groups: Iterable[int]) -> None:
        """TRL's own collator counts rows before they are trained; ours does not call it."""

    def rows_done(self, group: int, rows: int) -> bool:
        """So many rows of a group are done. Returns whether the group is."""
        self.rows[group] -= rows
        if self.rows[group]:
            return False
        del self.rows[group]
        self.ahead.add(group)
        while self.frontier in self.ahead:
            self.ahead.remove(self.frontier)
            self.frontier += 1
        return True


@dataclass(frozen=True)
class ArrivedGroup:
    """The rows of one group, and what they say of its G conversations.

    Args:
        rows: TRL's `RolloutSample`s.
        tags: of the rows, which no longer have them.
        size: G.
        sampled: conversations that were sampled.
        staleness: weight versions since then.
    """

    rows: list[Any]
    tags: list[RowTag]
    size: int
    sampled: int
    staleness: int

    @property
    def members(self) -> list[int]:
        """For each row the number of its conversation."""
        return [tag.member for tag in self.tags]

    @property
    def names(self) -> list[str]:
        """Of the reward functions, F."""
        return [name.removeprefix(REWARDS) for name in self.rows[0].metrics if name.startswith(REWARDS)]

    def rewards(self, name: str | None = None) -> Tensor:
        """(1, G) float64 the reward sums, or the rewards of one function; NaN where there is no finite one. Raises a
        `ValueError` for a name that no function has."""
        if name not in (None, *self.names):
            raise ValueError(
                f"snr_score_reward={name!r} is no reward function of this run; allowed here, where columns are not "
                f"logged: {', '.join(self.names)}."
            )
        key = "reward" if name is None else f"{REWARDS}{name}"
        rewards = torch.full((1, self.size), torch.nan, dtype=torch.float64)
        rewards[0, self.members] = torch.tensor([row.metrics[key] for row in self.rows], dtype=torch.float64)
        return rewards.masked_fill(~rewards.isfinite(), torch.nan)

    def advantages(self) -> Tensor:
        """(1, G) float64 as TRL has made them: of each conversation the one of its rows that is largest in size."""
        found = [0.0] * self.size
        for row, member in zip(self.rows, self.members, strict=True):
            found[member] = max(found[member], row.advantage, key=abs)
        return torch.tensor([found], dtype=torch.float64)

    def lengths(self) -> Tensor:
        """(1, G) trainable tokens."""
        counts = [np.count_nonzero(row.completion_mask) for row in self.rows]
        return torch.tensor(np.bincount(self.members, counts, self.size)).long().unsqueeze(0)


def check_row(row: Any, first: Any, size: int) -> None:
    """Raise a `ValueError` for a row that does not name its group and its rewards, or is not tagged like the first row
    of its group; it names the field, its value and what is allowed."""
    number, metrics, tag = row.group_id, row.metrics, row.metrics.get(TAG)
    names = [name for name in first.metrics if name.startswith(REWARDS)] or [f"{REWARDS}<name of a function>"]
    fits = isinstance(tag, RowTag) and 0 <= tag.member < size if TAG in first.metrics else TAG not in metrics
    needed = [
        (
            "group_id",
            number,
            isinstance(number, int) and number >= 0,
            "an int from 0, the same in all rows of a group",
        ),
        (f"metrics[{TAG!r}]", tag, fits, f"in no row of a group, or in all a RowTag with member from 0 to {size - 1}"),
    ]
    needed += [
        (f"metrics[{name!r}]", metrics.get(name), isinstance(metrics.get(name), Real), "a number, NaN for no reward")
        for name in ("reward", *names)
    ]
    for field, value, is_allowed, allowed in needed:
        if not is_allowed:
            raise ValueError(f"the rollout worker sent a row with {field}={value!r}; allowed: {allowed}.")


class QueueState(TypedDict):
    """State of a `GroupQueue` in a checkpoint."""

    ahead: list[int]
    since_kept: int
    generations: int


class GroupQueue:
    """The queue that TRL's dataset reads: rows of the groups that are kept, each group whole and in order of arrival.

    A group is complete when the rows that its tags name are there; without tags, when a row of another group comes,
    or when G rows are there.

    Args:
        trainer: with the rollout worker. Its `_decide` is the filter.
    """

    def __init__(self, trainer: Any):
        self.trainer, self.ledger = trainer, GroupLedger()
        self.inner = trainer.rollout_worker.rollout_buffer  # the worker's own queue
        self.since_kept = 0  # groups since the last one with anything to train on
        self.generations = 0  # optimizer steps before which groups had arrived
        self.arrivals: list[tuple[ArrivedGroup, Selection]] = []  # decided on, until the trainer takes them
        self.sampled = Counter[str]()  # tokens and completions of all groups, until the trainer takes them
        self._dropped = 0  # groups since the last one whose rows were handed on
        self._ready: deque[Any] = deque()  # rows for TRL
        self._open: list[Any] = []  # rows of the group that is arriving
        self._waited = 0.0  # seconds in `get` since the worker's queue last had a row

    def qsize(self) -> int:
        """Rows that wait, also of groups that will be dropped."""
        return int(self.inner.qsize()) + len(self._ready)

    def get(self, timeout: float = math.inf) -> Any:
        """The next row of a kept group.

        Raises:
            queue.Empty: after `timeout` seconds; TRL then looks whether the worker is well.
            ValueError: for a row that does not say what is needed.
            RuntimeError: where nothing can be trained on, or the worker seems to wait for the trainer.
        """
        deadline = time.monotonic() + timeout
        while not self._ready:
            left = max(0.0, deadline - time.monotonic())
            try:
                row = self.inner.get(timeout=None if left == math.inf else left)
            except queue.Empty:
                self._waited += left
                self._check_silence()
                raise
            self._waited = 0.0
            self._take(row)
        row, args = self._ready.popleft(), self.trainer.args
        is_stale = self.trainer.model_version - row.model_version > args.max_staleness
        if is_stale or 0 < (args.token_budget or 0) < len(row.input_ids):  # TRL's dataset or batcher passes over it
            self.ledger.rows_done(row.group_id, 1)
        return row

    def _take(self, row: Any) -> None:
        number, size, ledger = row.group_id, self.trainer.args.num_generations, self.ledger
        if self._open and number != self._open[0].group_id:
            self._close()
        check_row(row, self._open[0] if self._open else row, size)
        if not self._open and (number in ledger.rows or (number in ledger and number not in ledger.resumed)):
            raise ValueError(
                f"the rollout worker sent another row with group_id={number} after that group was complete. A group "
                f"ends after num_generations={size} rows or at a row of another group: send its rows one after the "
                f"other, one per conversation. If it has more or fewer, set metrics[{TAG!r}] of each row to "
                "ragen2_trl.trainers.async_groups.RowTag(rows=rows of the group, member=number of the conversation)."
            )
        self._open.append(row)
        tag = row.metrics.get(TAG)
        if len(self._open) == (size if tag is None else tag.rows):
            self._close()

    def _close(self) -> None:
        rows, self._open, trainer, args = self._open, [], self.trainer, self.trainer.args
        number, size, staleness = rows[0].group_id, args.num_generations, trainer.model_version - rows[0].model_version
        tags = [row.metrics.pop(TAG, RowTag(len(rows), place)) for place, row in enumerate(rows)]
        sampled = trainer.pilot_generations if tags[0].given_up else size
        group = ArrivedGroup(rows, tags, size, sampled, staleness)
        self.sampled.update(tokens=int(group.lengths().sum()), completions=sampled)
        if number in self.ledger.resumed:
            return
        if staleness <= args.max_staleness:  # else TRL drops and counts its rows
            selection, rows = trainer._decide(group)
            self.arrivals.append((group, selection))
            self.since_kept = 0 if selection.kept.any() else self.since_kept + 1
        self._ready.extend(rows)
        self.ledger.rows[number] = len(rows)
        self.ledger.rows_done(number, 0)  # a group without rows is done
        self._dropped = 0 if rows else self._dropped + 1
        if 0 < args.snr_max_empty_steps * (args.generation_batch_size // size) <= self.since_kept:
            said = f"{self.since_kept} groups in a row had nothing to train on "
            said += f"(snr_max_empty_steps={args.snr_max_empty_steps})"
            raise RuntimeError(nothing_kept(trainer, said, [one.rewards for _, one in self.arrivals]).text)

    def _check_silence(self) -> None:
        silent_after_s = self.trainer.args.heartbeat_stale_after_s
        if self._dropped and self._waited > silent_after_s:
            raise RuntimeError(
                f"the rollout worker has sent nothing for {self._waited:.0f} s, and the {self._dropped} groups before "
                "that were dropped: it may wait for newer weights, for which the trainer needs groups. Set a larger "
                "max_staleness, or snr_strategy='lossless', which drops no group; if sampling takes that long, a "
                f"larger heartbeat_stale_after_s (now {silent_after_s:g})."
            )

    def state(self) -> QueueState:
        """State for a checkpoint; a resumed worker counts its groups from the frontier."""
        ahead = sorted(group - self.ledger.frontier for group in self.ledger.ahead)
        return {"ahead": ahead, "since_kept": self.since_kept, "generations": self.generations}

    def load(self, state: QueueState) -> None:
        self.ledger.ahead, self.ledger.resumed = set(state["ahead"]), set(state["ahead"])
        self.since_kept, self.generations = state["since_kept"], state["generations"]

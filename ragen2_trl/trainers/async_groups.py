"""The trainer's side of TRL's rollout queue: whole groups are pulled, filtered, and accounted for until they are done.

Rows of a rollout worker come one by one. `GroupQueue` stands before the worker's own queue, whichever worker that is,
and hands TRL the rows of the groups that are kept. `GroupLedger` knows what became of each group: a checkpoint
continues behind the last one that is done with everything before it, and an epoch ends when its last group is done.
"""

import math
import queue
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple, NotRequired, Protocol, TypedDict

import numpy as np
import torch
from torch import Tensor

from ragen2_trl.trainers.selection import Selection

TAG = "snr_tag"  # in the metrics of a row, until `GroupQueue` takes it out
PAUSE_S = 1.0  # without a row, after which an untagged group of G rows or more is complete


class RowTag(NamedTuple):
    """Which row of its group a row is.

    Args:
        rows: of its group; more than G where conversations are several rows, fewer where one has no token to train.
        member: number of its conversation in the group.
        sampled: conversations of its group.
        given_up: whether its prompt was not worth more than its pilots.
        audited: whether it was not, and was sampled whole to see what is missed.
    """

    rows: int
    member: int
    sampled: int
    given_up: bool = False
    audited: bool = False


class LedgerState(TypedDict):
    """State of a `GroupLedger` in a checkpoint."""

    ahead: list[int]


class GroupLedger:
    """Which groups are done: trained, dropped, or left out as too old. It stands in for TRL's `_trained_groups`.

    Groups are numbered in the order of the dataset, and the *frontier* is the first that is not done. TRL asks
    `number in ledger` for a checkpoint, `len(ledger)` for the end of an epoch, and calls `update` with the group of
    each row when it collates a micro-batch, which is one ahead of the micro-batch that it trains.
    """

    def __init__(self) -> None:
        self.frontier = 0
        self.ahead: set[int] = set()  # done, beyond the frontier
        self.rows: dict[int, int] = {}  # of groups in progress: rows that are not done
        self.trained = 0  # groups whose last row was trained
        self._resumed: set[int] = set()  # done before the checkpoint that this run goes on from
        self._collated: deque[Counter[int]] = deque()  # rows by group of micro-batches that are not trained yet

    def __len__(self) -> int:
        """Groups before the frontier."""
        return self.frontier

    def __contains__(self, group: int) -> bool:
        return group < self.frontier or group in self.ahead

    def update(self, groups: Iterable[int]) -> None:
        """A micro-batch is collated: the group of each of its rows."""
        self._collated.append(Counter(groups))

    def left_out(self, groups: Iterable[int]) -> None:
        """Rows of the micro-batch that was collated last which are not computed."""
        self._collated[-1].update(groups)

    def micro_batch_trained(self) -> None:
        for group, rows in self._collated.popleft().items():
            self.rows_done(group, rows)
            self.trained += group in self

    def begin(self, group: int, rows: int) -> None:
        """So many rows of a group are about to be handed to TRL; without any it is done."""
        if rows:
            self.rows[group] = rows
        else:
            self._done(group)

    def rows_done(self, group: int, rows: int = 1) -> None:
        self.rows[group] -= rows
        if self.rows[group] == 0:
            del self.rows[group]
            self._done(group)

    def _done(self, group: int) -> None:
        self.ahead.add(group)
        while self.frontier in self.ahead:
            self.ahead.remove(self.frontier)
            self.frontier += 1

    def is_resumed(self, group: int) -> bool:
        """Whether a group that arrives was done before the run was resumed; asked once."""
        known = group in self._resumed
        self._resumed.discard(group)
        return known

    def state(self) -> LedgerState:
        """State for a checkpoint; a resumed worker counts its groups from the frontier."""
        return {"ahead": sorted(group - self.frontier for group in self.ahead)}

    def load(self, state: LedgerState) -> None:
        self.ahead, self._resumed = set(state["ahead"]), set(state["ahead"])


@dataclass(frozen=True)
class ScoredGroup:
    """The rows of one group, and what they say of its G conversations.

    Args:
        rows: TRL's `RolloutSample`s.
        members: for each row the number of its conversation; `None` where it cannot be told.
        rewards: (1, G) reward sums, NaN for a conversation without a row.
        rewards_per_func: (1, G, F) of each reward function; all NaN where `members` is `None`.
        lengths: (1, G) trainable tokens.
        names: of the reward functions.
    """

    rows: list[Any]
    members: list[int] | None
    rewards: Tensor
    rewards_per_func: Tensor
    lengths: Tensor
    names: list[str]


def scored_group(rows: list[Any], members: list[int] | None, size: int) -> ScoredGroup:
    """Collect what the rows of a group say.

    Args:
        rows: TRL's `RolloutSample`s.
        members: as tagged by our loop. Without tags, G rows or fewer are a conversation each. More than G come from
            conversations that forked into several rows: only the mean and the deviation of their rewards are known,
            and two values with this mean and deviation stand for them.
        size: G.
    """
    if members is None and len(rows) <= size:
        members = list(range(len(rows)))
    metrics = rows[0].metrics
    names = [name for name in metrics if name.startswith("rewards/")]
    # Lists, and one tensor at the end: this runs for every group.
    rewards, lengths = [math.nan] * size, [0] * size
    per_func = [[math.nan] * len(names) for _ in range(size)]
    counts = [int(np.count_nonzero(row.completion_mask)) for row in rows]
    if members is None:
        deviation = metrics["reward_std"]
        first = next((row for row in rows if math.isfinite(row.metrics["reward"])), None)
        if first is not None:
            mean = first.metrics["reward"] - first.advantage * (deviation + 1e-8)  # as TRL makes advantages
            low = size // 2
            apart = deviation * size / (low * (size - low)) ** 0.5
            rewards[:low] = [mean - apart * (size - low) / size] * low
            rewards[low:] = [mean + apart * low / size] * (size - low)
        lengths = [sum(counts) // size] * size
    else:
        for row, member, count in zip(rows, members, counts, strict=True):
            reward = row.metrics["reward"]
            rewards[member] = reward if math.isfinite(reward) else math.nan
            per_func[member] = [row.metrics[name] for name in names]
            lengths[member] += count
    return ScoredGroup(
        rows,
        members,
        torch.tensor([rewards], dtype=torch.float64),
        torch.tensor([per_func], dtype=torch.float64).view(1, size, len(names)),
        torch.tensor([lengths]),
        [name.removeprefix("rewards/") for name in names],
    )


@dataclass(frozen=True)
class Arrival:
    """A group that has arrived and been decided on.

    Args:
        group: its rows.
        selection: (1, G) its kept completions.
        tag: of its first row.
        staleness: weight versions since it was sampled.
    """

    group: ScoredGroup
    selection: Selection
    tag: RowTag
    staleness: int


class Decides(Protocol):
    """The filter's decision on one group: the kept members, (1, G), and the rows that reach TRL."""

    def __call__(self, group: ScoredGroup, given_up: bool) -> tuple[Selection, list[Any]]: ...


class QueueState(TypedDict):
    """State of a `GroupQueue` in a checkpoint."""

    since_kept: int
    generations: NotRequired[int]


class GroupQueue:
    """The queue that TRL's dataset reads: rows of the groups that are kept, each group whole and in order of arrival.

    A group is complete when the rows that its tag names are there; without tags, when a row of another group comes,
    or when it has G rows and the worker pauses.

    Args:
        inner: the worker's own queue.
        ledger: what becomes of the groups.
        decide: the filter.
        staleness: of a row, in weight versions.
        is_refused: whether TRL is going to leave a row out, as too old or too long.
        size: G.
        max_staleness: TRL's setting.
        max_dropped: groups dropped in a row after which `why` is raised; `inf` for any number.
        why: a message for that.
        silent_after_s: seconds without a row, after dropped groups, that a worker may take.
    """

    def __init__(
        self,
        inner: Any,
        ledger: GroupLedger,
        decide: Decides,
        staleness: Callable[[Any], int],
        is_refused: Callable[[Any], bool],
        size: int,
        max_staleness: int,
        max_dropped: float,
        why: Callable[[], str],
        silent_after_s: float,
    ):
        self.inner, self.ledger, self.decide = inner, ledger, decide
        self.staleness, self.is_refused, self.size = staleness, is_refused, size
        self.max_staleness, self.silent_after_s = max_staleness, silent_after_s
        self.max_dropped, self.why = max_dropped, why
        self.since_kept = 0  # groups since the last one with anything to train on
        self.generations = 0  # optimizer steps before which groups had arrived
        self._dropped = 0  # groups since the last one whose rows were handed on
        self.arrivals: list[Arrival] = []  # until the trainer takes them
        self.sampled = Counter[str]()  # tokens and completions of all groups, until the trainer takes them
        self._ready: deque[Any] = deque()  # rows for TRL
        self._open: list[Any] = []  # rows of the group that is arriving
        self._waited = 0.0  # seconds in `get` since the worker's queue last had a row

    def qsize(self) -> int:
        """Rows that wait, also of groups that will be dropped."""
        waiting: int = self.inner.qsize()
        return waiting + len(self._ready)

    def get(self, timeout: float | None = None) -> Any:
        """The next row of a kept group.

        Raises:
            queue.Empty: after `timeout` seconds; TRL then looks whether the worker is well.
            RuntimeError: where nothing can be trained on, or the worker seems to wait for the trainer.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while not self._ready:
            left = math.inf if deadline is None else max(0.0, deadline - time.monotonic())
            wait = min(left, PAUSE_S) if self._may_be_complete else left
            try:
                row = self.inner.get(timeout=None if wait == math.inf else wait)
            except queue.Empty:
                self._waited += wait
                if self._may_be_complete and self._waited >= PAUSE_S:
                    self._close()
                elif wait == left:
                    self._check_silence()
                    raise
                continue
            self._waited = 0.0
            self._take(row)
        row = self._ready.popleft()
        if self.is_refused(row):  # TRL's dataset or batcher passes over it next
            self.ledger.rows_done(row.group_id)
        return row

    def take_arrivals(self) -> list[Arrival]:
        """The groups decided on since the last call."""
        taken, self.arrivals = self.arrivals, []
        return taken

    def take_sampled(self) -> Counter[str]:
        """Tokens and completions of the groups that were completed since the last call, stale ones included."""
        taken, self.sampled = self.sampled, Counter()
        return taken

    @property
    def _may_be_complete(self) -> bool:
        """Whether a pause would tell that the group is complete."""
        return len(self._open) >= self.size and TAG not in self._open[0].metrics

    def _take(self, row: Any) -> None:
        if self._open and row.group_id != self._open[0].group_id:
            self._close()
        self._open.append(row)
        tag = row.metrics.get(TAG)
        if tag is not None and len(self._open) == tag.rows:
            self._close()

    def _close(self) -> None:
        rows, self._open = self._open, []
        number = rows[0].group_id
        tags = [row.metrics.pop(TAG, None) for row in rows]
        tag = tags[0] or RowTag(len(rows), 0, self.size)
        self.sampled.update(tokens=sum(int(row.completion_mask.sum()) for row in rows), completions=tag.sampled)
        if self.ledger.is_resumed(number):
            return
        if number in self.ledger or number in self.ledger.rows:
            raise RuntimeError(
                f"the rollout worker sent rows of group {number} after its group was complete; allowed: rows of a "
                "group one after the other, and a number of its own for each group."
            )
        staleness = self.staleness(rows[0])
        if staleness > self.max_staleness:  # TRL drops and counts its rows
            self._hand_on(number, rows)
            return
        group = scored_group(rows, None if tags[0] is None else [one.member for one in tags], self.size)
        selection, kept = self.decide(group, tag.given_up)
        self.arrivals.append(Arrival(group, selection, tag, staleness))
        self._hand_on(number, kept)
        self.since_kept = 0 if selection.kept.any() else self.since_kept + 1
        if self.since_kept >= self.max_dropped:
            raise RuntimeError(f"{self.since_kept} groups in a row had nothing to train on. {self.why()}")

    def _hand_on(self, number: int, rows: list[Any]) -> None:
        self._dropped = 0 if rows else self._dropped + 1
        self.ledger.begin(number, len(rows))
        self._ready.extend(rows)

    def _check_silence(self) -> None:
        if self._dropped and self._waited > self.silent_after_s:
            raise RuntimeError(
                f"the rollout worker has sent nothing for {self._waited:.0f} s, and the {self._dropped} groups before "
                "that were dropped: it may wait for newer weights, for which the trainer needs groups. What would "
                "change that: a larger max_staleness, snr_strategy='lossless', which drops no group, or a larger "
                f"heartbeat_stale_after_s (now {self.silent_after_s:g}) where sampling takes that long."
            )

    def state(self) -> QueueState:
        """State for a checkpoint."""
        return {"since_kept": self.since_kept, "generations": self.generations}

    def load(self, state: QueueState) -> None:
        self.since_kept, self.generations = state["since_kept"], state.get("generations", 0)

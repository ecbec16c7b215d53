"""Which completions go into which micro-batch, once some have been dropped.

TRL cuts a generation batch into `steps_per_generation` micro-batches of `per_device_train_batch_size` rows. When rows
are dropped, the kept ones are dealt again: every optimizer step gets its equal share, a share fills as few
micro-batches as it needs, and the micro-batches that are left over stay empty and are skipped. Where a micro-batch
computes a prompt once, it takes more rows, as long as it needs no more memory than one of TRL's. Pure arithmetic on
row numbers: no tensors, no TRL, the same result on every process.
"""

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple, TypeAlias

Row: TypeAlias = tuple[int, int]  # the process that sampled it, and its number among the kept rows there
Deal: TypeAlias = list[list[list[Row]]]  # for each micro-step, for each process, rows
Prompt: TypeAlias = tuple[int, int]  # its number on the process that sampled it, and its tokens


class Sharing(NamedTuple):
    """What sharing prompts needs.

    Args:
        prompts: the prompt of each kept row, for each process.
        budget: positions of one of TRL's micro-batches, up to which one takes more rows.
    """

    prompts: Sequence[Sequence[Prompt]]
    budget: int


KEYS_PER_POSITION = 8
"""Attention gathers a completion's keys and values, of its prompt too: this many weigh at most as much in memory as
the activations of a position."""

TOLERANCE = 0.05  # time of the update that we give to leave rows where they are


def deal_rows(
    lengths: Sequence[Sequence[int]],
    segments: Sequence[int],
    rows_per_micro_batch: int,
    of_segments: Sequence[Sequence[int]] | None = None,
    sharing: Sharing | None = None,
) -> Deal:
    """Deal kept rows to micro-steps and processes.

    Rows are taken in their given (shuffled) order to fill the segments evenly, so that no optimizer step sees only
    short completions, unless it is given how many belong to each. Inside a segment every process gets as many rows as
    every other, up to one, and rows of similar length share a micro-batch, which keeps padding small. Where prompts
    are shared, every process gets as many positions instead, and rows of the same prompt share a micro-batch. Rows
    stay on their process where that costs at most `TOLERANCE` of what the micro-steps would take in the best balance
    we know: dealing the rows of each micro-step to and fro, or cutting groups in a line into equal parts. A segment's
    filled micro-batches come last, so that the micro-step before an optimizer step has rows and gradients synchronise.

    Args:
        lengths: tokens of each kept row, for each process.
        segments: from `accumulation_segments`.
        rows_per_micro_batch: `per_device_train_batch_size`, the most rows a process takes in one micro-step, more only
            where prompts are shared; where there are more rows than fit into all micro-steps so, each takes its share
            of them.
        of_segments: for each process, how many of its kept rows belong to each segment, in their order.
        sharing: where a micro-batch computes a prompt once.

    Returns:
        For each micro-step, for each process, the rows. A micro-step with no row on any process is skipped.

    >>> deal_rows([[7, 3, 9, 5]], segments=[4], rows_per_micro_batch=2)
    [[[]], [[]], [[(0, 1), (0, 3)]], [[(0, 0), (0, 2)]]]
    >>> deal_rows([[7, 3], [9, 5]], segments=[1], rows_per_micro_batch=2)
    [[[(0, 1), (0, 0)], [(1, 1), (1, 0)]]]
    >>> deal_rows([[7, 3, 9]], segments=[1, 1], rows_per_micro_batch=2, of_segments=[[2, 1]])
    [[[(0, 1), (0, 0)]], [[(0, 2)]]]
    >>> prompts = [[(0, 2), (1, 2), (0, 2), (1, 2)]]
    >>> deal_rows([[7, 3, 9, 5]], segments=[2], rows_per_micro_batch=2, sharing=Sharing(prompts, budget=18))
    [[[(0, 1), (0, 3)]], [[(0, 0), (0, 2)]]]
    >>> deal_rows([[7, 3, 9, 5]], segments=[2], rows_per_micro_batch=2, sharing=Sharing(prompts, budget=24))
    [[[]], [[(0, 1), (0, 3), (0, 0), (0, 2)]]]
    """
    num_processes = len(lengths)
    if of_segments is None:
        rows = [(home, number) for home, own in enumerate(lengths) for number in range(len(own))]
        rows.sort(key=lambda row: (row[1] + 0.5) / len(lengths[row[0]]))  # of all processes in turn
        ends = [len(rows) * steps // sum(segments) for steps in accumulate(segments)]
        shares = [rows[start:stop] for start, stop in pairwise([0, *ends])]
    else:
        cuts = [list(pairwise(accumulate(own, initial=0))) for own in of_segments]
        shares = [
            [(home, number) for home, bounds in enumerate(of_processes) for number in range(*bounds)]
            for of_processes in zip(*cuts, strict=True)
        ]
    micro_steps: Deal = []
    for num_steps, share in zip(segments, shares, strict=True):
        most = min(num_steps, -(-len(share) // (rows_per_micro_batch * num_processes)))
        deal = _deal_by_positions(share, lengths, sharing, most, rows_per_micro_batch) if sharing and most else None
        if deal is None:
            deal = _deal_segment(share, lengths, sharing, most) if most else []
        micro_steps += [[[] for _ in range(num_processes)] for _ in range(num_steps - len(deal))]
        micro_steps += deal
    return micro_steps


def _deal_by_positions(
    rows: list[Row], lengths: Sequence[Sequence[int]], sharing: Sharing, most: int, rows_per_micro_batch: int
) -> Deal | None:
    """Fill as few micro-steps as memory allows, at most `most`: none needs more of it than one of TRL's.

    `None` where a deal of as many rows to each process is as good.
    """

    def fits(share: list[Row]) -> bool:
        sizes = [lengths[home][number] for home, number in share]
        needs = _positions(share, lengths, sharing) + sum(sizes) // KEYS_PER_POSITION
        if all(lengths[home][number] == sharing.prompts[home][number][1] for home, number in share):
            needs = len(share) * (max(sizes, default=0) + 1)  # without a completion there is no tree
        return len(share) <= rows_per_micro_batch or needs <= sharing.budget

    fewest = -(-_positions(rows, lengths, sharing) // (sharing.budget * len(lengths)))
    for num_filled in range(max(1, fewest), most + 1):
        deal = _deal_segment(rows, lengths, sharing, num_filled, by_positions=True)
        if all(map(fits, (share for shares in deal for share in shares))):
            by_rows = _deal_segment(rows, lengths, sharing, most)
            is_better = num_filled < most or _cost(deal, lengths, sharing) < _cost(by_rows, lengths, sharing)
            return deal if is_better else None
    return None


def _cost(deal: Deal, lengths: Sequence[Sequence[int]], sharing: Sharing | None) -> int:
    """Positions of the slowest process in each micro-step."""
    return sum(max(_positions(share, lengths, sharing) for share in shares) for shares in deal)


def _positions(share: list[Row], lengths: Sequence[Sequence[int]], sharing: Sharing | None) -> int:
    """Positions of a micro-batch."""
    sizes = [lengths[home][number] for home, number in share]
    if sharing is None:
        return len(share) * max(sizes, default=0)
    of_rows = [sharing.prompts[home][number] for home, number in share]
    shared = {(home, prompt): tokens for (home, _), (prompt, tokens) in zip(share, of_rows, strict=True)}
    return sum(sizes) - sum(tokens for _, tokens in of_rows) + sum(shared.values())


def _deal_segment(
    rows: list[Row],
    lengths: Sequence[Sequence[int]],
    sharing: Sharing | None,
    num_filled: int,
    by_positions: bool = False,
) -> Deal:
    """Of three deals, from the one that moves least to the one balanced best, the first that is good enough."""

    def length(row: Row) -> int:
        return lengths[row[0]][row[1]]

    def group(row: Row) -> tuple[int, int]:
        assert sharing is not None
        return row[0], sharing.prompts[row[0]][row[1]][0]

    weights: dict[Row, int] | None = None
    if sharing is None:
        rows = sorted(rows, key=length)
        blocks = _cut(rows, num_filled)
        balanced = [_deal_to_and_fro(block, len(lengths), start=number) for number, block in enumerate(blocks)]
    else:
        members: dict[tuple[int, int], list[int]] = {}
        for row in rows:
            members.setdefault(group(row), []).append(length(row))
        rows = sorted(
            rows, key=lambda row: (sum(members[group(row)]) / len(members[group(row)]), group(row), length(row))
        )
        if by_positions:
            first = {group(row): row for row in reversed(rows)}
            prompts = {row: sharing.prompts[row[0]][row[1]][1] for row in rows}
            weights = {row: max(1, length(row) - prompts[row] * (first[group(row)] != row)) for row in rows}
        balanced = [_cut(block, len(lengths), weights) for block in _cut(rows, num_filled, weights)]
    enough = (1 + TOLERANCE) * _cost(balanced, lengths, sharing)
    at_home = _deal_at_home(rows, len(lengths), num_filled, weights)
    for deal in (at_home, [_prefer_home(shares) for shares in balanced]):
        if _cost(deal, lengths, sharing) <= enough:
            return deal
    return balanced


def _deal_at_home(rows: list[Row], num_processes: int, num_filled: int, weights: dict[Row, int] | None) -> Deal:
    """Each process its own rows, except those it has too many of, in blocks of a like length."""
    shares = _prefer_home(_deal_to_and_fro(rows, num_processes, start=0))
    place = {row: number for number, row in enumerate(rows)}
    cuts = [_cut(sorted(share, key=place.__getitem__), num_filled, weights) for share in shares]
    return [list(blocks) for blocks in zip(*cuts, strict=True)]


def _prefer_home(shares: list[list[Row]]) -> list[list[Row]]:
    """Shares of the same sizes whose rows stay on their process where it has room for them.

    >>> _prefer_home([[(0, 0), (1, 0)], [(1, 1), (0, 1)]])
    [[(0, 0), (0, 1)], [(1, 0), (1, 1)]]
    """
    sizes = [len(share) for share in shares]
    at_home: list[list[Row]] = [[] for _ in shares]
    for row in sorted(row for share in shares for row in share):
        at_home[row[0]].append(row)
    # What is too much goes evenly spaced, so that short and long rows go alike.
    surplus = []
    for share, size in zip(at_home, sizes, strict=True):
        extra = max(0, len(share) - size)
        surplus += [share.pop(len(share) * number // extra) for number in reversed(range(extra))]
    for share, size in zip(at_home, sizes, strict=True):
        share += [surplus.pop() for _ in range(size - len(share))]
    return at_home


def _cut(rows: list[Row], num_blocks: int, weights: dict[Row, int] | None = None) -> list[list[Row]]:
    """Consecutive blocks of the same size, up to one, or of the same weight, up to a row. The last one is not empty.

    >>> _cut([(0, 0), (0, 1), (0, 2)], 2, {(0, 0): 1, (0, 1): 1, (0, 2): 2})
    [[(0, 0), (0, 1)], [(0, 2)]]
    """
    if weights is None:
        return [rows[len(rows) * b // num_blocks : len(rows) * (b + 1) // num_blocks] for b in range(num_blocks)]
    blocks: list[list[Row]] = [[] for _ in range(num_blocks)]
    total, before = sum(weights[row] for row in rows), 0
    for row in rows:
        middle = 2 * before + weights[row]
        blocks[-1 if row == rows[-1] else middle * num_blocks // (2 * total)].append(row)
        before += weights[row]
    return blocks


def _deal_to_and_fro(rows: list[Row], num_processes: int, start: int) -> list[list[Row]]:
    """Deal sorted rows forwards and backwards in turn, so that no process always gets the longer one of two.

    >>> _deal_to_and_fro([(0, 1), (0, 2), (0, 3), (0, 4)], 2, start=0)
    [[(0, 1), (0, 4)], [(0, 2), (0, 3)]]
    """
    shares: list[list[Row]] = [[] for _ in range(num_processes)]
    for number, row in enumerate(rows):
        turn, process = divmod(number, num_processes)
        backwards = (turn + start) % 2 == 1
        shares[num_processes - 1 - process if backwards else process].append(row)
    return shares

"""Which completions go into which micro-batch, once some have been dropped.

TRL cuts a generation batch into `steps_per_generation` micro-batches of `per_device_train_batch_size` rows. When rows
are dropped, the kept ones are dealt again: every optimizer step gets its equal share, a share fills as few
micro-batches as it needs, and the micro-batches that are left over stay empty and are skipped. Pure arithmetic on row
numbers: no tensors, no TRL, the same result on every process.
"""

from collections.abc import Sequence
from itertools import accumulate, pairwise


def accumulation_segments(num_micro_steps: int, left_in_window: int, accumulation: int) -> list[int]:
    """Cut the micro-steps of one pass over a generation batch at the optimizer steps.

    Args:
        num_micro_steps: micro-steps of the pass, TRL's `steps_per_generation`.
        left_in_window: micro-steps until the next optimizer step, this one included.
        accumulation: micro-steps from one optimizer step to the next, `gradient_accumulation_steps`.

    Returns:
        Lengths that sum to `num_micro_steps`; each segment but the last ends with an optimizer step.

    >>> accumulation_segments(8, 4, 4)  # two optimizer steps on one generation batch
    [4, 4]
    >>> accumulation_segments(2, 3, 4)  # the optimizer step comes after the next generation batch
    [2]
    >>> accumulation_segments(4, 1, 3)  # windows and generation batches out of step
    [1, 3]
    """
    cuts = [0, *range(left_in_window, num_micro_steps, accumulation), num_micro_steps]
    return [stop - start for start, stop in pairwise(cuts)]


def deal_rows(
    lengths: Sequence[int], segments: Sequence[int], rows_per_micro_batch: int, num_processes: int = 1
) -> list[list[list[int]]]:
    """Deal kept rows to micro-steps and processes.

    Rows are taken in their given (shuffled) order to fill the segments evenly, so that no optimizer step sees only
    short completions. Inside a segment, rows of similar length share a micro-batch, which keeps padding small, and
    each micro-batch is dealt round the processes, which keeps their token counts alike. A segment's filled
    micro-batches come last, so that the micro-step before an optimizer step has rows and gradients synchronise.

    Args:
        lengths: tokens of each kept row, over all processes.
        segments: from `accumulation_segments`.
        rows_per_micro_batch: `per_device_train_batch_size`, the most rows a process takes in one micro-step.
        num_processes: number of processes.

    Returns:
        For each micro-step, for each process, the row numbers. A micro-step with no row on any process is skipped.

    >>> deal_rows([7, 3, 9, 5], segments=[4], rows_per_micro_batch=2)
    [[[]], [[]], [[1, 3]], [[0, 2]]]
    >>> deal_rows([7, 3, 9, 5], segments=[2, 2], rows_per_micro_batch=1)
    [[[1]], [[0]], [[3]], [[2]]]
    """
    micro_steps: list[list[list[int]]] = []
    total_steps = sum(segments)
    ends = [len(lengths) * steps // total_steps for steps in accumulate(segments)]
    for num_steps, (start, stop) in zip(segments, pairwise([0, *ends]), strict=True):
        rows = sorted(range(start, stop), key=lambda row: lengths[row])
        num_filled = -(-len(rows) // (rows_per_micro_batch * num_processes))
        micro_steps += [[[] for _ in range(num_processes)] for _ in range(num_steps - num_filled)]
        for block in range(num_filled):
            chunk = rows[len(rows) * block // num_filled : len(rows) * (block + 1) // num_filled]
            micro_steps.append(_deal_to_and_fro(chunk, num_processes, start=block))
    return micro_steps


def _deal_to_and_fro(rows: list[int], num_processes: int, start: int) -> list[list[int]]:
    """Deal sorted rows forwards and backwards in turn, so that no process always gets the longer one of two.

    >>> _deal_to_and_fro([1, 2, 3, 4], 2, start=0)
    [[1, 4], [2, 3]]
    """
    shares: list[list[int]] = [[] for _ in range(num_processes)]
    for number, row in enumerate(rows):
        turn, process = divmod(number, num_processes)
        backwards = (turn + start) % 2 == 1
        shares[num_processes - 1 - process if backwards else process].append(row)
    return shares

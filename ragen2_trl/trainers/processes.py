"""What processes do together: hand rows to one another, and gather values of unequal numbers of rows."""

import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import recursively_apply, send_to_device
from torch import Tensor

from ragen2_trl.rollout_events import extend
from ragen2_trl.trainers.batches import Batch, join, take
from ragen2_trl.trainers.dealing import Deal, Row


def exchange_rows(
    rows: Batch,
    kept: list[int],
    deal: Deal,
    accelerator: Accelerator,
    pad_token_id: int,
    pad_to_multiple_of: int | None,
) -> tuple[Batch, dict[Row, int]]:
    """The rows that this process trains on. A call for all processes together.

    Args:
        rows: what this process sampled.
        kept: which of them are kept.
        deal: from `deal_rows`, the same on every process.
        accelerator: of the trainer.
        pad_token_id: of its tokenizer.
        pad_to_multiple_of: TRL's setting for padded widths.

    Returns:
        A batch, and for each row that this process was dealt its number in the batch.
    """
    me = accelerator.process_index
    dealt: list[list[Row]] = [[] for _ in range(accelerator.num_processes)]
    for shares in deal:
        for process, share in enumerate(shares):
            dealt[process] += share
    place = {(home, number): kept[number] for home, number in dealt[me] if home == me}
    if all(home == process for process, share in enumerate(dealt) for home, _ in share):
        return rows, place

    def sent(source: int, target: int) -> list[Row]:
        return [row for row in dealt[target] if row[0] == source] if source != target else []

    parcels = [[kept[number] for _, number in sent(me, target)] for target in range(len(dealt))]
    received = exchange(
        [take(rows, parcel, pad_to_multiple_of) if parcel else None for parcel in parcels], accelerator.device
    )
    parts, size = [rows], len(rows["prompt_ids"])
    for source, part in enumerate(received):
        if part is not None:
            arrived = sent(source, me)
            place |= {row: size + number for number, row in enumerate(arrived)}
            parts.append(send_to_device(part, accelerator.device))
            size += len(arrived)
    return join(parts, pad_token_id) if len(parts) > 1 else rows, place


def exchange(parcels: list[Any], device: torch.device) -> list[Any]:
    """Hand `parcels[p]` to process p and get what each process handed to this one; `None` for nothing.

    Args:
        parcels: for each process tensors, numbers and containers of them: what `torch.load` reads without running
            code.
        device: of this process, through which its process group sends.

    Returns:
        From each process what it sent, its tensors on the CPU.
    """
    outgoing = [None if parcel is None else _pack(parcel).to(device) for parcel in parcels]
    sizes = torch.tensor([0 if message is None else len(message) for message in outgoing], device=device)
    everyones = [torch.empty_like(sizes) for _ in parcels]
    dist.all_gather(everyones, sizes)
    to_me = [int(row[dist.get_rank()]) for row in everyones]
    incoming = [torch.empty(size, dtype=torch.uint8, device=device) for size in to_me]
    transfers = [dist.P2POp(dist.isend, message, p) for p, message in enumerate(outgoing) if message is not None]
    transfers += [dist.P2POp(dist.irecv, message, p) for p, message in enumerate(incoming) if len(message)]
    for work in dist.batch_isend_irecv(transfers) if transfers else ():
        work.wait()
    return [_unpack(message) if len(message) else None for message in incoming]


def _pack(parcel: Any) -> torch.Tensor:
    buffer = io.BytesIO()
    # Clones: a slice would be written with all of the tensor that it is one of.
    torch.save(recursively_apply(torch.clone, send_to_device(parcel, "cpu")), buffer)
    return torch.frombuffer(bytearray(buffer.getvalue()), dtype=torch.uint8)


def _unpack(message: torch.Tensor) -> Any:
    return torch.load(io.BytesIO(message.cpu().numpy().tobytes()), weights_only=True)


@contextmanager
def gathering_uneven_rows(accelerator: Accelerator) -> Iterator[None]:
    """Let a loss gather a value of each row where processes have unequal numbers of rows, as TRL does for metrics.

    Collectives need the same shape from all. What is missing comes as NaN, which TRL's means and extremes leave out.
    """

    def gather_padded(gather: Callable[[Any], Any], tensor: Any) -> Any:
        if isinstance(tensor, Tensor) and tensor.ndim and tensor.is_floating_point():
            tensor = accelerator.pad_across_processes(tensor, pad_index=torch.nan)
        return gather(tensor)

    take_off = extend(accelerator, "gather", gather_padded)
    try:
        yield
    finally:
        take_off()

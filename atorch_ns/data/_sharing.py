"""One order for all ranks: what rank 0 of a group has drawn, on every rank of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from atorch_ns.errors import RankError

__all__ = ["draw_together", "share_batches", "share_integer", "share_order"]

_INTEGERS, _OBJECTS = 0, 1


def draw_together(draw: Callable[[], list[Any]], group: dist.ProcessGroup, *, what: str) -> list[Any]:
    """What ``draw`` returns here, once it is known that it returned on every rank.

    Raises:
        RankError: it raised on another rank, whose number and reason the message gives.
        Exception: whatever it raised here.
    """
    error: Exception | None = None
    drawn: list[Any] = []
    try:
        drawn = draw()
    except Exception as raised:  # the other ranks must hear of it before it goes on
        error = raised
    reasons: list[str | None] = [None] * group.size()
    dist.all_gather_object(
        reasons, None if error is None else f"{type(error).__name__}: {error}", group=group
    )
    if error is not None:
        raise error
    failures = {rank: reason for rank, reason in enumerate(reasons) if reason is not None}
    if failures:
        told = "; ".join(f"data rank {rank}: {reason}" for rank, reason in failures.items())
        raise RankError(f"{what} failed on other ranks. {told}", failures=failures)
    return drawn


def share_order(order: Sequence[Any], group: dist.ProcessGroup) -> list[Any]:
    """The order that rank 0 of ``group`` passes: as int64 where all its entries are integers, else pickled.

    A collective: every rank of the group calls it. What the others pass is not looked at.
    """
    device = _device_of(group)
    values = _as_integers(order) if group.rank() == 0 else None
    kind = _INTEGERS if values is not None else _OBJECTS
    header = torch.tensor([kind, len(order)], dtype=torch.int64, device=device)
    dist.broadcast(header, group=group, group_src=0)
    kind, length = header.tolist()
    if kind == _INTEGERS:
        numbers = torch.empty(length, dtype=torch.int64) if values is None else values
        numbers = numbers.to(device)
        if length:
            dist.broadcast(numbers, group=group, group_src=0)
        return list(numbers.tolist())
    box: list[Any] = [list(order) if group.rank() == 0 else None]
    dist.broadcast_object_list(box, group=group, group_src=0)
    return list(box[0])


def share_batches(batches: Sequence[Sequence[Any]], group: dist.ProcessGroup) -> list[list[Any]]:
    """The batches of entries that rank 0 of ``group`` passes. A collective, as :func:`share_order`."""
    lengths = share_order([len(batch) for batch in batches], group)
    flat = iter(share_order([entry for batch in batches for entry in batch], group))
    return [[next(flat) for _ in range(length)] for length in lengths]


def share_integer(value: int, group: dist.ProcessGroup) -> int:
    """The value, below 2**63 in size, that rank 0 of ``group`` passes. A collective."""
    return int(share_order([value], group)[0])


def _as_integers(order: Sequence[Any]) -> torch.Tensor | None:
    if not all(isinstance(entry, (int, np.integer)) and not isinstance(entry, bool) for entry in order):
        return None
    try:
        return torch.tensor([int(entry) for entry in order], dtype=torch.int64)
    except (OverflowError, RuntimeError):  # an index beyond 64 bits
        return None


def _device_of(group: dist.ProcessGroup) -> torch.device:
    """A device whose tensors ``group`` can send: the CPU if it has a backend for it."""
    kinds = [part.split(":")[0] for part in str(dist.get_backend_config(group)).split(",")]
    if "cpu" in kinds:
        return torch.device("cpu")
    return torch.device(kinds[0], torch.accelerator.current_device_index())

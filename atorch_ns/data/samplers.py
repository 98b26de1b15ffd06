"""Samplers that give one rank its share of an order that all data-parallel ranks agree on.

Legend: N data-parallel ranks, r the rank of this process among them. A rank's share of an order is every
N-th entry from r on, so that the batches of all ranks in one step are together one stretch of the order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from itertools import islice
from typing import Any, TypeVar, final

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data import Sampler

from atorch_ns.errors import BatchSizeError, RankError


def nearest_sizes(size: int, divisor: int) -> str:
    """The advice that names the positive multiples of ``divisor`` next to ``size``."""
    below = size // divisor * divisor
    above = below + divisor
    if not below:
        return f"The nearest size that divides is {above}."
    return f"The nearest sizes that divide are {below} and {above}."


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


T = TypeVar("T")
_INNER = ("sampler", "batch_sampler", "steps")  # where a sampler keeps the one it draws from


def even_out(order: Sequence[T], num_ranks: int, *, drop_last: bool) -> list[T]:
    """``order`` at a length that ``num_ranks`` divides, as ``DistributedSampler`` does it.

    The tail is dropped with ``drop_last``; without it the order is continued with its own beginning.
    """
    if drop_last:
        return list(order[: len(order) // num_ranks * num_ranks])
    if not order:
        return []
    missing = -len(order) % num_ranks
    copies = math.ceil(missing / len(order))
    return [*order, *(list(order) * copies)[:missing]]


def length_of_share(length: int, num_ranks: int, *, drop_last: bool) -> int:
    """How many entries each rank gets of an order of that length."""
    return length // num_ranks if drop_last else math.ceil(length / num_ranks)


def split_batches(batches: Sequence[Sequence[T]], rank: int, num_ranks: int) -> list[list[T]]:
    """The rank's share of each global batch.

    Raises:
        BatchSizeError: ``num_ranks`` does not divide the length of one of them.
    """
    for number, batch in enumerate(batches):
        if len(batch) % num_ranks:
            raise BatchSizeError(
                f"batch {number} of batch_sampler has {len(batch)} entries, which {num_ranks} data-parallel "
                f"ranks cannot share evenly: each of its batches is a global batch. "
                f"{nearest_sizes(len(batch), num_ranks)}"
            )
    return [list(batch[rank::num_ranks]) for batch in batches]


def _layers(sampler: object) -> Iterator[object]:
    """The sampler, the sampler that it draws from, and so on."""
    seen: set[int] = set()
    while sampler is not None and id(sampler) not in seen:
        yield sampler
        seen.add(id(sampler))
        sampler = next(
            (inner for name in _INNER if (inner := getattr(sampler, name, None)) is not None), None
        )


def epoch_source(sampler: object) -> Any | None:
    """What has ``set_epoch``: the sampler, or the first one inside it that has."""
    return next((layer for layer in _layers(sampler) if callable(getattr(layer, "set_epoch", None))), None)


def distributed_position(sampler: object) -> tuple[int, int] | None:
    """``(num_replicas, rank)`` of the distributed sampler that this is or draws from; None if there is none."""
    for layer in _layers(sampler):
        num_replicas, rank = getattr(layer, "num_replicas", None), getattr(layer, "rank", None)
        if isinstance(num_replicas, int) and isinstance(rank, int):
            return num_replicas, rank
    return None


def readable_epoch(source: object) -> int | None:
    """The ``epoch`` that the source of :func:`epoch_source` shows, if it shows one."""
    epoch = getattr(source, "epoch", None)
    return epoch if isinstance(epoch, int) and not isinstance(epoch, bool) else None


@final
class RankSampler(Sampler[Any]):
    """The rank's share of one order that the user's sampler gives.

    Each epoch every rank draws from its own sampler, so that its state and the random numbers it uses
    stay in step on all ranks, and rank 0's order counts. Iterating is therefore a collective.

    Args:
        sampler: the user's sampler; needs ``__len__`` for the loader to have a length.
        num_replicas: N.
        rank: r.
        group: the process group of the N ranks.
        drop_last: drop the tail that N does not divide, instead of padding it with the beginning.
    """

    def __init__(
        self,
        sampler: Iterable[Any],
        *,
        num_replicas: int,
        rank: int,
        group: dist.ProcessGroup,
        drop_last: bool,
    ) -> None:
        self.sampler = sampler
        self.num_replicas = num_replicas
        self.rank = rank
        self.drop_last = drop_last
        self._group = group

    def __iter__(self) -> Iterator[Any]:
        # A generator, so that the collective happens once, when the first index is asked for: torch's
        # loader calls `iter` on its sampler more often than it uses the result.
        drawn = draw_together(
            lambda: list(self.sampler), self._group, what="Drawing the order of the samples"
        )
        order = even_out(share_order(drawn, self._group), self.num_replicas, drop_last=self.drop_last)
        yield from order[self.rank :: self.num_replicas]

    def __len__(self) -> int:
        return length_of_share(_length(self.sampler), self.num_replicas, drop_last=self.drop_last)

    @property
    def epoch(self) -> int | None:
        """The epoch that the user's sampler shows; None if it shows none."""
        return readable_epoch(epoch_source(self.sampler))

    def set_epoch(self, epoch: int) -> None:
        """Passes ``epoch`` to the user's sampler, if it wants to know."""
        _pass_epoch(self.sampler, epoch)


@final
class RankBatchSampler(Sampler[list[Any]]):
    """The rank's share of each batch of the user's batch sampler, whose batches are global ones.

    Draws as :class:`RankSampler` does; iterating is a collective.

    Args:
        batch_sampler: the user's batch sampler.
        num_replicas: N.
        rank: r.
        group: the process group of the N ranks.
    """

    def __init__(
        self,
        batch_sampler: Iterable[Sequence[Any]],
        *,
        num_replicas: int,
        rank: int,
        group: dist.ProcessGroup,
    ) -> None:
        self.batch_sampler = batch_sampler
        self.num_replicas = num_replicas
        self.rank = rank
        self._group = group

    def __iter__(self) -> Iterator[list[Any]]:
        drawn = draw_together(
            lambda: [list(batch) for batch in self.batch_sampler], self._group, what="Drawing the batches"
        )
        yield from split_batches(share_batches(drawn, self._group), self.rank, self.num_replicas)

    def __len__(self) -> int:
        return _length(self.batch_sampler)

    @property
    def epoch(self) -> int | None:
        """The epoch that the user's batch sampler shows; None if it shows none."""
        return readable_epoch(epoch_source(self.batch_sampler))

    def set_epoch(self, epoch: int) -> None:
        """Passes ``epoch`` to the user's batch sampler, if it wants to know."""
        _pass_epoch(self.batch_sampler, epoch)


@final
class StepSampler(Sampler[Any]):
    """What the loader asks for, step by step, from step ``skip`` on.

    Skipped entries are drawn and thrown away; their samples are never loaded.

    Args:
        steps: yields what one step loads: a list of indices, or one index where nothing batches.
    """

    def __init__(self, steps: Iterable[Any]) -> None:
        self.steps = steps
        self.skip = 0

    def __iter__(self) -> Iterator[Any]:
        return islice(iter(self.steps), self.skip, None)

    def __len__(self) -> int:
        return _length(self.steps)  # of the whole epoch


def _pass_epoch(sampler: object, epoch: int) -> None:
    source = epoch_source(sampler)
    if source is not None:
        source.set_epoch(epoch)


def _length(sampler: object) -> int:
    if not isinstance(sampler, Sized):
        raise TypeError(
            f"the sampler of type {type(sampler).__name__} has no __len__, so the loader has none."
        )
    return len(sampler)

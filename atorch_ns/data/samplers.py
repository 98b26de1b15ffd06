"""Samplers: one rank's share of an order that all data-parallel ranks agree on.

Legend: N data-parallel ranks, r the rank of this process among them. A rank's share of an order is every
N-th entry from r on, so that the batches of all ranks in one step are together one stretch of the order.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence, Sized
from itertools import islice
from typing import Any, TypeVar, final

import torch.distributed as dist
from torch.utils.data import Sampler

from atorch_ns.cluster import agree, from_first
from atorch_ns.errors import BatchSizeError


def nearest_sizes(size: int, divisor: int) -> str:
    """Advice that names the positive multiples of ``divisor`` next to ``size``."""
    below = size // divisor * divisor
    above = below + divisor
    if not below:
        return f"The nearest size that divides is {above}."
    return f"The nearest sizes that divide are {below} and {above}."


T = TypeVar("T")
_INNER = ("sampler", "batch_sampler", "steps")  # attributes that may hold an inner sampler


def even_out(order: Sequence[T], num_ranks: int, *, drop_last: bool) -> list[T]:
    """``order`` at a length divisible by ``num_ranks``, like ``DistributedSampler``.

    With ``drop_last`` the tail is dropped. Otherwise the order continues with its own beginning.
    """
    if drop_last:
        return list(order[: len(order) // num_ranks * num_ranks])
    if not order:
        return []
    missing = -len(order) % num_ranks  # up to the next multiple
    copies = math.ceil(missing / len(order))  # an order shorter than N is repeated
    return [*order, *(list(order) * copies)[:missing]]


def length_of_share(length: int, num_ranks: int, *, drop_last: bool) -> int:
    """Number of entries for each rank from an order of that length."""
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


def _layers_of(sampler: object) -> Iterator[object]:
    visited_ids: set[int] = set()  # samplers may refer to each other
    while sampler is not None and id(sampler) not in visited_ids:
        yield sampler
        visited_ids.add(id(sampler))
        sampler = next(
            (inner for name in _INNER if (inner := getattr(sampler, name, None)) is not None), None
        )


def epoch_source(sampler: object) -> Any | None:
    """The object with ``set_epoch``: the sampler, or the first inner one with the method."""
    return next((layer for layer in _layers_of(sampler) if callable(getattr(layer, "set_epoch", None))), None)


def distributed_position(sampler: object) -> tuple[int, int] | None:
    """``(num_replicas, rank)`` of this sampler or its inner distributed sampler; None without one."""
    for layer in _layers_of(sampler):
        num_replicas, rank = getattr(layer, "num_replicas", None), getattr(layer, "rank", None)
        if isinstance(num_replicas, int) and isinstance(rank, int):
            return num_replicas, rank
    return None


def readable_epoch(source: object) -> int | None:
    """The ``epoch`` of the source from :func:`epoch_source`, if it has one."""
    epoch = getattr(source, "epoch", None)
    return epoch if isinstance(epoch, int) and not isinstance(epoch, bool) else None


@final
class RankSampler(Sampler[Any]):
    """The rank's share of the entries drawn by the user's sampler or batch sampler.

    Each epoch every rank draws from its own sampler, so that its state and its random numbers stay in step
    on all ranks. Rank 0's entries are used. Iteration is therefore a collective, and entries must pickle.

    Args:
        sampler: the user's sampler; needs ``__len__`` for the loader to have a length.
        num_replicas: N.
        rank: r.
        group: the process group of the N ranks.
        drop_last: drop the tail that N does not divide, instead of padding it with the beginning.
        draws_batches: whether the sampler draws global batches. The rank then gets its share of each.
    """

    def __init__(
        self,
        sampler: Iterable[Any],
        *,
        num_replicas: int,
        rank: int,
        group: dist.ProcessGroup,
        drop_last: bool,
        draws_batches: bool,
    ) -> None:
        self.sampler = sampler
        self.num_replicas = num_replicas
        self.rank = rank
        self.drop_last = drop_last
        self.draws_batches = draws_batches
        self._group = group

    def __iter__(self) -> Iterator[Any]:
        # A generator, so that the collective happens once, when the first index is requested: torch's
        # loader calls `iter` on its sampler more often than it uses the result.
        entries = agree(
            self._draw_entries, what="drawing the order of the data", distributed=True, group=self._group
        )
        entries = from_first(entries, distributed=True, group=self._group)
        if self.draws_batches:
            yield from split_batches(entries, self.rank, self.num_replicas)
        else:
            order = even_out(entries, self.num_replicas, drop_last=self.drop_last)
            yield from order[self.rank :: self.num_replicas]

    def _draw_entries(self) -> list[Any]:
        return [list(entry) if self.draws_batches else entry for entry in self.sampler]

    def __len__(self) -> int:
        length = _sampler_length(self.sampler)
        if self.draws_batches:
            return length
        return length_of_share(length, self.num_replicas, drop_last=self.drop_last)

    @property
    def epoch(self) -> int | None:
        """The epoch of the user's sampler, or None if it has none."""
        return readable_epoch(epoch_source(self.sampler))

    def set_epoch(self, epoch: int) -> None:
        """Passes ``epoch`` to the user's sampler, if it has ``set_epoch``."""
        source = epoch_source(self.sampler)
        if source is not None:
            source.set_epoch(epoch)


@final
class StepSampler(Sampler[Any]):
    """The indices that the loader loads, step by step, starting at step ``skip``.

    Skipped entries are drawn and discarded. Their samples are never loaded.

    Args:
        steps: yields the indices of one step: a list, or one index where nothing batches.
    """

    def __init__(self, steps: Iterable[Any]) -> None:
        self.steps = steps
        self.skip = 0

    def __iter__(self) -> Iterator[Any]:
        return islice(iter(self.steps), self.skip, None)

    def __len__(self) -> int:
        return _sampler_length(self.steps)  # of the whole epoch


def _sampler_length(sampler: object) -> int:
    if not isinstance(sampler, Sized):
        raise TypeError(
            f"the sampler of type {type(sampler).__name__} has no __len__, so the loader has none either."
        )
    return len(sampler)

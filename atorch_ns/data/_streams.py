"""Iterable datasets: one rank's share of a stream that every rank reads.

Legend: N data-parallel ranks, r the rank of this process among them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sized
from typing import Any, TypeVar, final

import torch
from torch.utils.data import IterableDataset, get_worker_info

from atorch_ns.data._samplers import readable_epoch

__all__ = ["RankStream", "every_nth"]

T = TypeVar("T")
_NEVER_SET = -1


def every_nth(stream: Iterable[T], rank: int, num_ranks: int) -> Iterator[T]:
    """Entry r of each complete round of N entries; an incomplete last round gives nothing to any rank."""
    for position, entry in enumerate(stream):
        place = position % num_ranks
        if place == rank:
            mine = entry
        if place == num_ranks - 1:
            yield mine


@final
class RankStream(IterableDataset[Any]):
    """The rank's share of an iterable dataset, which otherwise looks like that dataset.

    The user's dataset divides itself between loader workers as torch documents, by ``get_worker_info`` or
    by a ``worker_init_fn`` that sets its attributes; the share of the rank is taken inside each worker.
    All other attributes are read from and written to the user's dataset.

    Args:
        dataset: yields the same samples in the same order on every rank.
        rank: r.
        num_ranks: N.
    """

    _OWN = frozenset({"dataset", "_share", "_epoch"})

    def __init__(self, dataset: Iterable[Any], *, rank: int, num_ranks: int) -> None:
        self.dataset = dataset
        self._share = (rank, num_ranks)
        # In shared memory, since persistent workers keep the dataset that they were started with.
        self._epoch = torch.tensor(_NEVER_SET, dtype=torch.int64).share_memory_()

    def __iter__(self) -> Iterator[Any]:
        epoch = int(self._epoch)
        if epoch != _NEVER_SET and get_worker_info() is not None:
            self._pass_epoch(epoch)
        rank, num_ranks = self._share
        return every_nth(iter(self.dataset), rank, num_ranks)

    def __len__(self) -> int:
        if not isinstance(self.dataset, Sized):
            raise TypeError(f"the dataset of type {type(self.dataset).__name__} has no __len__.")
        return len(self.dataset) // self._share[1]

    @property
    def epoch(self) -> int | None:
        """The epoch that the user's dataset shows; None if it shows none."""
        return readable_epoch(self.dataset)

    def set_epoch(self, epoch: int) -> None:
        """Passes ``epoch`` to the user's dataset, here and in every worker, if it wants to know."""
        self._epoch.fill_(epoch)
        self._pass_epoch(epoch)

    def _pass_epoch(self, epoch: int) -> None:
        listener = getattr(self.dataset, "set_epoch", None)
        if callable(listener):
            listener(epoch)

    def __getattr__(self, name: str) -> Any:
        if name in RankStream._OWN or (name.startswith("__") and name.endswith("__")):
            raise AttributeError(name)  # not set yet: the object is being unpickled
        return getattr(self.dataset, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in RankStream._OWN:
            object.__setattr__(self, name, value)
        else:
            setattr(self.dataset, name, value)

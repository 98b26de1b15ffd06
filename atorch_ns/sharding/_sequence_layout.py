"""Which positions of a sequence each rank holds, and the way from whole to divided and back.

Legend: T positions of the whole sequence, n ranks, L positions of one rank.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.distributed as dist

from atorch_ns.sharding._collectives import gather_from, scatter_to

__all__ = ["SequenceLayout"]

_LEAST_LOCAL = 2
"""Code that asks whether there is one query only (a decoding step) must not say yes on a part."""


@dataclass(frozen=True)
class SequenceLayout:
    """A sequence of ``length`` positions on ``ranks`` ranks, in equal parts.

    In order, rank r holds the r-th of n pieces. In zigzag, the sequence has 2n pieces and rank r holds the
    pieces r and 2n-1-r: under a causal mask, where later positions attend to more, all ranks then have equal
    work. A length that does not divide is padded by its last position; what is computed there is dropped.

    Attributes:
        length: T.
        ranks: n.
        rank: this rank's place.
        zigzag: whether each rank holds an early and a late piece.
    """

    length: int
    ranks: int
    rank: int
    zigzag: bool = False

    @property
    def local(self) -> int:
        """L, the same on every rank."""
        pieces = self.ranks * (2 if self.zigzag else 1)
        padded = max(math.ceil(self.length / pieces) * pieces, _LEAST_LOCAL * self.ranks)
        return padded // self.ranks

    @property
    def padded(self) -> int:
        """n L."""
        return self.local * self.ranks

    def positions(self, rank: int) -> list[int]:
        """The L positions of a rank, ascending; T and more for padding."""
        if not self.zigzag:
            return list(range(rank * self.local, (rank + 1) * self.local))
        half = self.local // 2
        early, late = rank * half, (2 * self.ranks - 1 - rank) * half
        return [*range(early, early + half), *range(late, late + half)]

    def num_real(self, rank: int) -> int:
        """How many positions of a rank are no padding; they come first."""
        return sum(position < self.length for position in self.positions(rank))

    @cached_property
    def own(self) -> torch.Tensor:
        """This rank's positions, int64 [L]; padding stands at the last position."""
        return torch.tensor(self.positions(self.rank)).clamp_(max=self.length - 1)

    def select(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        """This rank's positions of a whole ``x``; gradients stay on this rank."""
        return x.index_select(dim, self.own.to(x.device))

    def divide(self, x: torch.Tensor, dim: int, group: dist.ProcessGroup) -> torch.Tensor:
        """This rank's positions of a whole ``x``; the gradient is that of the whole."""
        return scatter_to(self.by_rank(x, dim), dim, group)

    def gather(self, x: torch.Tensor, dim: int, group: dist.ProcessGroup) -> torch.Tensor:
        """The whole of a divided ``x``, for results that all ranks use alike."""
        return self.in_order(gather_from(x, dim, group), dim)

    def in_order(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        """The parts of all ranks, joined along ``dim`` rank by rank, in the order of positions without padding."""
        if self.zigzag:
            chunks = x.chunk(2 * self.ranks, dim)
            early, late = chunks[0::2], chunks[1::2]
            x = torch.cat([*early, *reversed(late)], dim)
        return x if self.padded == self.length else x.narrow(dim, 0, self.length)

    def by_rank(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        """The inverse of :meth:`in_order`; the last position is repeated as padding."""
        missing = self.padded - self.length
        if missing:
            last = x.narrow(dim, self.length - 1, 1)
            x = torch.cat([x, *[last] * missing], dim)
        if self.zigzag:
            chunks = x.chunk(2 * self.ranks, dim)
            order = [place for rank in range(self.ranks) for place in (rank, 2 * self.ranks - 1 - rank)]
            x = torch.cat([chunks[place] for place in order], dim)
        return x

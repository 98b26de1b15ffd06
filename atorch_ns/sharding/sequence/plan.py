"""Plan of a block on a part of the sequence: the positions of each rank, and divided arguments and results.

Inside a block, gradients are those of the whole times the number of ranks. A weight's gradient is then the
mean over ranks, which leaves unchanged what each rank computes whole: uses of the weight outside the blocks.

Legend: T positions of the whole sequence, n ranks, L positions of one rank.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn

from atorch_ns.capture.nests import Path, leaves, map_leaves
from atorch_ns.sharding.collectives import Group, copy_to, gather_from, scale_gradient, scatter_to

_LEAST_LOCAL = 2  # code may mistake a part of a single position for a decoding step


@dataclass(frozen=True)
class SequenceLayout:
    """A sequence of ``length`` positions on ``ranks`` ranks, in equal parts.

    In order, rank r holds the r-th of n pieces. In zigzag, the sequence has 2n pieces and rank r holds the
    pieces r and 2n-1-r: under a causal mask, where later positions attend to more, all ranks then have equal
    work. A length that does not divide is padded by its last position; what is computed there is dropped.

    Attributes:
        length: T.
        ranks: n.
        rank: this rank's number in the group.
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
        total = max(math.ceil(self.length / pieces) * pieces, _LEAST_LOCAL * self.ranks)
        # A part of T positions would be taken for the whole.
        return (total + pieces if total == self.ranks * self.length else total) // self.ranks

    @property
    def padded(self) -> int:
        """n L."""
        return self.local * self.ranks

    def positions(self, rank: int) -> list[int]:
        """The L positions of a rank, ascending; padding has positions from T on."""
        return [position for run in self._rank_spans(rank) for position in run]

    def _rank_spans(self, rank: int) -> tuple[range, ...]:
        if not self.zigzag:
            return (range(rank * self.local, (rank + 1) * self.local),)
        half = self.local // 2
        early, late = rank * half, (2 * self.ranks - 1 - rank) * half  # where pieces r and 2n-1-r begin
        return range(early, early + half), range(late, late + half)

    def num_real(self, rank: int) -> int:
        """The number of positions of a rank that are not padding; they come first."""
        return sum(position < self.length for position in self.positions(rank))

    def places(self, rank: int, device: torch.device) -> torch.Tensor:
        """:meth:`positions`, int64 [L], made on ``device``: a copy from the host would wait for it."""
        return torch.cat([torch.arange(run.start, run.stop, device=device) for run in self._rank_spans(rank)])

    def local_positions(self, device: torch.device) -> torch.Tensor:
        """This rank's positions, int64 [L]; padding stands at the last position."""
        return self.places(self.rank, device).clamp_(max=self.length - 1)

    def select(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        """This rank's positions of a whole ``x``; gradients stay on this rank."""
        return x.index_select(dim, self.local_positions(x.device))

    def divide(self, x: torch.Tensor, dim: int, group: Group) -> torch.Tensor:
        """This rank's positions of a whole ``x``; the gradient is that of the whole."""
        return scatter_to(self.by_rank(x, dim), dim, group)

    def gather(self, x: torch.Tensor, dim: int, group: Group) -> torch.Tensor:
        """The whole of a divided ``x``, for a computation that is the same on all ranks."""
        return self.in_order(gather_from(x, dim, group), dim)

    def in_order(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        """The parts of all ranks, joined along ``dim`` by rank, in the order of positions without padding."""
        if self.zigzag:
            chunks = x.chunk(2 * self.ranks, dim)
            early, late = chunks[0::2], chunks[1::2]  # pieces r rise from rank to rank, pieces 2n-1-r fall
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
            order = [index for rank in range(self.ranks) for index in (rank, 2 * self.ranks - 1 - rank)]
            x = torch.cat([chunks[index] for index in order], dim)
        return x


AttentionKind = Literal["ulysses", "ring", "gather"]

Numbers = Literal["own", "whole"]
"""Position numbers made inside a block become this rank's positions or all positions."""


@dataclass(frozen=True, kw_only=True)
class BlockPlan:
    """Changes to a block's arguments, inner calls and results.

    Attributes:
        kind: how attention sees other ranks' keys; ``gather`` if it is written out as matrix products only.
        divided: the dimension of positions of each divided argument.
        sites: the meaning of the sequence's position numbers, tables and square masks, by their index in the
            order of the calls that make them.
        crossed: indices of the attention calls whose keys every rank has whole.
        products: the gathered dimension of the second factor, by index of the matrix product.
        num_products: the number of matrix products in a call of the block.
        outputs: the dimension of positions of each divided result.
    """

    kind: AttentionKind
    divided: Mapping[Path, int]
    sites: Mapping[int, Numbers] = field(default_factory=dict)
    crossed: frozenset[int] = frozenset()
    products: Mapping[int, int] = field(default_factory=dict)
    num_products: int = 0
    outputs: Mapping[Path, int] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class SequenceSettings:
    """Settings of sequence parallelism.

    Attributes:
        group: the ranks of the sequence axis.
        dim: the hidden states' dimension of positions.
        kind: how attention sees the keys of other ranks.
        balanced: whether causal ring attention divides the sequence in zigzag.
        head_share: the number of ranks that the heads of the blocks are still to be divided over.
        restore_precision: makes a copy of a block compute in its weights' dtypes, for tests; else ``None``.
        leave_whole: whether a block that cannot be divided runs whole on every rank; else it is refused.
    """

    group: dist.ProcessGroup
    device: torch.device
    dim: int = 1
    kind: Literal["auto", "ulysses", "ring"] = "auto"
    balanced: bool = True
    head_share: int = 1
    restore_precision: Callable[[nn.Module], None] | None = None
    leave_whole: bool = False


def divide_arguments(arguments: Any, plan: BlockPlan, layout: SequenceLayout, group: Group) -> Any:
    """``(args, kwargs)`` with this rank's positions of the whole arguments that the plan divides.

    Trained arguments that stay whole get the sum of the gradients of all ranks.
    """

    def divide(path: Path, leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        dim = plan.divided.get(path)
        if dim is not None:
            # The result of a joined block is already a part.
            is_whole = leaf.dim() > dim and leaf.size(dim) == layout.length
            return scale_gradient(layout.divide(leaf, dim, group), 1 / layout.ranks) if is_whole else leaf
        return scale_gradient(copy_to(leaf, group), 1 / layout.ranks) if leaf.requires_grad else leaf

    return map_leaves(divide, arguments)


def gather_results(output: Any, plan: BlockPlan, layout: SequenceLayout, group: Group) -> Any:
    """Returns a block's results, with parts gathered."""

    def gather(path: Path, leaf: Any) -> Any:
        dim = plan.outputs.get(path)
        if dim is None or leaf is None:
            return leaf
        # Into a block gradients are n times those of the whole, and out of it they are divided by n again.
        return layout.gather(scale_gradient(leaf, float(layout.ranks)), dim, group)

    return map_leaves(gather, output)


def find_hidden(arguments: Any, dim: int) -> tuple[Path, torch.Tensor] | None:
    """The hidden states: the first floating tensor that has ``dim``, with its path in ``(args, kwargs)``."""
    for path, leaf in leaves(arguments):
        if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() and leaf.dim() > dim:
            return path, leaf
    return None


def sequence_dims(tensor: torch.Tensor, length: int, dim: int, *, squares: bool = True) -> tuple[int, ...]:
    """The sequence dimensions of an argument, judged by their size.

    That is ``dim``, the first dimension of a table with a row per position, or the last two of a mask. A
    square is a mask, or without ``squares`` a table whose width happens to be the length.
    """
    sizes = tensor.shape
    if not squares and tensor.dim() >= 2 and sizes[-1] == sizes[-2] == length:
        return (tensor.dim() - 2,)  # a table: one row for each position
    if tensor.dim() >= 3 and sizes[-1] == length and sizes[-2] in (1, length):
        # A mask [..., T, T] or [..., 1, T].
        return tuple(axis for axis in (tensor.dim() - 2, tensor.dim() - 1) if sizes[axis] == length)
    if tensor.dim() > dim and sizes[dim] == length:
        return (dim,)  # hidden states, ids of tokens or positions
    if 1 <= tensor.dim() <= 2 and sizes[0] == length:
        return (0,)  # a table, or a list of numbers
    return ()

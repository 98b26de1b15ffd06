"""Collectives that gradients flow through, on plain tensors.

Each pair below is a forward and the matching backward communication. ``x`` is this rank's tensor; a group of one
rank communicates nothing.

=================  ============================  ============================  ==========================
function           forward                       backward                      used where
=================  ============================  ============================  ==========================
copy_to            as it is                      all-reduce (sum)              a replicated tensor enters
                                                                               a divided layer
reduce_from        all-reduce (sum)              as it is                      partial results leave it
gather_from        all-gather along ``dim``      this rank's piece             whole results leave it, and
                                                                               every rank does the same
                                                                               with them afterwards
scatter_to         this rank's piece             all-gather along ``dim``      its inverse
all_gather         all-gather along ``dim``      reduce-scatter (sum)          a divided tensor enters a
                                                                               layer divided otherwise
reduce_scatter     reduce-scatter (sum)          all-gather along ``dim``      its inverse
all_to_all         split ``split_dim``, join     the reverse                   from one division to another
                   ``join_dim``
exchange           rows to ranks by counts       the reverse                   tokens to experts
scale_gradient     as it is                      times a factor                sums that become means
=================  ============================  ============================  ==========================
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

__all__ = [
    "all_gather",
    "all_to_all",
    "copy_to",
    "exchange",
    "gather_from",
    "reduce_from",
    "reduce_scatter",
    "scale_gradient",
    "scatter_to",
]

Group = dist.ProcessGroup


def copy_to(x: torch.Tensor, group: Group) -> torch.Tensor:
    """``x``; its gradient is summed over the group."""
    return x if group.size() == 1 else _apply(_CopyTo, x, group)


def reduce_from(x: torch.Tensor, group: Group) -> torch.Tensor:
    """The sum of ``x`` over the group."""
    return x if group.size() == 1 else _apply(_ReduceFrom, x, group)


def gather_from(x: torch.Tensor, dim: int, group: Group) -> torch.Tensor:
    """The pieces of all ranks along ``dim``; each rank's gradient is that of its own piece.

    For results that all ranks use alike: their gradients are the same, so nothing is summed.
    """
    return x if group.size() == 1 else _apply(_GatherFrom, x, dim % x.dim(), group)


def scatter_to(x: torch.Tensor, dim: int, group: Group) -> torch.Tensor:
    """This rank's piece of ``x`` along ``dim``, which the group's size must divide."""
    return x if group.size() == 1 else _apply(_ScatterTo, x, dim % x.dim(), group)


def all_gather(x: torch.Tensor, dim: int, group: Group) -> torch.Tensor:
    """The pieces of all ranks along ``dim``; gradients of all ranks are summed."""
    return x if group.size() == 1 else _apply(_AllGather, x, dim % x.dim(), group)


def reduce_scatter(x: torch.Tensor, dim: int, group: Group) -> torch.Tensor:
    """This rank's piece along ``dim`` of the sum of ``x`` over the group."""
    return x if group.size() == 1 else _apply(_ReduceScatter, x, dim % x.dim(), group)


def all_to_all(x: torch.Tensor, split_dim: int, join_dim: int, group: Group) -> torch.Tensor:
    """Splits ``x`` along ``split_dim``, sends piece ``i`` to rank ``i``, joins what arrives along ``join_dim``.

    The group's size must divide ``x.size(split_dim)``.
    """
    if group.size() == 1:
        return x
    return _apply(_AllToAll, x, split_dim % x.dim(), join_dim % x.dim(), group)


def exchange(
    x: torch.Tensor, send_counts: Sequence[int], receive_counts: Sequence[int], group: Group
) -> torch.Tensor:
    """Sends the first ``send_counts[0]`` rows of ``x`` to rank 0, the next ``send_counts[1]`` to rank 1, ….

    Returns:
        ``[sum(receive_counts), …]``: the rows from rank 0, then those from rank 1, ….
    """
    return x if group.size() == 1 else _apply(_Exchange, x, tuple(send_counts), tuple(receive_counts), group)


def scale_gradient(x: torch.Tensor, factor: float) -> torch.Tensor:
    """``x``; its gradient is multiplied by ``factor``."""
    return _apply(_ScaleGradient, x, factor) if x.requires_grad and torch.is_grad_enabled() else x


def _apply(function: Any, *arguments: Any) -> torch.Tensor:
    result: torch.Tensor = function.apply(*arguments)
    return result


def _gathered(x: torch.Tensor, dim: int, group: Group) -> torch.Tensor:
    pieces = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(group.size())]
    dist.all_gather(pieces, x.contiguous(), group=group)
    return torch.cat(pieces, dim)


def _piece(x: torch.Tensor, dim: int, group: Group) -> torch.Tensor:
    size, rest = divmod(x.size(dim), group.size())
    if rest:
        raise ValueError(f"dimension {dim} of {tuple(x.shape)} does not divide into {group.size()} pieces")
    return x.narrow(dim, group.rank() * size, size).contiguous()


def _scattered_sum(x: torch.Tensor, dim: int, group: Group) -> torch.Tensor:
    pieces = [piece.contiguous() for piece in x.chunk(group.size(), dim)]
    out = torch.empty_like(pieces[group.rank()])
    dist.reduce_scatter(out, pieces, group=group)
    return out


def _transposed(x: torch.Tensor, split_dim: int, join_dim: int, group: Group) -> torch.Tensor:
    sent = torch.stack([piece.contiguous() for piece in x.chunk(group.size(), split_dim)])
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    return torch.cat(list(received.unbind(0)), join_dim)


def _exchanged(
    x: torch.Tensor, send: tuple[int, ...], receive: tuple[int, ...], group: Group
) -> torch.Tensor:
    out = x.new_empty((sum(receive), *x.shape[1:]))
    dist.all_to_all_single(out, x.contiguous(), list(receive), list(send), group=group)
    return out


class _CopyTo(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Group) -> torch.Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        gradient = gradients[0].clone(memory_format=torch.contiguous_format)
        dist.all_reduce(gradient, group=ctx.group)
        return gradient, None


class _ReduceFrom(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Group) -> torch.Tensor:
        out = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(out, group=group)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradients[0], None


class _GatherFrom(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, dim: int, group: Group) -> torch.Tensor:
        ctx.dim, ctx.group = dim, group
        return _gathered(x, dim, group)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return _piece(gradients[0], ctx.dim, ctx.group), None, None


class _ScatterTo(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, dim: int, group: Group) -> torch.Tensor:
        ctx.dim, ctx.group = dim, group
        return _piece(x, dim, group)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return _gathered(gradients[0], ctx.dim, ctx.group), None, None


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, dim: int, group: Group) -> torch.Tensor:
        ctx.dim, ctx.group = dim, group
        return _gathered(x, dim, group)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return _scattered_sum(gradients[0], ctx.dim, ctx.group), None, None


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, dim: int, group: Group) -> torch.Tensor:
        ctx.dim, ctx.group = dim, group
        return _scattered_sum(x, dim, group)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return _gathered(gradients[0], ctx.dim, ctx.group), None, None


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, split_dim: int, join_dim: int, group: Group) -> torch.Tensor:
        ctx.split_dim, ctx.join_dim, ctx.group = split_dim, join_dim, group
        return _transposed(x, split_dim, join_dim, group)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return _transposed(gradients[0], ctx.join_dim, ctx.split_dim, ctx.group), None, None, None


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, send: tuple[int, ...], receive: tuple[int, ...], group: Group
    ) -> torch.Tensor:
        ctx.send, ctx.receive, ctx.group = send, receive, group
        return _exchanged(x, send, receive, group)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return _exchanged(gradients[0], ctx.receive, ctx.send, ctx.group), None, None, None


class _ScaleGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, factor: float) -> torch.Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradients[0] * ctx.factor, None

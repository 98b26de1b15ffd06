"""Collectives that gradients flow through, on plain tensors.

Each function below is a forward communication with its backward one. ``x`` is this rank's tensor; a group of one
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

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

Group = dist.ProcessGroup
Step = Callable[[torch.Tensor], torch.Tensor]


def copy_to(x: torch.Tensor, group: Group) -> torch.Tensor:
    """``x``; its gradient is summed over the group."""
    return _paired(x, group, _same, _sum)


def reduce_from(x: torch.Tensor, group: Group) -> torch.Tensor:
    """The sum of ``x`` over the group."""
    return _paired(x, group, _sum, _same)


def gather_from(x: torch.Tensor, dim: int, group: Group) -> torch.Tensor:
    """The pieces of all ranks along ``dim``; each rank's gradient is that of its own piece.

    For results that are used in the same way on all ranks: their gradients are equal, so nothing is summed.
    """
    return _paired(x, group, _gathered, _piece, dim % x.dim())


def scatter_to(x: torch.Tensor, dim: int, group: Group) -> torch.Tensor:
    """This rank's piece of ``x`` along ``dim``, which the group's size must divide."""
    return _paired(x, group, _piece, _gathered, dim % x.dim())


def all_gather(x: torch.Tensor, dim: int, group: Group) -> torch.Tensor:
    """The pieces of all ranks along ``dim``; gradients of all ranks are summed."""
    return _paired(x, group, _gathered, _sum_piece, dim % x.dim())


def reduce_scatter(x: torch.Tensor, dim: int, group: Group) -> torch.Tensor:
    """This rank's piece along ``dim`` of the sum of ``x`` over the group."""
    return _paired(x, group, _sum_piece, _gathered, dim % x.dim())


def all_to_all(x: torch.Tensor, split_dim: int, join_dim: int, group: Group) -> torch.Tensor:
    """Splits ``x`` along ``split_dim``, sends piece ``i`` to rank ``i``, joins what arrives along ``join_dim``.

    The group's size must divide ``x.size(split_dim)``.
    """
    return _paired(x, group, _transposed, _transposed_back, split_dim % x.dim(), join_dim % x.dim())


def exchange(
    x: torch.Tensor, send_counts: Sequence[int], receive_counts: Sequence[int], group: Group
) -> torch.Tensor:
    """Sends the first ``send_counts[0]`` rows of ``x`` to rank 0, the next ``send_counts[1]`` to rank 1, ….

    Returns:
        ``[sum(receive_counts), …]``: the rows from rank 0, then those from rank 1, ….
    """
    return _paired(x, group, _exchanged, _sent_back, list(send_counts), list(receive_counts))


def scale_gradient(x: torch.Tensor, factor: float) -> torch.Tensor:
    """``x``; its gradient is multiplied by ``factor``."""
    needed = x.requires_grad and torch.is_grad_enabled()
    return _applied(x, _same, lambda gradient: gradient * factor) if needed else x


class _Paired(torch.autograd.Function):
    """Applies one function forward and another to the gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, forward: Step, backward: Step) -> torch.Tensor:
        ctx.of_gradient = backward
        return forward(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return ctx.of_gradient(gradients[0]), None, None


def _paired(
    x: torch.Tensor,
    group: Group,
    forward: Callable[..., torch.Tensor],
    backward: Callable[..., torch.Tensor],
    *where: Any,
) -> torch.Tensor:
    """``forward(x, *where, group)``, whose gradient is ``backward(gradient, *where, group)``."""
    if group.size() == 1:
        return x
    return _applied(
        x, lambda x: forward(x, *where, group), lambda gradient: backward(gradient, *where, group)
    )


def _applied(x: torch.Tensor, forward: Step, backward: Step) -> torch.Tensor:
    result: torch.Tensor = _Paired.apply(x, forward, backward)  # type: ignore[no-untyped-call]
    return result


def _same(x: torch.Tensor, _: Group | None = None) -> torch.Tensor:
    return x.view_as(x)


def _sum(x: torch.Tensor, group: Group) -> torch.Tensor:
    out = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(out, group=group)
    return out


def _gathered(x: torch.Tensor, dim: int, group: Group) -> torch.Tensor:
    pieces = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(group.size())]
    dist.all_gather(pieces, x.contiguous(), group=group)
    return torch.cat(pieces, dim)


def _piece(x: torch.Tensor, dim: int, group: Group) -> torch.Tensor:
    size, rest = divmod(x.size(dim), group.size())
    if rest:
        raise ValueError(f"dimension {dim} of {tuple(x.shape)} does not divide into {group.size()} pieces")
    return x.narrow(dim, group.rank() * size, size).contiguous()


def _sum_piece(x: torch.Tensor, dim: int, group: Group) -> torch.Tensor:
    pieces = [piece.contiguous() for piece in x.chunk(group.size(), dim)]
    out = torch.empty_like(pieces[group.rank()])
    dist.reduce_scatter(out, pieces, group=group)
    return out


def _transposed(x: torch.Tensor, split_dim: int, join_dim: int, group: Group) -> torch.Tensor:
    sent = torch.stack([piece.contiguous() for piece in x.chunk(group.size(), split_dim)])
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    return torch.cat(list(received.unbind(0)), join_dim)


def _transposed_back(x: torch.Tensor, split_dim: int, join_dim: int, group: Group) -> torch.Tensor:
    return _transposed(x, join_dim, split_dim, group)


def _exchanged(x: torch.Tensor, send: list[int], receive: list[int], group: Group) -> torch.Tensor:
    out = x.new_empty((sum(receive), *x.shape[1:]))
    dist.all_to_all_single(out, x.contiguous(), receive, send, group=group)
    return out


def _sent_back(x: torch.Tensor, send: list[int], receive: list[int], group: Group) -> torch.Tensor:
    return _exchanged(x, receive, send, group)

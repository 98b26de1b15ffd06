"""Overlap inside divided layers: the first half of a batch is reduced while the second half is computed.

Halves are along the first dimension; the first is larger where its size is odd. A size of 1 gives one, whose
reduction overlaps with the weight's gradient alone. Layers with their own code (fp8) are not cut.

Legend: B batch, T tokens, I input features, O output features, n ranks.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from atorch_ns.sharding.collectives import total
from atorch_ns.sharding.rank_context import Region, TensorGroup
from atorch_ns.sharding.tensor.plan import CONV1D, LINEAR, LayerKind


def can_overlap(group: TensorGroup, kind: LayerKind, x: torch.Tensor) -> bool:
    """Returns whether a layer of that kind computes ``x`` in halves."""
    return group.overlap and kind in (LINEAR, CONV1D) and x.dim() > 1


def overlapped_columns(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    kind: LayerKind,
    *,
    group: TensorGroup,
    region: Region | None,
) -> torch.Tensor:
    """[B, …, I] to this rank's [B, …, O / n]; the backward pass reduces the gradient of ``x`` in halves.

    Later layers of the region that take ``x`` add to its gradient first, so that it is reduced once.
    """
    out: torch.Tensor
    out, view = _Columns.apply(x, weight, bias, kind, group.process_group)  # type: ignore[no-untyped-call]
    if region is not None:
        region.entered(x, view)
    return out


def overlapped_rows(
    x: torch.Tensor, weight: torch.Tensor, kind: LayerKind, group: TensorGroup
) -> torch.Tensor:
    """This rank's [B, …, I / n] to [B, …, O], summed over the ranks in halves."""
    out: torch.Tensor = _Rows.apply(x, weight, kind, group.process_group)  # type: ignore[no-untyped-call]
    return out


class _Totals:
    """Sums over a group that are begun one after the other and awaited together."""

    def __init__(self, group: Any) -> None:
        self._group = group
        self._pending: list[tuple[torch.Tensor, Any]] = []

    def begin(self, x: torch.Tensor) -> None:
        """Begins to sum ``x``, which nothing else may hold."""
        x = x.contiguous()
        self._pending.append((x, dist.all_reduce(x, group=self._group, async_op=True)))

    def wait(self) -> torch.Tensor:
        """The sums, joined along the first dimension."""
        for _, work in self._pending:
            work.wait()
        return torch.cat([x for x, _ in self._pending]) if len(self._pending) > 1 else self._pending[0][0]


class _Columns(torch.autograd.Function):
    """A column-parallel product, and ``x`` for other layers, whose gradients come with this one's."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        kind: LayerKind,
        group: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.set_materialize_grads(False)  # a result that nobody used has None for its gradient
        ctx.group = group
        return kind.compute(None, *_save_factors(ctx, kind, x, weight), bias), x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor | None, of_others: torch.Tensor | None) -> tuple[Any, ...]:
        if gradient is None:
            return None if of_others is None else total(of_others, ctx.group), None, None, None, None
        x, weight = ctx.saved_tensors  # once: a recomputation gives each a single time
        totals = _Totals(ctx.group)
        halves = gradient.chunk(2)  # splits samples; a single sample stays in one chunk
        others = [None] * len(halves) if of_others is None else of_others.chunk(2)
        for half, other in zip(halves, others, strict=True):
            of_input = _of_input(ctx, half, weight)
            totals.begin(of_input if other is None else of_input + other)
        of_bias = gradient.flatten(0, -2).sum(0) if ctx.needs_input_grad[2] else None  # during a reduction
        of_weight = _of_weight(ctx, gradient, x)  # during the last reduction
        return totals.wait(), of_weight, of_bias, None, None


class _Rows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, kind: LayerKind, group: Any) -> torch.Tensor:
        x, weight = _save_factors(ctx, kind, x, weight)
        totals = _Totals(group)
        for half in x.chunk(2):
            totals.begin(kind.compute(None, half, weight, None))  # summed while the next half is computed
        return totals.wait()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        x, weight = ctx.saved_tensors
        of_input = _of_input(ctx, gradient, weight) if ctx.needs_input_grad[0] else None
        return of_input, _of_weight(ctx, gradient, x), None, None


def _save_factors(
    ctx: Any, kind: LayerKind, x: torch.Tensor, weight: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    # Autocast would cast inside the product, where the backward pass could not get at the factors.
    ctx.kind, ctx.dtypes = kind, (x.dtype, weight.dtype)
    device = x.device.type
    if torch.is_autocast_enabled(device) and x.dtype != torch.float64:  # autocast leaves float64 alone
        x, weight = (factor.to(torch.get_autocast_dtype(device)) for factor in (x, weight))
    ctx.save_for_backward(x, weight)
    return x, weight


def _of_input(ctx: Any, gradient: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return (gradient @ (weight if ctx.kind.out_dim == 0 else weight.t())).to(ctx.dtypes[0])  # […, I]


def _of_weight(ctx: Any, gradient: torch.Tensor, x: torch.Tensor) -> torch.Tensor | None:
    if not ctx.needs_input_grad[1]:
        return None
    x, rows = x.flatten(0, -2), gradient.flatten(0, -2)  # [B T, I], [B T, O]
    return (rows.t() @ x if ctx.kind.out_dim == 0 else x.t() @ rows).to(ctx.dtypes[1])

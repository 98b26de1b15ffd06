"""Divided layers: each computes with its rank's part of a weight.

The parameters are DTensors on the tensor axis; activations are plain tensors. A layer keeps its class, its
attributes and its parameter names: its class becomes a subclass that differs in ``forward`` alone.

Legend: B batch, T tokens, I input features, O output features, V vocabulary, D model width, n ranks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
from torch import nn
from torch.distributed import ProcessGroup

from atorch_ns.sharding.rank_context import Region, TensorGroup, divide_class, local_part
from atorch_ns.sharding.sequence.tokens import DividedTokens
from atorch_ns.sharding.tensor.attention import DividedAttention
from atorch_ns.sharding.tensor.overlap import can_overlap, overlapped_columns, overlapped_rows
from atorch_ns.sharding.tensor.plan import CONV1D, LINEAR, ROUNDING, LayerKind
from atorch_ns.sharding.vocabulary.logits import DividedLogits

F = TypeVar("F", bound=Callable[..., Any])


def _not_compiled(forward: F) -> F:
    # Where the positions of samples are divided too, a layer computes on the part.
    @functools.wraps(forward)
    def on_parts(layer: Any, x: torch.Tensor) -> torch.Tensor:
        return (
            x.through(functools.partial(forward, layer))
            if isinstance(x, DividedTokens)
            else forward(layer, x)
        )

    # A compiler breaks its graph around a divided layer. In a graph, torch's in-place collectives are lost
    # without an error (torch 2.13), with the gradients of what they return.
    return torch.compiler.disable(on_parts)  # type: ignore[no-any-return]


@dataclass
class _Setting:
    kind: LayerKind  # kind of the layer before it was divided
    group: TensorGroup
    region: Region | None  # region that it begins or ends; None for embeddings and heads
    keeps_divided: bool = False  # whether a head leaves its outputs divided


def _entered_columns(layer: Any, setting: _Setting, x: torch.Tensor) -> torch.Tensor:
    kind, group, region = setting.kind, setting.group, setting.region
    weight, bias = local_part(layer.weight), None if layer.bias is None else local_part(layer.bias)
    # The first column sums the gradient of the input, after other columns have added theirs.
    is_first = region is None or not region.has_entered(x)
    if is_first and x.requires_grad and torch.is_grad_enabled() and can_overlap(group, kind, x):
        return overlapped_columns(x, weight, bias, kind, group=group, region=region)
    inputs = group.enter(x) if region is None else region.enter(x)
    return kind.compute(layer, inputs, weight, bias)


class _Column:
    """Column-parallel: […, I] to this rank's [..., O / n]."""

    _tensor: _Setting

    @_not_compiled
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        setting: _Setting = self._tensor
        out = _entered_columns(self, setting, x)
        if setting.region is not None:
            setting.region.inside(self.training, out.device)
        return out


class _Row:
    """Row-parallel: this rank's [..., I / n] to [..., O], summed over ranks; the bias joins the sum."""

    _tensor: _Setting

    @_not_compiled
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        setting: _Setting = self._tensor
        if setting.region is not None:
            setting.region.outside()
        weight = local_part(self.weight)
        if can_overlap(setting.group, setting.kind, x):
            out = overlapped_rows(x, weight, setting.kind, setting.group)
        else:
            partial = setting.kind.compute(self, x, weight, None)
            out = setting.group.leave(partial) if setting.region is None else setting.region.leave(partial)
        if self.bias is not None:
            out = out + local_part(self.bias).to(out.dtype)
        if setting.region is not None:
            setting.region.after_row(out.device)
        return out


class RoundingLinear(Protocol):
    """A linear layer that multiplies and exchanges in fewer bits, in a form that a compiler can graph."""

    def product(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """[..., I] times [O, I]; ``x`` may be what :meth:`gathered` returned."""

    def gathered(self, x: torch.Tensor, dim: int, group: ProcessGroup) -> torch.Tensor:
        """The whole input from its pieces along ``dim``, as :func:`traced_gather`; for :meth:`product`."""

    def scattered(self, x: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
        """This rank's rows of the sum of [T B, O], as :func:`traced_scatter`."""


TRACEABLE = (LINEAR, CONV1D, ROUNDING)
"""Kinds of divided layers that a compiler can put into a graph. Layers with their own code are excluded."""


class _TracedColumn:
    """Column-parallel, in a compiler's graphs: [B, T / n or T, I] to this rank's [B, T, O / n]."""

    _tensor: _Setting

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        setting: _Setting = self._tensor
        assert setting.region is not None
        # The bias apart: inductor joins products of two factors.
        out = setting.kind.compute(self, setting.region.enter(x), local_part(self.weight), None)
        return out if self.bias is None else out + local_part(self.bias).to(out.dtype)


class _TracedRow:
    """Row-parallel, in compiled graphs: this rank's [B, T, I / n] to its piece of the sum, [B, T / n, O]."""

    _tensor: _Setting

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        setting: _Setting = self._tensor
        assert setting.region is not None
        weight = local_part(self.weight)
        if setting.kind is ROUNDING:
            out = _scattered_rows(self, x, weight, setting)
        else:
            out = setting.region.leave(setting.kind.compute(self, x, weight, None))
        return out if self.bias is None else out + local_part(self.bias).to(out.dtype)


def _scattered_rows(
    layer: RoundingLinear, x: torch.Tensor, weight: torch.Tensor, setting: _Setting
) -> torch.Tensor:
    # torch's fused_scaled_matmul_reduce_scatter cuts rows in their order (torch 2.13). So tokens come first:
    # with several samples first, ranks would get whole samples in the place of their tokens.
    assert setting.region is not None
    dim, group = setting.region.sequence_dim, setting.group.process_group
    assert dim is not None
    assert isinstance(group, ProcessGroup)
    first = x.movedim(dim, 0)  # [T, B, I / n]
    piece: torch.Tensor = layer.scattered(layer.product(first.flatten(0, -2), weight), group)
    piece = piece.unflatten(0, (-1, *first.shape[1:-1])).movedim(0, dim)
    return piece


class _GatheredColumn:
    """Column-parallel with gathered outputs: […, I] to the whole […, O], each rank computing O / n of it."""

    _tensor: _Setting

    @_not_compiled
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        setting: _Setting = self._tensor
        out = _entered_columns(self, setting, x)
        if setting.keeps_divided:
            return DividedLogits.of(out, setting.group)
        return setting.group.gather(out, -1)


class _VocabularyRows:
    """Vocabulary-parallel: ids […] to […, D], each rank looking up the ids of its V / n rows."""

    _tensor: _Setting

    @_not_compiled
    def forward(self: Any, ids: torch.Tensor) -> torch.Tensor:
        setting: _Setting = self._tensor
        weight = local_part(self.weight)
        rows = weight.size(0)
        local = ids - setting.group.rank * rows  # rows of this rank's part
        foreign = (local < 0) | (local >= rows)  # ids that other ranks look up
        padding = self.padding_idx
        try:
            # padding_idx counts rows of the whole table; here it must count those of the part.
            if padding is not None:
                mine = padding - setting.group.rank * rows
                self.padding_idx = mine if 0 <= mine < rows else None
            out = setting.kind.compute(self, local.masked_fill(foreign, 0), weight, None)
        finally:
            self.padding_idx = padding
        return setting.group.leave(out.masked_fill(foreign.unsqueeze(-1), 0))  # one rank has each id's row


_CLASSES = {
    "colwise": _Column,
    "rowwise": _Row,
    "colwise_gather_output": _GatheredColumn,
    "embedding_rowwise": _VocabularyRows,
}
_TRACED = {"colwise": _TracedColumn, "rowwise": _TracedRow}


def as_divided(
    module: nn.Module, kind: LayerKind, style: str, group: TensorGroup, *, region: Region | None
) -> None:
    """Makes ``module``, whose parameters are divided, compute in ``style``; ``kind``: its kind when whole."""
    vars(module)["_tensor"] = _Setting(kind, group, region)
    # Code may reshape by out_features or in_features: they become those of the part.
    count = {"colwise": kind.counts[0], "colwise_gather_output": kind.counts[0], "rowwise": kind.counts[1]}
    name = count.get(style)
    if name and isinstance(getattr(module, name, None), int):
        setattr(module, name, getattr(module, name) // group.size)
    is_traced = region is not None and region.traced
    divide_class(module, (_TRACED if is_traced else _CLASSES)[style])


def keep_divided(module: nn.Module) -> None:
    """Makes a divided head return its outputs as :class:`DividedLogits`."""
    setting: _Setting = vars(module)["_tensor"]
    setting.keeps_divided = True


def attention_by_heads(module: nn.Module, group: TensorGroup) -> None:
    """Makes an ``nn.MultiheadAttention``, whose parameters are divided, compute this rank's heads."""
    assert isinstance(module, nn.MultiheadAttention)
    region = Region(group, num_rows=1, random=module.dropout > 0)
    region.watch(module)
    vars(module)["_tensor_group"], vars(module)["_region"] = group, region
    divide_class(module, DividedAttention)

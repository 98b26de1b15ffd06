"""What travels between two stages of DeepSpeed's pipeline engine.

The engine gives every floating tensor that arrives a gradient, wants it back, and runs one backward pass for
each floating tensor that leaves. So all tensors that need gradients travel as one, and everything else as
bytes, with a header that says how to take them apart.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import reduce
from typing import Any, NamedTuple

import torch

__all__ = ["Wire", "anchor", "pack", "read_header", "unpack"]

Wire = tuple[torch.Tensor, ...]
"""The tensor with gradients, if there is one, then the header, then the bytes, if there are any."""

_DTYPES = (
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
    torch.complex64,
    torch.complex128,
)
_ALIGNMENT = 16
"""Bytes; a multiple of the size of every dtype, so that a piece can be read in its own."""


class Entry(NamedTuple):
    """One tensor: whether it needs a gradient, its dtype and its shape."""

    needs_grad: bool
    dtype: torch.dtype
    shape: tuple[int, ...]


def pack(tensors: Sequence[torch.Tensor]) -> Wire:
    """What a stage hands to the next one, in the form in which it travels."""
    entries = [Entry(t.requires_grad and t.is_floating_point(), t.dtype, tuple(t.shape)) for t in tensors]
    header = torch.tensor(_codes(entries), dtype=torch.int64, device=tensors[0].device)
    with_grad = [t for t, entry in zip(tensors, entries, strict=True) if entry.needs_grad]
    rest = [t for t, entry in zip(tensors, entries, strict=True) if not entry.needs_grad]
    wire = [header]
    if with_grad:
        wire.insert(0, _joined(with_grad))
    if rest:
        wire.append(torch.cat([_bytes(tensor) for tensor in rest]))
    return tuple(wire)


def read_header(wire: Wire) -> tuple[Entry, ...]:
    """The entries that a header names; waits for the device."""
    header = wire[0] if not wire[0].is_floating_point() else wire[1]
    codes = header.tolist()
    entries = []
    position = 0
    while position < len(codes):
        needs_grad, dtype, num_dims = codes[position : position + 3]
        position += 3
        shape = tuple(codes[position : position + num_dims])
        entries.append(Entry(bool(needs_grad), _DTYPES[dtype], shape))
        position += num_dims
    return tuple(entries)


def unpack(wire: Wire, entries: Sequence[Entry]) -> list[torch.Tensor]:
    """The tensors that :func:`pack` was given; those that need gradients are parts of one leaf."""
    joined = iter(_split([entry for entry in entries if entry.needs_grad], wire[0]))
    pieces = iter(_from_bytes([entry for entry in entries if not entry.needs_grad], wire[-1]))
    return [next(joined) if entry.needs_grad else next(pieces) for entry in entries]


def anchor(output: torch.Tensor, received: torch.Tensor) -> torch.Tensor:
    """``output``, from which a gradient of zero reaches ``received`` even where nothing was made of it."""
    anchored: torch.Tensor = _Anchor.apply(output, received)  # type: ignore[no-untyped-call]
    return anchored


class _Anchor(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, output: torch.Tensor, received: torch.Tensor) -> torch.Tensor:
        ctx.like = (received.shape, received.dtype, received.device)
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        shape, dtype, device = ctx.like
        return gradients[0], torch.zeros((), dtype=dtype, device=device).expand(shape)


def _codes(entries: Sequence[Entry]) -> list[int]:
    return [
        code
        for entry in entries
        for code in (int(entry.needs_grad), _DTYPES.index(entry.dtype), len(entry.shape), *entry.shape)
    ]


def _joined(tensors: list[torch.Tensor]) -> torch.Tensor:
    if len(tensors) == 1:
        return tensors[0].contiguous()
    widest = reduce(torch.promote_types, (tensor.dtype for tensor in tensors))  # exact for every one of them
    return torch.cat([tensor.reshape(-1).to(widest) for tensor in tensors])


def _split(entries: Sequence[Entry], joined: torch.Tensor) -> list[torch.Tensor]:
    if len(entries) < 2:
        return [joined][: len(entries)]
    pieces = joined.split([math.prod(entry.shape) for entry in entries])
    return [piece.to(entry.dtype).view(entry.shape) for piece, entry in zip(pieces, entries, strict=True)]


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    return torch.nn.functional.pad(flat, (0, -flat.numel() % _ALIGNMENT))


def _from_bytes(entries: Sequence[Entry], packed: torch.Tensor) -> list[torch.Tensor]:
    found, start = [], 0
    for entry in entries:
        size = math.prod(entry.shape) * entry.dtype.itemsize
        found.append(packed[start : start + size].view(entry.dtype).view(entry.shape))
        start += size + (-size % _ALIGNMENT)
    return found

"""Memory that a kernel takes and gives back inside one call, where it is large."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch

__all__ = ["workspace_bytes"]


def workspace_bytes(func: Any, args: Sequence[Any], out: Any) -> tuple[int, ...]:
    """Bytes of each piece of memory that an operator needs beside what it reads and gives.

    Known for convolutions on CPUs: oneDNN copies what lies in memory as [B, C, H, W] into blocks of channels and back.
    What cuDNN takes depends on the algorithm that it chooses when it runs, and is not counted.
    """
    formula = _FORMULAS.get(func)
    return () if formula is None else formula(args, out)


def _convolution(args: Sequence[Any], out: torch.Tensor) -> tuple[int, ...]:
    """Its input and weight in blocks, or its result before that is brought into order, whichever is more."""
    given, weight = args[0], args[1]
    if not _in_blocks(given, weight):
        return ()
    return max((_padded(out),), (_padded(given), _bytes(weight)), key=sum)


def _convolution_backward(args: Sequence[Any], _: Any) -> tuple[int, ...]:
    """The result's gradient and the input in blocks. The weight's gradient is summed up in fp32; of a depthwise kernel
    with channels last, in many parts."""
    gradient, given, weight = args[:3]
    groups = args[9]
    if not _in_blocks(given, weight):
        parts = _DEPTHWISE_PARTS if given.device.type == "cpu" and groups == weight.shape[0] > 1 else 0
        return (parts * 4 * weight.numel(),) if parts else ()
    sums = 2 * 4 * weight.numel() if weight.itemsize < 4 else 0
    return tuple(size for size in (_padded(gradient), _padded(given), sums) if size)


def _in_blocks(given: torch.Tensor, weight: torch.Tensor) -> bool:
    if given.device.type != "cpu" or weight.dim() not in (4, 5):
        return False
    last = torch.channels_last if weight.dim() == 4 else torch.channels_last_3d
    if given.is_contiguous(memory_format=last) and not given.is_contiguous():
        return False
    # An fp32 kernel of one point is a product of matrices as it lies.
    return any(size > 1 for size in weight.shape[2:]) or given.itemsize < 4


def _padded(tensor: torch.Tensor) -> int:
    """Bytes in blocks; fewer channels than one block has are not put into any."""
    channels = tensor.shape[1]
    blocks = -(-channels // _BLOCK)
    return _bytes(tensor) if channels < _BLOCK else _bytes(tensor) // channels * blocks * _BLOCK


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.itemsize


# What torch 2.13 with oneDNN was seen to take; ``tests/profile/test_workspaces.py`` holds single convolutions against
# it, and the benchmark ``estimate_peers`` the peak of a whole network.
_BLOCK: Final = 16
"""Channels of a block."""
_DEPTHWISE_PARTS: Final = 256
"""Copies of a depthwise kernel's gradient that are summed up."""

_FORMULAS: Mapping[Any, Callable[[Sequence[Any], Any], tuple[int, ...]]] = {
    torch.ops.aten.convolution.default: _convolution,
    torch.ops.aten.convolution_backward.default: _convolution_backward,
}

"""Workspaces: memory that a kernel takes and gives back inside one call."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from atorch_ns.torch_compat import has_matrix_tiles, onednn_block, onednn_computes_in


def workspace_bytes(func: Any, args: Sequence[Any], out: Any) -> tuple[int, ...]:
    """Bytes of each workspace that an operator needs in addition to its inputs and outputs.

    Known for convolutions on CPUs: oneDNN copies [B, C, H, W] tensors into blocks of channels and back;
    ATen's own kernels, for dtypes that oneDNN does not compute in on this CPU, make columns (im2col).
    Workspaces of cuDNN depend on the algorithm that it chooses when it runs, and are not counted.
    """
    formula = _FORMULAS.get(func)
    return () if formula is None or args[1].device.type != "cpu" else formula(args, out)


def _convolution_workspaces(args: Sequence[Any], out: torch.Tensor) -> tuple[int, ...]:
    """Input and weight in oneDNN's blocks, or the result, whichever is more; AMX copies them twice."""
    inputs, weight = args[0], args[1]
    if not onednn_computes_in(inputs.dtype):
        return _column_workspaces(out, weight, args[3:], (_tensor_bytes(out),))
    if not _in_blocks(inputs, weight):
        return ()
    if inputs.itemsize < 4 and weight.shape[1] > 1 and has_matrix_tiles():
        return (2 * max(_tensor_bytes(inputs), _tensor_bytes(out)),)
    return max((_padded_bytes(out),), (_padded_bytes(inputs), _tensor_bytes(weight)), key=sum)


def _convolution_backward(args: Sequence[Any], _: Any) -> tuple[int, ...]:
    """The result's gradient and the input in blocks. The weight's gradient is summed in fp32. Of a depthwise
    kernel with channels last, each channel takes a block by a block, except for small kernels."""
    gradient, inputs, weight = args[:3]
    if not onednn_computes_in(inputs.dtype):
        return _column_workspaces(gradient, weight, args[4:], (_tensor_bytes(inputs), _tensor_bytes(weight)))
    if not _in_blocks(inputs, weight):
        depthwise = args[9] == weight.shape[0] > 1 and weight.shape[-1] > 3
        return (onednn_block() ** 2 * 4 * weight.numel(),) if depthwise else ()
    sums = 2 * 4 * weight.numel() if weight.itemsize < 4 else 0
    return tuple(size for size in (_padded_bytes(gradient), _padded_bytes(inputs), sums) if size)


def _column_workspaces(
    out: torch.Tensor, weight: torch.Tensor, options: Sequence[Any], results: tuple[int, ...]
) -> tuple[int, ...]:
    """The patches of the input under each position of the kernel. In 2D, groups run one by one, and their
    results are joined at the end."""
    stride, padding, dilation, is_transposed, _, groups = options[:6]
    if is_transposed or max(dilation) > 1:
        return ()  # one sample's at a time
    patches = _tensor_bytes(out) // out.shape[1] * (weight.numel() // weight.shape[0])
    if max(weight.shape[2:]) == 1 and max(stride) == 1 and not any(padding):
        patches = 0  # the input itself
    if weight.dim() == 5:
        return (patches * groups,) if patches else ()
    return max((patches,) if patches else (), results if groups > 1 else (), key=sum)


def _in_blocks(inputs: torch.Tensor, weight: torch.Tensor) -> bool:
    if weight.dim() not in (4, 5):
        return False
    last = torch.channels_last if weight.dim() == 4 else torch.channels_last_3d
    if inputs.is_contiguous(memory_format=last) and not inputs.is_contiguous():
        return False
    # An fp32 kernel of one point is a matrix product without a copy.
    return any(size > 1 for size in weight.shape[2:]) or inputs.itemsize < 4


def _padded_bytes(tensor: torch.Tensor) -> int:
    """Bytes in blocks; fewer channels than one block has are not copied into one."""
    block, channels = onednn_block(), tensor.shape[1]
    blocks = -(-channels // block)
    return _tensor_bytes(tensor) if channels < block else _tensor_bytes(tensor) // channels * blocks * block


def _tensor_bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.itemsize


# Measured of torch 2.13 with oneDNN on CPUs with AVX2, AVX-512 and AMX;
# ``tests/costs/test_workspaces.py`` checks single convolutions, and the benchmark ``estimate_peers`` the
# peak of a whole network.
_FORMULAS: Mapping[Any, Callable[[Sequence[Any], Any], tuple[int, ...]]] = {
    torch.ops.aten.convolution.default: _convolution_workspaces,
    torch.ops.aten.convolution_backward.default: _convolution_backward,
}

"""Fused kernels for attention to a part of the keys, where torch has one that tells the sum of exponentials.

A kernel is trusted once it has agreed with the formula on this device, in this dtype and for this head width.

Legend: B batch, H heads, T queries, S keys, E head width.
"""

from __future__ import annotations

import functools
from typing import Final, Protocol

import torch

from atorch_ns.sharding._isolated import isolated
from atorch_ns.torch_compat import CpuFlashAttention, CudaFlashAttention

__all__ = ["Kernel", "find_kernel"]

_TOLERANCES: Final = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 6e-2}
"""Rounding of values around 1; a wrong order of the logarithms or a lost factor gives 1e-1 and more."""
_LARGEST_WIDTH: Final = 256


class Kernel(Protocol):
    """Fused attention without dropout or mask, on [B, H, T, E] and [B, H, S, E]."""

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, causal: bool, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The result [B, H, T, E] and the logarithm of the sum of exponentials, float32 [B, H, T]."""
        ...

    def backward(
        self,
        gradient: torch.Tensor,
        tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        result: tuple[torch.Tensor, torch.Tensor],
        causal: bool,
        scale: float,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The gradients of queries, keys and values, given those three, and result and logarithm."""
        ...


def find_kernel(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> Kernel | None:
    """A kernel that has proved right for such tensors; ``None`` if there is none."""
    width = query.size(-1)
    alike = query.dtype == key.dtype == value.dtype and value.size(-1) == width
    if not alike or query.dim() != 4 or width % 8 or width > _LARGEST_WIDTH:
        return None
    return _proved(query.device, query.dtype, width)


@functools.cache
def _proved(device: torch.device, dtype: torch.dtype, width: int) -> Kernel | None:
    kernel: Kernel
    if device.type == "cpu" and dtype in (torch.float32, torch.bfloat16, torch.float16):
        kernel = CpuFlashAttention()
    elif device.type == "cuda" and dtype in (torch.bfloat16, torch.float16):
        kernel = CudaFlashAttention()
    else:
        return None
    try:
        errors = isolated(lambda: [_error(kernel, device, dtype, width, c) for c in (False, True)], device)
    except (
        RuntimeError,
        TypeError,
        AttributeError,
    ):  # a build without it, a device too old, a changed signature
        return None
    return kernel if max(errors) < _TOLERANCES[dtype] else None


def _error(kernel: Kernel, device: torch.device, dtype: torch.dtype, width: int, causal: bool) -> float:
    """The largest deviation from the formula, written out."""
    generator = torch.Generator().manual_seed(0)
    drawn = [torch.randn(1, 2, 8, width, generator=generator).to(device, dtype) for _ in range(4)]
    query, key, value, gradient = (tensor.float() for tensor in drawn)
    scale = width**-0.5
    scores = query @ key.transpose(-1, -2) * scale
    if causal:
        hidden = torch.ones(8, 8, dtype=torch.bool, device=device).triu(1)
        scores = scores.masked_fill(hidden, float("-inf"))
    weights, lse = scores.softmax(-1), scores.logsumexp(-1)
    out = weights @ value
    share = (gradient * out).sum(-1, keepdim=True)
    of_scores = weights * (gradient @ value.transpose(-1, -2) - share) * scale
    of_key, of_value = of_scores.transpose(-1, -2) @ query, weights.transpose(-1, -2) @ gradient
    tensors = (drawn[0], drawn[1], drawn[2])
    found = kernel.forward(*tensors, causal, scale)
    gradients = kernel.backward(drawn[3], tensors, (out.to(dtype), lse), causal, scale)
    expected = (out, lse, of_scores @ key, of_key, of_value)
    pairs = zip((*found, *gradients), expected, strict=True)
    return max(float((mine.float() - theirs).abs().max()) for mine, theirs in pairs)

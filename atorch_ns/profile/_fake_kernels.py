"""Kernels on fake tensors where torch's own refuse what real ones run, or give other memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

__all__ = ["FAKE_KERNELS"]


def _grouped_mm(
    first: torch.Tensor,
    second: torch.Tensor,
    offs: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Products of groups, as experts compute: torch's fake kernel takes bf16 alone, the real one fp32 too.

    Groups of rows [M, K] × [G, K, N] give [M, N]; groups of columns [G, M, K] × [K, N] give [M, N]; groups of
    the summed dim [M, K] × [K, N] give [G, M, N].
    """
    dtype = out_dtype or first.dtype
    if first.dim() == 2 and second.dim() == 2:
        assert offs is not None
        return first.new_empty((offs.shape[0], first.shape[0], second.shape[1]), dtype=dtype)
    if first.dim() == 3 and second.dim() == 3:
        return first.new_empty((first.shape[0], first.shape[1], second.shape[2]), dtype=dtype)
    return first.new_empty((first.shape[-2], second.shape[-1]), dtype=dtype)


def _reduced_in_place(func: Any) -> Callable[..., torch.Tensor]:
    """Losses that compute every element into their result before they reduce it keep that memory."""

    def kernel(first: torch.Tensor, second: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        plain: torch.Tensor = func(first, second, *args, **kwargs)
        if plain.dim():
            return plain
        elements = math.prod(torch.broadcast_shapes(first.shape, second.shape))
        return plain.new_empty(elements).as_strided((), ())

    return kernel


def _layer_norm(
    value: torch.Tensor, shape: Any, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float
) -> tuple[torch.Tensor, ...]:
    """With 16-bit values and fp32 weights the CPU's kernel keeps mean and deviation in fp32."""
    plain = _aten.native_layer_norm.default(value, shape, weight, bias, eps)
    mixed = weight is not None and weight.dtype != value.dtype and value.device.type == "cpu"
    if not mixed:
        return tuple(plain)
    assert weight is not None
    return (plain[0], *(one.new_empty(one.shape, dtype=weight.dtype) for one in plain[1:]))


_aten = torch.ops.aten

FAKE_KERNELS: Mapping[Any, Callable[..., Any]] = {
    _aten._grouped_mm.default: _grouped_mm,
    _aten.native_layer_norm.default: _layer_norm,
    **{
        func: _reduced_in_place(func)
        for func in (
            _aten.mse_loss.default,
            _aten.smooth_l1_loss.default,
            _aten.soft_margin_loss.default,
            _aten.binary_cross_entropy.default,
        )
    },
}
"""By operator; each takes the operator's arguments and gives its result on fake tensors."""

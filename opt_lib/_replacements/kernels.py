"""The edge to packages with kernels: what of them is called, and on what.

Legend: D features, I inner features, V classes, N rows, H heads, T tokens, B samples.

Their kernels run on plain CUDA tensors. On all others, such as the fake ones that a model is traced with, the
small CPU ones that a division is tested with, and DTensors, torch's own operators compute the same.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import nn

from opt_lib._replacements.base import Requirements

_FLOATS: Final = frozenset({"float32", "float16", "bfloat16"})

LIGER: Final = Requirements(
    package="liger_kernel",
    install="install it with: pip install 'atorch-ns[liger]'",
    imports=("liger_kernel.transformers.functional",),
    device_types=frozenset({"cuda"}),
    dtypes=_FLOATS,
)
"""Requirements of Liger's Triton kernels."""

APEX: Final = Requirements(
    package="apex",
    install="build NVIDIA's apex from its sources with --cpp_ext --cuda_ext; the package of that name on PyPI is another",
    imports=("apex.normalization.fused_layer_norm", "fused_layer_norm_cuda"),
    device_types=frozenset({"cuda"}),
    dtypes=_FLOATS,
)
"""Requirements of apex' CUDA kernels."""

RmsKernel = Callable[[torch.Tensor, torch.Tensor, float, float], torch.Tensor]
"""``(x [..., D], weight [D] of the same dtype, eps, offset added to the weight) -> normalised x``."""


def runs_kernels(*tensors: torch.Tensor | None) -> bool:
    """Whether all are plain tensors on a CUDA device."""
    return all(t is None or (type(t) in (torch.Tensor, nn.Parameter) and t.is_cuda) for t in tensors)


def liger() -> Any:
    """Liger's functions, by an import that torch.compile can trace."""
    from liger_kernel.transformers import functional

    return functional


def apex() -> Any:
    """The functions of apex' normalisations, likewise."""
    from apex.normalization import fused_layer_norm

    return fused_layer_norm


def torch_rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, offset: float) -> torch.Tensor:
    """torch's kernel. With an offset in fp32: ``1 + weight`` has no room for a small weight in half precision."""
    if offset:
        x, weight = x.float(), weight.float() + offset
    return F.rms_norm(x, weight.shape, weight, eps)


def liger_rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, offset: float) -> torch.Tensor:
    """Liger's kernel; it may not overwrite the incoming gradient, which others may read."""
    casting = "gemma" if offset else "llama"  # gemma: the whole product in fp32
    result: torch.Tensor = liger().liger_rms_norm(x, weight, eps, offset, casting, False)
    return result


def apex_rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, offset: float) -> torch.Tensor:
    """apex' kernel."""
    if offset:
        x, weight = x.float(), weight.float() + offset
    with torch.autocast("cuda", enabled=False):  # apex would cast both to its dtype
        result: torch.Tensor = apex().fused_rms_norm_affine(x, weight, tuple(weight.shape), eps)
    return result


_RMS_KERNELS: Final[dict[str, RmsKernel]] = {
    "torch": torch_rms_norm,
    "liger": liger_rms_norm,
    "apex": apex_rms_norm,
}


def rms_norm(kernel: str, x: torch.Tensor, weight: torch.Tensor, eps: float, offset: float) -> torch.Tensor:
    """``x / rms(x) * (offset + weight)`` by the kernels named.

    Args:
        kernel: ``torch``, ``liger`` or ``apex``.
        x: [..., D].
        weight: [D], in the dtype of ``x``.
        eps: added to the mean square.
        offset: added to the weight; with one, torch and apex give fp32.
    """
    chosen = _RMS_KERNELS[kernel] if runs_kernels(x, weight) else torch_rms_norm
    return chosen(x, weight, eps, offset)


def layer_norm(
    x: torch.Tensor,
    shape: tuple[int, ...],
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
) -> torch.Tensor:
    """``F.layer_norm`` by apex where it can run, which is where all dtypes are equal and autocast is off."""
    same = weight is not None and bias is not None and x.dtype == weight.dtype == bias.dtype
    if not same or not runs_kernels(x, weight, bias) or torch.is_autocast_enabled("cuda"):
        return F.layer_norm(x, shape, weight, bias, eps)
    result: torch.Tensor = apex().fused_layer_norm_affine(x, weight, bias, shape, eps)
    return result


def silu_mul(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """``silu(gate) * up``, both [..., I], by Liger where it can run; it keeps neither result for the backward pass."""
    if not runs_kernels(gate, up) or gate.dtype != up.dtype:
        return F.silu(gate) * up
    result: torch.Tensor = liger().liger_swiglu(gate, up)
    return result


def rotate(
    original: Callable[..., tuple[torch.Tensor, torch.Tensor]],
    q: torch.Tensor,
    k: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotary embedding of q and k [B, H, T, D], cos and sin [1 or B, T, D], by Liger where it can run."""
    if not runs_kernels(q, k, cos, sin) or cos.dim() != 3 or cos.shape[-1] != q.shape[-1]:
        return original(q, k, cos, sin)
    rotated: tuple[torch.Tensor, torch.Tensor] = liger().liger_rope(q, k, cos, sin)
    return rotated


def linear_cross_entropy(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    target: torch.Tensor,
    ignore_index: int,
    reduction: str,
) -> torch.Tensor:
    """Loss of ``F.linear(x, weight, bias)`` [N, V] against ``target`` [N] by Liger."""
    result: torch.Tensor = liger().liger_fused_linear_cross_entropy(
        x, weight, target, bias=bias, ignore_index=ignore_index, reduction=reduction
    )
    return result

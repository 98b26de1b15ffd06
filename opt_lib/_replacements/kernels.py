"""The edge to packages with kernels: what of them is called, and on what.

Legend: D features, I inner features, V classes, N rows, H heads, T tokens, B samples.

Kernels run on plain CUDA tensors outside of compiled code. On others, such as DTensors and the small CPU
tensors that test a division, torch's own operators compute the same. In a copy of a model that is traced for
its cost, each kernel is one operator without values, which reads, writes and keeps what the kernel does.
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

TRACED: Final = "traced"
"""The kernel of modules that are traced for their cost."""

RmsKernel = Callable[[torch.Tensor, torch.Tensor, float, float], torch.Tensor]
"""``(x [..., D], weight [D] of the same dtype, eps, offset added to the weight) -> normalised x``."""


def runs_kernels(*tensors: torch.Tensor | None) -> bool:
    """Returns whether all are plain tensors on a CUDA device and nothing is being compiled.

    TorchInductor fuses torch's operators with those around them, and copies what foreign Triton kernels may
    change. A step of a compiled Llama of 1.3 billion parameters took 269 ms with Liger's norms and MLPs; 258
    ms and 1.4 GiB less at the peak with torch's (H200, torch 2.11, Liger 0.8.5; eight steps each; see the
    benchmark ``gpu``).
    """
    return not torch.compiler.is_compiling() and all(t is None or _is_on_gpu(t) for t in tensors)


def _is_on_gpu(tensor: torch.Tensor) -> bool:
    return type(tensor) in (torch.Tensor, nn.Parameter) and tensor.is_cuda  # no DTensor, no fake tensor


def liger() -> Any:
    """Liger's functions, by an import that torch.compile can trace."""
    from liger_kernel.transformers import functional

    return functional


def apex() -> Any:
    """The functions of apex' normalisations, likewise."""
    from apex.normalization import fused_layer_norm

    return fused_layer_norm


def torch_rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, offset: float) -> torch.Tensor:
    """torch's kernel; in fp32 with an offset, since ``1 + weight`` in half precision loses small weights."""
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
    TRACED: lambda x, weight, *_: _TracedRmsNorm.apply(x, weight),  # type: ignore[no-untyped-call]
}


def rms_norm(kernel: str, x: torch.Tensor, weight: torch.Tensor, eps: float, offset: float) -> torch.Tensor:
    """``x / rms(x) * (offset + weight)`` by the kernels named.

    Args:
        kernel: ``torch``, ``liger`` or ``apex``; ``traced`` in a copy that is traced.
        x: [..., D].
        weight: [D], in the dtype of ``x``.
        eps: added to the mean square.
        offset: added to the weight; with one, torch and apex give fp32.
    """
    runs = kernel == TRACED or runs_kernels(x, weight)
    return (_RMS_KERNELS[kernel] if runs else torch_rms_norm)(x, weight, eps, offset)


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


def silu_mul(kernel: str, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """``silu(gate) * up``, both [..., I], by Liger where it can run, which saves no result for backward."""
    if kernel == TRACED:
        product: torch.Tensor = _TracedSiluMul.apply(gate, up)  # type: ignore[no-untyped-call]
        return product
    if not runs_kernels(gate, up) or gate.dtype != up.dtype:
        return F.silu(gate) * up
    result: torch.Tensor = liger().liger_swiglu(gate, up)
    return result


def rotate(
    kernel: str,
    original: Callable[..., tuple[torch.Tensor, torch.Tensor]],
    q: torch.Tensor,
    k: torch.Tensor,
    *,
    cos: torch.Tensor,
    sin: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotary embedding of q and k [B, H, T, D], cos and sin [1 or B, T, D], by Liger where it can run."""
    # cos and sin turn whole heads: partial rotary embeddings go to the model's own function.
    is_usual = cos.dim() == 3 and cos.shape[-1] == q.shape[-1]
    if kernel == TRACED and is_usual:
        pair: tuple[torch.Tensor, torch.Tensor] = _TracedRotation.apply(q, k, cos, sin)  # type: ignore[no-untyped-call]
        return pair
    if not is_usual or not runs_kernels(q, k, cos, sin):
        return original(q, k, cos, sin)
    result: tuple[torch.Tensor, torch.Tensor] = liger().liger_rope(q, k, cos, sin)
    return result


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


# Operators without values, for tracing; they save and overwrite what liger-kernel 0.8 and torch 2.13 do.

_SCHEMAS: Final = {
    "rms_norm": "(Tensor x, Tensor weight) -> (Tensor, Tensor)",
    "rms_norm_backward": "(Tensor gradient, Tensor x, Tensor weight, Tensor inverse_rms) -> (Tensor, Tensor)",
    "silu_mul": "(Tensor gate, Tensor up) -> Tensor",
    "silu_mul_backward": "(Tensor gradient, Tensor(a!) gate, Tensor(b!) up) -> (Tensor(a!), Tensor(b!))",
    "rotate": "(Tensor(a!) q, Tensor(b!) k, Tensor cos, Tensor sin) -> (Tensor(a!), Tensor(b!))",
}
# Results of each operator: new tensors, or those that it overwrites.
_RESULTS: Final[dict[str, Callable[..., Any]]] = {
    "rms_norm": lambda x, _: (torch.empty_like(x), x.new_empty(x.shape[:-1], dtype=torch.float32)),
    "rms_norm_backward": lambda _, x, weight, __: (torch.empty_like(x), torch.empty_like(weight)),
    "silu_mul": lambda gate, _: torch.empty_like(gate),
    "silu_mul_backward": lambda _, gate, up: (gate, up),
    "rotate": lambda q, k, *_: (q, k),
}


def _define_library() -> torch.library.Library:
    library = torch.library.Library("kernel", "FRAGMENT")
    for name, schema in _SCHEMAS.items():
        library.define(name + schema)
        # For all devices, fake and meta included; gradients come from the functions below.
        library.impl(name, _RESULTS[name], "CompositeExplicitAutograd")
    return library


_LIBRARY: Final = _define_library()  # its operators go when it goes
_kernel: Final = torch.ops.kernel


class _TracedRmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> Any:
        y, inverse_rms = _kernel.rms_norm(x, weight)
        ctx.save_for_backward(x, weight, inverse_rms)  # as Liger: x, and one number a row
        return y

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return _kernel.rms_norm_backward(gradient, *ctx.saved_tensors)


class _TracedSiluMul(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: torch.Tensor, up: torch.Tensor) -> Any:
        ctx.save_for_backward(gate, up)  # not the product, which is computed again
        return _kernel.silu_mul(gate, up)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return _kernel.silu_mul_backward(gradient, *ctx.saved_tensors)  # into the memory of gate and up


class _TracedRotation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Any:
        ctx.save_for_backward(cos, sin)  # q and k are overwritten
        return _rotate_heads(q, k, cos, sin)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return *_rotate_heads(*gradients, *ctx.saved_tensors), None, None


def _rotate_heads(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Any:
    # The kernel works in place if heads [B, H, T, D] lie behind tokens in memory, as after a linear layer.
    heads = _kernel.rotate(q.transpose(1, 2).contiguous(), k.transpose(1, 2).contiguous(), cos, sin)
    return tuple(each.transpose(1, 2) for each in heads)

"""Comparison of divided with whole computation: gradients of a test loss, relative errors."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, Final

import torch
from torch import nn

from atorch_ns.capture.structure import copy_structure
from atorch_ns.torch_compat import TorchDispatchMode

# Gradients below this share of the largest one are compared on its scale. The key bias of attention has a
# zero gradient up to rounding: it shifts all scores of a query equally and leaves their softmax unchanged.
_FLOOR = 1e-2


_INTEGERS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def sum_of_bits(part: torch.Tensor) -> torch.Tensor:
    """The sum of an array's bits as integers, 0-d int64; equal for equal bits, in any order of summation."""
    whole = torch.view_as_real(part.resolve_conj()) if part.is_complex() else part
    return whole.detach().contiguous().view(_INTEGERS[whole.itemsize]).sum(dtype=torch.int64)


def weighted_sum(tensors: Iterable[torch.Tensor], *, seed: int) -> torch.Tensor | None:
    """The sum of all elements with random weights that are equal on every rank; ``None`` without tensors."""
    generator = torch.Generator().manual_seed(seed)  # on the CPU: the same numbers for every device
    total: torch.Tensor | None = None
    for tensor in tensors:
        # A plain sum misses a wrong order of elements, and it is constant after a norm or a softmax.
        summand = (tensor * torch.randn(tensor.shape, generator=generator).to(tensor)).sum()
        total = summand if total is None else total + summand
    return total


def gradients_of(total: torch.Tensor, targets: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The gradients of ``total`` for each target; zeros where it does not depend on it."""
    if not total.requires_grad:
        return [torch.zeros_like(target) for target in targets]
    gradients = torch.autograd.grad(total, targets, allow_unused=True)
    # Targets that are not used have no gradient (None); sparse embeddings have a sparse one.
    pairs = zip(targets, gradients, strict=True)
    return [torch.zeros_like(target) if grad is None else grad.to_dense() for target, grad in pairs]


def largest(tensor: torch.Tensor) -> float:
    """max|tensor|. 0 for an empty tensor, NaN if any element is NaN."""
    tensor = tensor.detach()
    if not tensor.numel():
        return 0.0
    if not tensor.is_floating_point():
        return float(tensor.abs().max())
    low, high = map(float, tensor.aminmax())  # without a tensor of absolute values, a tenth of the time
    return max(abs(low), abs(high))  # and 0.0, not -0.0, for zeros


def relative_error(actual: torch.Tensor | None, target: torch.Tensor, *, floor: float = 0.0) -> float:
    """max|actual - target| / max(max|target|, floor). Compares real and imaginary parts separately.

    Infinite for different shapes, for different integers, and where only one has an infinity or NaN.
    """
    if actual is None or actual.shape != target.shape:
        return float("inf")
    # view_as_real refuses a conjugate that is not computed yet, hence resolve_conj.
    if target.is_complex() and actual.is_complex():
        actual, target = torch.view_as_real(actual.resolve_conj()), torch.view_as_real(target.resolve_conj())
    if not target.is_floating_point():
        return 0.0 if torch.equal(actual, target) else float("inf")
    error, scale = largest(actual - target), largest(target)
    if not math.isfinite(error + scale):
        # Infinities and NaN must be in the same places. All other elements determine the error.
        # A reference that is all NaN proves nothing.
        same = (actual == target) | (actual.isnan() & target.isnan())
        finite = target.isfinite() & actual.isfinite()
        if not bool((finite | same).all()) or bool(target.isnan().all()):
            return float("inf")
        error, scale = largest((actual - target)[finite]), largest(target[finite])
    return error / max(scale, floor, 1e-30)  # 1e-30: two tensors of zeros differ by 0, not by NaN


def gradient_floor(gradients: Iterable[torch.Tensor]) -> float:
    """The smallest scale for comparing gradients. Smaller gradients use it too."""
    return _FLOOR * max(filter(math.isfinite, map(largest, gradients)), default=0.0)


def copy_to_run(module: nn.Module) -> nn.Module:
    """Copies a module but shares parameter memory. Gradients and buffers, which code may write, are new."""
    return copy_structure(module, lambda kind, x: x.detach() if kind == "parameter" else x.clone(), {})


class InFloat32(TorchDispatchMode):
    """Skips a module's own casts to 16 bits in this thread: self-tests have fp32 values and tolerances."""

    # Else torch raises an error for operators such as flex_attention inside the mode.
    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = dict(kwargs or {})
        if options.get("dtype") in (torch.bfloat16, torch.float16):
            options["dtype"] = torch.float32
        return func(*args, **options)

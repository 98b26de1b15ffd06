"""Comparison of what is computed divided with what is computed whole: gradients of a test loss, relative errors."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from atorch_ns.torch_compat import TorchDispatchMode

_FLOOR = 1e-2
"""Gradients smaller than this share of the largest are compared on its scale: that of attention's key bias is zero but
for rounding."""


def weighted_sum(tensors: Iterable[torch.Tensor], *, seed: int) -> torch.Tensor | None:
    """The sum of all elements with random weights, equal on every rank; ``None`` for no tensors."""
    generator = torch.Generator().manual_seed(seed)
    total: torch.Tensor | None = None
    for tensor in tensors:
        summand = (tensor * torch.randn(tensor.shape, generator=generator).to(tensor)).sum()
        total = summand if total is None else total + summand
    return total


def gradients_of(total: torch.Tensor, targets: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The gradients of ``total`` for each target; zeros where it does not depend on it."""
    if not total.requires_grad:
        return [torch.zeros_like(target) for target in targets]
    found = torch.autograd.grad(total, targets, allow_unused=True)
    pairs = zip(targets, found, strict=True)
    return [torch.zeros_like(target) if grad is None else grad for target, grad in pairs]


def largest(tensor: torch.Tensor) -> float:
    """max|tensor|; 0 for no elements, NaN where one is."""
    tensor = tensor.detach()
    if not tensor.numel():
        return 0.0
    if not tensor.is_floating_point():
        return float(tensor.abs().max())
    low, high = map(float, tensor.aminmax())  # without a tensor of absolute values, a tenth of the time
    return max(abs(low), abs(high))  # and 0.0, not -0.0, for zeros


def relative_error(found: torch.Tensor | None, wanted: torch.Tensor, *, floor: float = 0.0) -> float:
    """max|found - wanted| / max(max|wanted|, floor); infinite for what is not finite or of another shape."""
    if found is None or found.shape != wanted.shape:
        return float("inf")
    if not wanted.numel():
        return 0.0
    error = largest(found - wanted) / max(largest(wanted), floor, 1e-30)
    return error if error == error else float("inf")


def gradient_floor(gradients: Iterable[torch.Tensor]) -> float:
    """The scale below which gradients are compared as if they were that large."""
    return _FLOOR * max(map(largest, gradients), default=0.0)


class InFloat32(TorchDispatchMode):
    """Leaves out casts to 16 bits that a module asks for itself: self-tests have weights and inputs in fp32, and their
    tolerances are for its roundings. For the thread that enters it."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = dict(kwargs or {})
        if given.get("dtype") in (torch.bfloat16, torch.float16):
            given["dtype"] = torch.float32
        return func(*args, **given)

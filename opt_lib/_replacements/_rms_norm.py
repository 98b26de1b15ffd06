"""The ways in which models write RMSNorm, and which of them a module is.

Legend: D features.

Models differ in details that no name tells: whether the weight counts from 0 or from 1, and the dtype of the
result where input and weight differ. So a module is judged by what it computes: it is called on a small
input, and has the form that agrees with it in values, gradients and dtypes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import nn

__all__ = ["RmsNormForm", "form_of"]

ResultDtype = Literal["promoted", "input", "weight"]
_PROBED_DTYPES = (torch.float32, torch.bfloat16)
_ROW_SCALES = (1e-3, 1.0, 30.0)
"""Rows of these sizes: in the smallest, the epsilon decides."""


@dataclass(frozen=True, kw_only=True)
class RmsNormForm:
    """One way to write ``x / rms(x) * weight``.

    Attributes:
        offset: what is added to the weight.
        result: the dtype of the result, where input and weight differ.
    """

    offset: float
    result: ResultDtype

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """Normalises the last dimension of ``x`` [..., D] by torch's fused kernel; ``weight`` is [D]."""
        together = torch.promote_types(x.dtype, weight.dtype)
        result = {"promoted": together, "input": x.dtype, "weight": weight.dtype}[self.result]
        if self.offset:
            # 1 + weight has no room for a small weight in half precision.
            together, weight = torch.float32, weight.float() + self.offset
        return F.rms_norm(x.to(together), weight.shape, weight.to(together), eps).to(result)


def form_of(module: nn.Module, num_features: int, eps: float) -> RmsNormForm | str:
    """The form that computes what ``module`` does, or why there is none.

    Args:
        module: its only parameter is ``weight``, [D]; it may be on the meta device.
        num_features: D.
        eps: what it adds to the mean square.
    """
    pairs = [(x, weight) for x in _PROBED_DTYPES for weight in _PROBED_DTYPES]
    original = functools.partial(_call, module)
    try:
        expected = [_probe(original, num_features, *pair) for pair in pairs]
    except Exception as error:
        return f"it could not be tried on a small input ({type(error).__name__})"
    for offset in (0.0, 1.0):
        for result in get_args(ResultDtype):
            form = RmsNormForm(offset=offset, result=result)
            actual = (_probe(functools.partial(form, eps=eps), num_features, *pair) for pair in pairs)
            if all(map(_agree, expected, actual, pairs)):
                return form
    return "it computes something else than torch's rms_norm"


def _call(module: nn.Module, x: torch.Tensor, weight: torch.Tensor) -> Any:
    return torch.func.functional_call(module, {"weight": weight}, (x,))


@torch.enable_grad()
def _probe(
    run: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    num_features: int,
    x_dtype: torch.dtype,
    weight_dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The result on a small input on the CPU, and the gradients of input and weight."""
    generator = torch.Generator().manual_seed(0)
    # Two leading dimensions, and neither of size D: a module that normalises another one is found out.
    shape = (len(_ROW_SCALES), 2 if num_features != 2 else 4, num_features)
    scale = torch.tensor(_ROW_SCALES)[:, None, None]
    x = (torch.randn(shape, generator=generator) * scale).to(x_dtype).requires_grad_()
    weight = (torch.rand(num_features, generator=generator) + 0.5).to(weight_dtype).requires_grad_()
    towards = torch.randn(shape, generator=generator)
    with torch.random.fork_rng(devices=[]):
        result = run(x, weight)
    x_gradient, weight_gradient = torch.autograd.grad((result.float() * towards).sum(), (x, weight))
    return result.detach(), x_gradient, weight_gradient


def _agree(
    original: tuple[torch.Tensor, ...], fused: tuple[torch.Tensor, ...], dtypes: tuple[torch.dtype, ...]
) -> bool:
    """Whether all tensors agree but for rounding; the original may round once more, in the lower dtype."""
    reduced = min(dtypes, key=lambda dtype: dtype.itemsize)
    tolerance = 1e-6 if reduced == torch.float32 else 4 * torch.finfo(reduced).eps
    return all(_close(one, other, tolerance) for one, other in zip(original, fused, strict=True))


def _close(one: torch.Tensor, other: torch.Tensor, tolerance: float) -> bool:
    """Whether dtypes are equal, and values within ``tolerance`` of the largest in their row."""
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    one, other = one.float(), other.float()
    size = other.abs().amax(dim=-1, keepdim=True)
    return bool(((one - other).abs() <= tolerance * (1 + size)).all())

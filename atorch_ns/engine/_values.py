"""Values for a model whose structure alone was sent: as the original's are, tensor by tensor, without them.

A trial needs weights with which the model behaves as it does in training: norms near one, logits that are
finite. What a tensor's values look like is told by two numbers, so that no initialisation needs to be known.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import torch
from torch import nn

__all__ = ["Moments", "ValueFiller", "moments_of"]

_SAMPLES: Final = 65536
_UNKNOWN_STD: Final = 0.02


@dataclass(frozen=True)
class Moments:
    """What a tensor's values look like, from a sample of at most 65,536 of them.

    Attributes:
        mean, std: of the finite ones; ``std`` 0 for a constant.
        low, high: the least and the greatest.
    """

    mean: float
    std: float
    low: float
    high: float


@torch.no_grad()
def moments_of(tensor: torch.Tensor) -> Moments:
    """Reads the moments of a strided, real tensor of any dtype; the tensor is not changed."""
    if tensor.numel() == 0:
        return Moments(0.0, 0.0, 0.0, 0.0)
    flat = tensor.detach()
    flat = flat.reshape(-1) if flat.is_contiguous() else flat.flatten(0, -1)
    step = max(1, flat.numel() // _SAMPLES)
    sample = flat[::step].to(device="cpu", dtype=torch.float64)
    sample = sample[torch.isfinite(sample)]
    if sample.numel() == 0:
        return Moments(0.0, _UNKNOWN_STD, 0.0, 0.0)
    low, high = float(sample.min()), float(sample.max())
    std = 0.0 if low == high else float(sample.std(correction=0))
    return Moments(float(sample.mean()), std, low, high)


class ValueFiller:
    """Initialises modules of one model from the moments of their original tensors.

    It is called as ``_init_weights`` of Hugging Face models is: with one module whose own tensors have memory
    and no values. A tensor without moments (of a module that a method put in) gets what the module's
    ``reset_parameters`` gives, or small random values.

    Args:
        model: the whole model, as sent.
        moments: by the tensor's full name in it.
    """

    def __init__(self, model: nn.Module, moments: Mapping[str, Moments]) -> None:
        self._paths = {module: path for path, module in model.named_modules()}
        self._moments = dict(moments)

    @torch.no_grad()
    def __call__(self, module: nn.Module) -> None:
        """Gives values to the parameters and buffers that ``module`` itself holds and that have none."""
        path = self._paths.get(module)
        unset = {name: tensor for name, tensor in _own_tensors(module).items() if _is_unset(tensor)}
        for name in list(unset):
            moments = None if path is None else self._moments.get(f"{path}.{name}" if path else name)
            if moments is not None:
                _draw(unset.pop(name), moments)
        if unset:
            _initialise(module)
        for tensor in unset.values():
            if _is_unset(tensor):
                _draw(tensor, Moments(0.0, _UNKNOWN_STD, 0.0, 1.0))


def _own_tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    named = (*module._parameters.items(), *module._buffers.items())
    return {name: tensor for name, tensor in named if tensor is not None and not tensor.is_meta}


def _is_unset(tensor: torch.Tensor) -> bool:
    """Whether it holds the marks that memory without values is filled with: NaN, or the least integer."""
    if tensor.numel() == 0 or tensor.dtype == torch.bool:
        return False
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    if tensor.is_floating_point():
        return bool(torch.isnan(tensor.detach().amin()))
    return bool(tensor.amax() == torch.iinfo(tensor.dtype).min)


def _initialise(module: nn.Module) -> None:
    reset = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
    if callable(reset):
        try:
            reset()
        except Exception:  # the caller draws what this leaves unset
            return


def _draw(tensor: torch.Tensor, moments: Moments) -> None:
    if tensor.is_floating_point() or tensor.is_complex():
        if moments.std == 0.0:
            tensor.fill_(moments.mean)
        else:
            tensor.normal_(moments.mean, moments.std)
    elif tensor.dtype != torch.bool:
        low, high = math.floor(moments.low), math.floor(moments.high)
        tensor.random_(low, high + 1)

"""The user's loss function with autocast, scaling and fp32 around it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch

from atorch_ns.errors import InputError
from atorch_ns.job._precision import floats_to
from atorch_ns.job._scaling import LossScaler

if TYPE_CHECKING:
    from atorch_ns.job._job import Autocast

__all__ = ["LossFunction", "first_loss", "wrap_loss"]

LossFunction = Callable[[Any, Any], Any]
"""``(batch, output) -> loss``, or a list or tuple that begins with the loss."""


def wrap_loss(
    loss_func: LossFunction, *, autocast: Autocast | None, scaler: LossScaler | None, upcast: bool
) -> LossFunction:
    """The loss function a user calls; the same object if nothing surrounds it.

    Args:
        loss_func: the user's.
        autocast: run it under autocast.
        scaler: let the gradient scale enter in its backward pass.
        upcast: give it the model's floating outputs in fp32.
    """
    if autocast is None and scaler is None and not upcast:
        return loss_func

    @functools.wraps(loss_func)
    def wrapped(batch: Any, output: Any) -> Any:
        if upcast:
            output = floats_to(output, torch.float32)
        context = torch.autocast(autocast.device_type, autocast.dtype) if autocast else nullcontext()
        with context:
            value = loss_func(batch, output)
        return value if scaler is None else _with_first(value, scaler.scaled(first_loss(value)))

    return wrapped


def first_loss(value: Any) -> torch.Tensor:
    """The loss in what a loss function returned.

    Raises:
        InputError: if there is no scalar tensor where the loss should be.
    """
    loss = value[0] if isinstance(value, (list, tuple)) and value else value
    if not isinstance(loss, torch.Tensor):
        raise InputError(
            f"loss_func returned {type(value).__name__}, but the loss must be a tensor, or the first item of "
            "a list or tuple."
        )
    if loss.numel() != 1:
        raise InputError(
            f"loss_func returned a tensor of shape {tuple(loss.shape)}; the loss must be one number. "
            "Reduce it, for example by .mean()."
        )
    return loss


def _with_first(value: Any, loss: torch.Tensor) -> Any:
    if isinstance(value, torch.Tensor):
        return loss
    if isinstance(value, list):
        return [loss, *value[1:]]
    if hasattr(value, "_replace"):
        return type(value)(loss, *value[1:])
    return (loss, *value[1:])

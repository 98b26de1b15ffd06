"""Autocast around a model and its loss, and inputs in the dtype of half-precision weights."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

__all__ = ["autocast_forward", "cast_inputs", "floats_to"]


def autocast_forward(model: nn.Module, device_type: str, dtype: torch.dtype) -> None:
    """Runs every forward pass of ``model`` under autocast. Hooks are added; ``forward`` is not replaced.

    Args:
        model: the outermost module, wrappers included.
        device_type: ``"cpu"`` or ``"cuda"``.
        dtype: of matrix products.
    """
    entered: list[AbstractContextManager[None]] = []

    def enter(*_: Any) -> None:
        context = torch.autocast(device_type, dtype=dtype)
        context.__enter__()
        entered.append(context)

    def leave(*_: Any) -> None:
        if entered:
            entered.pop().__exit__(None, None, None)

    model.register_forward_pre_hook(enter, prepend=True)
    model.register_forward_hook(leave, always_call=True)


def cast_inputs(model: nn.Module, dtype: torch.dtype) -> None:
    """Casts the floating tensors among the model's inputs to ``dtype``, before every forward pass."""

    def cast(_: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        return floats_to(args, dtype), floats_to(kwargs, dtype)

    model.register_forward_pre_hook(cast, with_kwargs=True, prepend=True)


def floats_to(data: Any, dtype: torch.dtype) -> Any:
    """A nested structure with every floating tensor in ``dtype``."""

    def convert(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    return tree_map_only(torch.Tensor, convert, data)


LossFunction = Callable[[Any, Any], Any]

"""Autocast around a model and its loss, and inputs in the dtype of half-precision weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from atorch_ns.torch_compat import tree_map_only

__all__ = ["autocast_forward", "cast_inputs", "floats_to"]


def autocast_forward(model: nn.Module, device_type: str, dtype: torch.dtype) -> None:
    """Runs every forward pass of ``model`` under autocast. Hooks are added; ``forward`` is not replaced.

    Args:
        model: the outermost module, wrappers included.
        device_type: ``"cpu"`` or ``"cuda"``.
        dtype: of matrix products.
    """
    scope = _AutocastScope(device_type, dtype)
    model.register_forward_pre_hook(scope.enter, prepend=True)
    model.register_forward_hook(scope.leave, always_call=True)


def cast_inputs(model: nn.Module, dtype: torch.dtype) -> None:
    """Casts the floating tensors among the model's inputs to ``dtype``, before every forward pass."""

    model.register_forward_pre_hook(_Cast(dtype), with_kwargs=True, prepend=True)


def floats_to(data: Any, dtype: torch.dtype) -> Any:
    """A nested structure with every floating tensor in ``dtype``."""

    def convert(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    return tree_map_only(torch.Tensor, convert, data)


class _AutocastScope:
    """Enters autocast before a forward pass and leaves it after; copies and pickles with the model."""

    def __init__(self, device_type: str, dtype: torch.dtype) -> None:
        self._device_type = device_type
        self._dtype = dtype
        self._entered: list[torch.autocast] = []

    def enter(self, *_: Any) -> None:
        context = torch.autocast(self._device_type, dtype=self._dtype)
        context.__enter__()
        self._entered.append(context)

    def leave(self, *_: Any) -> None:
        if self._entered:
            self._entered.pop().__exit__(None, None, None)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_entered": []}


class _Cast:
    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def __call__(self, _: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        return floats_to(args, self._dtype), floats_to(kwargs, self._dtype)

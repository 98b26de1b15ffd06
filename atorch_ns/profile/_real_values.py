"""Values of the batch on fake tensors: models look at masks and positions to choose what they run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from atorch_ns.profile._fake_kernels import FAKE_KERNELS
from atorch_ns.profile._operators import label
from atorch_ns.torch_compat import TorchDispatchMode, fake_tensor_type, outside_fake_mode

__all__ = ["RealValues", "may_be_real"]

_WITHOUT_VALUES = ("aten.empty", "aten.empty_strided", "aten.empty_permuted")

_LARGEST = 1 << 21
"""Elements of the largest tensor that is computed for its values: positions, not a mask of all pairs."""


def may_be_real(tensor: torch.Tensor, num_elements: int, device: torch.device) -> bool:
    """Whether a tensor of the batch keeps its values: one of integers or truth values that is small enough,
    on a device that this machine has."""
    small = not _floats(tensor.dtype) and num_elements <= _LARGEST
    return small and not tensor.is_meta and _is_here(device)


class RealValues(TorchDispatchMode):
    """Inside a fake mode, really computes what depends on real tensors alone, and integers made from nothing.

    With an attention mask of ones many models leave the mask out and call another kernel; on a fake mask
    they cannot know. Whatever meets a fake tensor is fake, by :data:`FAKE_KERNELS` where they know better, and
    so is what would be large or random.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._fake = fake_tensor_type()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "prim":
            return func(*args, **kwargs)
        inputs = _tensors((args, tuple(kwargs.values())))
        if any(isinstance(tensor, self._fake) for tensor in inputs):
            kernel = FAKE_KERNELS.get(func, func)
            return kernel(*args, **kwargs)
        if torch.Tag.nondeterministic_seeded in func.tags or (not inputs and label(func) in _WITHOUT_VALUES):
            return func(*args, **kwargs)
        if func._schema.is_mutable:
            return self._really(func, args, kwargs)
        try:
            fake = func(*args, **kwargs)
        except RuntimeError:  # its shape or value depends on what is in the tensors
            if not inputs:
                raise
            return self._really(func, args, kwargs)
        outputs = _tensors(fake)
        small = all(tensor.numel() <= _LARGEST for tensor in outputs)
        wanted = bool(inputs) or not any(_floats(tensor.dtype) for tensor in outputs)
        if not (small and wanted and all(_is_here(tensor.device) for tensor in outputs)):
            return fake
        return self._really(func, args, kwargs)

    def _really(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        with outside_fake_mode():
            return func(*args, **kwargs)


def _is_here(device: torch.device) -> bool:
    """Whether values can be had there: on the CPU, or on a GPU that this process uses already."""
    return device.type == "cpu" or (device.type == "cuda" and torch.cuda.is_initialized())


def _floats(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, (tuple, list)):
        return [tensor for item in value for tensor in _tensors(item)]
    return []

"""Real values of a batch among fake tensors: models read masks and positions to choose their kernels."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

from atorch_ns.capture.nests import tensors_of
from atorch_ns.capture.operators import label
from atorch_ns.torch_compat import TorchDispatchMode, fake_tensor_type, outside_fake_mode


def _grouped_mm(
    first: torch.Tensor,
    second: torch.Tensor,
    offs: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    dtype = out_dtype or first.dtype  # torch's fake kernel takes bf16 alone, the real one fp32 too
    if first.dim() == 2 and second.dim() == 2:  # [M, K] × [K, N], in groups of the summed dim
        assert offs is not None
        return first.new_empty((offs.shape[0], first.shape[0], second.shape[1]), dtype=dtype)
    if first.dim() == 3 and second.dim() == 3:
        return first.new_empty((first.shape[0], first.shape[1], second.shape[2]), dtype=dtype)
    return first.new_empty((first.shape[-2], second.shape[-1]), dtype=dtype)  # groups of rows, or of columns


def _reduced_in_place(func: Any) -> Callable[..., torch.Tensor]:
    def kernel(first: torch.Tensor, second: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        plain: torch.Tensor = func(first, second, *args, **kwargs)
        if plain.dim():
            return plain  # without a reduction
        # The real kernel computes each element into its result, and keeps that memory after reducing it.
        elements = math.prod(torch.broadcast_shapes(first.shape, second.shape))
        return plain.new_empty(elements).as_strided((), ())

    return kernel


def _layer_norm(
    value: torch.Tensor, shape: Any, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float
) -> tuple[torch.Tensor, ...]:
    # With 16-bit values and fp32 weights the CPU keeps mean and deviation in fp32.
    plain = _aten.native_layer_norm.default(value, shape, weight, bias, eps)
    if weight is None or weight.dtype == value.dtype or value.device.type != "cpu":
        return tuple(plain)
    return (plain[0], *(moment.new_empty(moment.shape, dtype=weight.dtype) for moment in plain[1:]))


_aten = torch.ops.aten

_LOSSES = (_aten.mse_loss, _aten.smooth_l1_loss, _aten.soft_margin_loss, _aten.binary_cross_entropy)
FAKE_KERNELS: Mapping[Any, Callable[..., Any]] = {
    _aten._grouped_mm.default: _grouped_mm,
    _aten.native_layer_norm.default: _layer_norm,
    **{loss.default: _reduced_in_place(loss.default) for loss in _LOSSES},
}
"""Fake kernels by operator; each takes the operator's arguments and returns its result on fake tensors."""


_WITHOUT_VALUES = ("aten.empty", "aten.empty_strided", "aten.empty_permuted")  # uninitialised memory

_LARGEST = 1 << 21  # elements of the largest tensor computed for its values, unless the batch has more tokens
_MOST_TOKENS = 1 << 27  # of the largest batch whose positions are computed for their values: 1 GiB of int64


def largest_real(num_tokens: int) -> int:
    """Elements of the largest tensor that is computed for its values: positions, not a mask of all pairs.

    Args:
        num_tokens: B × T of the batch. Models read positions and padding masks of this size, or else build
            masks of T × T that training does not have. Twice as many count, since they append columns.
    """
    return max(_LARGEST, 2 * min(num_tokens, _MOST_TOKENS))


def may_be_real(
    tensor: torch.Tensor, num_elements: int, device: torch.device, *, largest: int = _LARGEST
) -> bool:
    """Whether a tensor of the batch keeps its values: few integers or booleans on a device in use here."""
    small = not _is_floating(tensor.dtype) and num_elements <= largest
    return small and not tensor.is_meta and _is_usable(device)


def fake_like(
    tensor: torch.Tensor,
    device: torch.device,
    *,
    dtype: torch.dtype | None = None,
    is_parameter: bool = False,
    largest: int = _LARGEST,
) -> torch.Tensor:
    """In a fake mode, a fake tensor like ``tensor``, or (no parameter) a real copy by :func:`may_be_real`."""
    if not is_parameter and may_be_real(tensor, tensor.numel(), device, largest=largest):
        with outside_fake_mode():
            return tensor.detach().to(device, copy=True)
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=dtype or tensor.dtype, device=device)


def tensor_metadata(func: Any, args: tuple[Any, ...]) -> Any:
    """The result of an operator of the namespace ``prim``, which asks for a tensor's device or dtype."""
    if func is torch.ops.prim.device.default:  # two of three calls; a fake tensor holds its device
        device = getattr(args[0], "fake_device", None)
        if device is not None:
            return device
    return func(*args)


class RealValues(TorchDispatchMode):
    """Mode inside a fake mode that computes for real on real tensors alone, and integers without inputs.

    With an attention mask of ones many models drop the mask and call another kernel; a fake mask has no
    values to decide by. Results of fake tensors are fake, by :data:`FAKE_KERNELS` where torch's fake kernels
    are wrong, and so are large or random results.

    Args:
        largest: elements of the largest result that is real: :func:`largest_real`.
    """

    def __init__(self, largest: int = _LARGEST) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._largest = largest
        self._fake = fake_tensor_type()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "prim":
            return tensor_metadata(func, args)
        inputs = tensors_of((args, tuple(kwargs.values())))
        if any(isinstance(tensor, self._fake) for tensor in inputs):
            kernel = FAKE_KERNELS.get(func, func)
            return kernel(*args, **kwargs)
        # Models do not decide by random or uninitialised values.
        if torch.Tag.nondeterministic_seeded in func.tags or (not inputs and label(func) in _WITHOUT_VALUES):
            return func(*args, **kwargs)
        if func._schema.is_mutable:  # an in-place operator on real tensors
            return self._compute_real_values(func, args, kwargs)
        try:
            fake = func(*args, **kwargs)  # only for the size of the result
        except RuntimeError:  # its shape or value depends on the tensors' values
            if not inputs:
                raise
            return self._compute_real_values(func, args, kwargs)
        outputs = tensors_of(fake)
        small = all(tensor.numel() <= self._largest for tensor in outputs)
        has_values = bool(inputs) or not any(_is_floating(tensor.dtype) for tensor in outputs)
        if not (small and has_values and all(_is_usable(tensor.device) for tensor in outputs)):
            return fake
        return self._compute_real_values(func, args, kwargs)

    def _compute_real_values(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        with outside_fake_mode():
            return func(*args, **kwargs)


def _is_usable(device: torch.device) -> bool:
    # A GPU that is not in use is not initialised for this.
    return device.type == "cpu" or (device.type == "cuda" and torch.cuda.is_initialized())


def _is_floating(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex

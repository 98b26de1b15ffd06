"""Precisions: how a step runs in each, as the methods that choose a precision run it."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from atorch_ns.profile._trace import precision_key
from atorch_ns.torch_compat import tree_map_only

__all__ = ["ALL_PRECISIONS", "KEPT_IN_FP32", "Precision"]

ALL_PRECISIONS = ("float32", "float32/bfloat16", "bfloat16", "bfloat16/bfloat16")
"""Weights as the model has them, autocast over them, 16-bit weights, and autocast over gathered 16-bit copies."""

KEPT_IN_FP32 = ("inv_freq",)
"""Buffers that stay in fp32 when a model is cast: rotary frequencies lose whole positions in 16 bits."""


@dataclass(frozen=True)
class Precision:
    """One way to run a step.

    Attributes:
        key: as :func:`precision_key` writes it.
        weights: dtype of floating parameters; ``None`` for what the model has.
        autocast: dtype of matrix products under autocast.
    """

    key: str
    weights: torch.dtype | None
    autocast: torch.dtype | None

    @classmethod
    def parse(cls, key: str) -> Precision:
        """From a key; weights in fp32 are those of the model as it is."""
        weights, _, autocast = key.partition("/")
        return cls(
            precision_key(weights, autocast or None),
            None if weights == "float32" else getattr(torch, weights),
            getattr(torch, autocast) if autocast else None,
        )

    @property
    def casts_buffers(self) -> bool:
        """Whether buffers are cast with the parameters: by ``half``, not by sharding with mixed precision."""
        return self.weights is not None and self.autocast is None

    def dtype_of(self, kind: str, tensor: torch.Tensor) -> torch.dtype:
        """The dtype of a parameter (``kind`` is ``"parameter"``), a buffer (its name) or another tensor."""
        if self.weights is None or not tensor.is_floating_point():
            return tensor.dtype
        if kind == "parameter" or (self.casts_buffers and kind not in ("plain", *KEPT_IN_FP32)):
            return self.weights
        return tensor.dtype

    def context(self, device_type: str) -> AbstractContextManager[Any]:
        """What surrounds the forward pass and the loss."""
        return nullcontext() if self.autocast is None else torch.autocast(device_type, self.autocast)

    def install(self, model: nn.Module, blocks: Mapping[str, nn.Module]) -> None:
        """Adds the hooks that cast what goes into the model and comes out of it.

        With 16-bit weights the model's inputs are cast, under sharding with mixed precision those of each
        unit too; with ``half`` the loss is given outputs in fp32.
        """
        if self.weights is None:
            return
        for module in {id(module): module for module in (model, *blocks.values())}.values():
            if module is model or not self.casts_buffers:
                module.register_forward_pre_hook(self._cast_inputs, with_kwargs=True, prepend=True)
        if self.casts_buffers:
            model.register_forward_hook(lambda _, __, output: _floats_to(output, torch.float32))

    def _cast_inputs(self, _: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        assert self.weights is not None
        return _floats_to(args, self.weights), _floats_to(kwargs, self.weights)


def _floats_to(data: Any, dtype: torch.dtype) -> Any:
    def convert(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    return tree_map_only(torch.Tensor, convert, data)

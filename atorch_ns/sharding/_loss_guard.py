"""Losses that read weights of which each rank holds a part."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from atorch_ns.errors import StepError
from atorch_ns.torch_compat import plain_name, tree_leaves

__all__ = ["explain_divided_weights"]

Loss = Callable[[Any, Any], Any]


def explain_divided_weights(loss: Loss, model: nn.Module) -> Loss:
    """``loss``, whose failure for mixing divided weights with plain tensors names the weights.

    Every rank computes the same loss, so all of them raise.

    Args:
        loss: ``(batch, output) -> loss``.
        model: divided.
    """

    def guarded(batch: Any, output: Any) -> Any:
        try:
            found = loss(batch, output)
        except RuntimeError as error:
            if "DTensor" not in str(error):
                raise
            names = _read(loss, batch, output, model)
            if not names:
                raise
            raise _refusal(names) from error
        if any(isinstance(one, DTensor) for one in tree_leaves(found)):
            names = _read(loss, batch, output, model)
            raise _refusal(names)
        return found

    guarded.__wrapped__ = loss  # type: ignore[attr-defined]
    return guarded


class _Reads(TorchFunctionMode):
    """Notes the divided parameters that functions are called with."""

    def __init__(self, names: Mapping[int, str]) -> None:
        super().__init__()
        self.found: dict[str, None] = {}
        self._names = names

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        for given in tree_leaves((args, kwargs)):
            if isinstance(given, torch.Tensor) and id(given) in self._names:
                self.found.setdefault(self._names[id(given)])
        return func(*args, **kwargs)


def _read(loss: Loss, batch: Any, output: Any, model: nn.Module) -> list[str]:
    """The divided parameters that the loss reads; it is run once more."""
    names = {id(p): plain_name(name) for name, p in model.named_parameters() if isinstance(p, DTensor)}
    reads = _Reads(names)
    # It has just failed and may fail again: what counts is what it read until then.
    with contextlib.suppress(Exception), reads, torch.no_grad():
        loss(batch, output)
    return list(reads.found)


def _refusal(names: Sequence[str]) -> StepError:
    shown = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
    return StepError(
        f"loss_func computes with {shown or 'weights'}, of which each rank of the tensor axis holds a part (a DTensor), "
        "and with plain tensors. Take the whole value, weight.full_tensor(), or of a result such as "
        "weight.pow(2).sum().full_tensor(); or use the optimizer's weight_decay for a penalty on weights."
    )

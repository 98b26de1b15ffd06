"""A loss for a model whose user gave none, so that a step can be profiled."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from atorch_ns.errors import InputError

__all__ = ["AssumedLoss", "assumed_format"]


class AssumedLoss:
    """``(batch, output) -> loss``: the loss in the output, else the output's mean.

    Attributes:
        assumed: which it was, as a sentence; empty before the first call.
    """

    def __init__(self) -> None:
        self.assumed = ""

    def __call__(self, batch: Any, output: Any) -> torch.Tensor:
        """The loss; raises InputError if the output holds no tensor of floats."""
        loss, what = _find(output)
        self.assumed = f"No loss function was given; the loss is taken to be {what}."
        return loss


def assumed_format(batch: Any) -> str | None:
    """The ``model_input_format`` that suits a batch: dictionaries and sequences are unpacked."""
    if isinstance(batch, Mapping):
        return "unpack_dict"
    return "unpack_sequence" if isinstance(batch, (list, tuple)) else None


def _find(output: Any) -> tuple[torch.Tensor, str]:
    named = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if isinstance(named, torch.Tensor):
        return named, "the output's own loss"
    first = output[0] if isinstance(output, Sequence) and len(output) else output
    if isinstance(first, torch.Tensor) and first.numel() == 1:
        return first, "the output's first item" if first is not output else "the output itself"
    for tensor in _floats(output):
        # Not its shape: the trace runs batches of other sizes than the user's.
        return tensor.mean(), "the mean of the output" + (
            "" if tensor is output else "'s first tensor of floats"
        )
    raise InputError(
        f"the model returned {type(output).__name__} without a tensor of floats, so there is nothing to "
        "differentiate. Give a loss function."
    )


def _floats(output: Any) -> Iterator[torch.Tensor]:
    if isinstance(output, torch.Tensor):
        if output.is_floating_point():
            yield output
    elif isinstance(output, Mapping):
        for value in output.values():
            yield from _floats(value)
    elif isinstance(output, (list, tuple)):
        for value in output:
            yield from _floats(value)

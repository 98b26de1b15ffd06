"""The kinds of layers that can be divided, and how each computes with a part of its weight.

Legend: I input features, O output features, V vocabulary, D model width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

__all__ = ["EMBEDDING", "Kind", "kind_of", "own_values"]

Compute = Callable[[Any, torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]
"""``(module, input, weight, bias) -> output``."""


@dataclass(frozen=True)
class Kind:
    """A kind of layer.

    Attributes:
        name: for messages.
        out_dim: the dimension of the weight that outputs lie along; of an embedding, the vocabulary.
        in_dim: the other.
        compute: the layer's computation with the weight and bias given.
        counts: the attributes that hold its number of outputs and of inputs, divided with it.
    """

    name: str
    out_dim: int
    in_dim: int
    compute: Compute
    counts: tuple[str, str]

    def sizes(self, module: nn.Module) -> tuple[int, int]:
        """(outputs, inputs) of the whole layer."""
        weight = module._parameters["weight"]
        assert weight is not None
        return weight.shape[self.out_dim], weight.shape[self.in_dim]


def _linear(_: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return F.linear(x, weight, bias)


def _conv1d(_: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    rows = x.reshape(-1, x.size(-1))
    out = torch.mm(rows, weight) if bias is None else torch.addmm(bias, rows, weight)
    return out.view(*x.shape[:-1], weight.size(1))


def _embedding(module: Any, ids: torch.Tensor, weight: torch.Tensor, _: torch.Tensor | None) -> torch.Tensor:
    return F.embedding(ids, weight, module.padding_idx)


def _as_written(
    module: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """The code of the module's own class, run on the values given (a linear layer in fp8, a scaled embedding)."""
    with own_values(module, weight, bias):
        out: torch.Tensor = type(module).whole_forward(module, x)
    return out


@contextmanager
def own_values(module: nn.Module, weight: torch.Tensor, bias: torch.Tensor | None) -> Iterator[None]:
    """Lets the module's own code see these tensors in place of its parameters."""
    held: dict[str, Any] = module._parameters
    before = dict(held)
    held["weight"] = weight
    if "bias" in held:
        held["bias"] = bias
    try:
        yield
    finally:
        held.update(before)


LINEAR = Kind("linear", 0, 1, _linear, ("out_features", "in_features"))
CONV1D = Kind("Conv1D", 1, 0, _conv1d, ("nf", "nx"))
EMBEDDING = Kind("embedding", 0, 1, _embedding, ("", ""))
_LINEAR_AS_WRITTEN = Kind("linear", 0, 1, _as_written, ("out_features", "in_features"))
_EMBEDDING_AS_WRITTEN = Kind("embedding", 0, 1, _as_written, ("", ""))


def kind_of(module: nn.Module) -> Kind | None:
    """The kind of a layer; ``None`` for a module that cannot be divided."""
    cls = type(module)
    weight = module._parameters.get("weight")
    if weight is None or weight.dim() != 2:
        return None
    if isinstance(module, nn.Linear):
        return LINEAR if cls.forward is nn.Linear.forward else _LINEAR_AS_WRITTEN
    if isinstance(module, nn.Embedding):
        if module.max_norm is not None or module.scale_grad_by_freq or module.sparse:
            return None
        return EMBEDDING if cls.forward is nn.Embedding.forward else _EMBEDDING_AS_WRITTEN
    if cls.__name__ == "Conv1D" and weight.shape == (getattr(module, "nx", 0), getattr(module, "nf", 0)):
        return CONV1D
    return None

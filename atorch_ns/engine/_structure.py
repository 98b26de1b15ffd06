"""A copy of a model's structure without its weights, also of one that cannot be pickled or deep-copied."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from atorch_ns.engine._values import ValueFiller, moments_of

__all__ = ["structure_of"]


def structure_of(model: nn.Module) -> nn.Module:
    """A copy whose parameters are on meta and, when it is materialised, look like the original's.

    Ties, buffers, hooks and settings are as they were. An attribute that cannot be copied (a lock, an open
    file) is shared with the original.
    """
    memo: dict[int, Any] = {}
    stand_ins: dict[int, torch.Tensor] = {}
    for parameter in model.parameters():
        data = torch.empty_like(parameter, device="meta")
        stand_in = nn.Parameter(data, requires_grad=parameter.requires_grad)
        stand_in.__dict__.update(parameter.__dict__)
        memo[id(parameter)] = stand_ins[id(parameter)] = stand_in
    duplicate = _copied(model, memo)
    named = model.named_parameters(remove_duplicate=False)
    moments = {name: moments_of(tensor) for name, tensor in named if not tensor.is_meta}
    if moments:
        object.__setattr__(duplicate, "_init_weights", ValueFiller(duplicate, moments))
    return duplicate


def _copied(module: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """The module with its children, each attribute copied where it can be."""
    if id(module) in memo:
        known: nn.Module = memo[id(module)]
        return known
    duplicate: nn.Module = module.__class__.__new__(module.__class__)
    memo[id(module)] = duplicate
    for child in module._modules.values():
        if child is not None:
            _copied(child, memo)
    duplicate.__dict__.update({name: _copy_or_share(value, memo) for name, value in module.__dict__.items()})
    return duplicate


def _copy_or_share(value: Any, memo: dict[int, Any]) -> Any:
    try:
        return copy.deepcopy(value, memo)
    except Exception:  # whatever its class says; parameters, buffers and modules can all be copied
        return value

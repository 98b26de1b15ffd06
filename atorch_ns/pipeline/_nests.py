"""Nests: tuples, lists, mappings and dataclass instances with tensors at their leaves."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

import torch

__all__ = ["leaves", "map_leaves", "num_rows"]


def leaves(nest: Any) -> list[torch.Tensor]:
    """The tensors of a nest, in order; one that stands in several places is given several times."""
    found: list[torch.Tensor] = []
    _collect(nest, found)
    return found


def num_rows(batch: Any) -> int | None:
    """The first dim of a batch's tensors; ``None`` if they do not share one."""
    sizes = {tensor.shape[0] for tensor in leaves(batch) if tensor.dim()}
    return sizes.pop() if len(sizes) == 1 else None


def map_leaves(nest: Any, kind: type, function: Callable[[Any], Any]) -> Any:
    """A nest of the same structure in which every instance of ``kind`` is what ``function`` makes of it.

    The leaves are visited in the order of :func:`leaves`. Objects of other kinds are shared with ``nest``.
    """
    if isinstance(nest, kind):
        return function(nest)
    if isinstance(nest, torch.Tensor):
        return nest
    if isinstance(nest, Mapping):
        return _map_mapping(nest, kind, function)
    if isinstance(nest, (tuple, list)):
        parts = [map_leaves(item, kind, function) for item in nest]
        return nest._make(parts) if hasattr(nest, "_make") else type(nest)(parts)
    if dataclasses.is_dataclass(nest) and not isinstance(nest, type):
        made = copy.copy(nest)  # not `replace`, which would run __post_init__ again
        for entry in dataclasses.fields(nest):
            if hasattr(nest, entry.name):
                value = map_leaves(getattr(nest, entry.name), kind, function)
                object.__setattr__(made, entry.name, value)
        return made
    return nest


def _map_mapping(nest: Mapping[Any, Any], kind: type, function: Callable[[Any], Any]) -> Any:
    items = {key: map_leaves(value, kind, function) for key, value in nest.items()}
    if type(nest) is dict or not isinstance(nest, MutableMapping):
        return items
    made = copy.copy(nest)
    for key, value in items.items():
        made[key] = value
    return made


def _collect(nest: Any, found: list[torch.Tensor]) -> None:
    if isinstance(nest, torch.Tensor):
        found.append(nest)
    elif isinstance(nest, Mapping):
        for item in nest.values():
            _collect(item, found)
    elif isinstance(nest, (tuple, list)):
        for item in nest:
            _collect(item, found)
    elif dataclasses.is_dataclass(nest) and not isinstance(nest, type):
        for entry in dataclasses.fields(nest):
            if hasattr(nest, entry.name):
                _collect(getattr(nest, entry.name), found)

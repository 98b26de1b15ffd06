"""Batches of other sizes: what B and T are in a sample batch, and the same batch with others.

Legend: B samples, T tokens in each.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

import torch

from atorch_ns.profile._boundaries import tensors_in

__all__ = ["batch_sizes", "map_batch", "resized_shape"]


def batch_sizes(batch: Any) -> tuple[int, int]:
    """(B, T): dim 0 of the first tensor with dims, and dim 1 of the first [B, T] tensor of integers, or 1."""
    with_dims = [tensor for tensor in tensors_in(batch) if tensor.dim()]
    if not with_dims:
        return 1, 1
    num_samples = with_dims[0].shape[0]
    for tensor in with_dims:
        if tensor.dim() == 2 and not tensor.is_floating_point() and tensor.shape[0] == num_samples:
            return num_samples, tensor.shape[1]
    return num_samples, 1


def resized_shape(
    shape: tuple[int, ...], sizes: tuple[int, int], new_sizes: tuple[int, int]
) -> tuple[int, ...]:
    """``shape`` with B in dim 0 and T in all later dims replaced; tensors without B in dim 0 stay."""
    (num_samples, num_tokens), (new_samples, new_tokens) = sizes, new_sizes
    if not shape or shape[0] != num_samples:
        return shape
    rest = (new_tokens if num_tokens > 1 and size == num_tokens else size for size in shape[1:])
    return (new_samples, *rest)


def map_batch(function: Callable[[torch.Tensor], torch.Tensor], batch: Any) -> Any:
    """The batch with ``function`` applied to every tensor in it."""
    if isinstance(batch, torch.Tensor):
        return function(batch)
    if isinstance(batch, Mapping):
        items = {key: map_batch(function, value) for key, value in batch.items()}
        if type(batch) is dict or not isinstance(batch, MutableMapping):
            return items
        mapping = copy.copy(batch)
        for key, value in items.items():
            mapping[key] = value
        return mapping
    if isinstance(batch, (tuple, list)):
        parts = [map_batch(function, value) for value in batch]
        return batch._make(parts) if hasattr(batch, "_make") else type(batch)(parts)
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        instance = copy.copy(batch)
        for entry in dataclasses.fields(batch):
            if hasattr(batch, entry.name):
                value = map_batch(function, getattr(batch, entry.name))
                object.__setattr__(instance, entry.name, value)
        return instance
    return batch

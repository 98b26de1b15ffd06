"""Batches of other sizes: what B and T are in a sample batch, and the same batch with others.

Legend: B samples, T tokens in each.
"""

from __future__ import annotations

from typing import Any

from atorch_ns.capture.nests import unique_tensors_of


def batch_sizes(batch: Any) -> tuple[int, int]:
    """(B, T): dim 0 of the first tensor with dims, and dim 1 of the first [B, T] tensor of integers, or 1."""
    with_dims = [tensor for tensor in unique_tensors_of(batch) if tensor.dim()]
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

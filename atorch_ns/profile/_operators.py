"""What one operator costs: floating point operations, and bytes read and written."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

__all__ = ["count_flops", "is_free", "label", "moved_bytes"]

_aten = torch.ops.aten

# They give an uninitialised or a described tensor and start no kernel.
_FREE_NAMES = frozenset(
    {
        "empty",
        "empty_like",
        "empty_permuted",
        "empty_strided",
        "new_empty",
        "new_empty_strided",
        "lift_fresh",
        "_local_scalar_dense",
        "device",
        "layout",
        "is_contiguous",
        "sym_size",
        "sym_stride",
        "sym_numel",
        "sym_storage_offset",
        "size",
        "stride",
        "numel",
        "dim",
        "storage_offset",
        "set_",
        "resize_",
    }
)


@functools.cache
def label(func: Any) -> str:
    """The operator's name as ``aten.mm``."""
    return str(func.name()).split(".")[0].replace("::", ".")


@functools.cache
def is_free(func: Any) -> bool:
    """Whether the operator only describes memory: a view, or a tensor without values."""
    if label(func).rpartition(".")[2] in _FREE_NAMES:
        return True
    returned = func._schema.returns
    aliases = [value.alias_info for value in returned]
    return bool(aliases) and all(alias is not None and not alias.is_write for alias in aliases)


def moved_bytes(tensors: Sequence[torch.Tensor]) -> tuple[int, ...]:
    """Bytes of each tensor that an operator reads or writes; of a broadcast one, its size in memory."""
    return tuple(min(t.numel() * t.itemsize, t.untyped_storage().nbytes()) for t in tensors)


def count_flops(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> int:
    """Floating point operations of a matrix product, a convolution or attention; 0 for all else.

    A multiply and an add are two operations, and attention is counted without its mask, as
    ``torch.utils.flop_counter`` has it, whose formulas these are except for the kernels it lacks.
    """
    own = _OWN.get(func._overloadpacket)
    if own is not None:
        return own(*args)
    formula = flop_registry.get(func._overloadpacket)
    return 0 if formula is None else int(formula(*args, **kwargs, out_val=out))


def _attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any) -> int:
    """Q·Kᵀ and P·V: query [B, H, T, E], key [B, G, S, E], value [B, G, S, F]."""
    batch, heads, tokens, width = query.shape
    return 2 * batch * heads * tokens * key.shape[-2] * (width + value.shape[-1])


def _attention_backward(
    _: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *__: Any
) -> int:
    """Scores once more, then the gradients of P, V, Q and K: five products for the two of the forward pass."""
    batch, heads, tokens, width = query.shape
    return 2 * batch * heads * tokens * key.shape[-2] * (3 * width + 2 * value.shape[-1])


def _matrix_vector(matrix: torch.Tensor, *_: Any) -> int:
    return 2 * matrix.numel()


def _dot(vector: torch.Tensor, *_: Any) -> int:
    return 2 * vector.numel()


def _add_matrix_vector(_: torch.Tensor, matrix: torch.Tensor, *__: Any) -> int:
    return 2 * matrix.numel()


def _grouped(first: torch.Tensor, second: torch.Tensor, *_: Any) -> int:
    """Every row, or column, or element of the summed dim is in one group: the whole product once."""
    if first.dim() == 3 and second.dim() == 3:
        return 2 * first.numel() * second.shape[-1]
    rows, summed = first.shape[-2:]
    return 2 * rows * summed * second.shape[-1]


_OWN: Mapping[Any, Callable[..., int]] = {
    _aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
    _aten.mv: _matrix_vector,
    _aten.addmv: _add_matrix_vector,
    _aten.dot: _dot,
    _aten._grouped_mm: _grouped,
}

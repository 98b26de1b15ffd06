"""Operators: their names, those that only describe memory, and those whose results recomputation keeps."""

from __future__ import annotations

import functools
from typing import Any

import torch

# They make an uninitialised tensor or describe one, and start no kernel; of the first, schemas do not say so.
_FREE_NAMES = frozenset(
    [
        "_unsafe_view", "as_strided_", "detach_", "squeeze_", "t_", "transpose_", "unsqueeze_",
        "promote_types", "result_type", "empty", "empty_like", "empty_permuted", "empty_strided",
        "new_empty", "new_empty_strided", "lift_fresh", "_local_scalar_dense", "device", "layout",
        "is_contiguous", "sym_size", "sym_stride", "sym_numel", "sym_storage_offset", "size", "stride",
        "numel", "dim", "storage_offset", "set_", "resize_",
    ]
)  # fmt: skip

WEIGHT_PRODUCTS = ("aten.mm", "aten.addmm", "aten.linear", "aten._scaled_mm", "aten._grouped_mm")
"""Products of activations and weights, of linear layers and experts; those of two activations are batched."""

_GETTERS = (
    "_base", "shape", "dtype", "device", "ndim", "layout", "is_cuda", "is_cpu", "is_meta", "is_sparse",
    "itemsize",
)  # fmt: skip
_QUESTIONS = (
    "size", "dim", "ndimension", "numel", "nelement", "stride", "element_size", "get_device",
    "is_floating_point", "is_complex", "is_signed", "is_contiguous", "__len__",
)  # fmt: skip
METADATA: frozenset[Any] = frozenset(
    {getattr(torch.Tensor, name).__get__ for name in _GETTERS}
    | {getattr(torch.Tensor, name) for name in _QUESTIONS}
    | {torch.is_floating_point, torch.is_complex, torch.numel}
)
"""Functions that describe a tensor without reading its values."""


@functools.cache
def label(func: Any) -> str:
    """The operator's name as ``aten.mm``."""
    return str(func.name()).split(".")[0].replace("::", ".")  # without the overload


@functools.cache
def is_free(func: Any) -> bool:
    """Whether the operator only describes memory: a view, or a tensor without values."""
    if label(func).rpartition(".")[2] in _FREE_NAMES:
        return True
    results = func._schema.returns
    aliases = [value.alias_info for value in results]
    return bool(aliases) and all(alias is not None and not alias.is_write for alias in aliases)


_MAXIMA = ("aten.max", "aten.amax")  # fp8 scales come from them
_BESIDE_ATTENTION = (
    *(
        *WEIGHT_PRODUCTS,
        "aten.convolution",
        "aten.native_layer_norm",
        "aten._fused_rms_norm",
        "aten.native_group_norm",
    ),
    *("aten.gelu", "aten.silu", "aten.relu", "aten.tanh", "aten.sigmoid"),
)


def is_saved(saved: tuple[str, ...] | str, operator: str, number: int) -> bool:
    """Whether selective recomputation keeps the results of an operator's call.

    ``every_second_product`` is torchtitan's per-operator recomputation. It keeps a block's first, third, …
    product with weights, fused attention, functional collectives, and maxima, from which fp8 has its scales.
    ``all_but_attention`` is the selective recomputation of Korthikanti et al. 2022, section 5. It keeps
    products with weights, normalisations and activation functions; scores, softmax, dropout, the weighted sum
    and element-wise operators are computed again.

    Args:
        saved: the rule, or names of operators, with or without their overload.
        operator: the name, as ``aten.mm``.
        number: number of products with weights that ran before it in the block.
    """
    if saved == "every_second_product":
        if operator in WEIGHT_PRODUCTS:
            return number % 2 == 0
        return operator in _MAXIMA or operator.startswith(
            ("_c10d_functional.", "aten._scaled_dot_product", "flex_attention")
        )
    if saved == "all_but_attention":
        return (
            operator in _BESIDE_ATTENTION or operator in _MAXIMA or operator.startswith("_c10d_functional.")
        )
    return operator in {".".join(name.removeprefix("torch.ops.").split(".")[:2]) for name in saved}

"""Operators: names, bytes, floating point operations, and workspaces that a kernel allocates inside one call."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

from atorch_ns.torch_compat import has_matrix_tiles, onednn_block, onednn_computes_in

_aten = torch.ops.aten

# They make an uninitialised tensor or describe one, and start no kernel; of the first, schemas do not say so.
_FREE_NAMES = frozenset(
    [
        "_unsafe_view",
        "as_strided_",
        "detach_",
        "squeeze_",
        "t_",
        "transpose_",
        "unsqueeze_",
        "promote_types",
        "result_type",
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
    ]
)

WEIGHT_PRODUCTS = ("aten.mm", "aten.addmm", "aten.linear", "aten._scaled_mm", "aten._grouped_mm")
"""Products of activations with weights, as of linear layers and experts; products of two activations are batched ones."""

_GETTERS = (
    "_base",
    "shape",
    "dtype",
    "device",
    "ndim",
    "layout",
    "is_cuda",
    "is_cpu",
    "is_meta",
    "is_sparse",
    "itemsize",
)
_QUESTIONS = (
    "size",
    "dim",
    "ndimension",
    "numel",
    "nelement",
    "stride",
    "element_size",
    "get_device",
    "is_floating_point",
    "is_complex",
    "is_signed",
    "is_contiguous",
    "__len__",
)
METADATA: frozenset[Any] = frozenset(
    {getattr(torch.Tensor, name).__get__ for name in _GETTERS}
    | {getattr(torch.Tensor, name) for name in _QUESTIONS}
    | {torch.is_floating_point, torch.is_complex, torch.numel}
)
"""Functions that describe a tensor, and read none of its values."""


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


_MAXIMA = ("aten.max", "aten.amax")
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
    """Whether selective recomputation keeps what a call of an operator gives.

    ``every_second_product`` is torchtitan's per-operator recomputation: of the products with weights in a block the first, the
    third and so on, fused attention, functional collectives, and maxima, from which fp8 has its scales.
    ``all_but_attention`` is the selective recomputation of Korthikanti et al. 2022, section 5: products with weights,
    normalisations and activation functions, so that scores, softmax, dropout, the weighted sum and element-wise operators
    are computed again.

    Args:
        saved: the rule, or names of operators, with or without their overload.
        operator: the name, as ``aten.mm``.
        number: how many products with weights ran before it in the block.
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


def moved_bytes(tensors: Sequence[torch.Tensor]) -> tuple[int, ...]:
    """Bytes of each tensor that an operator reads or writes; for a broadcast one, its size in memory."""
    return tuple(min(t.numel() * t.itemsize, t.untyped_storage().nbytes()) for t in tensors)


def count_flops(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> int:
    """Floating point operations of a matrix product, a convolution or attention; 0 for other operators.

    A multiply and an add are two operations, by the formulas of ``torch.utils.flop_counter`` and, for kernels that it
    lacks, of this module. Of fused attention with a causal mask only the pairs that the mask leaves are counted:
    kernels skip the others, in blocks.
    """
    own = _OWN.get(func._overloadpacket)
    if own is not None:
        flops = own(*args)
    else:
        formula = flop_registry.get(func._overloadpacket)
        flops = 0 if formula is None else int(formula(*args, **kwargs, out_val=out))
    if flops and is_causal(func, args, kwargs):
        query, key = (args[position_of(func, name)] for name in ("query", "key"))
        flops = _below_diagonal(flops, query.shape[-2], key.shape[-2])
    return flops


@functools.cache
def position_of(func: Any, name: str) -> int:
    """The place of an argument of an operator; -1 where it has none of that name."""
    names = [argument.name for argument in func._schema.arguments]
    return names.index(name) if name in names else -1


def is_causal(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether the call is fused attention in which no token sees a later one."""
    place = position_of(func, "is_causal")
    return bool(kwargs.get("is_causal", args[place] if 0 <= place < len(args) else False))


def _below_diagonal(flops: int, num_queries: int, num_keys: int) -> int:
    """The part of all pairs' operations in which the key is not after the query."""
    square = min(num_queries, num_keys)
    pairs = square * (square + 1) // 2 + (num_queries - square) * num_keys
    return flops // (num_queries * num_keys) * pairs


def _attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any) -> int:
    """Q·Kᵀ and P·V: query [B, H, T, E], key [B, G, S, E], value [B, G, S, F]."""
    batch, heads, tokens, width = query.shape
    return 2 * batch * heads * tokens * key.shape[-2] * (width + value.shape[-1])


def _attention_backward(
    _: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *__: Any
) -> int:
    """Scores again, then the gradients of P, V, Q and K: five products for the two of the forward pass."""
    batch, heads, tokens, width = query.shape
    return 2 * batch * heads * tokens * key.shape[-2] * (3 * width + 2 * value.shape[-1])


def _once_each(tensor: torch.Tensor, *_: Any) -> int:
    """A multiply and an add for each element, as of a matrix by a vector."""
    return 2 * tensor.numel()


def _grouped(first: torch.Tensor, second: torch.Tensor, *_: Any) -> int:
    """Every row, column or element of the summed dim is in one group: the whole product once."""
    if first.dim() == 3 and second.dim() == 3:
        return 2 * first.numel() * second.shape[-1]
    rows, summed = first.shape[-2:]
    return 2 * rows * summed * second.shape[-1]


_OWN: Mapping[Any, Callable[..., int]] = {
    _aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
    _aten.mv: _once_each,
    _aten.addmv: lambda _, matrix, *__: _once_each(matrix),
    _aten.dot: _once_each,
    _aten._grouped_mm: _grouped,
}


def workspace_bytes(func: Any, args: Sequence[Any], out: Any) -> tuple[int, ...]:
    """Bytes of each workspace that an operator needs in addition to its inputs and outputs.

    Known for convolutions on CPUs: oneDNN copies [B, C, H, W] tensors into blocks of channels and back;
    ATen's own kernels, for dtypes that oneDNN does not compute in on this CPU, make columns (im2col).
    Workspaces of cuDNN depend on the algorithm that it chooses when it runs, and are not counted.
    """
    formula = _FORMULAS.get(func)
    return () if formula is None or args[1].device.type != "cpu" else formula(args, out)


def _convolution(args: Sequence[Any], out: torch.Tensor) -> tuple[int, ...]:
    """Input and weight in oneDNN's blocks, or the result, whichever is more; AMX copies them twice."""
    given, weight = args[0], args[1]
    if not onednn_computes_in(given.dtype):
        return _columns(out, weight, args[3:], (_bytes(out),))
    if not _in_blocks(given, weight):
        return ()
    if given.itemsize < 4 and weight.shape[1] > 1 and has_matrix_tiles():
        return (2 * max(_bytes(given), _bytes(out)),)
    return max((_padded(out),), (_padded(given), _bytes(weight)), key=sum)


def _convolution_backward(args: Sequence[Any], _: Any) -> tuple[int, ...]:
    """The result's gradient and the input in blocks. The weight's gradient is accumulated in fp32; for a depthwise
    kernel with channels last, each channel takes a block by a block, except for small kernels."""
    gradient, given, weight = args[:3]
    if not onednn_computes_in(given.dtype):
        return _columns(gradient, weight, args[4:], (_bytes(given), _bytes(weight)))
    if not _in_blocks(given, weight):
        depthwise = args[9] == weight.shape[0] > 1 and weight.shape[-1] > 3
        return (onednn_block() ** 2 * 4 * weight.numel(),) if depthwise else ()
    sums = 2 * 4 * weight.numel() if weight.itemsize < 4 else 0
    return tuple(size for size in (_padded(gradient), _padded(given), sums) if size)


def _columns(
    out: torch.Tensor, weight: torch.Tensor, options: Sequence[Any], results: tuple[int, ...]
) -> tuple[int, ...]:
    """The patches of the input under each position of the kernel. In 2D, groups run one after another, and their
    results are joined at the end."""
    stride, padding, dilation, transposed, _, groups = options[:6]
    if transposed or max(dilation) > 1:
        return ()  # one sample's at a time
    patches = _bytes(out) // out.shape[1] * (weight.numel() // weight.shape[0])
    if max(weight.shape[2:]) == 1 and max(stride) == 1 and not any(padding):
        patches = 0  # the input itself
    if weight.dim() == 5:
        return (patches * groups,) if patches else ()
    return max((patches,) if patches else (), results if groups > 1 else (), key=sum)


def _in_blocks(given: torch.Tensor, weight: torch.Tensor) -> bool:
    if weight.dim() not in (4, 5):
        return False
    last = torch.channels_last if weight.dim() == 4 else torch.channels_last_3d
    if given.is_contiguous(memory_format=last) and not given.is_contiguous():
        return False
    # An fp32 kernel of one point is a matrix product without a copy.
    return any(size > 1 for size in weight.shape[2:]) or given.itemsize < 4


def _padded(tensor: torch.Tensor) -> int:
    """Bytes in blocks; fewer channels than one block has are not copied into one."""
    block, channels = onednn_block(), tensor.shape[1]
    blocks = -(-channels // block)
    return _bytes(tensor) if channels < block else _bytes(tensor) // channels * blocks * block


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.itemsize


# Measured of torch 2.13 with oneDNN on CPUs with AVX2, AVX-512 and AMX;
# ``tests/capture/test_operators.py`` checks single convolutions, and the benchmark ``estimate_peers`` the
# peak of a whole network.
_FORMULAS: Mapping[Any, Callable[[Sequence[Any], Any], tuple[int, ...]]] = {
    torch.ops.aten.convolution.default: _convolution,
    torch.ops.aten.convolution_backward.default: _convolution_backward,
}

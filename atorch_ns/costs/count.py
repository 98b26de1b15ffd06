"""Counts of operators: floating point operations, bytes read and written, and the kind of fused attention."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

from atorch_ns.capture.nests import tensors_of
from atorch_ns.capture.operators import is_free, label
from atorch_ns.cluster import AttentionKind
from atorch_ns.torch_compat import TorchDispatchMode

_aten = torch.ops.aten


def is_attention(name: str) -> bool:
    """Returns whether an operator of this name is fused attention."""
    return "scaled_dot_product" in name


@dataclass
class OperatorCounts:
    """Total costs of the operators of one pass.

    Attributes:
        products: floating point operations of matrix products and convolutions.
        attention: floating point operations of fused attention.
        operands: bytes that matrix products and convolutions read and write.
        moved: bytes that all other operators but attention read and write.
        num_operators: operators started, without views.
        head_width, is_causal, num_queries: of the last attention (:class:`~atorch_ns.cluster.AttentionKind`).
    """

    products: int = 0
    attention: int = 0
    operands: int = 0
    moved: int = 0
    num_operators: int = 0
    head_width: int = 0
    is_causal: bool = False
    num_queries: int = 1

    def add(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> None:
        """Counts one call of an operator."""
        if func.namespace == "prim" or is_free(func):
            return
        self.num_operators += 1
        flops = count_flops(func, args, kwargs, out)
        if flops and is_attention(label(func)):
            query = args[position_of(func, "query")]
            self.attention += flops
            self.head_width, self.num_queries = query.shape[-1], query.shape[-2]
            self.is_causal = is_causal(func, args, kwargs)
            return
        num_bytes = sum(moved_bytes(tensors_of((args, tuple(kwargs.values()), out))))
        if flops:
            self.products += flops
            self.operands += num_bytes
        else:
            self.moved += num_bytes

    def __add__(self, other: OperatorCounts) -> OperatorCounts:
        """Sums both. The kind of attention is that of the side with more attention."""
        most = self if self.attention >= other.attention else other
        names = ("products", "attention", "operands", "moved", "num_operators")
        return replace(most, **{name: getattr(self, name) + getattr(other, name) for name in names})

    def attention_kind(self, passes: str) -> AttentionKind:
        """Kind of its attention, which sets the rate, in the ``"forward"`` or the ``"backward"`` pass."""
        return AttentionKind(passes, self.head_width, self.is_causal, self.num_queries)


class OperatorCounter(TorchDispatchMode):
    """Counts the operators that run inside, in :attr:`counts`, which a caller may replace on the way."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts = OperatorCounts()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        self.counts.add(func, args, kwargs, out)
        return out


def moved_bytes(tensors: Sequence[torch.Tensor]) -> tuple[int, ...]:
    """Bytes of each tensor that an operator reads or writes; for a broadcast one, its size in memory."""
    return tuple(min(t.numel() * t.itemsize, t.untyped_storage().nbytes()) for t in tensors)


def count_flops(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> int:
    """Floating point operations of a matrix product, a convolution or attention; 0 for other operators.

    A multiply and an add are two operations; formulas are of ``torch.utils.flop_counter`` and this module.
    Of causal fused attention only the pairs inside the mask count: kernels skip the others, in blocks.
    """
    counter = _OWN.get(func._overloadpacket)
    if counter is not None:
        flops = counter(*args)
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
    """Returns whether the call is fused attention in which no token sees a later one."""
    index = position_of(func, "is_causal")
    return bool(kwargs.get("is_causal", args[index] if 0 <= index < len(args) else False))


def _below_diagonal(flops: int, num_queries: int, num_keys: int) -> int:
    """The part of all pairs' operations in which the key is not after the query."""
    square = min(num_queries, num_keys)
    pairs = square * (square + 1) // 2 + (num_queries - square) * num_keys
    return flops // (num_queries * num_keys) * pairs


def _attention_flops(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any) -> int:
    """Q·Kᵀ and P·V: query [B, H, T, E], key [B, G, S, E], value [B, G, S, F]."""
    batch, heads, tokens, width = query.shape
    return 2 * batch * heads * tokens * key.shape[-2] * (width + value.shape[-1])


def _attention_backward(_: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *__: Any) -> int:
    """Scores again, then the gradients of P, V, Q and K: five products for the two of the forward pass."""
    batch, heads, tokens, width = query.shape
    return 2 * batch * heads * tokens * key.shape[-2] * (3 * width + 2 * value.shape[-1])


def _once_each(tensor: torch.Tensor, *_: Any) -> int:
    """A multiply and an add for each element, as of a matrix by a vector."""
    return 2 * tensor.numel()


def _grouped_mm_flops(first: torch.Tensor, second: torch.Tensor, *_: Any) -> int:
    """Every row, column or element of the summed dim is in one group: the whole product once."""
    if first.dim() == 3 and second.dim() == 3:
        return 2 * first.numel() * second.shape[-1]
    rows, inner = first.shape[-2:]
    return 2 * rows * inner * second.shape[-1]


_OWN: Mapping[Any, Callable[..., int]] = {
    _aten._scaled_dot_product_flash_attention_for_cpu: _attention_flops,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
    _aten._scaled_dot_product_fused_attention_overrideable: _attention_flops,
    _aten._scaled_dot_product_fused_attention_overrideable_backward: _attention_backward,
    _aten.mv: _once_each,
    _aten.addmv: lambda _, matrix, *__: _once_each(matrix),
    _aten.dot: _once_each,
    _aten._grouped_mm: _grouped_mm_flops,
}

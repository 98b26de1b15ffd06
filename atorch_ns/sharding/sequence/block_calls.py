"""Calls inside a block on a part of the sequence: attention, and position numbers that the block makes.

Position numbers are calls such as ``arange(T)``, ``table[:T]`` and ``ones(T, T)``.

Legend: T positions of the whole sequence, L positions of this rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Final, Literal

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from atorch_ns.errors import InputError
from atorch_ns.sharding.collectives import Group
from atorch_ns.sharding.sequence.attention import (
    AttentionCall,
    multi_head_attention,
    ulysses_attention,
    whole_mask,
)
from atorch_ns.sharding.sequence.plan import BlockPlan, Numbers, SequenceLayout
from atorch_ns.sharding.sequence.products import Product
from atorch_ns.sharding.sequence.ring import ring_attention

Function = Callable[..., Any]

# Functions that make square masks of T x T.
_FILLED: Final[frozenset[Function]] = frozenset({torch.ones, torch.zeros, torch.full, torch.empty})
_FILLED_LIKE: Final[frozenset[Function]] = frozenset(
    {torch.Tensor.new_ones, torch.Tensor.new_zeros, torch.Tensor.new_full, torch.Tensor.new_empty}
)
_VIEWS: Final[frozenset[Function]] = frozenset({torch.Tensor.view, torch.Tensor.reshape, torch.Tensor.expand})
_TRIANGLES: Final[dict[Function, Literal["lower", "upper"]]] = {
    torch.tril: "lower",
    torch.Tensor.tril: "lower",
    torch.triu: "upper",
    torch.Tensor.triu: "upper",
}
_OTHER = -1  # the count of a call that numbers no positions
USE_SDPA: Final = (
    "Use an attention that calls torch.nn.functional.scaled_dot_product_attention, in transformers' models where they "
    "offer it by attn_implementation='sdpa', or divide over the axes data, zero or pipeline."
)
"""Advice for hand-written attention that cannot be divided."""


class SeenCalls(TorchFunctionMode):
    """Records the calls of a block that runs whole.

    Args:
        length: T, which differs from other sizes in the block.

    Attributes:
        attentions: the attention calls in order.
        products: the key dimension of the second factor, by index of the matrix product.
        num_products: the number of matrix products.
        sites: indices of the position numbers, tables and square masks that are T long.
    """

    def __init__(self, length: int) -> None:
        super().__init__()
        self.attentions: list[AttentionCall] = []
        self.products: dict[int, int] = {}
        self.num_products = 0
        self.sites: set[int] = set()
        self._length = length
        self._count = 0  # calls so far that may number positions

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            self.attentions.append(AttentionCall.of(*args, **kwargs))
        elif func is F.multi_head_attention_forward:
            # Only to see its attention call: the result is computed below, by torch.
            multi_head_attention(self._record_attention, lambda mask, _: mask, *args, **kwargs)
        elif (count := position_count(func, args, kwargs)) is not None:
            if count == self._length:
                self.sites.add(self._count)
            self._count += 1
        elif (product := Product.of(func, args, kwargs)) is not None:
            dim = product.gathered_dim(self._length)
            if dim is not None:
                self.products[self.num_products] = dim
            self.num_products += 1
        return func(*args, **kwargs)

    def _record_attention(self, call: AttentionCall) -> torch.Tensor:
        self.attentions.append(call)
        return call.run()


class DividedCalls(TorchFunctionMode):
    """Makes a block that sees L of T positions compute the same for them as when it sees all T.

    Attention sees the keys of all ranks. Where the plan says that they number positions, 0 to
    L-1 become this rank's or all ranks' positions. The first L rows of a table become the rows of these.

    Attributes:
        crossed: indices of the attention calls so far with keys of another sequence.
        products: the matrix products so far whose second factor was gathered, with its dimension.
    """

    def __init__(self, plan: BlockPlan, layout: SequenceLayout, group: Group) -> None:
        super().__init__()
        self.crossed: set[int] = set()
        self.products: dict[int, int] = {}
        self._plan = plan
        self._layout = layout
        self._group = group
        self._num_attentions = 0
        self._num_products = 0
        self._num_sites = 0

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            return self._run_divided_attention(AttentionCall.of(*args, **kwargs))
        if func is F.multi_head_attention_forward:
            return multi_head_attention(self._run_divided_attention, self._widen_mask, *args, **kwargs)
        # Sites are counted in the order of calls, as when the block was seen whole.
        if self._plan.sites and (count := position_count(func, args, kwargs)) is not None:
            self._num_sites += 1
            numbers = self._plan.sites.get(self._num_sites - 1)
            if numbers is not None:
                self._expect_local_length(count)
                return with_positions(
                    func, args, kwargs, self._layout, numbers=numbers, rows=bool(self._plan.products)
                )
        if self._plan.products:
            if (product := Product.of(func, args, kwargs)) is not None:
                args, kwargs = self._gather_keys(product, args, kwargs)
                return func(*args, **kwargs)
            if (rows := triangle(func, args, kwargs, self._layout)) is not None:
                return rows
        view = square_view(func, args, kwargs, self._layout)
        return func(*args, **kwargs) if view is None else view

    def enter(self) -> None:
        """Turns the mode on in this thread."""
        super().__enter__()  # type: ignore[no-untyped-call]

    def leave(self) -> None:
        """Turns the mode off."""
        super().__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def check(self) -> None:
        """Checks a pass that ended without an error.

        Raises:
            InputError: if the block has not made the matrix products that it made when it was tested.
        """
        if self._plan.products and self._num_products != self._plan.num_products:
            raise InputError(
                f"a block that writes its attention out made {self._num_products} matrix products, but "
                f"{self._plan.num_products} when it was tested: its code takes another branch. {USE_SDPA}"
            )

    def _gather_keys(
        self, product: Product, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        index = self._num_products
        self._num_products += 1
        dim = self._plan.products.get(index)
        if dim is None:
            return args, kwargs
        length = product.right.size(dim)
        if length == self._layout.local:
            self.products[index] = dim
            right = product.gathered(dim, self._layout, self._group)
            return product.with_right(right, args, kwargs)
        if length == self._layout.length:  # another sequence, which every rank has whole
            return args, kwargs
        raise InputError(
            f"a matrix product has {length} keys, but this rank holds {self._layout.local} positions. {USE_SDPA}"
        )

    def _run_divided_attention(self, call: AttentionCall) -> torch.Tensor:
        index = self._num_attentions
        self._num_attentions += 1
        call = call.cast()  # before anything travels: autocast would cast inside the kernel alone
        if call.query.size(-2) != self._layout.local:
            raise InputError(
                f"an attention call has {call.query.size(-2)} queries where this rank holds "
                f"{self._layout.local} positions: only queries that are the sequence's can be divided."
            )
        # Keys of another sequence may happen to be L long: the test has noted such calls.
        if index in self._plan.crossed or call.key.size(-2) != self._layout.local:
            self.crossed.add(index)
            return self._run_cross_attention(call)
        if self._plan.kind == "ring":
            return ring_attention(call, self._layout, self._group)
        return ulysses_attention(call, self._layout, self._group)

    def _run_cross_attention(self, call: AttentionCall) -> torch.Tensor:
        if call.causal:
            raise InputError("a causal attention call has keys that are not divided like its queries.")
        mask = call.mask
        if mask is not None and mask.dim() > 1 and mask.size(-2) == self._layout.length:
            mask = self._layout.select(mask, -2)  # the rows of this rank's queries
        return replace(call, mask=mask).run()

    def _widen_mask(self, mask: torch.Tensor, is_cross: bool) -> torch.Tensor:
        return mask if is_cross else whole_mask(mask, self._layout, self._group)

    def _expect_local_length(self, count: int) -> None:
        if count != self._layout.local:
            raise InputError(
                f"a block made {count} position numbers, but this rank holds {self._layout.local} positions. "
                "Its code takes another branch than when it was tested; pass position ids into it instead."
            )


def position_count(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int | None:
    """The number of positions that a call may number; ``None`` for calls that number none.

    Other calls of the same functions have the count -1, so that such calls are counted alike in every run.
    """
    if func is torch.arange:
        start, end, step = _range_of(*args, **kwargs)
        return end if isinstance(end, int) and start == 0 and step == 1 else _OTHER
    if func is torch.Tensor.__getitem__:
        return next((int(item.stop) for item in _index_tuple(args[1]) if _is_prefix(item)), None)
    if func in _FILLED or func in _FILLED_LIKE:
        size = _size_of(func, args, kwargs)
        if size is None or len(size) < 2 or not all(isinstance(number, int) for number in size):
            return _OTHER
        return int(size[-1]) if size[-1] == size[-2] else _OTHER
    return None


def with_positions(
    func: Function,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    layout: SequenceLayout,
    *,
    numbers: Numbers,
    rows: bool = False,
) -> Any:
    """The result of a call that numbers L positions, for this rank's positions or for all T.

    A square mask has a row and a column for every position of the sequence. With ``rows``, a square of this
    rank has only the rows of its own positions.
    """
    own_square = rows and numbers == "own"  # [L, T] in place of [T, T]
    if func is torch.arange:
        output = func(*args, **kwargs)
        local = layout.local_positions(output.device).to(output)
        return local if numbers == "own" else torch.arange(layout.length, device=local.device).to(output)
    if func is torch.Tensor.__getitem__:
        table, index = args
        indices = [slice(0, layout.length) if _is_prefix(item) else item for item in _index_tuple(index)]
        # Of [:T, :T] the first prefix is that of rows, which alone may be this rank's.
        prefixes = [slot for slot, item in enumerate(_index_tuple(index)) if _is_prefix(item)]
        if own_square or (numbers == "own" and len(prefixes) == 1):
            indices[prefixes[0]] = layout.local_positions(table.device)
        return table[tuple(indices)]
    size = _size_of(func, args, kwargs)
    assert size is not None
    larger = (*size[:-2], layout.local if own_square else layout.length, layout.length)
    return _with_size(func, args, kwargs, larger)


def triangle(
    func: Function, args: tuple[Any, ...], kwargs: dict[str, Any], layout: SequenceLayout
) -> torch.Tensor | None:
    """The triangle of [..., L, T], this rank's rows of a square; ``None`` for any other call."""
    if func not in _TRIANGLES or not args or args[0].shape[-2:] != (layout.local, layout.length):
        return None
    diagonal = args[1] if len(args) > 1 else kwargs.get("diagonal", 0)
    device = args[0].device
    # [L, T]: column less row, with rows at this rank's positions.
    offsets = torch.arange(layout.length, device=device) - layout.local_positions(device)[:, None] - diagonal
    inside = offsets <= 0 if _TRIANGLES[func] == "lower" else offsets >= 0
    matrix: torch.Tensor = args[0].masked_fill(~inside, 0)
    return matrix


def square_view(
    func: Function, args: tuple[Any, ...], kwargs: dict[str, Any], layout: SequenceLayout
) -> torch.Tensor | None:
    """A view of a mask [..., L, T] that code takes for square, [..., L, L]; ``None`` for any other call."""
    if func not in _VIEWS or kwargs or len(args) < 2:
        return None
    size = tuple(args[1]) if isinstance(args[1], (tuple, list)) else args[1:]
    local, whole = layout.local, layout.length
    if local == whole or size[-2:] != (local, local) or args[0].shape[-2:] != (local, whole):
        return None
    view: torch.Tensor = func(args[0], (*size[:-1], whole))
    return view


def _range_of(*bounds: Any, start: Any = 0, end: Any = None, step: Any = 1, **_: Any) -> tuple[Any, Any, Any]:
    if len(bounds) == 1:  # arange(end)
        return start, bounds[0], step
    if bounds:
        start, end, step = (*bounds, step)[:3]
    return start, end, step


def _index_tuple(index: Any) -> tuple[Any, ...]:
    return index if isinstance(index, tuple) else (index,)


def _is_prefix(index: Any) -> bool:
    return (
        isinstance(index, slice)
        and index.start in (None, 0)
        and isinstance(index.stop, int)
        and index.stop > 0  # not counted from the end
        and index.step in (None, 1)
    )


def _size_of(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Sequence[Any] | None:
    arguments = args[1:] if func in _FILLED_LIKE else args  # methods begin with a tensor
    if not arguments:
        size = kwargs.get("size")
        return size if isinstance(size, (tuple, list)) else None
    return arguments[0] if isinstance(arguments[0], (tuple, list)) else arguments


def _with_size(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any], size: Sequence[int]) -> Any:
    first = args[:1] if func in _FILLED_LIKE else ()
    arguments = args[len(first) :]
    if not arguments:
        return func(*first, **{**kwargs, "size": size})
    rest = arguments[1:] if isinstance(arguments[0], (tuple, list)) else ()
    return func(*first, size, *rest, **kwargs)

"""Position numbers that a block makes by itself: ``arange(T)``, ``table[:T]``, ``ones(T, T)``.

Legend: T positions of the whole sequence, L of this rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import torch

from atorch_ns.sharding._sequence_layout import SequenceLayout
from atorch_ns.sharding._sequence_plan import Numbers

__all__ = ["position_count", "square_view", "with_positions"]

Function = Callable[..., Any]

_FILLED: Final[frozenset[Function]] = frozenset({torch.ones, torch.zeros, torch.full, torch.empty})
_FILLED_LIKE: Final[frozenset[Function]] = frozenset(
    {torch.Tensor.new_ones, torch.Tensor.new_zeros, torch.Tensor.new_full, torch.Tensor.new_empty}
)
_VIEWS: Final[frozenset[Function]] = frozenset({torch.Tensor.view, torch.Tensor.reshape, torch.Tensor.expand})
_OTHER = -1


def position_count(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int | None:
    """How many positions a call may be meant to number; ``None`` for calls that number none.

    Calls of the same functions that mean something else have a count too, -1, so that counting such calls gives
    the same in every run.
    """
    if func is torch.arange:
        start, end, step = _range_of(*args, **kwargs)
        return end if isinstance(end, int) and start == 0 and step == 1 else _OTHER
    if func is torch.Tensor.__getitem__:
        return next((int(item.stop) for item in _indices(args[1]) if _is_prefix(item)), None)
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
    numbers: Numbers,
) -> Any:
    """What a call that numbers L positions gives for this rank's ones, or for all T.

    A square is always that of all positions: as a mask it has a row and a column for each.
    """
    if func is torch.arange:
        found = func(*args, **kwargs)
        own = layout.own.to(found)
        return own if numbers == "own" else torch.arange(layout.length, device=own.device).to(found)
    if func is torch.Tensor.__getitem__:
        table, index = args
        indices = _indices(index)
        is_square = sum(_is_prefix(item) for item in indices) > 1
        rows: Any = slice(0, layout.length)
        if numbers == "own" and not is_square:
            rows = layout.own.to(table.device)
        return table[tuple(rows if _is_prefix(item) else item for item in indices)]
    size = _size_of(func, args, kwargs)
    assert size is not None
    larger = (*size[:-2], layout.length, layout.length)
    return _with_size(func, args, kwargs, larger)


def square_view(
    func: Function, args: tuple[Any, ...], kwargs: dict[str, Any], layout: SequenceLayout
) -> torch.Tensor | None:
    """A view of a mask [..., L, T] that code takes for a square one, [..., L, L]; ``None`` for any other call."""
    if func not in _VIEWS or kwargs or len(args) < 2:
        return None
    size = tuple(args[1]) if isinstance(args[1], (tuple, list)) else args[1:]
    own, whole = layout.local, layout.length
    if own == whole or size[-2:] != (own, own) or args[0].shape[-2:] != (own, whole):
        return None
    view: torch.Tensor = func(args[0], (*size[:-1], whole))
    return view


def _range_of(*bounds: Any, start: Any = 0, end: Any = None, step: Any = 1, **_: Any) -> tuple[Any, Any, Any]:
    if len(bounds) == 1:
        return start, bounds[0], step
    if bounds:
        start, end, step = (*bounds, step)[:3]
    return start, end, step


def _indices(index: Any) -> tuple[Any, ...]:
    return index if isinstance(index, tuple) else (index,)


def _is_prefix(index: Any) -> bool:
    return (
        isinstance(index, slice)
        and index.start in (None, 0)
        and isinstance(index.stop, int)
        and index.stop > 0
        and index.step in (None, 1)
    )


def _size_of(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Sequence[Any] | None:
    own = args[1:] if func in _FILLED_LIKE else args
    if not own:
        size = kwargs.get("size")
        return size if isinstance(size, (tuple, list)) else None
    return own[0] if isinstance(own[0], (tuple, list)) else own


def _with_size(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any], size: Sequence[int]) -> Any:
    first = args[:1] if func in _FILLED_LIKE else ()
    own = args[len(first) :]
    if not own:
        return func(*first, **{**kwargs, "size": size})
    rest = own[1:] if isinstance(own[0], (tuple, list)) else ()
    return func(*first, size, *rest, **kwargs)

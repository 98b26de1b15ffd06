"""Which ranks form a group along each axis: pure functions, so any world can be checked without starting it.

The first axis named is the innermost: its groups are neighbouring ranks. With
``[("tensor", 4), ("pipeline", 2), ("data", 2)]`` on 16 ranks, tensor groups are ``[0, 1, 2, 3], …``, pipeline
groups ``[0, 4], …`` and data groups ``[0, 8], …``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np

from atorch_ns.errors import LayoutError

__all__ = ["AXES", "check_axes", "fit", "layout", "mesh_ranks"]

AXES = ("data", "zero", "tensor", "sequence", "pipeline", "expert")
"""The axes a mesh may have. ``pipe`` is read as ``pipeline``."""

_ALIASES = {"pipe": "pipeline"}

Axes = Sequence[tuple[str, int]]


def check_axes(axes: Iterable[tuple[str, int]]) -> tuple[tuple[str, int], ...]:
    """Checks names and sizes and writes aliases out.

    Raises:
        LayoutError: for an unknown name, a repeated name, or a size that is not a positive integer.
    """
    checked: list[tuple[str, int]] = []
    for name, size in axes:
        full = _ALIASES.get(name, name)
        if full not in AXES:
            raise LayoutError(f"unknown axis {name!r}. Axes are {', '.join(AXES)}.")
        if any(full == other for other, _ in checked):
            raise LayoutError(f"the axis {full!r} is named twice.")
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise LayoutError(f"{full}={size!r} is no size: give a positive integer.")
        checked.append((full, size))
    return tuple(checked)


def fit(axes: Iterable[tuple[str, int]], world_size: int) -> tuple[tuple[str, int], ...]:
    """Sets the size of ``data`` so that all sizes multiply to the number of processes.

    A missing ``data`` axis is added, outermost, where the other sizes leave room for it.

    Raises:
        LayoutError: if the other sizes do not divide ``world_size``.
    """
    checked = check_axes(axes)
    others = [(name, size) for name, size in checked if name != "data"]
    product = math.prod(size for _, size in others)
    if world_size % product:
        raise LayoutError(_does_not_divide(others, product, world_size))
    data = world_size // product
    if all(name != "data" for name, _ in checked):
        return (*checked, ("data", data)) if data > 1 or not checked else checked
    return tuple((name, data if name == "data" else size) for name, size in checked)


def layout(
    axes: Iterable[tuple[str, int]], world_size: int, rank_order: Sequence[int] | None = None
) -> dict[str, list[list[int]]]:
    """The groups of ranks along each axis.

    Args:
        axes: ``(name, size)``, innermost first. The size of ``data`` is fitted to ``world_size``.
        world_size: number of processes.
        rank_order: ``rank_order[i]`` is the rank at position ``i``; ``None`` for 0, 1, 2, ….

    Returns:
        For every axis its groups, each a list of ranks in mesh order.

    Raises:
        LayoutError: if sizes or rank order do not describe ``world_size`` processes.

    Example:
        >>> layout([("tensor", 2), ("data", 2)], 4)
        {'tensor': [[0, 1], [2, 3]], 'data': [[0, 2], [1, 3]]}
    """
    fitted = fit(axes, world_size)
    ranks = mesh_ranks(fitted, world_size, rank_order)
    groups: dict[str, list[list[int]]] = {}
    for position, (name, size) in enumerate(reversed(fitted)):
        lines = np.moveaxis(ranks, position, -1).reshape(-1, size)
        groups[name] = lines.tolist()
    return {name: groups[name] for name, _ in fitted}


def mesh_ranks(
    axes: Iterable[tuple[str, int]], world_size: int, rank_order: Sequence[int] | None = None
) -> np.ndarray:
    """The ranks as an array with one dimension per axis, outermost axis first (as ``DeviceMesh`` wants it).

    Raises:
        LayoutError: if sizes do not multiply to ``world_size`` or ``rank_order`` is no permutation.
    """
    sizes = [size for _, size in check_axes(axes)]
    if math.prod(sizes) != world_size:
        raise LayoutError(f"the sizes multiply to {math.prod(sizes)}, but there are {world_size} processes.")
    order = list(range(world_size)) if rank_order is None else list(rank_order)
    if sorted(order) != list(range(world_size)):
        raise LayoutError(
            f"the rank order must name each of the ranks 0 to {world_size - 1} once; it is {_short(order)}."
        )
    return np.asarray(order).reshape(list(reversed(sizes)))


def _does_not_divide(others: Axes, product: int, world_size: int) -> str:
    shown = " × ".join(f"{name}={size}" for name, size in others)
    total = f" (= {product})" if len(others) > 1 else ""
    advice = f"Start {product * max(1, round(world_size / product))} processes"
    if len(others) == 1:
        divisors = [n for n in range(1, world_size + 1) if world_size % n == 0]
        shown_divisors = ", ".join(map(str, divisors[:12]))
        advice = f"Use {others[0][0]} in {{{shown_divisors}}} or start {product} processes"
    return f"{shown}{total} does not divide {world_size} processes. {advice}."


def _short(order: list[int]) -> str:
    text = repr(order)
    return text if len(text) <= 80 else text[:77] + "..."

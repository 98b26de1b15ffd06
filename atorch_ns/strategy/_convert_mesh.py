"""The mesh of a converted strategy, and what ZeRO 1 becomes beside axes that divide the model."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

from atorch_ns.strategy._conversion import Converter
from atorch_ns.strategy._plan import MODEL_AXES

__all__ = ["use_axes"]

_ORDER: Final = ("tensor", "sequence", "expert", "zero", "data", "pipeline")
"""From the inside out, as a search has them: ranks along ``tensor`` are neighbours."""


def use_axes(converter: Converter, sizes: Mapping[str, int], *, processes: int | None = None) -> None:
    """Adds ``parallel_mode`` with the axes that are larger than 1, the innermost first.

    Args:
        converter: gets the method.
        sizes: of the axes, by name, in any order.
        processes: how many there are, if the file says so; ``data`` takes those that are left.

    Raises:
        StrategyFileError: if the other sizes do not divide ``processes``.
    """
    large = {axis: size for axis, size in sizes.items() if size > 1}
    if not large:
        return
    others = math.prod(size for axis, size in large.items() if axis != "data")
    if processes is not None:
        if processes % others:
            named = ", ".join(f"{axis}={size}" for axis, size in large.items() if axis != "data")
            raise converter.wrong("num_processes", processes, f"a multiple of {others}, which {named} need")
        if large.get("data", 1) != processes // others:
            large["data"] = processes // others
            converter.carry("the axis data", f"{large['data']}: the ranks that are left")
    else:
        # Named although it is 1, because an axis that is added when the job starts stands outside of all others.
        large.setdefault("data", 1)
        converter.carry("the axis data", "takes the ranks that are left; it is fitted when the job starts")
    axes = [[axis, large[axis]] for axis in _ORDER if axis in large]
    converter.use("parallel_mode", axes=axes)
    divided = [f"{axis}={size}" for axis, size in large.items() if axis in MODEL_AXES]
    if divided and converter.config("zero1") is not None:
        converter.drop("zero1")
        converter.use("zero2")
        converter.carry(
            "ZeRO 1",
            f"→ zero2. zero1 is for ranks that hold the whole model, and here {', '.join(divided)} divides it. zero2 "
            "shards gradients too, and trains the same",
        )

"""What backends that know one group of ranks, all of them, ask of the mesh."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from atorch_ns.method import Conflict
from atorch_ns.strategy import DATA_AXES

__all__ = ["one_axis_only"]


def one_axis_only(used: Callable[[Any], bool], backend: str) -> Conflict:
    """The conflict of ``backend`` with meshes on which its group is not all processes.

    Args:
        used: whether a config of the method that this is for chooses the backend.
        backend: its name, for the reason.
    """
    reason = (
        f"{backend} shards over all processes at once, so the mesh must have no more than one axis larger than 1, "
        f"{' or '.join(DATA_AXES)}. Use another backend for this mesh."
    )
    return Conflict("parallel_mode", reason, when=lambda mine, mesh: used(mine) and not _fits(mesh.axes))


def _fits(axes: Iterable[tuple[str, int]]) -> bool:
    large = [name for name, size in axes if size > 1]
    return len(large) <= 1 and set(large) <= set(DATA_AXES)

"""What backends that know one group of ranks, or whole models only, ask of the mesh."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from atorch_ns.method import Conflict
from atorch_ns.strategy import MODEL_AXES

__all__ = ["one_axis_only", "whole_models_only"]

_WHOLE = {"data", "zero"}


def one_axis_only(used: Callable[[Any], bool], backend: str) -> Conflict:
    """The conflict of ``backend`` with meshes on which its group is not all processes.

    Args:
        used: whether a config of the method that this is for chooses the backend.
        backend: its name, for the reason.
    """
    reason = (
        f"{backend} shards over all processes at once, so the mesh must have no more than one axis larger than 1, "
        f"{' or '.join(sorted(_WHOLE))}. Use another backend for this mesh."
    )
    return Conflict("parallel_mode", reason, when=lambda mine, mesh: used(mine) and not _fits(mesh.axes))


def whole_models_only(used: Callable[[Any], bool], backend: str, *, why: str) -> Conflict:
    """The conflict of ``backend`` with meshes on which a rank holds a part of the model.

    Args:
        used: whether a config of the method that this is for chooses the backend.
        backend: its name, for the reason.
        why: a clause after 'because'.
    """
    reason = (
        f"{backend} is for ranks that hold the whole model, because {why}, and the mesh has an axis of "
        f"{', '.join(MODEL_AXES)} that is larger than 1. Use zero2 or fsdp with the default backend, or ddp."
    )
    return Conflict("parallel_mode", reason, when=lambda mine, mesh: used(mine) and _divides_model(mesh.axes))


def _divides_model(axes: Iterable[tuple[str, int]]) -> bool:
    return any(size > 1 and name in MODEL_AXES for name, size in axes)


def _fits(axes: Iterable[tuple[str, int]]) -> bool:
    large = [name for name, size in axes if size > 1]
    return len(large) <= 1 and set(large) <= _WHOLE

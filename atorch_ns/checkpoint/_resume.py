"""Going on where a run has stopped, or beginning where there is nothing to go on from."""

from __future__ import annotations

import os
from os import PathLike
from pathlib import Path
from typing import Any

import torch.distributed as dist

from atorch_ns.checkpoint._folder import latest
from atorch_ns.checkpoint._load import load
from atorch_ns.cluster import agree
from atorch_ns.errors import CheckpointError
from atorch_ns.job import Result

__all__ = ["resume"]


def resume(path: str | PathLike[str], result: Result, *, data_position: bool = True) -> dict[str, Any] | None:
    """:func:`load` of the latest checkpoint below ``path``, if there is one; collective.

    For scripts that may be started again at any moment, on any number of ranks: rank 0 looks, and all ranks do
    the same.

    Args:
        path: the folder given to ``save``; it need not be there yet.
        result: of ``auto_accelerate``, with the same model.
        data_position: as for ``load``.

    Returns:
        What ``load`` returns, or ``None`` if there is no complete checkpoint.

    Raises:
        CheckpointError: as ``load`` does, and for a path to a file or to what cannot be read.
        RankError: if another rank failed.
    """
    cluster = result.job.cluster

    def look() -> str:
        if cluster.rank != 0:
            return ""
        _check_folder(Path(path))
        found = latest(path)
        return "" if found is None else str(found)

    found = [agree(look, what="looking for a checkpoint", distributed=cluster.distributed)]
    if cluster.distributed:
        dist.broadcast_object_list(found, src=0)
    return load(found[0], result, data_position=data_position) if found[0] else None


def _check_folder(path: Path) -> None:
    """Nothing saved yet is a beginning; what can never be saved to, or cannot be seen, is a mistake."""
    present = next(place for place in (path.absolute(), *path.absolute().parents) if place.exists())
    if not present.is_dir():
        raise CheckpointError(
            f"{present} is a file, so there are no checkpoints in {path}. Give the folder that is given to save."
        )
    try:
        os.scandir(present).close()
    except OSError as error:
        raise CheckpointError(f"cannot look for checkpoints in {path}: {error}") from error

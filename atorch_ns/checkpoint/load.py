"""Going on where a run has stopped, or beginning where there is nothing to go on from."""

from __future__ import annotations

import contextlib
import logging
import os
import platform
from collections.abc import Iterator
from os import PathLike
from pathlib import Path
from typing import Any

from atorch_ns.checkpoint.files import check_files, share_of, way_out
from atorch_ns.checkpoint.folder import DamagedError, find, latest
from atorch_ns.checkpoint.save import lane_of
from atorch_ns.checkpoint.source import Source
from atorch_ns.cluster import Cluster, agree, from_first, gathered
from atorch_ns.errors import CheckpointError
from atorch_ns.job import Result

log = logging.getLogger("atorch_ns")


def load(path: str | PathLike[str], result: Result, *, data_position: bool = True) -> dict[str, Any]:
    """Makes ``result`` go on where a checkpoint was saved; collective.

    The strategy and the number of ranks may be others than those it was saved under. Everything is checked
    before anything is changed, the content of the files too: the ranks of a machine share the reading of those
    that any of them needs. What fails later, such as a disk that is lost meanwhile, says that the job is changed.

    Hyperparameters (learning rates, betas, …) are those of the checkpoint, parameter by parameter. Random
    states are each rank's own. With more ranks than it was saved by, the additional ones begin states of
    their own, unless all saved ones were equal: then those are equal too.

    Reading uses torch's ``.metadata`` file, a pickle: load checkpoints of people you trust.

    Args:
        path: the folder given to ``save``, for the latest checkpoint in it, or that of one step.
        result: of ``auto_accelerate``, with the same model.
        data_position: ``False`` to begin the data anew, as one must with another global batch size.

    Returns:
        ``step``, ``extra`` as saved, ``path`` of the checkpoint, the ``world_size`` and ``strategy`` it was
        saved under, and ``notes``: what it holds that there is nothing here to restore to, or the reverse.

    Raises:
        CheckpointError: if it is missing, damaged, or of another model, optimizer, scheduler or batch size.
        RankError: if another rank failed.
    """
    lane_of(result.job).wait()
    cluster = result.job.cluster
    folder = _find(Path(path).absolute(), result)

    def open_source() -> Source:
        with _damage_told(folder):
            return Source.open(folder, result, data_position=data_position)

    source = agree(open_source, what="checking the checkpoint", distributed=cluster.distributed)
    _check_content(source, cluster)
    try:
        source.read(distributed=cluster.distributed)
        source.restore()
    except Exception as error:
        reason = f"{type(error).__name__}: {error}".removesuffix(".")
        raise CheckpointError(
            f"loading {folder} failed after a part of it had been loaded: {reason}. The model and the optimizer are "
            "changed: load a checkpoint, or start anew, before training goes on. "
            f"{way_out(folder)}"
        ) from error
    manifest, notes = source.manifest, source.notes
    if notes and cluster.rank == 0:
        log.warning("%s: %s", folder, "; ".join(notes))
    return {
        "step": manifest.step,
        "extra": manifest.extra,
        "path": folder,
        "world_size": manifest.world_size,
        "strategy": [(part["name"], part["config"]) for part in manifest.strategy],
        "notes": notes,
    }


def _find(path: Path, result: Result) -> Path:
    """The checkpoint that rank 0 finds; collective."""
    cluster = result.job.cluster

    def look() -> str:
        with _damage_told(path):
            return str(find(path)) if cluster.rank == 0 else ""

    found = agree(look, what="finding the checkpoint", distributed=cluster.distributed)
    return Path(from_first(found, distributed=cluster.distributed))


@contextlib.contextmanager
def _damage_told(folder: Path) -> Iterator[None]:
    """Adds to an error about a damaged checkpoint what to load in its place."""
    try:
        yield
    except DamagedError as error:
        raise CheckpointError(f"{error} {way_out(folder)}") from error


def _check_content(source: Source, cluster: Cluster) -> None:
    """Compares the files that will be read with what was written; collective. Changes nothing."""
    records = source.manifest.files
    if records is None:
        return
    sizes = {name: records[name].size for name in source.files if name in records}
    share = share_of(cluster.rank, gathered((platform.node(), sizes), distributed=cluster.distributed))

    def check() -> None:
        with _damage_told(source.folder):
            check_files(source.folder, records, share)

    agree(check, what="checking the content of the checkpoint", distributed=cluster.distributed)


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

    found = agree(look, what="looking for a checkpoint", distributed=cluster.distributed)
    place = from_first(found, distributed=cluster.distributed)
    return load(place, result, data_position=data_position) if place else None


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

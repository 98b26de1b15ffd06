"""Loading: under any strategy, on any number of ranks."""

from __future__ import annotations

import contextlib
import logging
import platform
from collections.abc import Iterator
from os import PathLike
from pathlib import Path
from typing import Any

import torch.distributed as dist

from atorch_ns.checkpoint._files import check_files, share_of, way_out
from atorch_ns.checkpoint._folder import DamagedError, find
from atorch_ns.checkpoint._pending import lane_of
from atorch_ns.checkpoint._source import Source
from atorch_ns.cluster import Cluster, agree
from atorch_ns.errors import CheckpointError
from atorch_ns.job import Result

__all__ = ["load"]

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

    found = [agree(look, what="finding the checkpoint", distributed=cluster.distributed)]
    if cluster.distributed:
        dist.broadcast_object_list(found, src=0)
    return Path(found[0])


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
    needed: list[Any] = [
        (platform.node(), {name: records[name].size for name in source.files if name in records})
    ]
    if cluster.distributed:
        needed = needed * cluster.world_size
        dist.all_gather_object(needed, needed[0])
    share = share_of(cluster.rank, needed)

    def check() -> None:
        with _damage_told(source.folder):
            check_files(source.folder, records, share)

    agree(check, what="checking the content of the checkpoint", distributed=cluster.distributed)

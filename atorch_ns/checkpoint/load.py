"""Loading of a checkpoint into a job, and resuming of a run from its latest one."""

from __future__ import annotations

import contextlib
import logging
import os
import platform
from collections.abc import Iterator
from os import PathLike
from pathlib import Path
from typing import Any

from atorch_ns.checkpoint.files import alternative, check_files, share_of
from atorch_ns.checkpoint.folder import DamagedError, find, latest
from atorch_ns.checkpoint.save import lane_of
from atorch_ns.checkpoint.source import Source
from atorch_ns.cluster import Cluster
from atorch_ns.errors import CheckpointError
from atorch_ns.job import Result
from atorch_ns.text import error_text

log = logging.getLogger("atorch_ns")


def load(path: str | PathLike[str], result: Result, *, data_position: bool = True) -> dict[str, Any]:
    """Loads a checkpoint, so that ``result`` continues where it was saved. Collective.

    The strategy and the number of ranks may differ from those of the save. Everything is checked before
    anything is changed, the contents of files too, which the ranks of a machine share. The error of a later
    failure, such as a lost disk, says that the job is changed.

    Hyperparameters (learning rates, betas, …) are those of the checkpoint, by parameter. Random states are
    each rank's own. Additional ranks get new states, unless all saved ones were equal: then equal ones.

    Reading uses torch's ``.metadata`` file, a pickle: load only checkpoints that you trust.

    Args:
        path: the folder given to ``save``, for the latest checkpoint in it, or that of one step.
        result: result of ``auto_accelerate``, with the same model.
        data_position: whether to restore the position in the data; another global batch size needs ``False``.

    Returns:
        ``step``, ``extra``, ``path``, the ``world_size`` and ``strategy`` of the save, its ``data`` position
        (``epoch``, ``batches``, ``global_batch_size``, or ``None``), and ``notes`` on states of one side.

    Raises:
        CheckpointError: if it is missing, damaged, or of another model, optimizer, scheduler or batch size.
        RankError: if another rank failed.
    """
    lane_of(result.job).wait()  # a save in the background may write what is to be loaded
    cluster = result.job.cluster
    location = Path(path).absolute()

    def find_folder() -> Path:
        with _alternative_named(location):
            return find(location)

    folder = cluster.on_first(find_folder, what="finding the checkpoint")

    def open_source() -> Source:
        with _alternative_named(folder):
            return Source.open(folder, result, data_position=data_position)

    source = cluster.agree(open_source, what="checking the checkpoint")
    if result.optim is not None and any(p.grad is not None for p in result.model.parameters()):
        log.warning("%s: existing gradients are dropped and do not count in later steps.", folder)
        result.optim.zero_grad()
    _check_content(source, cluster)
    # Up to here nothing was changed; a failure from here on leaves a job that is half loaded.
    try:
        source.read(distributed=cluster.distributed)
        source.restore()
    except Exception as error:
        reason = error_text(error).removesuffix(".")
        raise CheckpointError(
            f"loading {folder} failed after a part of it was loaded: {reason}. The model and the optimizer have "
            "changed: load a checkpoint or start over before you continue training. "
            f"{alternative(folder)}"
        ) from error
    if result.job.step.same_weights is not None:
        result.job.step.same_weights.begin_anew()
    manifest, notes = source.manifest, source.notes
    if notes and cluster.rank == 0:
        log.warning("%s: %s", folder, "; ".join(notes))
    return {
        "step": manifest.step,
        "extra": manifest.extra,
        "path": folder,
        "world_size": manifest.world_size,
        "strategy": [(part["name"], part["config"]) for part in manifest.strategy],
        "data": manifest.data,
        "notes": notes,
    }


@contextlib.contextmanager
def _alternative_named(folder: Path) -> Iterator[None]:
    try:
        yield
    except DamagedError as error:
        raise CheckpointError(f"{error} {alternative(folder)}") from error


def _check_content(source: Source, cluster: Cluster) -> None:
    records = source.manifest.files
    if records is None:
        return
    sizes = {name: records[name].size for name in source.files if name in records}
    share = share_of(cluster.rank, cluster.gathered((platform.node(), sizes)))  # of this machine's files

    def check() -> None:
        with _alternative_named(source.folder):
            check_files(source.folder, records, share)

    cluster.agree(check, what="checking the content of the checkpoint")


def resume(path: str | PathLike[str], result: Result, *, data_position: bool = True) -> dict[str, Any] | None:
    """Calls :func:`load` on the latest checkpoint below ``path``, if there is one. Collective.

    For scripts that may be restarted at any moment, on any number of ranks: rank 0 decides for all.

    Args:
        path: the folder given to ``save``; it need not exist yet.
        result: result of ``auto_accelerate``, with the same model.
        data_position: the argument of ``load``.

    Returns:
        The result of ``load``, or ``None`` if there is no complete checkpoint.

    Raises:
        CheckpointError: as ``load`` does, and for a path to a file or to what cannot be read.
        RankError: if another rank failed.
    """
    cluster = result.job.cluster

    def find_latest() -> Path | None:
        _check_folder(Path(path))
        return latest(path)

    folder = cluster.on_first(find_latest, what="looking for a checkpoint")
    return load(folder, result, data_position=data_position) if folder else None


def _check_folder(path: Path) -> None:
    # A folder that does not exist yet is a first start, if a folder above it can be read.
    present = next(ancestor for ancestor in (path.absolute(), *path.absolute().parents) if ancestor.exists())
    if not present.is_dir():
        raise CheckpointError(
            f"{present} is a file, so there are no checkpoints in {path}. Give the folder that is passed to save."
        )
    try:
        os.scandir(present).close()  # fails where it cannot be read
    except OSError as error:
        raise CheckpointError(f"cannot look for checkpoints in {path}: {error}") from error

"""Saving of a checkpoint, complete or not at all."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from os import PathLike
from pathlib import Path
from typing import Any

import torch.distributed as dist

from atorch_ns.checkpoint import folder as folder_module
from atorch_ns.checkpoint.contents import Contents, read_contents, with_all_ranks
from atorch_ns.checkpoint.files import record_files
from atorch_ns.checkpoint.manifest import FileRecord, plain_json
from atorch_ns.checkpoint.tensors import write_tensors
from atorch_ns.errors import CheckpointError
from atorch_ns.job import Job, Result
from atorch_ns.strategy import JSON


class PendingSave:
    """A checkpoint being written by a thread of every rank.

    Args:
        folder: folder of the checkpoint.
        write: function that writes it.
    """

    def __init__(self, folder: Path, write: Callable[[], None]) -> None:
        self.folder = folder
        self._write = write
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=f"atorch_ns save {folder.name}")
        self._thread.start()

    @property
    def done(self) -> bool:
        """Whether it has been written, or has failed."""
        return not self._thread.is_alive()

    def wait(self, timeout_s: float | None = None) -> Path:
        """Waits until all ranks have written.

        Call it on every rank before the process group is destroyed.

        Args:
            timeout_s: seconds to wait; ``None`` for as long as it takes.

        Returns:
            The checkpoint's folder.

        Raises:
            CheckpointError: if it failed (once: the next save goes ahead), or is not done in time.
        """
        self._thread.join(timeout_s)
        if not self.done:
            raise CheckpointError(f"{self.folder} is still being written after {timeout_s} s; wait longer.")
        error, self._error = self._error, None
        if error is not None:
            raise error
        return self.folder

    def _run(self) -> None:
        try:
            self._write()
        except BaseException as error:  # raised by wait()
            self._error = error


class SaveLane:
    """Queue of a job's saves, of which one runs at a time."""

    def __init__(self) -> None:
        self._pending: PendingSave | None = None
        self._group: dist.ProcessGroup | None = None

    def wait(self) -> None:
        """Waits for the background save, if there is one, and raises its error."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.wait()

    def begin(self, pending: PendingSave) -> PendingSave:
        """Registers ``pending``, for which the next save waits."""
        self._pending = pending
        return pending

    def group(self, job: Job) -> dist.ProcessGroup | None:
        """A gloo group of all ranks, for collectives during training. Its first call is collective."""
        if self._group is None and job.cluster.distributed:
            self._group = dist.new_group(backend="gloo")
        return self._group


def lane_of(job: Job) -> SaveLane:
    """The job's lane."""
    if not isinstance(job.save_lane, SaveLane):
        job.save_lane = SaveLane()
    return job.save_lane


def save(
    path: str | PathLike[str],
    result: Result,
    *,
    extra: Mapping[str, JSON] | None = None,
    step: int | None = None,
    position: Mapping[str, int] | None = None,
    asynchronous: bool = False,
) -> PendingSave | None:
    """Saves everything that a run needs to continue, as ``path/step-N``. Collective.

    Saved are the weights (fp32 where the job has fp32 masters) and persistent buffers, the optimizer's states
    and hyperparameters, the scheduler, the loss scaler, every rank's random states, the position in the data
    and the number of steps. It is written through ``torch.distributed.checkpoint``, each rank its own part,
    under names that depend on the model alone, so that any strategy on any number of ranks can load it.

    A checkpoint is complete or absent. If a save is interrupted, the one before stays the latest;
    the next save removes its files. Call it between steps, on every rank.

    Args:
        path: folder that all ranks share, made if it does not exist. One job at a time may save into it.
        result: result of ``auto_accelerate``.
        extra: additional JSON values; rank 0's are saved.
        step: N; ``None`` for ``result.train_step.num_steps``, which the plain training loop does not count.
            A checkpoint of the same step is replaced.
        position: the position in the data where no loader of ``result`` counts it: ``epoch``, its ``batches``
            that are done, and their ``global_batch_size``.
        asynchronous: whether to copy the states to CPU memory and write them while training; one at a time.

    Returns:
        With ``asynchronous``, the pending save; else ``None``.

    Raises:
        CheckpointError: for states that have no form in a checkpoint, a folder that cannot be written or that
            a rank does not see, and for a failure of the previous background save.
        RankError: if another rank failed.
    """
    job = result.job
    lane = lane_of(job)
    lane.wait()  # the save before ends first
    if job.step.same_place is not None:
        job.step.same_place.meet("S")  # all ranks are at this call
    number = result.train_step.num_steps if step is None else step
    part = job.cluster.agree(lambda: _read_states(result, number, extra, position), what="reading the states")
    contents = with_all_ranks(part, job)
    parent = Path(path).absolute()
    folder = _open_folder(parent, number, job)
    if not asynchronous:
        _write_checkpoint(folder, contents, job, None)
        return None
    cpu_contents, group = contents.copied(), lane.group(job)
    target = parent / folder_module.step_name(number)
    return lane.begin(PendingSave(target, lambda: _write_checkpoint(folder, cpu_contents, job, group)))


def _read_states(
    result: Result, step: int, extra: Mapping[str, JSON] | None, position: Mapping[str, int] | None
) -> Contents:
    if isinstance(step, bool) or not isinstance(step, int) or step < 0:
        raise CheckpointError(f"step must be a non-negative integer; it is {step!r}.")
    values: Any = plain_json(dict(extra or {}), what="extra")
    data = position if result.dataloader is None else result.dataloader.state_dict()
    return read_contents(result, step=step, extra=values, data=None if data is None else dict(data))


def _open_folder(parent: Path, step: int, job: Job) -> Path:
    cluster, what = job.cluster, "opening the checkpoint"

    def make() -> Path:
        try:
            folder_module.clean(parent)
            return folder_module.new_folder(parent, step)
        except OSError as error:
            raise CheckpointError(f"cannot write checkpoints to {parent}: {error}") from error

    def check() -> Path:
        if not folder.is_dir():
            raise CheckpointError(
                f"rank 0 created {folder}, but rank {cluster.rank} cannot see it. Save to a folder that all ranks share."
            )
        return folder

    folder = cluster.on_first(make, what=what)
    return cluster.agree(check, what=what)  # every rank sees it


def _write_checkpoint(folder: Path, contents: Contents, job: Job, group: dist.ProcessGroup | None) -> None:
    # Tensors, then digests of what is on the disk, then the manifest: a folder that has it is complete.
    write_tensors(contents.tensors, folder, distributed=job.cluster.distributed, group=group)
    files = _record_written_files(folder, job, group)

    def complete() -> None:
        if job.cluster.rank != 0:
            return
        try:
            contents.manifest.model_copy(update={"files": files}).write(folder)
            folder_module.commit(folder, contents.manifest.step)
        except OSError as error:
            raise CheckpointError(f"cannot complete the checkpoint in {folder.parent}: {error}") from error

    job.cluster.agree(complete, what="completing the checkpoint", group=group)


def _record_written_files(folder: Path, job: Job, group: dist.ProcessGroup | None) -> dict[str, FileRecord]:
    # Each rank reads its own files back. Collective over the group.
    cluster = job.cluster
    records = cluster.agree(
        lambda: record_files(folder, cluster.rank), what="reading what was written", group=group
    )
    all_records = cluster.gathered(records, group=group)
    return {name: record for files in all_records for name, record in files.items()}

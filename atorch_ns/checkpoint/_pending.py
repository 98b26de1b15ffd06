"""A checkpoint that is written in the background, and what one such save needs of the one before."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import torch.distributed as dist

from atorch_ns.errors import CheckpointError
from atorch_ns.job import Job

__all__ = ["PendingSave", "SaveLane", "lane_of"]


class PendingSave:
    """A checkpoint being written by a thread of every rank.

    Args:
        place: where it will be.
        write: writes it.
    """

    def __init__(self, place: Path, write: Callable[[], None]) -> None:
        self.place = place
        self._write = write
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=f"atorch_ns save {place.name}")
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
            raise CheckpointError(f"{self.place} is still being written after {timeout_s} s; wait longer.")
        error, self._error = self._error, None
        if error is not None:
            raise error
        return self.place

    def _run(self) -> None:
        try:
            self._write()
        except BaseException as error:  # raised where somebody waits
            self._error = error


class SaveLane:
    """The saves of one job, one after the other."""

    def __init__(self) -> None:
        self._pending: PendingSave | None = None
        self._group: dist.ProcessGroup | None = None

    def wait(self) -> None:
        """Waits for the save in the background, if any, and raises its error."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.wait()

    def begin(self, pending: PendingSave) -> PendingSave:
        """Makes ``pending`` what the next save waits for."""
        self._pending = pending
        return pending

    def group(self, job: Job) -> dist.ProcessGroup | None:
        """All ranks, connected apart from training, whose collectives may run meanwhile. Collective once."""
        if self._group is None and job.cluster.distributed:
            self._group = dist.new_group(backend="gloo")
        return self._group


def lane_of(job: Job) -> SaveLane:
    """The job's lane."""
    if not isinstance(job.save_lane, SaveLane):
        job.save_lane = SaveLane()
    return job.save_lane

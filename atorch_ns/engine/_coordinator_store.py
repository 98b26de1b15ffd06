"""The folder of a standalone engine: one file for each job under way, and a lock against a second engine."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import os
from dataclasses import dataclass
from pathlib import Path

from atorch_ns.errors import CoordinatorError, InputError
from atorch_ns.search import Candidate, SearchSettings, Setting, from_json, to_json

__all__ = ["JobRecord", "JobStore"]

_LOGGER = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class JobRecord:
    """What a job is made of.

    Attributes:
        job: its name.
        world_size: ranks that take part.
        setting, settings, candidates: of its search.
    """

    job: str
    world_size: int
    setting: Setting
    settings: SearchSettings
    candidates: tuple[Candidate, ...]


class JobStore:
    """Jobs as files.

    A job that cannot be written is served all the same; it does not outlive the engine's process.

    Args:
        folder: made where there is none.

    Raises:
        CoordinatorError: another engine uses it, or it cannot be written.
    """

    def __init__(self, folder: Path) -> None:
        self._jobs = folder / "jobs"
        try:
            self._jobs.mkdir(parents=True, exist_ok=True)
            self._lock = (folder / "engine.lock").open("a")
        except OSError as error:
            raise CoordinatorError(
                f"the history folder {folder} cannot be written: {error.strerror}"
            ) from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self._lock.close()
            raise CoordinatorError(
                f"another engine serves the history folder {folder}; give this one a folder of its own"
            ) from error

    def save(self, record: JobRecord) -> None:
        """Writes a job, whole or not at all."""
        path = self._path(record.job)
        draft = path.with_suffix(".tmp")
        try:
            with draft.open("w") as file:
                file.write(to_json(record))
                file.flush()
                os.fsync(file.fileno())
            draft.replace(path)
        except OSError as error:
            draft.unlink(missing_ok=True)
            _LOGGER.warning("job %s cannot be kept and ends with this process: %s", record.job, error)

    def load(self) -> list[JobRecord]:
        """The jobs under way; what cannot be read is left where it is and said."""
        records = (_read(path) for path in sorted(self._jobs.glob("*.json")))
        return [record for record in records if record is not None]

    def forget(self, job: str) -> None:
        """Removes a job's file, if there is one."""
        with contextlib.suppress(OSError):
            self._path(job).unlink(missing_ok=True)

    def close(self) -> None:
        """Gives up the folder; may be called twice."""
        self._lock.close()

    def _path(self, job: str) -> Path:
        # Names come from the network: none of their characters becomes part of a path.
        return self._jobs / f"{hashlib.sha256(job.encode()).hexdigest()[:32]}.json"


def _read(path: Path) -> JobRecord | None:
    try:
        return from_json(JobRecord, path.read_bytes())
    except (OSError, InputError) as error:
        _LOGGER.warning("the job in %s cannot be read and is left alone: %s", path, error)
        return None

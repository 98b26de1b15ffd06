"""Jobs of a coordinator server: the one search of an ordinary run, or the many of a standalone engine."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from atorch_ns.engine.coordinator.coordinator import Coordinator
from atorch_ns.errors import CoordinatorError, InputError
from atorch_ns.search import Candidate, History, SearchSetting, SearchSettings, from_json, to_json
from atorch_ns.system import write_whole

_LOGGER = logging.getLogger(__name__)


class NoSuchJobError(CoordinatorError):
    """A call for a job that this server does not have."""


@dataclass(frozen=True, kw_only=True)
class JobRecord:
    """A job of a standalone engine.

    Attributes:
        job: name of the job.
        world_size: number of ranks.
        setting, settings, candidates: arguments of its search.
    """

    job: str
    world_size: int
    setting: SearchSetting
    settings: SearchSettings
    candidates: tuple[Candidate, ...]


class OneJob:
    """The one search of an ordinary run; its job has no name."""

    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator = coordinator
        self.tick = coordinator.tick

    def get(self, job: str) -> Coordinator:
        """The coordinator, if the call is for no other job."""
        if job:
            raise NoSuchJobError(f"job '{job}' does not exist here: this coordinator serves only one search")
        return self._coordinator

    def create(self, record: JobRecord) -> int:
        """Refuses, since the search exists from the start."""
        raise CoordinatorError(
            "this coordinator serves only one search; create jobs on `atorch-ns engine serve`"
        )

    def close(self, timeout_s: float) -> None:
        """Waits until all ranks have left, if the search is over."""
        if self._coordinator.over is not None:
            self._coordinator.wait_until_left(timeout_s)


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
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # ends with the process, even when killed
        except OSError as error:
            self._lock.close()
            raise CoordinatorError(
                f"another engine serves the history folder {folder}; give this engine a separate folder"
            ) from error

    def save(self, record: JobRecord) -> None:
        """Writes a job, whole or not at all."""
        try:
            write_whole(self._record_path(record.job), to_json(record))
        except OSError as error:
            _LOGGER.warning("job %s cannot be saved and ends with this process: %s", record.job, error)

    def load(self) -> list[JobRecord]:
        """The jobs under way; a file that cannot be read is logged and left."""
        records = []
        for path in sorted(self._jobs.glob("*.json")):
            try:
                records.append(from_json(JobRecord, path.read_bytes()))
            except (OSError, InputError) as error:
                _LOGGER.warning("the job in %s cannot be read and is skipped: %s", path, error)
        return records

    def forget(self, job: str) -> None:
        """Removes a job's file, if there is one."""
        with contextlib.suppress(OSError):
            self._record_path(job).unlink(missing_ok=True)

    def close(self) -> None:
        """Gives up the folder; may be called twice."""
        self._lock.close()

    def _record_path(self, job: str) -> Path:
        # Names come from the network: none of their characters becomes part of a path.
        return self._jobs / f"{hashlib.sha256(job.encode()).hexdigest()[:32]}.json"


_MAX_JOBS = 64  # jobs under way at once


@dataclass(kw_only=True)
class _Served:
    record: JobRecord
    coordinator: Coordinator
    ended: float | None = None  # on the clock of EngineJobs


class EngineJobs:
    """Searches of many jobs over one history. Thread-safe.

    A job whose fingerprint the history knows begins with the strategy found before; if one trial confirms it,
    the search ends. Jobs that were under way when the engine ended go on from their trials.

    Args:
        folder: ``history.jsonl`` with all trials, and ``jobs/`` with the jobs under way.
        clock: seconds, monotonic.
        heartbeat_timeout_s: a rank that is silent for longer has vanished.
        join_timeout_s: how long a new job waits for its ranks.
        rejoin_timeout_s: how long a job that was taken up again waits for them.
        keep_s: seconds for which the outcome of a job can be fetched.

    Raises:
        CoordinatorError: another engine uses the folder, or it cannot be written.
    """

    def __init__(
        self,
        folder: Path,
        *,
        clock: Callable[[], float] = time.monotonic,
        heartbeat_timeout_s: float = 10.0,
        join_timeout_s: float = 300.0,
        rejoin_timeout_s: float = 30.0,
        keep_s: float = 300.0,
    ) -> None:
        self._clock, self._keep_s = clock, keep_s
        self._heartbeat_timeout_s, self._join_timeout_s = heartbeat_timeout_s, join_timeout_s
        self._lock = threading.RLock()
        self._jobs: dict[str, _Served] = {}
        self._store = JobStore(folder)
        try:
            self._history = History(folder / "history.jsonl", on_note=_LOGGER.warning)
            for record in self._store.load():
                try:
                    num_trials = self._start_coordinator(record, rejoin_timeout_s)
                except Exception:  # the other jobs go on, as beside a file that cannot be read
                    _LOGGER.exception("job %s cannot continue and is skipped", record.job)
                    continue
                _LOGGER.info("job %s goes on after %d trials", record.job, num_trials)
        except BaseException:
            self._store.close()
            raise

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the jobs under way."""
        with self._lock:
            return tuple(name for name, job in self._jobs.items() if job.ended is None)

    def get(self, job: str) -> Coordinator:
        """The coordinator of a job.

        Raises:
            NoSuchJobError: there is none, or it was over long ago.
        """
        with self._lock:
            if (entry := self._jobs.get(job)) is None:
                raise NoSuchJobError(f"job '{job}' does not exist on this engine, or it ended long ago")
            return entry.coordinator

    def create(self, record: JobRecord) -> int:
        """Makes a job. The same call again keeps the existing job.

        Returns:
            Number of trials taken over from an unfinished search, or 1 for a known strategy.

        Raises:
            CoordinatorError: another job has this name, or there are too many.
        """
        with self._lock:
            if (entry := self._jobs.get(record.job)) is not None:
                if entry.record != record:
                    raise CoordinatorError(f"the name '{record.job}' is taken; choose another name")
                return 0  # the same call again: its answer was lost
            if len(self.names) >= _MAX_JOBS:
                raise CoordinatorError(f"this engine serves {_MAX_JOBS} jobs already; try again later")
            self._store.save(record)  # first: no rank may join a job that a restart forgets
            try:
                taken_over = self._start_coordinator(record, self._join_timeout_s)
            except Exception:
                self._store.forget(record.job)  # or no engine could start on this folder again
                raise
        _LOGGER.info("job %s: %d ranks, %d candidates", record.job, record.world_size, len(record.candidates))
        return taken_over

    def tick(self) -> None:
        """Moves all coordinators, records the jobs that have ended, and forgets those that ended long ago."""
        with self._lock:
            jobs = list(self._jobs.items())
        now = self._clock()
        for name, job in jobs:  # without the lock, so that calls of other jobs are answered meanwhile
            job.coordinator.tick()
            if job.ended is None and job.coordinator.over is not None:
                self._conclude_job(job, now)
            elif job.ended is not None and now - job.ended > self._keep_s:
                with self._lock:
                    del self._jobs[name]

    def close(self, timeout_s: float) -> None:
        """Waits until ranks know of an end that has come; jobs under way stay in the folder."""
        with self._lock:
            jobs = list(self._jobs.values())
        limit = time.monotonic() + timeout_s
        for job in jobs:
            if job.coordinator.over is not None:
                job.coordinator.wait_until_left(max(0.0, limit - time.monotonic()))
        self.tick()  # writes the ends that have come meanwhile into the history
        self._store.close()

    def _start_coordinator(self, record: JobRecord, join_timeout_s: float) -> int:
        search, taken_over = self._history.begin(record.setting, record.settings, record.candidates)
        coordinator = Coordinator(
            search,
            record.world_size,
            candidates=record.candidates,
            heartbeat_timeout_s=self._heartbeat_timeout_s,
            join_timeout_s=join_timeout_s,
        )
        self._jobs[record.job] = _Served(record=record, coordinator=coordinator)
        return taken_over

    def _conclude_job(self, job: _Served, now: float) -> None:
        job.ended = now
        over = job.coordinator.over
        # A search that somebody ended goes on from its trials when the job comes again.
        if over is not None and over.outcome is not None and not job.coordinator.cancelled:
            self._history.conclude(over.outcome)
        self._store.forget(job.record.job)
        _LOGGER.info("job %s is over%s", job.record.job, f": {over.error}" if over and over.error else "")

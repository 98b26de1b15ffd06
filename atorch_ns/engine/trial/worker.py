"""TrialWorker: runs the trials of one rank, each in a fresh process of its own."""

from __future__ import annotations

import contextlib
import itertools
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, Self

import torch

from atorch_ns.cluster import Cluster
from atorch_ns.engine.trial.pickling import pack
from atorch_ns.engine.trial.process import Rendezvous, TrialSetting
from atorch_ns.engine.trial.report import RankReport
from atorch_ns.engine.trial.watch import TrialWatch
from atorch_ns.engine.trial.worker_process import WorkerProcess
from atorch_ns.job import Inputs, is_on_meta
from atorch_ns.search import TrialStatus, TrialTask


def new_log_folder(path: Path | None) -> tuple[Path, str]:
    """A folder for the logs of one search, on its first rank.

    It belongs to this search alone: reports of earlier ones name the files of theirs.

    Args:
        path: the folder to make, numbered where its name is taken; ``None`` for a temporary one.

    Returns:
        The folder, and why it is a temporary one although ``path`` was given; else an empty text.
    """
    problem = ""
    if path is not None:
        try:
            return _make_numbered_folder(path), ""
        except OSError as error:
            problem = f"logs of trials cannot be kept in {path}: {error}"
    folder = Path(tempfile.mkdtemp(prefix="atorch_ns_trials_"))
    return folder, f"{problem}; they are in {folder}" if problem else ""


@contextlib.contextmanager
def log_folder(shared: Path) -> Iterator[Path]:
    """The folder on this rank's machine; a temporary one of its own where it cannot be made there.

    A machine's last rank removes it in the end if it holds only empty files, which killed ranks leave.
    """
    try:
        shared.mkdir(mode=0o700, exist_ok=True)
        folder = shared
    except OSError:
        folder = Path(tempfile.mkdtemp(prefix="atorch_ns_trials_"))
    try:
        yield folder
    finally:
        with contextlib.suppress(OSError):
            for path in folder.iterdir():
                _remove_if_empty(path)
            folder.rmdir()


def _make_numbered_folder(path: Path) -> Path:
    for number in itertools.count(1):
        folder = path if number == 1 else path.with_name(f"{path.name}-{number}")
        with contextlib.suppress(FileExistsError):
            folder.mkdir()
            return folder
    raise AssertionError("not reached")


_POLL_S: Final = 0.05
_START_LIMIT_S: Final = 300.0  # for importing torch, methods and the user's modules from a slow disk
_NO_FAILURE: Final = ("ok", "stopped early", "cancelled")


class TrialWorker:
    """Runs trials in forks of a helper process that has everything imported (the zygote).

    The user's process never holds a trial's memory and does not die of a trial. It is left as it was:
    weights, random states and environment are only read. The helper starts when the worker is made and is
    waited for by the first trial; one that dies is started again.

    Args:
        inputs: the user's objects, with a small dataset: everything but the weights is sent.
        cluster: cluster as this rank sees it.
        rendezvous: address at which the ranks of a trial meet; ``None`` for one rank.
        log_dir: folder of the log files, one for each trial that printed anything.
        memory_limit_bytes: a trial that needs more than this is "out of memory"; ``None`` for no limit.
        enforce_limit: whether the system enforces that limit on trials, as on the training that is to follow.
        keep_logs: whether logs of trials that ran well, and of the helper itself, are kept, too.
        carried: state that methods carry to the helper, by their names.

    Raises:
        InputError: if an argument cannot be sent to another process; the message names it.
    """

    def __init__(
        self,
        inputs: Inputs,
        cluster: Cluster,
        *,
        rendezvous: Rendezvous | None,
        log_dir: Path,
        memory_limit_bytes: int | None = None,
        enforce_limit: bool = False,
        keep_logs: bool = True,
        carried: Mapping[str, Any] | None = None,
    ) -> None:
        self._method_states = carried
        self._keep_logs = keep_logs
        self._keep_own_log = keep_logs
        self._inputs = inputs
        self._rank = cluster.rank
        self._log_dir = Path(log_dir)
        self._log_dir.mkdir(parents=True, exist_ok=True)
        self._by_value: tuple[str, ...] = ()
        self._setting = TrialSetting(
            cluster=cluster,
            rendezvous=rendezvous,
            num_threads=torch.get_num_threads(),
            matmul_precision=torch.get_float32_matmul_precision(),
            default_dtype=torch.get_default_dtype(),
            memory_limit_bytes=memory_limit_bytes,
            enforce_limit=enforce_limit,
            begins_whole=cluster.device_type == "cpu" and not is_on_meta(inputs.model),
        )
        self._job = pack(inputs, carried=carried)
        self._process: WorkerProcess | None = self._start_process()

    def run(self, task: TrialTask, cancelled: Callable[[], bool]) -> RankReport:
        """Runs a trial; see :class:`~atorch_ns.engine.Worker`.

        The deadline counts once the helper is ready. A cancelled or late trial is killed with all it started.
        """
        if task.kind == "single" and self._rank:  # rank 0 runs it alone
            return RankReport(task_id=task.id, rank=self._rank, status="ok")
        process = self._ready_process(task, cancelled)
        if isinstance(process, RankReport):
            return process
        log = self._log_dir / f"trial-{task.id}-{task.attempt}-rank{self._rank}.log"
        watch = TrialWatch(process, task, self._rank, log)
        try:
            report = watch.follow(cancelled)
        except BaseException:  # Ctrl-C: nothing may be left running
            watch.kill()
            raise
        finally:
            if not process.alive:  # the next trial starts another
                process.close()
                self._process = None
        self._keep_own_log |= self._process is None and report.status not in _NO_FAILURE
        return self._with_log(report, log, overran=report.total_seconds > task.deadline_s)

    def close(self) -> None:
        """Ends the helper and its trial. May be called twice."""
        if self._process is not None:
            self._process.close()
            self._process = None
        if not self._keep_own_log:
            self._own_log.unlink(missing_ok=True)
        _remove_if_empty(self._own_log)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def _own_log(self) -> Path:
        return self._log_dir / f"worker-rank{self._rank}.log"

    def _start_process(self) -> WorkerProcess:
        return WorkerProcess(self._setting, self._job, self._own_log)

    def _ready_process(self, task: TrialTask, cancelled: Callable[[], bool]) -> WorkerProcess | RankReport:
        limit = time.monotonic() + _START_LIMIT_S
        while True:
            if self._process is None:
                self._process = self._start_process()
            process = self._process
            if process.ready:
                return process
            process.event(_POLL_S)
            status, reason = self._find_obstacle(process, limit)
            if reason:
                process.close()
                self._process = None
                self._keep_own_log = True
                return RankReport(task_id=task.id, rank=self._rank, status=status, reason=reason)
            if cancelled():
                reason = "it was ended while the process that runs trials was still importing"
                return RankReport(task_id=task.id, rank=self._rank, status="cancelled", reason=reason)

    def _find_obstacle(self, process: WorkerProcess, limit: float) -> tuple[TrialStatus, str]:
        if process.broken is not None:
            missing = process.broken["missing"]
            # A module that the helper cannot import: its classes and functions are sent by value instead.
            if missing in sys.modules and missing not in self._by_value:
                self._by_value += (missing,)
                self._job = pack(self._inputs, by_value=self._by_value, carried=self._method_states)
                process.close()
                self._own_log.unlink(missing_ok=True)  # it names the module that is sent now
                self._process = self._start_process()
                return "ok", ""
            return "raised", (
                f"the arguments cannot be rebuilt in another process: {process.broken['reason']}. "
                f"Its output is in {self._own_log}"
            )
        if not process.ready and not process.alive:
            return "died", (
                f"the trial worker ended while it started: {process.how_it_died()}. Its output is in "
                f"{self._own_log}"
            )
        if time.monotonic() > limit:
            return "hung", f"the trial worker was not ready within {_START_LIMIT_S:.0f} s"
        return "ok", ""

    def _with_log(self, report: RankReport, log: Path, *, overran: bool) -> RankReport:
        # The log of a rank that was late is kept, as the coordinator may find it to be the cause.
        if not self._keep_logs and report.status in _NO_FAILURE and not overran:
            log.unlink(missing_ok=True)
        _remove_if_empty(log)
        return replace(report, log=str(log) if log.exists() else "")


def _remove_if_empty(path: Path) -> None:
    with contextlib.suppress(OSError):
        if path.stat().st_size == 0:
            path.unlink()

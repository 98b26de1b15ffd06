"""The parent's side of forked ranks: start them, watch them, ask for stacks, stop them, collect.

What happens inside a forked rank: enter the environment, run the function, report, wait, leave.

A rank leaves by ``os._exit``: a process that holds a DeviceMesh may abort while Python finalises. It leaves
only when the parent says that every rank has reported, so that no rank loses its peer inside the last
collective.
"""

from __future__ import annotations

import contextlib
import faulthandler
import io
import os
import pickle
import random
import select
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Literal, NoReturn

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

# A rank whose parent has vanished ends by itself this long after the time limit.
_ORPHAN_GRACE_S: Final = 30.0
# A rank that raised keeps its connections open this long, so that peers finish the collective they share.
_LINGER_S: Final = 2.0


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What all ranks of one run share.

    Attributes:
        num_ranks: the world size.
        folder: where the ranks' files lie.
        timeout_s: the time limit that the parent holds, in seconds.
        env: additions to the environment of every rank.
        master_port: the port for ``env://``; None when the rank itself starts the process group here.
    """

    num_ranks: int
    folder: Path
    timeout_s: float
    env: Mapping[str, str]
    master_port: int | None

    def files(self, rank: int) -> RankFiles:
        """The files of one rank."""
        return RankFiles(
            report=self.folder / f"report_{rank}",
            output=self.folder / f"output_{rank}",
            stacks=self.folder / f"stacks_{rank}",
        )


@dataclass(frozen=True, kw_only=True)
class RankFiles:
    """Where a rank writes its report, what it prints, and its stacks when it is asked for them."""

    report: Path
    output: Path
    stacks: Path


@dataclass(frozen=True, kw_only=True)
class Report:
    """How the function ended on one rank.

    Attributes:
        value: the pickled return value; None when the function raised.
        error: the pickled exception; None when there is none or it does not survive pickling.
        error_type: the name of the exception's class, empty when there is none.
        message: ``str(exception)``.
        traceback: the formatted traceback.
    """

    value: bytes | None = None
    error: bytes | None = field(default=None, repr=False)
    error_type: str = ""
    message: str = ""
    traceback: str = ""


def rank_main(
    fn: Callable[..., Any], args: tuple[Any, ...], setup: Setup, rank: int, release_fd: int
) -> NoReturn:
    """Be rank ``rank`` until the parent closes the other end of ``release_fd``; never returns."""
    exit_code = 1
    try:
        files = setup.files(rank)
        _redirect_output(files.output)
        _arm_stack_dumps(files, setup)
        try:
            _enter(setup, rank)
            report = Report(value=_pickled(fn(*args)))
        except BaseException as error:  # SystemExit too: the report is the only way out of a rank
            report = _error_report(error)
        sys.stdout.flush()
        sys.stderr.flush()
        _write(files.report, report)
        select.select([release_fd], [], [], None if report.value is not None else _LINGER_S)
        exit_code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(exit_code)


def rank_environment(setup: Setup, rank: int) -> dict[str, str]:
    """The variables a launcher would set for this rank on one node."""
    variables = {
        "RANK": str(rank),
        "WORLD_SIZE": str(setup.num_ranks),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(setup.num_ranks),
    }
    if setup.master_port is not None:
        variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(setup.master_port)}
    return variables | dict(setup.env)


def _enter(setup: Setup, rank: int) -> None:
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name, None)
    os.environ.update(rank_environment(setup, rank))
    # A rank leaves without cleaning up: its temporary files go when the run's folder goes.
    tempfile.tempdir = str(setup.folder)
    # Ranks that a launcher starts share no random state: a test must not pass because they do here.
    random.seed(rank)
    torch.manual_seed(rank)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(rank)
    if setup.master_port is None:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{setup.folder / 'store'}",
            rank=rank,
            world_size=setup.num_ranks,
            timeout=timedelta(seconds=setup.timeout_s + _ORPHAN_GRACE_S),
        )


def _redirect_output(path: Path) -> None:
    """Send what Python and C libraries print to a file; the parent's captured streams stay untouched."""
    with path.open("ab") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)


def _arm_stack_dumps(files: RankFiles, setup: Setup) -> None:
    """Stacks on SIGUSR1 and on a crash; the end of a rank that nobody waits for any more."""
    stacks = os.open(files.stacks, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    faulthandler.enable(file=2)
    faulthandler.register(signal.SIGUSR1, file=stacks)
    faulthandler.dump_traceback_later(setup.timeout_s + _ORPHAN_GRACE_S, exit=True, file=stacks)


class _Pickler(pickle.Pickler):
    """Refuses what would be rebuilt without its ranks."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, (DTensor, DeviceMesh)):
            raise pickle.PicklingError(f"a {type(value).__name__} belongs to its ranks")
        return NotImplemented


def _pickled(value: Any) -> bytes:
    data = io.BytesIO()
    try:
        _Pickler(data).dump(value)
    except Exception as error:
        raise TypeError(
            f"the rank's return value of type {type(value).__name__} cannot be sent back: {error}. "
            "Return CPU tensors (full_tensor() of a DTensor) and plain Python values."
        ) from error
    return data.getvalue()


def _error_report(error: BaseException) -> Report:
    return Report(
        error=_surviving_pickle(error),
        error_type=type(error).__name__,
        message=str(error),
        traceback="".join(traceback.format_exception(error)),
    )


def _surviving_pickle(error: BaseException) -> bytes | None:
    """The pickled exception if it can be rebuilt from it: many exceptions cannot."""
    try:
        data = pickle.dumps(error)
        pickle.loads(data)
    except Exception:
        return None
    return data


def _write(path: Path, report: Report) -> None:
    partial = path.with_name(f"{path.name}.{time.monotonic_ns()}")
    partial.write_bytes(pickle.dumps(report))
    partial.replace(path)


_POLL_S: Final = 0.003
# After a first failure the others get this long to fail as well: often all fail for the same reason.
_FAILURE_GRACE_S: Final = 0.5
_STACKS_WAIT_S: Final = 2.0
_EXIT_WAIT_S: Final = 5.0


@dataclass(frozen=True, kw_only=True)
class Ended:
    """What is left of a rank.

    Attributes:
        rank: which.
        report: what it reported, if it came to that.
        stopped: why it was stopped before it reported; None when it was not.
        exit_code: the process's exit code, minus the signal's number when a signal ended it.
        stacks: its threads' stacks, when it was stopped.
        output: what it printed.
        seconds: from the start to its end.
    """

    rank: int
    report: Report | None
    stopped: Literal["timed_out", "stopped"] | None
    exit_code: int
    stacks: str
    output: str
    seconds: float

    def how_it_died(self) -> str:
        """The exit of a rank that never reported, in words."""
        if self.exit_code >= 0:
            return f"the process left with exit code {self.exit_code} before the function returned"
        with contextlib.suppress(ValueError):
            return f"the process was ended by {signal.Signals(-self.exit_code).name}"
        return f"the process was ended by signal {-self.exit_code}"


@dataclass(kw_only=True)
class _Rank:
    """A forked rank as the parent sees it."""

    rank: int
    pid: int
    files: RankFiles
    exit_code: int | None = None
    seconds: float | None = None
    stopped: Literal["timed_out", "stopped"] | None = None

    def poll(self) -> None:
        """Take note of its exit, and end whatever it started and left behind."""
        if self.exit_code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.exit_code = os.waitstatus_to_exitcode(status)
                self._kill_group()

    def has_reported(self) -> bool:
        return self.files.report.exists()

    def failed(self) -> bool:
        if self.has_reported():
            report: Report = pickle.loads(self.files.report.read_bytes())
            return report.value is None
        return self.exit_code is not None

    def ask_for_stacks(self) -> None:
        if self.exit_code is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGUSR1)

    def kill(self) -> None:
        """End the process and all it started; returns when it is gone."""
        if self.exit_code is None:
            self._kill_group()
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
            self.exit_code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

    def _kill_group(self) -> None:
        # The group's number cannot be anybody else's as long as a process is left in it.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)

    def ended(self) -> Ended:
        report = pickle.loads(self.files.report.read_bytes()) if self.has_reported() else None
        return Ended(
            rank=self.rank,
            report=report,
            stopped=self.stopped if report is None else None,
            exit_code=self.exit_code if self.exit_code is not None else 0,
            stacks=_without_harness(_text(self.files.stacks)),
            output=_text(self.files.output),
            seconds=self.seconds or 0.0,
        )


def _text(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""


def _without_harness(stacks: str) -> str:
    """Stacks (innermost call first) without the calls that led to the rank's function."""
    kept, inside = [], True
    for line in stacks.splitlines():
        inside = (inside or not line.startswith("  ")) and "in rank_main" not in line
        if inside:
            kept.append(line)
    return "\n".join(kept)


class RankPool:
    """The ranks of one run; leaving the ``with`` block ends every one of them, whatever happened."""

    def __init__(self, fn: Callable[..., Any], args: tuple[Any, ...], setup: Setup) -> None:
        self._setup = setup
        self._ranks: list[_Rank] = []
        self._release_fd: int | None = None
        self._call = (fn, args)

    def __enter__(self) -> RankPool:
        sys.stdout.flush()
        sys.stderr.flush()
        self._start = time.monotonic()
        try:
            self._fork_all()
        except BaseException:
            self._end_all()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end_all()

    def wait(self, *, stop_on_failure: bool) -> None:
        """Until every rank has reported or died, the time limit, or (if asked) shortly after a failure."""
        deadline = self._start + self._setup.timeout_s
        why: Literal["timed_out", "stopped"] = "timed_out"
        seen: set[int] = set()
        while running := self._running():
            now = time.monotonic()
            ended = {rank.rank for rank in self._ranks if rank not in running}
            if stop_on_failure and any(self._ranks[rank].failed() for rank in ended - seen):
                if now + _FAILURE_GRACE_S < deadline:
                    deadline, why = now + _FAILURE_GRACE_S, "stopped"
                stop_on_failure = False
            seen |= ended
            if now >= deadline:
                self._stop(running, why)
                return
            time.sleep(_POLL_S)

    def finish(self) -> list[Ended]:
        """Let the ranks that have reported go, and collect what all of them left."""
        self._release()
        limit = time.monotonic() + _EXIT_WAIT_S
        while time.monotonic() < limit:
            for rank in self._ranks:
                rank.poll()
            if all(rank.exit_code is not None for rank in self._ranks):
                break
            time.sleep(_POLL_S)
        self._end_all()
        return [rank.ended() for rank in self._ranks]

    def _fork_all(self) -> None:
        fn, args = self._call
        release_end, self._release_fd = os.pipe()
        try:
            for rank in range(self._setup.num_ranks):
                with warnings.catch_warnings():
                    # Python 3.12 warns when the parent has threads; ours run no operators.
                    warnings.simplefilter("ignore", DeprecationWarning)
                    pid = os.fork()
                if pid == 0:
                    # From here on this is the rank. It must never run a line of the caller's again.
                    try:
                        os.setpgid(0, 0)
                        os.close(self._release_fd)
                        rank_main(fn, args, self._setup, rank, release_end)
                    finally:
                        os._exit(1)
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.setpgid(pid, pid)  # the rank does so too; whoever comes first
                self._ranks.append(_Rank(rank=rank, pid=pid, files=self._setup.files(rank)))
        finally:
            os.close(release_end)

    def _running(self) -> list[_Rank]:
        """The ranks that have neither reported nor died."""
        running = []
        for rank in self._ranks:
            rank.poll()
            if rank.exit_code is None and not rank.has_reported():
                running.append(rank)
            elif rank.seconds is None:
                rank.seconds = time.monotonic() - self._start
        return running

    def _stop(self, running: list[_Rank], why: Literal["timed_out", "stopped"]) -> None:
        for rank in running:
            rank.stopped, rank.seconds = why, time.monotonic() - self._start
            rank.ask_for_stacks()
        self._await_stacks(running)
        for rank in running:
            rank.kill()

    def _await_stacks(self, running: list[_Rank]) -> None:
        """Until every stack file has stopped growing: the handler writes line by line."""
        limit = time.monotonic() + _STACKS_WAIT_S
        sizes: list[int] = []
        while time.monotonic() < limit:
            time.sleep(0.05)
            before, sizes = sizes, [len(_text(rank.files.stacks)) for rank in running]
            if sizes == before and all(sizes):
                return

    def _release(self) -> None:
        if self._release_fd is not None:
            os.close(self._release_fd)
            self._release_fd = None

    def _end_all(self) -> None:
        self._release()
        for rank in self._ranks:
            rank.kill()

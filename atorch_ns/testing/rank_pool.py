"""Forked ranks: the program of a rank, and the supervisor that starts, watches, stops and collects them.

A rank exits by ``os._exit``: a process that holds a DeviceMesh may abort while Python finalises. It waits for
the parent's signal that every rank has reported, so that no rank loses its peer inside the last collective.
"""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import select
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, Final, Generic, Literal, NamedTuple, NoReturn, TypeVar

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from atorch_ns.capture.random_states import seed_all
from atorch_ns.system import arm_stack_dumps, kill_group, redirect_output, write_whole
from atorch_ns.text import signal_text, with_article

T = TypeVar("T")

# A rank whose parent has vanished ends by itself this long after the time limit.
_ORPHAN_GRACE_S: Final = 30.0
# A rank that raised keeps its connections open this long, so that peers finish the collective they share.
_LINGER_S: Final = 2.0


@dataclass(frozen=True, kw_only=True)
class Setup:
    """Settings of one run, shared by its ranks.

    Attributes:
        num_ranks: the world size.
        folder: folder of the ranks' files.
        timeout_s: the parent's time limit, in seconds.
        env: additions to the environment of every rank.
        master_port: the port for ``env://``; None when the default group is started before the function.
    """

    num_ranks: int
    folder: Path
    timeout_s: float
    env: Mapping[str, str]
    master_port: int | None

    def files(self, rank: int) -> RankFiles:
        """The files of one rank."""
        return RankFiles(*(self.folder / f"{kind}_{rank}" for kind in RankFiles._fields))


class RankFiles(NamedTuple):
    """Files of a rank: its report, its output, and its stacks on request."""

    report: Path
    output: Path
    stacks: Path


@dataclass(frozen=True, kw_only=True)
class WorkerReport:
    """Outcome of the function on one rank, as the rank reports it.

    Attributes:
        value: the pickled return value; None when the function raised.
        error: the pickled exception; None when there is none or it cannot be rebuilt from its pickle.
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
    """Runs this process as ``rank`` until the parent closes the other end of ``release_fd``."""
    exit_code = 1
    try:
        files = setup.files(rank)
        redirect_output(files.output)
        stacks = os.open(files.stacks, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        arm_stack_dumps(setup.timeout_s + _ORPHAN_GRACE_S, stacks)
        try:
            _set_up_rank(setup, rank)
            report = WorkerReport(value=_pickle_value(fn(*args)))
        except BaseException as error:  # SystemExit too: the report is the only way out of a rank
            report = WorkerReport(
                error=_surviving_pickle(error),
                error_type=type(error).__name__,
                message=str(error),
                traceback="".join(traceback.format_exception(error)),
            )
        sys.stdout.flush()  # os._exit does not flush
        sys.stderr.flush()
        write_whole(files.report, pickle.dumps(report), durable=False)
        # A rank waits for its release, so that no peer loses it in a collective; one that raised waits less.
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


def _set_up_rank(setup: Setup, rank: int) -> None:
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name, None)  # those of a launcher
    os.environ.update(rank_environment(setup, rank))
    # A rank leaves without cleaning up: its temporary files go when the run's folder goes.
    tempfile.tempdir = str(setup.folder)
    # Ranks that a launcher starts share no random state: a test must not pass because they do here.
    seed_all(rank)
    if setup.master_port is None:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{setup.folder / 'store'}",
            rank=rank,
            world_size=setup.num_ranks,
            timeout=timedelta(seconds=setup.timeout_s + _ORPHAN_GRACE_S),
        )


class _Pickler(pickle.Pickler):
    """Refuses DTensors and meshes, which would be rebuilt without their ranks."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, (DTensor, DeviceMesh)):
            raise pickle.PicklingError(f"{with_article(value)} is valid only on its ranks")
        return NotImplemented


def _pickle_value(value: Any) -> bytes:
    data = io.BytesIO()
    try:
        _Pickler(data).dump(value)
    except Exception as error:
        raise TypeError(
            f"the rank's return value of type {type(value).__name__} cannot be sent back: {error}. "
            "Return CPU tensors (full_tensor() of a DTensor) and plain Python values."
        ) from error
    return data.getvalue()


def _surviving_pickle(error: BaseException) -> bytes | None:
    try:
        data = pickle.dumps(error)
        pickle.loads(data)  # many exceptions cannot be rebuilt
    except Exception:
        return None
    return data


_POLL_S: Final = 0.003
# After a first failure the others get this long to fail as well: often all fail for the same reason.
_FAILURE_GRACE_S: Final = 0.5
_STACKS_WAIT_S: Final = 2.0  # for ranks to write their stacks
_EXIT_WAIT_S: Final = 5.0  # until ranks are killed


Status = Literal["returned", "raised", "died", "timed_out", "stopped"]
_MAX_OUTPUT_CHARS: Final = 4000


@dataclass(frozen=True, kw_only=True)
class Outcome(Generic[T]):
    """Outcome of a call on one rank.

    Attributes:
        rank: number of the rank.
        status: "returned"; "raised" an exception; "died" without a report (a crash, a signal, an exit);
            "timed_out"; or "stopped" by us since another rank had failed.
        value: the function's return value; None unless ``status`` is "returned".
        error: the exception, when it can be rebuilt in this process.
        error_type: the name of the exception's class; empty when there is none.
        message: the exception's text, or the reason of a rank's death.
        traceback: the exception's traceback; of a stopped or timed-out rank, the stacks of its threads.
        output: text that the rank wrote to stdout and stderr.
        seconds: time from the start of all ranks to this one's end.
    """

    rank: int
    status: Status
    value: T | None = None
    error: BaseException | None = None
    error_type: str = ""
    message: str = ""
    traceback: str = ""
    output: str = ""
    seconds: float = 0.0

    def describe(self) -> str:
        """Several lines: what happened, where, and the end of the rank's output."""
        what = {"raised": f"raised {self.error_type}", "timed_out": "timed out", "stopped": "was stopped"}
        head = f"--- rank {self.rank} {what.get(self.status, self.status)} after {self.seconds:.1f} s"
        reason = self.traceback or self.message
        text = self.output[-_MAX_OUTPUT_CHARS:].strip()
        tail = f"\n... printed by rank {self.rank}:\n{text}" if text else ""
        return f"{head}\n{reason.rstrip()}{tail}"


@dataclass(kw_only=True)
class _Rank:
    rank: int
    pid: int
    files: RankFiles
    exit_code: int | None = None
    seconds: float | None = None
    stopped: Literal["timed_out", "stopped"] | None = None

    def poll(self) -> None:
        """Records its exit, and ends the processes that it started and left running."""
        if self.exit_code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.exit_code = os.waitstatus_to_exitcode(status)
                kill_group(self.pid)  # what it started and left running

    def has_reported(self) -> bool:
        return self.files.report.exists()

    def has_failed(self) -> bool:
        return self._read_report().value is None if self.has_reported() else self.exit_code is not None

    def ask_for_stacks(self) -> None:
        if self.exit_code is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGUSR1)

    def kill(self) -> None:
        """Ends the process and all it started; returns when it is gone."""
        if self.exit_code is None:
            kill_group(self.pid)
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
            self.exit_code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

    def outcome(self) -> Outcome[Any]:
        base = Outcome[Any](
            rank=self.rank,
            status=self.stopped or "died",
            output=_read_text(self.files.output),
            seconds=self.seconds or 0.0,
        )
        if not self.has_reported():
            if self.stopped:
                return replace(base, traceback=_without_harness(_read_text(self.files.stacks)))
            return replace(base, message=_death_message(self.exit_code or 0))
        report = self._read_report()
        if report.value is None:
            return replace(
                base,
                status="raised",
                error=_unpickle_error(report.error),
                error_type=report.error_type,
                message=report.message,
                traceback=report.traceback,
            )
        try:
            return replace(base, status="returned", value=pickle.loads(report.value))
        except Exception as error:
            text = f"the return value cannot be rebuilt outside the rank: {error!r}. Return CPU tensors."
            return replace(base, status="raised", error=error, error_type=type(error).__name__, message=text)

    def _read_report(self) -> WorkerReport:
        report: WorkerReport = pickle.loads(self.files.report.read_bytes())
        return report


def _unpickle_error(error: bytes | None) -> BaseException | None:
    rebuilt: BaseException | None = None
    with contextlib.suppress(Exception):  # this process may lack the class
        rebuilt = None if error is None else pickle.loads(error)
    return rebuilt


def _death_message(exit_code: int) -> str:
    if exit_code >= 0:  # signals are negative
        return f"the process left with exit code {exit_code} before the function returned"
    return f"the process was ended by {signal_text(-exit_code)}"


def _read_text(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""


def _without_harness(stacks: str) -> str:
    # The innermost call comes first: what follows rank_main has led to the rank's function.
    lines, inside = [], True
    for line in stacks.splitlines():
        inside = (inside or not line.startswith("  ")) and "in rank_main" not in line
        if inside:
            lines.append(line)
    return "\n".join(lines)


class RankPool:
    """The ranks of one run; leaving the ``with`` block ends every one of them, whatever happened."""

    def __init__(self, fn: Callable[..., Any], args: tuple[Any, ...], setup: Setup) -> None:
        self._setup = setup
        self._ranks: list[_Rank] = []
        self._release_fd: int | None = None
        self._call = (fn, args)

    def __enter__(self) -> RankPool:
        sys.stdout.flush()  # else each rank writes the buffer again
        sys.stderr.flush()
        self._start = time.monotonic()
        try:
            self._fork_all()
        except BaseException:
            self._end_all()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._end_all()

    def wait(self, *, stop_on_failure: bool) -> None:
        """Waits for all ranks to report or die, the time limit, or a failure (``stop_on_failure``)."""
        deadline = self._start + self._setup.timeout_s
        why: Literal["timed_out", "stopped"] = "timed_out"
        old_ends: set[int] = set()
        while running := self._poll_running():
            now = time.monotonic()
            ends = {rank.rank for rank in self._ranks if rank not in running}
            # After a first failure the others get a moment to fail as well, and are stopped then.
            if stop_on_failure and any(self._ranks[rank].has_failed() for rank in ends - old_ends):
                if now + _FAILURE_GRACE_S < deadline:
                    deadline, why = now + _FAILURE_GRACE_S, "stopped"
                stop_on_failure = False  # only the first shortens the wait
            old_ends |= ends
            if now >= deadline:
                self._stop_ranks(running, why)
                return
            time.sleep(_POLL_S)

    def finish(self) -> list[Outcome[Any]]:
        """Lets the ranks that have reported exit, and collects the outcomes of all."""
        self._release_ranks()
        limit = time.monotonic() + _EXIT_WAIT_S
        while time.monotonic() < limit:
            for rank in self._ranks:
                rank.poll()
            if all(rank.exit_code is not None for rank in self._ranks):
                break
            time.sleep(_POLL_S)
        self._end_all()
        return [rank.outcome() for rank in self._ranks]

    def _fork_all(self) -> None:
        fn, args = self._call
        release_end, self._release_fd = os.pipe()  # closing it releases all ranks
        try:
            for rank in range(self._setup.num_ranks):
                with warnings.catch_warnings():
                    # Python 3.12 warns when the parent has threads; ours run no operators.
                    warnings.simplefilter("ignore", DeprecationWarning)
                    pid = os.fork()
                if pid == 0:
                    # The child process is the rank, and must never run a line of the caller's again.
                    try:
                        os.setpgid(0, 0)  # what it starts can be ended with it
                        os.close(self._release_fd)
                        rank_main(fn, args, self._setup, rank, release_end)
                    finally:
                        os._exit(1)
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.setpgid(pid, pid)  # the rank does so too, whichever is first
                self._ranks.append(_Rank(rank=rank, pid=pid, files=self._setup.files(rank)))
        finally:
            os.close(release_end)

    def _poll_running(self) -> list[_Rank]:
        running = []
        for rank in self._ranks:
            rank.poll()
            if rank.exit_code is None and not rank.has_reported():
                running.append(rank)
            elif rank.seconds is None:
                rank.seconds = time.monotonic() - self._start
        return running

    def _stop_ranks(self, running: list[_Rank], why: Literal["timed_out", "stopped"]) -> None:
        for rank in running:
            rank.stopped, rank.seconds = why, time.monotonic() - self._start
            rank.ask_for_stacks()
        self._await_stacks(running)
        for rank in running:
            rank.kill()

    def _await_stacks(self, running: list[_Rank]) -> None:
        # Stacks are written line by line: a file is complete once it has stopped growing.
        limit = time.monotonic() + _STACKS_WAIT_S
        sizes: list[int] = []
        while time.monotonic() < limit:
            time.sleep(0.05)
            before, sizes = sizes, [len(_read_text(rank.files.stacks)) for rank in running]
            if sizes == before and all(sizes):
                return

    def _release_ranks(self) -> None:
        if self._release_fd is not None:
            os.close(self._release_fd)
            self._release_fd = None

    def _end_all(self) -> None:
        self._release_ranks()
        for rank in self._ranks:
            rank.kill()

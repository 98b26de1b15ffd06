"""The parent's side of forked ranks: start them, watch them, ask for stacks, stop them, collect."""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Literal

from atorch_ns.testing._rank_process import RankFiles, Report, Setup, rank_main

__all__ = ["Ended", "RankPool"]

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

"""Trial watch: follows one trial from the user's process to its report, death, deadline or cancellation."""

from __future__ import annotations

import contextlib
import re
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from atorch_ns.engine.trial.failures import oom_kills
from atorch_ns.engine.trial.process import REPORT, TASK
from atorch_ns.engine.trial.report import RankReport
from atorch_ns.engine.trial.worker_process import WorkerProcess
from atorch_ns.search import TrialStatus, TrialTask
from atorch_ns.text import signal_text

_POLL_S: Final = 0.05
_KILL_LIMIT_S: Final = 2.0  # time for a killed trial to be gone
_STACKS_LIMIT_S: Final = 1.0  # time for the stacks of all threads to be written
# A rank that lost its peers waits this long to hear from the coordinator that one of them failed.
_PEER_GRACE_S: Final = 5.0


@dataclass
class TrialWatch:
    """One trial, as the user's process sees it.

    Attributes:
        process: helper process that forks the trial.
        task: task of the trial.
        rank: this rank.
        log: file with the output of the trial.
        phase: last reported phase.
        report: report of the trial; ``None`` until it arrives.
        secondary: whether the report blames another rank.
        exit_code: exit code of the trial's process, or minus the signal's number; ``None`` while it runs.
    """

    process: WorkerProcess
    task: TrialTask
    rank: int
    log: Path
    phase: str = "starting"
    report: RankReport | None = None
    secondary: bool = False
    exit_code: int | None = None

    def follow(self, cancelled: Callable[[], bool]) -> RankReport:
        """Waits until the trial has ended, whatever ends it, and returns its report."""
        start = time.monotonic()
        kills = oom_kills()  # compared when the trial dies
        self.process.command(
            {"do": "trial", "task": TASK.dump_python(self.task, mode="json"), "log": str(self.log)}
        )
        while self.exit_code is None and self.process.alive:
            self._receive_event(_POLL_S)
            if self.report is None and self.exit_code is None:
                if cancelled():
                    self.kill()
                    return self._make_report("cancelled", start, f"ended in the phase: {self.phase}")
                if time.monotonic() - start > self.task.deadline_s:
                    return self._report_hang(start)
            elif time.monotonic() - start > self.task.deadline_s + _KILL_LIMIT_S:
                self.kill()  # it has reported and does not exit
        if self.report is None:
            return self._report_death(start, kills)
        if self.secondary and _waits_for(cancelled, _PEER_GRACE_S):
            return self._make_report("cancelled", start, f"lost another rank: {self.report.reason}")
        total = time.monotonic() - start
        setup = self.report.setup_seconds
        late = max(0.0, total - self.report.total_seconds)  # forking and, without sound forks, importing
        return replace(self.report, setup_seconds=setup + late if setup else 0.0, total_seconds=total)

    def kill(self) -> None:
        """Ends the trial and all that it started. Returns when it is gone."""
        limit = time.monotonic() + _KILL_LIMIT_S
        self.process.command({"do": "kill"})
        while self.exit_code is None and self.process.alive and time.monotonic() < limit:
            self._receive_event(_POLL_S)
        if self.exit_code is None:
            self.process.close()  # the zygote hangs as well; the worker starts another

    def _receive_event(self, timeout_s: float) -> None:
        event = self.process.event(timeout_s)
        if event is None:
            return
        if event["is"] == "phase":
            self.phase = event["text"]
        elif event["is"] == "report":
            self.report = REPORT.validate_python(event["report"])
            self.secondary = event["secondary"]
        elif event["is"] == "ended":
            self.exit_code = event["exit_code"]

    def _report_hang(self, start: float) -> RankReport:
        before = _file_size(self.log)
        self.process.command({"do": "stacks"})
        limit = time.monotonic() + _STACKS_LIMIT_S
        size = before
        # The dump is complete once the file has grown and grows no more.
        while time.monotonic() < limit and not (size > before and size == _file_size(self.log)):
            size = _file_size(self.log)
            self._receive_event(_POLL_S)
        self.kill()
        where = _innermost_frame(self.log, before)
        reason = f"no report within {self.task.deadline_s:.3g} s; it was in the phase: {self.phase}{where}"
        return self._make_report("hung", start, reason)

    def _report_death(self, start: float, kills: tuple[int, ...]) -> RankReport:
        if self.exit_code is None:
            how = f"the trial worker ended ({self.process.how_it_died()})"
        elif self.exit_code >= 0:
            how = f"the trial left with exit code {self.exit_code}"
        else:
            how = f"the trial was ended by {signal_text(-self.exit_code)}"
        # Anybody may send SIGKILL; the system's count of kills for memory tells whether it did.
        by_system = self.exit_code in (None, -signal.SIGKILL) and oom_kills() != kills
        if by_system:
            how += ", as the system ran out of memory"
        status: TrialStatus = "out of memory" if by_system else "died"
        return self._make_report(status, start, f"{how} in the phase: {self.phase}")

    def _make_report(self, status: TrialStatus, start: float, reason: str) -> RankReport:
        if status != "cancelled":  # a trial that could not tell its end leaves a log all the same
            with contextlib.suppress(OSError), self.log.open("a", encoding="utf-8") as log:
                log.write(f"{status}: {reason}\n")
        return RankReport(
            task_id=self.task.id,
            rank=self.rank,
            status=status,
            reason=reason,
            total_seconds=time.monotonic() - start,
        )


def _waits_for(condition: Callable[[], bool], patience_s: float) -> bool:
    limit = time.monotonic() + patience_s
    while not condition():
        if time.monotonic() > limit:
            return False
        time.sleep(_POLL_S)
    return True


def _file_size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _innermost_frame(log: Path, start: int) -> str:
    if not log.exists():
        return ""
    dump = log.read_bytes()[start:].decode(errors="replace")  # by faulthandler, innermost call first
    current = dump.partition("Current thread")[2] or dump
    match = re.search(r'File "([^"]+)", line (\d+) in (\S+)', current)
    return "" if match is None else f" (in {match[3]}, {Path(match[1]).name}:{match[2]})"

"""Failures of trials: an exception's kind, its cause in one line, and the system's kills for memory."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from atorch_ns.errors import AtorchError, RankError, StepError
from atorch_ns.job import is_out_of_memory
from atorch_ns.search import TrialStatus
from atorch_ns.system import cgroup_files
from atorch_ns.text import error_text, user_frame


def oom_kills() -> tuple[int, ...]:
    """Counts of processes that the system has killed for memory, in this process's cgroup and on the machine.

    Sources: ``memory.events`` (cgroup v2), ``memory.oom_control`` (v1) and ``/proc/vmstat``, each with a line
    ``oom_kill <count>``. Empty where the system has none of them.
    """
    files = [*cgroup_files("memory", "memory.events", "memory.oom_control"), Path("/proc/vmstat")]
    counts = (_read_kill_count(path) for path in files)
    return tuple(count for count in counts if count is not None)


def _read_kill_count(path: Path) -> int | None:
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return None
    rows = (line.split() for line in lines)
    return next((int(words[1]) for words in rows if len(words) == 2 and words[0] == "oom_kill"), None)


# What gloo, NCCL and the store say when the other side has gone.
_LOST_PEER: Final = (
    "Connection closed by peer", "Connection reset by peer", "gloo/transport", "Broken pipe",
    "remote process exited", "Socket closed", "Failed to recv, got 0 bytes", "wait timeout after",
)  # fmt: skip


class NonFiniteLoss(Exception):
    """The loss of a trial became infinite or NaN."""


class Interrupted(Exception):
    """A trial that was ended from outside, with the status and the reason to report."""

    def __init__(self, status: TrialStatus, reason: str) -> None:
        super().__init__(reason)
        self.status: TrialStatus = status


@dataclass(frozen=True)
class Failure:
    """Failure of a trial on one rank.

    Attributes:
        status: status of its report.
        reason: the exception's type and text, and the user's line it came from.
        secondary: whether another rank is the cause: this one was left alone in a collective.
        refused_by: the method that refused, where one did.
    """

    status: TrialStatus
    reason: str
    secondary: bool = False
    refused_by: str | None = None


def explain(error: BaseException, *, applying: bool) -> Failure:
    """Reads an exception. While ``applying`` a strategy, this package's own errors are refusals of it."""
    text = error_text(error, 1000)
    if isinstance(error, NonFiniteLoss):
        return Failure("non-finite", str(error))
    if isinstance(error, Interrupted):
        return Failure(error.status, str(error))
    if isinstance(error, RankError):  # of another rank, told by an agreement
        return Failure("raised", text, secondary=True)
    if is_out_of_memory(error):
        return Failure("out of memory", text)
    # torch has no classes for these.
    if isinstance(error, RuntimeError) and any(phrase in str(error) for phrase in _LOST_PEER):
        return Failure("raised", text, secondary=True)
    if isinstance(error, AtorchError) and (applying or isinstance(error, StepError)):
        return Failure("refused", text, refused_by=error.refused_by if applying else None)
    return Failure("raised", text + _error_location(error))


def _error_location(error: BaseException) -> str:
    frame = user_frame(error)
    return "" if frame is None else f" (in {frame.name}, {Path(frame.filename).name}:{frame.lineno})"

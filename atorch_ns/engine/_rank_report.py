"""What one rank reports of one trial, and what runs trials on a rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from atorch_ns.search import TrialStatus, TrialTask

__all__ = ["RankReport", "Worker"]


@dataclass(frozen=True, kw_only=True)
class RankReport:
    """One rank's part of a trial's outcome. Plain values only (JSON by pydantic's ``TypeAdapter``).

    Attributes:
        task_id: of the task it answers.
        rank: whose.
        status: how it ended here.
        step_seconds: each timed step, the maximum over ranks; the same on every rank.
        peak_bytes: the most that tensors (CPU) or the allocator (GPU) held; ``None`` if it was not measured.
        state_bytes: parameters, gradients and optimizer states after the last step.
        collectives: by kind, calls and bytes in one step.
        loss: of the last step, the mean over ranks.
        setup_seconds, total_seconds: to the first timed step, and to the end.
        reason: why it failed: the exception's type and text, or how the process ended.
        log: path of the file with its output and traceback.
        refused_by: the method that refused to be applied, where one did.
    """

    task_id: int
    rank: int
    status: TrialStatus
    step_seconds: tuple[float, ...] = ()
    peak_bytes: int | None = None
    state_bytes: int | None = None
    collectives: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    loss: float | None = None
    setup_seconds: float = 0.0
    total_seconds: float = 0.0
    reason: str = ""
    log: str = ""
    refused_by: str | None = None


class Worker(Protocol):
    """Runs the trials of one rank, one at a time."""

    def run(self, task: TrialTask, cancelled: Callable[[], bool]) -> RankReport:
        """Runs a trial; never raises for what the trial does.

        Args:
            task: what to run. Overrunning ``task.deadline_s`` gives the status "hung".
            cancelled: asked several times a second; once it is true (another rank failed, the search ended),
                the trial is ended and the status is "cancelled".
        """

    def close(self) -> None:
        """Ends whatever it started; may be called twice."""

"""A client in the coordinator's own process: one rank without a socket."""

from __future__ import annotations

from atorch_ns.engine._coordinator import Coordinator
from atorch_ns.engine._coordinator_types import Over
from atorch_ns.engine._rank_report import RankReport
from atorch_ns.search import TrialTask

__all__ = ["LocalClient"]


class LocalClient:
    """What :class:`CoordinatorClient` does, by direct calls. For jobs of one process, and for tests."""

    def __init__(self, coordinator: Coordinator, rank: int = 0) -> None:
        self._coordinator = coordinator
        self._rank = rank
        self._done_id = 0
        self._joined = False

    def join(self) -> None:
        """Enters the job."""
        self._coordinator.join(self._rank, session=f"local-{id(self)}")
        self._joined = True

    def next_task(self) -> TrialTask | Over:
        """Waits for the next task or the end."""
        while True:
            if (answer := self._coordinator.next_task(self._rank, self._done_id, wait_s=10.0)) is not None:
                return answer

    def report(self, report: RankReport) -> None:
        """Reports a trial."""
        self._coordinator.report(report)
        self._done_id = report.task_id

    def cancelled(self, task_id: int) -> bool:
        """Whether a running task is to be ended."""
        beat = self._coordinator.heartbeat(self._rank)
        return beat.over or task_id in beat.cancel

    def cancel(self, reason: str) -> None:
        """Ends the search with the best so far."""
        self._coordinator.cancel(reason)

    def leave(self, reason: str = "") -> None:
        """Says goodbye."""
        if self._joined:
            self._coordinator.leave(self._rank, reason)

    def close(self) -> None:
        """Nothing to close."""

"""A trial under way: who has reported, who is to end it, who is late."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

from atorch_ns.engine._merge import failed, merge_reports
from atorch_ns.engine._rank_report import RankReport
from atorch_ns.search import TrialOutcome, TrialTask

__all__ = ["TrialUnderWay", "Verdict"]

Verdict = Literal["taken", "duplicate", "stale"]
"""What became of a report."""


@dataclass(kw_only=True)
class TrialUnderWay:
    """One task from its first hand-out to the last rank's report. Not thread-safe.

    Attributes:
        task: as the ranks know it.
        search_id: its id in the search.
        world_size: how many ranks report.
        started: when it began, on the coordinator's clock.
        grace_s: how long a rank may overrun the task's deadline, and how long it may take to end a trial
            that it was told to end.
    """

    task: TrialTask
    search_id: int
    world_size: int
    started: float
    grace_s: float
    cancelled_at: float | None = None
    _reports: dict[int, RankReport] = field(default_factory=dict)
    _late: dict[int, float] = field(default_factory=dict)

    def add(self, report: RankReport, now: float) -> Verdict:
        """Takes a rank's report; a failure cancels the trial for the others."""
        if report.task_id != self.task.id or not 0 <= report.rank < self.world_size:
            return "stale"
        if report.rank in self._reports:
            return "duplicate"
        if report.rank in self._late and report.status == "cancelled":
            report = replace(report, status="hung", reason=self._late_reason(report.rank))
        self._reports[report.rank] = report
        if failed(report):
            self.cancel(now)
        return "taken"

    def has_reported(self, rank: int) -> bool:
        """Whether this rank's report is here."""
        return rank in self._reports

    @property
    def missing(self) -> list[int]:
        """The ranks whose reports are not here."""
        return [rank for rank in range(self.world_size) if rank not in self._reports]

    def cancel(self, now: float) -> None:
        """Tells all ranks that have not reported to end the trial."""
        if self.cancelled_at is None:
            self.cancelled_at = now

    def look(self, now: float) -> None:
        """Cancels the trial if a rank has overrun the deadline and not said so itself."""
        overrun = now - self.started
        if self.cancelled_at is None and overrun > self.task.deadline_s + self.grace_s:
            self._late = dict.fromkeys(self.missing, overrun)
            self.cancel(now)

    def stuck(self, now: float) -> dict[int, str]:
        """The ranks that did not end the trial in time after they were told to, with the reason."""
        if self.cancelled_at is None or now - self.cancelled_at <= self.grace_s:
            return {}
        waited = now - self.cancelled_at
        reason = f"did not end trial {self.task.id} within {waited:.1f} s of being told to"
        return dict.fromkeys(self.missing, reason)

    def outcome(self) -> TrialOutcome:
        """All reports as one outcome."""
        return merge_reports(list(self._reports.values()))

    def _late_reason(self, rank: int) -> str:
        return (
            f"rank {rank} had not reported after {self._late[rank]:.1f} s; the deadline was "
            f"{self.task.deadline_s:g} s"
        )

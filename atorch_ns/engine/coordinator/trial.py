"""Trial under way: the reports of all ranks, merged into one outcome, and the ranks that are late."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from atorch_ns.engine.trial.report import RankReport
from atorch_ns.errors import AtorchError
from atorch_ns.search import SearchOutcome, TrialOutcome, TrialStatus, TrialTask


@dataclass(frozen=True, kw_only=True)
class Heartbeat:
    """Answer to a heartbeat.

    Attributes:
        cancel: the tasks that the rank is to end.
        over: whether the search is over.
    """

    cancel: tuple[int, ...] = ()
    over: bool = False


@dataclass(frozen=True, kw_only=True)
class Over:
    """The end of a search, the same for all ranks.

    Attributes:
        outcome: outcome of the search; ``None`` if it failed.
        error: reason why it failed; empty if it did not.
        failures: reason by rank.
    """

    outcome: SearchOutcome | None = None
    error: str = ""
    failures: Mapping[int, str] = field(default_factory=dict)


class NotJoinedError(AtorchError):
    """A call by a rank that this coordinator does not know: it was restarted, or the rank never joined."""


# Errors of a rank whose partner went away: a consequence of another rank's failure, not a cause.
_COLLATERAL = re.compile(
    r"connection (was )?(closed|reset|refused|aborted)|closed by peer|broken pipe|remote process|"
    r"ncclRemoteError|ncclSystemError|socket (closed|error)|\bepipe\b|\beconnreset\b|"
    r"(wait|read|store|barrier).{0,40}time[d]? ?out",
    re.IGNORECASE,
)
# The likeliest root cause first. A rank that died or ran out of memory makes others raise, seldom the
# reverse; a rank that raised makes others hang; a rank that was cancelled is nobody's cause.
_CAUSES: tuple[TrialStatus, ...] = (
    "out of memory", "died", "non-finite", "wrong", "refused", "raised", "hung", "cancelled", "stopped early", "ok",
)  # fmt: skip
_COLLATERAL_PLACE = _CAUSES.index("hung") + 0.5  # behind every real cause, before a cancelled rank


def has_failed(report: RankReport) -> bool:
    """Returns whether the rank gave no step times."""
    return report.status not in ("ok", "stopped early")


def merge_reports(reports: Sequence[RankReport]) -> TrialOutcome:
    """One outcome from the reports of all ranks.

    The worst status wins; among ranks that failed, the one that failed on its own before those that were
    cancelled or lost their partner; among equals, the one that comes first in ``reports``.

    Args:
        reports: one or more, at most one for each rank, in the order in which they arrived.
    """
    assert reports, "no rank reported"
    cause = min(reports, key=_cause_priority)
    by_rank = sorted(reports, key=lambda report: report.rank)
    first = by_rank[0]
    losses = [report.loss for report in by_rank if report.loss is not None]
    trouble = has_failed(cause)
    return TrialOutcome(
        status=cause.status,
        step_seconds=_slowest_steps([report.step_seconds for report in by_rank]),
        peak_bytes=_of_all([report.peak_bytes for report in by_rank]),
        process_bytes=_of_all([report.process_bytes for report in by_rank]),
        further_bytes=_of_all([report.further_bytes for report in by_rank]),
        state_bytes=_of_all([report.state_bytes for report in by_rank]),
        collectives=None if trouble else dict(first.collectives),
        loss=losses[0] if losses else None,
        setup_seconds=max(report.setup_seconds for report in by_rank),
        total_seconds=max(report.total_seconds for report in by_rank),
        reason=cause.reason,
        rank=cause.rank if trouble else None,
        log=cause.log if trouble else first.log,
        refused_by=cause.refused_by,
        while_applying=cause.while_applying,
        enforced=all(report.enforced for report in by_rank),
    )


def _cause_priority(report: RankReport) -> float:
    if report.status == "raised" and _COLLATERAL.search(report.reason):
        return _COLLATERAL_PLACE
    return _CAUSES.index(report.status)


def _slowest_steps(steps: Sequence[tuple[float, ...]]) -> tuple[float, ...]:
    rows = [times for times in steps if times]  # a task of one rank is timed there alone
    # A step takes as long as on its slowest rank; steps that only some ranks timed are left out.
    return tuple(max(times) for times in zip(*rows, strict=False))


def _of_all(values: Sequence[int | None]) -> tuple[int, ...]:
    numbers = tuple(value for value in values if value is not None)
    return numbers if len(numbers) == len(values) else ()  # a maximum of some ranks would mislead


Verdict = Literal["taken", "duplicate", "stale"]
"""Result of taking a report."""


@dataclass(kw_only=True)
class TrialUnderWay:
    """One task from its first hand-out to the last rank's report. Not thread-safe.

    Attributes:
        task: the task, numbered by the coordinator.
        search_id: id of the task in the search.
        world_size: number of ranks that report.
        started: start of the trial, on the coordinator's clock.
        grace_s: seconds by which a rank may overrun the deadline, and within which it ends a cancelled trial.
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
        # It was cancelled for being late, so its lateness is the cause, not the cancelling.
        if report.rank in self._late and report.status == "cancelled":
            report = replace(report, status="hung", reason=self._late_reason(report.rank))
        self._reports[report.rank] = report
        if has_failed(report):
            self.cancel(now)
        return "taken"

    def has_reported(self, rank: int) -> bool:
        """Returns whether this rank has reported."""
        return rank in self._reports

    @property
    def missing(self) -> list[int]:
        """The ranks that have not reported."""
        return [rank for rank in range(self.world_size) if rank not in self._reports]

    def cancel(self, now: float) -> None:
        """Cancels the trial on all ranks that have not reported."""
        if self.cancelled_at is None:
            self.cancelled_at = now

    def look(self, now: float) -> None:
        """Cancels the trial if a rank has overrun the deadline and not reported it itself."""
        overrun = now - self.started
        if self.cancelled_at is None and overrun > self.task.deadline_s + self.grace_s:
            self._late = dict.fromkeys(self.missing, overrun)
            self.cancel(now)

    def stuck(self, now: float) -> dict[int, str]:
        """The ranks that did not end a cancelled trial in time, with the reason."""
        if self.cancelled_at is None or now - self.cancelled_at <= self.grace_s:
            return {}
        delay = now - self.cancelled_at
        reason = f"did not end trial {self.task.id} within {delay:.1f} s of being told to"
        return dict.fromkeys(self.missing, reason)

    def outcome(self) -> TrialOutcome:
        """All reports as one outcome."""
        return merge_reports(list(self._reports.values()))

    def _late_reason(self, rank: int) -> str:
        late, deadline = self._late[rank], self.task.deadline_s
        return f"rank {rank} had not reported after {late:.1f} s; the deadline was {deadline:g} s"

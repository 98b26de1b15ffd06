"""What came of a trial, from what each rank reports of it."""

from __future__ import annotations

import re
from collections.abc import Sequence

from atorch_ns.engine._rank_report import RankReport
from atorch_ns.search import TrialOutcome, TrialStatus

__all__ = ["failed", "merge_reports"]

# What a rank says whose partner went away: a consequence of another rank's failure, not a cause.
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
_COLLATERAL_PLACE = _CAUSES.index("hung") + 0.5


def failed(report: RankReport) -> bool:
    """Whether the rank gave no step times."""
    return report.status not in ("ok", "stopped early")


def merge_reports(reports: Sequence[RankReport]) -> TrialOutcome:
    """One outcome from the reports of all ranks.

    The worst status wins; among ranks that failed, the one that failed on its own before those that were
    cancelled or lost their partner; among equals, the one that comes first in ``reports``.

    Args:
        reports: at least one, at most one a rank, in the order in which they arrived.
    """
    assert reports, "no rank reported"
    cause = min(reports, key=_place)
    by_rank = sorted(reports, key=lambda report: report.rank)
    first = by_rank[0]
    losses = [report.loss for report in by_rank if report.loss is not None]
    trouble = failed(cause)
    return TrialOutcome(
        status=cause.status,
        step_seconds=_slowest([report.step_seconds for report in by_rank]),
        peak_bytes=_of_all([report.peak_bytes for report in by_rank]),
        state_bytes=_of_all([report.state_bytes for report in by_rank]),
        collectives=None if trouble else dict(first.collectives),
        loss=losses[0] if losses else None,
        setup_seconds=max(report.setup_seconds for report in by_rank),
        total_seconds=max(report.total_seconds for report in by_rank),
        reason=cause.reason,
        rank=cause.rank if trouble else None,
        log=cause.log if trouble else first.log,
        refused_by=cause.refused_by,
    )


def _place(report: RankReport) -> float:
    if report.status == "raised" and _COLLATERAL.search(report.reason):
        return _COLLATERAL_PLACE
    return _CAUSES.index(report.status)


def _slowest(steps: Sequence[tuple[float, ...]]) -> tuple[float, ...]:
    """Step by step the maximum; the steps that all ranks timed. Ranks that timed none do not count."""
    timed = [times for times in steps if times]
    return tuple(max(times) for times in zip(*timed, strict=False))


def _of_all(values: Sequence[int | None]) -> tuple[int, ...]:
    known = tuple(value for value in values if value is not None)
    return known if len(known) == len(values) else ()

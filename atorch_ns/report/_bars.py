"""Memory and time of the candidates in parts, for stacked bars."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from atorch_ns.estimate import MemoryParts, TimeParts
from atorch_ns.report._measures import Figure, peak, seconds
from atorch_ns.search import Row, SearchOutcome

__all__ = ["Bar", "MemoryInfo", "TimeInfo", "memory_info", "time_info"]


class Bar(NamedTuple):
    """One candidate's predicted parts and what was measured.

    Attributes:
        key, label: the candidate's.
        number: of its line in the table of candidates.
        is_best, is_baseline: whether it won, and whether it is the baseline.
        parts: predicted bytes or seconds, in the order of ``MemoryParts`` or ``TimeParts``.
        measured: ``None`` if it was not tried or failed.
        note: for memory, the worst moment in words.
    """

    key: str
    label: str
    number: int
    is_best: bool
    is_baseline: bool
    parts: tuple[float, ...]
    measured: Figure | None
    note: str = ""

    @property
    def predicted(self) -> float:
        """The sum of the parts."""
        return sum(self.parts)


class MemoryInfo(NamedTuple):
    """Peak bytes per rank, in parts, against the limit.

    Attributes:
        names: of the parts.
        bars: the winner first.
        limit_bytes: what one rank may use; 0 where unknown.
    """

    names: tuple[str, ...]
    bars: tuple[Bar, ...]
    limit_bytes: int

    def over(self, bar: Bar) -> float:
        """Bytes by which a candidate is over the limit, measured where it was; negative if it fits."""
        value = bar.measured.value if bar.measured and bar.measured.value is not None else bar.predicted
        return value - self.limit_bytes


class TimeInfo(NamedTuple):
    """Seconds per step, in parts.

    Attributes:
        names: of the parts.
        bars: the winner first.
    """

    names: tuple[str, ...]
    bars: tuple[Bar, ...]


def memory_info(outcome: SearchOutcome, *, limit: int = 12) -> MemoryInfo:
    """Memory of the first ``limit`` candidates worth showing; the winner and the baseline always are."""
    bars = [
        _bar(outcome, number, row, row.candidate.estimate.memory, _measured(peak(row)))
        for number, row in _worth_showing(outcome, limit)
        if row.candidate.estimate is not None
    ]
    return MemoryInfo(MemoryParts._fields, tuple(bars), outcome.setting.memory_limit_bytes)


def time_info(outcome: SearchOutcome, *, limit: int = 12) -> TimeInfo:
    """Step time of the first ``limit`` candidates worth showing."""
    bars = [
        _bar(outcome, number, row, row.candidate.estimate.time, _measured(seconds(row)))
        for number, row in _worth_showing(outcome, limit)
        if row.candidate.estimate is not None
    ]
    return TimeInfo(TimeParts._fields, tuple(bars))


def _bar(
    outcome: SearchOutcome, number: int, row: Row, parts: Sequence[float], measured: Figure | None
) -> Bar:
    candidate = row.candidate
    return Bar(
        key=candidate.key,
        label=candidate.label,
        number=number,
        is_best=candidate.key == outcome.best,
        is_baseline=candidate.is_baseline,
        parts=tuple(parts),
        measured=measured,
        note=candidate.estimate.peak_at if candidate.estimate else "",
    )


def _measured(figure: Figure) -> Figure | None:
    return figure if figure.source == "measured" else None


def _worth_showing(outcome: SearchOutcome, limit: int) -> list[tuple[int, Row]]:
    """Winner and baseline, then what was tried, then what could have been, then what does not fit."""
    order = {"won": 0, "lost": 1, "failed": 1, "untried": 2, "pruned": 3}

    def rank(numbered: tuple[int, Row]) -> tuple[int, int]:
        number, row = numbered
        if row.candidate.key == outcome.best:
            return (-2, number)
        if row.candidate.is_baseline:
            return (-1, number)
        kind = row.candidate.pruned.kind if row.candidate.pruned else ""
        return (order[row.fate] + (2 if kind in ("same", "impossible") else 0), number)

    ranked = sorted(enumerate(outcome.rows, 1), key=rank)[:limit]
    return sorted(ranked, key=lambda numbered: numbered[0])

"""The report's tables as cells of text, for whoever draws them: a terminal, a file, a page."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from atorch_ns.report._accuracy import AccuracyInfo
from atorch_ns.report._bars import Bar, MemoryInfo, TimeInfo
from atorch_ns.report._candidates import CandidatesInfo, fate_text
from atorch_ns.report._history import HistoryInfo
from atorch_ns.report._pareto import ParetoInfo
from atorch_ns.report._units import (
    UNKNOWN,
    bytes_text,
    compared_text,
    measured_text,
    number_text,
    percent_text,
    seconds_text,
)
from atorch_ns.report._waterfall import WaterfallInfo

__all__ = [
    "Sheet",
    "accuracy_sheet",
    "candidates_sheet",
    "history_sheet",
    "memory_sheet",
    "pareto_sheet",
    "time_sheet",
    "waterfall_sheet",
]

_SHORT = 16
"""Characters that need no break."""

_FEW = 9
"""Columns, of which two are wide, that fit into the page."""


class Sheet(NamedTuple):
    """A table.

    Attributes:
        columns: their heads.
        rows: cells, as many in each row as there are columns.
        words: indices of the columns that hold words; the others hold numbers.
        ends_in_sentences: whether the last column holds sentences, which need room.
    """

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    words: frozenset[int]
    ends_in_sentences: bool = False

    @property
    def short(self) -> frozenset[int]:
        """The columns of words in which nothing is long."""
        return frozenset(
            at
            for at in self.words
            if all(len(cell) <= _SHORT for cell in (self.columns[at], *(row[at] for row in self.rows)))
        )

    @property
    def is_roomy(self) -> bool:
        """Whether its sentences can be wide: there are not many columns beside them."""
        return self.ends_in_sentences and len(self.columns) <= _FEW

    def without_unknown(self) -> Sheet:
        """The sheet without the columns in which nothing is known."""
        kept = [
            at
            for at in range(len(self.columns))
            if not all(row[at] == UNKNOWN for row in self.rows) or not self.rows
        ]
        return self._replace(
            columns=tuple(self.columns[at] for at in kept),
            rows=tuple(tuple(row[at] for at in kept) for row in self.rows),
            words=frozenset(new for new, at in enumerate(kept) if at in self.words),
        )


def candidates_sheet(info: CandidatesInfo) -> Sheet:
    """One line a candidate: predicted and measured, its fate and the reason."""
    columns = (
        "#",
        "strategy",
        "step predicted",
        "step measured",
        "against the baseline",
        "peak predicted",
        "peak measured",
        "fate",
        "why",
    )
    rows = [
        (
            str(line.number),
            line.label + (" (baseline)" if line.is_baseline else ""),
            seconds_text(line.predicted_seconds),
            _measured_seconds(line.time.value, line.time.spread, line.time.num),
            "" if line.is_baseline else compared_text(line.speedup),
            bytes_text(line.predicted_bytes),
            bytes_text(line.memory.value) if line.memory.source == "measured" else UNKNOWN,
            fate_text(line, planned=info.planned),
            line.reason,
        )
        for line in info.lines
    ]
    return Sheet(columns, tuple(rows), frozenset({1, 7, 8}), ends_in_sentences=True)


def memory_sheet(info: MemoryInfo) -> Sheet:
    """Predicted peak in parts, the measured peak, and what is left of the limit."""
    parts = _used(info.bars)
    names = [info.names[part] for part in parts]
    columns = ("#", "strategy", *names, "predicted", "measured", "of the limit", "worst moment")
    rows = [
        (
            str(bar.number),
            bar.label,
            *(bytes_text(bar.parts[part]) for part in parts),
            bytes_text(bar.predicted),
            bytes_text(bar.measured.value) if bar.measured else UNKNOWN,
            _limit_text(info, info.over(bar)),
            bar.note,
        )
        for bar in info.bars
    ]
    return Sheet(columns, tuple(rows), frozenset({1, len(columns) - 1}), ends_in_sentences=True)


def time_sheet(info: TimeInfo) -> Sheet:
    """Predicted step in parts, and the measured step."""
    parts = _used(info.bars)
    names = [info.names[part] for part in parts]
    rows = [
        (
            str(bar.number),
            bar.label,
            *(seconds_text(bar.parts[part]) for part in parts),
            seconds_text(bar.predicted),
            _measured_seconds(bar.measured.value, bar.measured.spread, bar.measured.num)
            if bar.measured
            else UNKNOWN,
        )
        for bar in info.bars
    ]
    return Sheet(("#", "strategy", *names, "predicted", "measured"), tuple(rows), frozenset({1}))


def history_sheet(info: HistoryInfo) -> Sheet:
    """The trials in their order."""
    rows = [
        (
            str(point.trial),
            point.label,
            point.status,
            _measured_seconds(point.seconds, point.spread, point.num_steps),
            f"{seconds_text(point.best_seconds)} (trial {point.best_trial})" if point.best_trial else UNKNOWN,
            seconds_text(point.total_seconds),
        )
        for point in info.points
    ]
    columns = ("trial", "strategy", "how it ended", "step (measured)", "best so far", "took")
    return Sheet(columns, tuple(rows), frozenset({1, 2}))


def waterfall_sheet(info: WaterfallInfo) -> Sheet:
    """What each change brought."""
    rows = [
        (
            bar.label,
            seconds_text(bar.before),
            seconds_text(bar.after),
            f"{'+' if bar.change > 0 else '-'}{seconds_text(abs(bar.change))}",
            bar.source,
        )
        for bar in info.bars
    ]
    columns = ("change", "step before", "step after", "difference", "source")
    return Sheet(columns, tuple(rows), frozenset({0, 4}))


def accuracy_sheet(infos: Iterable[AccuracyInfo]) -> Sheet:
    """How good the predictions were."""
    rows = [
        (
            info.quantity,
            str(len(info.points)),
            number_text(info.correlation),
            percent_text(info.median_error),
            percent_text(info.worst_error),
        )
        for info in infos
    ]
    columns = ("predicted", "candidates", "rank correlation", "median error", "worst error")
    return Sheet(columns, tuple(rows), frozenset({0}))


def pareto_sheet(info: ParetoInfo) -> Sheet:
    """The front, the fastest first."""
    rows = [
        (str(point.number), point.label, point.time.as_seconds(), point.memory.as_bytes())
        for point in info.front
    ]
    return Sheet(("#", "strategy", "step", "peak"), tuple(rows), frozenset({1}))


def _used(bars: Sequence[Bar]) -> list[int]:
    """The parts that any bar has."""
    return (
        [part for part in range(len(bars[0].parts)) if any(bar.parts[part] for bar in bars)] if bars else []
    )


def _measured_seconds(value: float | None, spread: float, num: int) -> str:
    if value is None or num == 0:
        return UNKNOWN
    return f"{measured_text(value, spread if num > 1 else None)}, n={num}"


def _limit_text(info: MemoryInfo, over: float) -> str:
    if not info.limit_bytes:
        return UNKNOWN
    return f"{bytes_text(over)} over" if over > 0 else f"{bytes_text(-over)} free"

"""Tables of the report as cells of text, and as plain text or for a rich console."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from io import StringIO
from typing import TYPE_CHECKING, NamedTuple

from atorch_ns.estimate import Collective, Estimate
from atorch_ns.report.info.accuracy import AccuracyInfo
from atorch_ns.report.info.breakdown import Bar, MemoryInfo, TimeInfo, TimelineInfo
from atorch_ns.report.info.candidates import CandidatesInfo, HistoryInfo, ParetoInfo, fate_text
from atorch_ns.report.info.operators import OperatorsInfo
from atorch_ns.report.info.verdict import WaterfallInfo
from atorch_ns.text import (
    UNKNOWN,
    bytes_text,
    compared_text,
    count_text,
    measured_text,
    number_text,
    percent_text,
    seconds_text,
)

if TYPE_CHECKING:
    import rich.table

_SHORT = 16
"""Characters that need no break."""

_FEW = 9
"""Columns, of which two are wide, that fit into the page."""

TEXT_WIDTH = 140
"""Characters of a line where there is no terminal to ask."""

_GAP = 3
_LEAST_WORDS = 24


class Table(NamedTuple):
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

    def without_unknown(self) -> Table:
        """The table without the columns in which nothing is known."""
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


def rich_table(table: Table, *, width: int = TEXT_WIDTH) -> rich.table.Table:
    """The table for a rich console. What is too long is folded, never cut.

    A last column of sentences is put below the first column of words, so that there is room.
    """
    from rich import box
    from rich.table import Table as RichTable
    from rich.text import Text

    table = table.without_unknown()
    columns, rows = (
        _with_sentences_under_names(table) if table.ends_in_sentences else (table.columns, table.rows)
    )
    numbers = {position for position in range(len(columns)) if position not in table.words}
    lengths = {at: max(len(columns[at]) // 2, *(len(row[at]) for row in rows), 1) for at in numbers}
    words = len(columns) - len(numbers)
    roomy = sum(lengths.values()) + len(columns) * _GAP + words * _LEAST_WORDS <= width
    drawn = RichTable(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1))
    for position, name in enumerate(columns):
        # A number is not broken while words can give way.
        least = lengths[position] if position in numbers and roomy else None
        justify = "right" if position in numbers else "left"
        drawn.add_column(name, justify=justify, overflow="fold", min_width=least)  # type: ignore[arg-type]
    for row in rows:
        drawn.add_row(*(Text(cell) for cell in row))
    return drawn


def as_text(table: Table, *, width: int = TEXT_WIDTH) -> str:
    """The table as plain text, without colours and without spaces at the ends of lines."""
    from rich.console import Console

    stream = StringIO()
    console = Console(file=stream, width=width, no_color=True, force_terminal=False, highlight=False)
    console.print(rich_table(table, width=width))
    return "\n".join(line.rstrip() for line in stream.getvalue().splitlines()).strip("\n")


def _with_sentences_under_names(table: Table) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    at, last = min(table.words), len(table.columns) - 1
    columns = list(table.columns[:last])
    columns[at] = f"{columns[at]}, and {table.columns[last]}"
    rows = []
    for row in table.rows:
        cells = list(row[:last])
        cells[at] = f"{cells[at]}\n  {row[last]}" if row[last] else cells[at]
        rows.append(tuple(cells))
    return tuple(columns), rows


def candidates_table(info: CandidatesInfo) -> Table:
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
    return Table(columns, tuple(rows), frozenset({1, 7, 8}), ends_in_sentences=True)


def memory_table(info: MemoryInfo) -> Table:
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
    return Table(columns, tuple(rows), frozenset({1, len(columns) - 1}), ends_in_sentences=True)


def time_table(info: TimeInfo) -> Table:
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
    return Table(("#", "strategy", *names, "predicted", "measured"), tuple(rows), frozenset({1}))


def history_table(info: HistoryInfo) -> Table:
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
    return Table(columns, tuple(rows), frozenset({1, 2}))


def waterfall_table(info: WaterfallInfo) -> Table:
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
    return Table(columns, tuple(rows), frozenset({0, 4}))


def accuracy_table(infos: Iterable[AccuracyInfo]) -> Table:
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
    return Table(columns, tuple(rows), frozenset({0}))


def pareto_table(info: ParetoInfo) -> Table:
    """The front, the fastest first."""
    rows = [
        (str(point.number), point.label, point.time.as_seconds(), point.memory.as_bytes())
        for point in info.front
    ]
    return Table(("#", "strategy", "step", "peak"), tuple(rows), frozenset({1}))


def timeline_table(info: TimelineInfo) -> Table:
    """Each rank's figures."""
    rows = tuple(
        (
            str(row.rank),
            ", ".join(map(str, row.stages)),
            seconds_text(row.busy_seconds),
            percent_text(row.idle_share),
            " + ".join(map(str, row.live_micro_batches)),
        )
        for row in info.rows
    )
    return Table(("rank", "stages", "busy", "idle", "micro-batches held at most"), rows, frozenset())


def parts_table(estimate: Estimate) -> Table:
    """Memory and time in parts, each with its share; parts of nothing left out."""
    rows = []
    for part, num_bytes in estimate.memory._asdict().items():
        if num_bytes:
            share = num_bytes / estimate.peak_bytes
            rows.append(("memory", part, bytes_text(num_bytes), percent_text(share)))
    rows.append(("memory", "peak", bytes_text(estimate.peak_bytes), ""))
    for part, seconds in estimate.time._asdict().items():
        if seconds:
            share = seconds / estimate.step_seconds
            rows.append(("time", part, seconds_text(seconds), percent_text(share)))
    rows.append(("time", "step", seconds_text(estimate.step_seconds), ""))
    return Table(("of", "part", "predicted", "share"), tuple(rows), frozenset({0, 1}))


def collectives_table(collectives: tuple[Collective, ...]) -> Table:
    """What each step communicates."""
    rows = tuple((each.kind, each.axis, str(each.count), bytes_text(each.num_bytes)) for each in collectives)
    return Table(("collective", "over", "calls", "bytes"), rows, frozenset({0, 1}))


def operators_table(info: OperatorsInfo) -> Table:
    """The operators as a table."""
    rows = [
        (
            line.name,
            str(line.calls),
            count_text(line.flops, "FLOP"),
            percent_text(line.flops_share),
            bytes_text(line.num_bytes),
            percent_text(line.bytes_share),
            line.mostly_in,
        )
        for line in info.lines
    ]
    columns = ("operator", "calls", "work", "of work", "read and written", "of bytes", "mostly in")
    return Table(columns, tuple(rows), frozenset({0, 6}))


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

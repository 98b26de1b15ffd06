"""Report tables as text cells, as plain text and for a rich console."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from functools import partial
from io import StringIO
from typing import NamedTuple, TypeVar

from atorch_ns.cluster.measured import Comparison
from atorch_ns.estimate import Collective, Estimate
from atorch_ns.report.info.accuracy import AccuracyInfo
from atorch_ns.report.info.breakdown import Bar, MemoryInfo, TimeInfo, TimelineInfo, TimelineRow, used_parts
from atorch_ns.report.info.candidates import (
    CandidateLine,
    CandidatesInfo,
    HistoryInfo,
    HistoryPoint,
    ParetoInfo,
    fate_text,
)
from atorch_ns.report.info.operators import OperatorLine, OperatorsInfo
from atorch_ns.report.info.verdict import WaterfallBar, WaterfallInfo
from atorch_ns.text import (
    UNKNOWN,
    bytes_text,
    compared_text,
    count_text,
    interval_text,
    measured_text,
    number_text,
    percent_text,
    seconds_text,
)

T = TypeVar("T")
_Columns = Mapping[str, Callable[[T], str]]  # the text of each column's cell, by the column's head

_SHORT = 16  # characters that need no break

_FEW = 9  # columns, of which two are wide, that fit into the page

TEXT_WIDTH = 140
"""Characters of a line that is not written to a terminal."""

_GAP = 3  # characters between columns
_LEAST_WORDS = 24  # characters with which a column of text begins at most


class Table(NamedTuple):
    """A table.

    Attributes:
        columns: heads of the columns.
        rows: cells, as many in each row as there are columns.
        words: indices of the columns of text; the others hold numbers.
        ends_in_sentences: the last column holds sentences, which need room.
    """

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    words: frozenset[int]
    ends_in_sentences: bool = False

    @property
    def short(self) -> frozenset[int]:
        """The columns of text in which no cell is long."""
        cells = list(zip(self.columns, *self.rows, strict=True))  # column by column
        return frozenset(at for at in self.words if max(map(len, cells[at])) <= _SHORT)

    @property
    def is_roomy(self) -> bool:
        """True if its sentences can be wide, as there are few other columns."""
        return self.ends_in_sentences and len(self.columns) <= _FEW

    def without_unknown(self) -> Table:
        """The table without the columns in which nothing is known."""
        places = range(len(self.columns))
        useful = [at for at in places if any(row[at] != UNKNOWN for row in self.rows) or not self.rows]
        return self._keep_columns(useful)

    def without(self, column: str) -> Table:
        """The table without a column, for tables whose rows are numbered as in one before."""
        return self._keep_columns([at for at, name in enumerate(self.columns) if name != column])

    def _keep_columns(self, indices: list[int]) -> Table:
        return self._replace(
            columns=tuple(self.columns[at] for at in indices),
            rows=tuple(tuple(row[at] for at in indices) for row in self.rows),
            words=frozenset(new for new, at in enumerate(indices) if at in self.words),
            ends_in_sentences=self.ends_in_sentences and indices[-1] == len(self.columns) - 1,
        )


def as_text(table: Table, *, width: int = TEXT_WIDTH) -> str:
    """The table as plain text, without colours and without spaces at the ends of lines.

    Long text is folded, never cut. A last column of sentences goes below the first column of text, for room.
    A table that is too wide is continued below, with its first column again.
    """
    from rich import box
    from rich.console import Console
    from rich.table import Table as RichTable
    from rich.text import Text

    table = table.without_unknown()
    narrow = {at for at in range(len(table.columns)) if at not in table.words} | table.short
    columns, rows = _with_sentences_under_names(table)
    widths = _column_widths(list(zip(columns, *rows, strict=True)), narrow, width)
    total = sum(widths) + len(widths) * _GAP
    if total > width and (num := len(table.columns)) > 3:
        halves = range(num // 2), [0, *range(num // 2, num)]
        return "\n\n".join(as_text(table._keep_columns([*half]), width=width) for half in halves)
    grid = RichTable(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1))
    for index, name in enumerate(columns):
        justify = "left" if index in table.words else "right"
        grid.add_column(name, justify=justify, overflow="fold", width=widths[index])  # type: ignore[arg-type]
    for row in rows:
        grid.add_row(*(Text(cell) for cell in row))  # not markup: names may hold brackets
    stream = StringIO()
    console = Console(file=stream, width=total, no_color=True, force_terminal=False, highlight=False)
    console.print(grid)
    return "\n".join(line.rstrip() for line in stream.getvalue().splitlines()).strip("\n")


def _column_widths(columns: Sequence[Sequence[str]], narrow: Set[int], room: int) -> list[int]:
    """Characters of each column, given by head and cells; more than ``room`` if words would break else."""
    # Characters of the longest word, of the longest line, of a head in two lines, and of the longest cell.
    words = [max(map(len, " ".join(cells).split()), default=1) for cells in columns]
    lines = [max(map(len, "\n".join(cells).split("\n"))) for cells in columns]
    heads = [math.ceil(len(cells[0]) / 2) if at in narrow else 0 for at, cells in enumerate(columns)]
    below = [max(map(len, "\n".join(cells[1:]).split("\n"))) for cells in columns]
    widths = [width if at in narrow else min(width, _LEAST_WORDS) for at, width in enumerate(words)]
    targets = [
        max(widths[at], heads[at], below[at]) if at in narrow else lines[at] for at in range(len(columns))
    ]
    free = room - sum(widths) - len(columns) * _GAP
    order = sorted(range(len(columns)), key=lambda at: (at not in narrow, targets[at]))
    # Columns of numbers and short text get whole lines before long text gets more than it needs.
    for position, at in enumerate(order):
        share = free if at in narrow else free // (len(order) - position)
        more = max(0, min(targets[at] - widths[at], share))
        widths[at] += more
        free -= more
    # With room to spare the heads of those columns stay on one line.
    for at in order:
        more = max(0, min(len(columns[at][0]) - widths[at], free)) if at in narrow else 0
        widths[at] += more
        free -= more
    return widths


def _with_sentences_under_names(table: Table) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    last = len(table.columns) - 1
    at = min(table.words, default=last)
    if at == last or not table.ends_in_sentences:
        return table.columns, list(table.rows)
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

    def label(line: CandidateLine) -> str:
        return line.label + (" (baseline)" if line.is_baseline else "")

    def measured_peak(line: CandidateLine) -> str:
        return bytes_text(line.memory.value) if line.memory.source == "measured" else UNKNOWN

    def predicted_peak(line: CandidateLine) -> str:
        whole = interval_text(line.predicted_bytes, line.bytes_interval, bytes_text)
        if line.allocated_bytes == line.predicted_bytes:  # as on a CPU
            return whole
        return f"{whole},\n{bytes_text(line.allocated_bytes)} allocated"

    columns: _Columns[CandidateLine] = {
        "#": lambda line: str(line.number),
        "strategy": label,
        "step predicted": lambda line: interval_text(
            line.predicted_seconds, line.seconds_interval, seconds_text
        ),
        "step measured": lambda line: _measured_seconds(line.time.value, line.time.spread, line.time.num),
        "vs. baseline": lambda line: "" if line.is_baseline else compared_text(line.speedup),
        "peak predicted": predicted_peak,
        "peak measured": measured_peak,
        "fate": lambda line: fate_text(line, planned=info.planned),
        "why": lambda line: line.reason,
    }
    return _build_table(info.lines, columns, {"strategy", "fate", "why"})._replace(ends_in_sentences=True)


def memory_table(info: MemoryInfo) -> Table:
    """Predicted peak in parts, the measured peak, and the rest of the limit."""

    def remainder(bar: Bar) -> str:
        over = info.over(bar)
        return f"{bytes_text(over)} over" if over > 0 else f"{bytes_text(-over)} free"

    def tensor_bytes(bar: Bar) -> str:
        return bytes_text(sum(bar.parts[: info.names.index("reserve")]))

    def reserved_bytes(bar: Bar) -> str:
        return bytes_text(sum(bar.parts[: info.names.index("outside")]))

    has_more = any(bar.parts[info.names.index("outside")] for bar in info.bars)
    columns: _Columns[Bar] = {
        **_part_columns(info, bytes_text),
        **({"allocated": tensor_bytes, "reserved": reserved_bytes} if has_more else {}),
        "measured": lambda bar: bytes_text(bar.measured.value) if bar.measured else UNKNOWN,
        "of the limit": remainder if info.limit_bytes else lambda bar: UNKNOWN,
        "peak at": lambda bar: bar.note,
    }
    return _build_table(info.bars, columns, {"strategy", "peak at"})._replace(ends_in_sentences=True)


def time_table(info: TimeInfo) -> Table:
    """Predicted step in parts, and the measured step."""

    def step_text(bar: Bar) -> str:
        figure = bar.measured
        return _measured_seconds(figure.value, figure.spread, figure.num) if figure else UNKNOWN

    return _build_table(info.bars, {**_part_columns(info, seconds_text), "measured": step_text}, {"strategy"})


def _part_columns(info: MemoryInfo | TimeInfo, text: Callable[[float], str]) -> _Columns[Bar]:

    def part_text(bar: Bar, *, part: int) -> str:
        return text(bar.parts[part])

    return {
        "#": lambda bar: str(bar.number),
        "strategy": lambda bar: bar.label,
        **{info.names[part]: partial(part_text, part=part) for part in used_parts(info)},
        "predicted": lambda bar: text(bar.predicted),
    }


def history_table(info: HistoryInfo) -> Table:
    """The trials in their order."""

    def best(point: HistoryPoint) -> str:
        text = f"{seconds_text(point.best_seconds)} (trial {point.best_trial})"
        return text if point.best_trial else UNKNOWN

    columns: _Columns[HistoryPoint] = {
        "trial": lambda point: str(point.trial),
        "strategy": lambda point: point.label,
        "result": lambda point: point.status,
        "step (measured)": lambda point: _measured_seconds(point.seconds, point.spread, point.num_steps),
        "best so far": best,
        "took": lambda point: seconds_text(point.total_seconds),
    }
    return _build_table(info.points, columns, {"strategy", "result"})


def waterfall_table(info: WaterfallInfo) -> Table:
    """Step time before and after each change."""
    columns: _Columns[WaterfallBar] = {
        "change": lambda bar: bar.label,
        "step before": lambda bar: seconds_text(bar.before),
        "step after": lambda bar: seconds_text(bar.after),
        "difference": lambda bar: f"{'+' if bar.change > 0 else '-'}{seconds_text(abs(bar.change))}",
        "source": lambda bar: bar.source,
    }
    return _build_table(info.bars, columns, {"change", "source"})


def accuracy_table(infos: Iterable[AccuracyInfo]) -> Table:
    """Errors and rank correlation of the predictions."""
    columns: _Columns[AccuracyInfo] = {
        "predicted": lambda info: info.quantity,
        "candidates": lambda info: str(len(info.points)),
        "rank correlation": lambda info: number_text(info.correlation),
        "median error": lambda info: percent_text(info.median_error),
        "worst error": lambda info: percent_text(info.worst_error),
    }
    return _build_table(infos, columns, {"predicted"})


def pareto_table(info: ParetoInfo) -> Table:
    """The front, the fastest first."""
    columns: _Columns[CandidateLine] = {
        "#": lambda point: str(point.number),
        "strategy": lambda point: point.label,
        "step": lambda point: point.time.as_seconds(),
        "peak": lambda point: point.memory.as_bytes(),
    }
    return _build_table(info.front, columns, {"strategy"})


def timeline_table(info: TimelineInfo) -> Table:
    """Stages, busy and idle time, and micro-batches held, rank by rank."""
    columns: _Columns[TimelineRow] = {
        "rank": lambda row: str(row.rank),
        "stages": lambda row: ", ".join(map(str, row.stages)),
        "busy": lambda row: seconds_text(row.busy_seconds),
        "idle": lambda row: percent_text(row.idle_share),
        "most micro-batches held": lambda row: " + ".join(map(str, row.live_micro_batches)),
    }
    return _build_table(info.rows, columns, set())


def parts_table(estimate: Estimate) -> Table:
    """Memory and time in parts, each with its share; parts of nothing left out."""
    rows = []
    for of, parts, whole, total, interval, text in (
        ("memory", estimate.memory, "peak", estimate.peak_bytes, estimate.peak_bytes_interval, bytes_text),
        ("time", estimate.time, "step", estimate.step_seconds, estimate.step_seconds_interval, seconds_text),
    ):
        entries = [(part, value) for part, value in parts._asdict().items() if value]
        rows += [(of, part, text(value), percent_text(value / total)) for part, value in entries]
        if of == "memory" and estimate.allocated_bytes < total:
            rows.append((of, "allocated", text(estimate.allocated_bytes), ""))
            rows.append((of, "reserved", text(estimate.reserved_bytes), ""))
        rows.append((of, whole, interval_text(total, interval, text), ""))
    return Table(("of", "part", "predicted", "share"), tuple(rows), frozenset({0, 1}))


def collectives_table(collectives: tuple[Collective, ...]) -> Table:
    """Collectives of a step: calls and bytes."""
    columns: _Columns[Collective] = {
        "collective": lambda each: each.kind,
        "over": lambda each: each.axis,
        "calls": lambda each: str(each.count),
        "bytes": lambda each: bytes_text(each.num_bytes),
    }
    return _build_table(collectives, columns, {"collective", "over"})


def operators_table(info: OperatorsInfo) -> Table:
    """The operators with their work and memory traffic."""
    columns: _Columns[OperatorLine] = {
        "operator": lambda line: line.name,
        "calls": lambda line: str(line.calls),
        "work": lambda line: count_text(line.flops, "FLOP"),
        "of work": lambda line: percent_text(line.flops_share),
        "read and written": lambda line: bytes_text(line.num_bytes),
        "of bytes": lambda line: percent_text(line.bytes_share),
        "mostly in": lambda line: line.mostly_in,
    }
    return _build_table(info.lines, columns, {"operator", "mostly in"})


def comparisons_table(comparisons: Iterable[Comparison]) -> Table:
    """Measured speeds beside the table's, and the measured speed as a share of the table's."""

    def figure_text(value: float | None, unit: str) -> str:
        if unit == "s":
            return seconds_text(value)
        return count_text(value, unit) if unit else percent_text(value)

    columns: _Columns[Comparison] = {
        "figure": lambda row: row.figure,
        "measured": lambda row: figure_text(row.measured, row.unit),
        "table": lambda row: figure_text(row.table, row.unit),
        "of the table": lambda row: percent_text(row.share),
    }
    return _build_table(comparisons, columns, {"figure"})


def _build_table(items: Iterable[T], columns: _Columns[T], words: Set[str]) -> Table:
    """A table with a row for each item and the given columns; ``words`` are the heads of columns of text."""
    rows = tuple(tuple(cell(item) for cell in columns.values()) for item in items)
    return Table(tuple(columns), rows, frozenset(at for at, head in enumerate(columns) if head in words))


def _measured_seconds(value: float | None, spread: float, num: int) -> str:
    if value is None or num == 0:
        return UNKNOWN
    return f"{measured_text(value, spread if num > 1 else None)}, n={num}"

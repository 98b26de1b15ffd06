"""Picture of a pipeline's step: a row for each rank, a block for each pass."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from atorch_ns.report._svg import FONT, Canvas, legend_rows, nice_ticks
from atorch_ns.report._timeline import TimelineInfo, TimelineRow
from atorch_ns.report._timeline_text import KIND_NAMES, timeline_sentence
from atorch_ns.report._units import percent_text, seconds_text

__all__ = ["MOST_ROWS", "timeline_picture"]

_LEFT, _RIGHT = 34, 46  # for the ranks' numbers and their idle shares
_ROW, _BAR = 26, 20
MOST_ROWS = 16
"""Ranks that are drawn; of more, as many are chosen evenly."""

_THIN = 3.0  # narrower blocks are drawn as one with their neighbours
_LAP = 4  # height of the mark under a later stage's passes
_LINE = FONT * 1.6

_STYLES = {"F": "p0", "B": "p1", "I": "p6", "W": "p4", "mixed": "p5"}
_LATER = "a later stage of the rank"
_MIXED = "several passes"


class _Span(NamedTuple):
    """What is drawn as one block; ``text`` is its micro-batch."""

    kind: str
    x: float
    width: float
    later: bool
    text: str


def timeline_picture(info: TimelineInfo, width: int, name: str) -> str:
    """Ranks from top to bottom, time from left to right; the empty parts of a row are idle."""
    rows = info.first(MOST_ROWS)
    scale = (width - _LEFT - _RIGHT) / (info.step_seconds or 1.0)
    spans = [list(_merged(row, scale)) for row in rows]
    legend = _legend(info, spans, width)
    top = _LINE * (len(legend) + 2)
    bottom = top + _ROW * len(rows)
    canvas = Canvas(name, f"Pipeline: {info.schedule}", timeline_sentence(info), width, int(bottom + 26))
    _draw_legend(canvas, legend)
    canvas.text(0, top - 8, "rank", style="muted")
    canvas.text(width, top - 8, "idle", style="muted", anchor="end")
    for position, (row, drawn) in enumerate(zip(rows, spans, strict=True)):
        y = top + _ROW * position
        canvas.text(_LEFT - 8, y + 15, str(row.rank), anchor="end")
        canvas.text(width, y + 15, percent_text(row.idle_share), anchor="end")
        canvas.box(_LEFT, y, width - _LEFT - _RIGHT, _BAR, style="idle")
        _draw_row(canvas, drawn, y)
    _draw_axis(canvas, info, scale, bottom)
    return canvas.finish()


def _merged(row: TimelineRow, scale: float) -> Iterator[_Span]:
    """The row's blocks in the units of the picture, thin neighbours as one."""
    start = end = 0.0
    thin: set[str] = set()
    for block in row.blocks:
        x, length = _LEFT + block.start * scale, (block.end - block.start) * scale
        if not length:  # the first stage's backward for inputs, which it does not have
            continue
        if thin and (length >= _THIN or x > end + 1):
            yield _whole(thin, start, end)
            thin = set()
        if length >= _THIN:
            yield _Span(block.kind, x, length, block.lap > 0, str(block.micro_batch))
            continue
        start = start if thin else x
        end = x + length
        thin.add(block.kind)
    if thin:
        yield _whole(thin, start, end)


def _whole(kinds: Iterable[str], start: float, end: float) -> _Span:
    only = set(kinds)
    return _Span(only.pop() if len(only) == 1 else "mixed", start, end - start, False, "")


def _draw_row(canvas: Canvas, spans: Sequence[_Span], y: float) -> None:
    for kind, style in _STYLES.items():
        boxes = [(span.x, y, span.width, _BAR) for span in spans if span.kind == kind]
        if boxes:
            canvas.boxes(boxes, style=style)
    marks = [(span.x, y + _BAR - _LAP, span.width, _LAP) for span in spans if span.later]
    if marks:
        canvas.boxes(marks, style="lap")
    for span in spans:
        if span.text and span.width > FONT * 0.6 * len(span.text) + 3:
            canvas.text(span.x + span.width / 2, y + 14, span.text, style="on", anchor="middle")


def _draw_axis(canvas: Canvas, info: TimelineInfo, scale: float, y: float) -> None:
    ticks = nice_ticks(info.step_seconds, num=6 if canvas.width > 500 else 3)
    for tick in ticks:
        x = _LEFT + tick * scale
        if x <= canvas.width - _RIGHT + 1:
            canvas.line(x, y - (_ROW - _BAR), x, y, style="grid")
            canvas.text(x, y + 14, seconds_text(tick) if tick else "0", anchor="middle", style="muted")


def _legend(
    info: TimelineInfo, spans: Sequence[Sequence[_Span]], width: int
) -> list[list[tuple[float, str]]]:
    drawn = {span.kind for row in spans for span in row}
    names = [KIND_NAMES[kind] for kind in info.kinds if kind in drawn]
    if "mixed" in drawn:
        names.append(_MIXED)
    names.append("idle")
    if any(span.later for row in spans for span in row):
        names.append(_LATER)
    return legend_rows(names, width)


def _draw_legend(canvas: Canvas, rows: Sequence[Sequence[tuple[float, str]]]) -> None:
    styles = {KIND_NAMES[kind]: style for kind, style in _STYLES.items() if kind in KIND_NAMES}
    styles |= {_MIXED: _STYLES["mixed"], "idle": "idle", _LATER: _STYLES["F"]}
    for line, row in enumerate(rows):
        y = FONT * (1 + 1.6 * line)
        for x, label in row:
            canvas.box(x, y - FONT + 1, FONT + 2, FONT + 2, style=styles[label])
            if label == _LATER:
                canvas.box(x, y + 3 - _LAP, FONT + 2, _LAP, style="lap")
            canvas.text(x + FONT + 7, y, label)

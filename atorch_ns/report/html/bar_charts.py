"""Pictures made of bars: the waterfall, memory and time in parts, and a pipeline's timeline."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from atorch_ns.report.html.svg import FONT, WIDTH, Canvas, Unit, fit_text, legend_rows, nice_ticks, text_width
from atorch_ns.report.info.breakdown import Bar, MemoryInfo, TimeInfo, TimelineInfo, TimelineRow, used_parts
from atorch_ns.report.info.verdict import WaterfallBar, WaterfallInfo
from atorch_ns.report.text.text import KIND_NAMES, timeline_sentence
from atorch_ns.text import bytes_text, percent_text, seconds_text

_LINE = FONT * 1.6  # height of a legend's line

_STEP_ROW = 48  # a label, and a bar below it
_STEP_BAR = 18
_GAP = 6  # between a bar and its figure


def waterfall_picture(info: WaterfallInfo) -> str:
    """The baseline's step, each change as a floating bar, and the winner's step."""
    changes = ", ".join(f"{bar.label} {_signed_seconds_text(bar.change)}" for bar in info.bars)
    start, end = seconds_text(info.baseline_seconds), seconds_text(info.winner_seconds)
    description = f"From {start} to {end}: {changes or 'the baseline won'}."
    rows = [(f"baseline: {info.baseline}", 0.0, info.baseline_seconds, "total", start)]
    for bar in info.bars:
        note = "" if bar.source == "measured" else f" ({bar.source})"
        # A change is a bar from the step before it to the step after it.
        low, high = sorted((bar.before, bar.after))
        style = "faster" if bar.change <= 0 else "slower"
        rows.append((f"{bar.label}{note}", low, high, style, _change_text(bar)))
    rows.append((f"winner: {info.winner}", 0.0, info.winner_seconds, "total", end))
    title = "From the baseline to the winner"
    canvas = Canvas("waterfall", title, description, WIDTH, height=_STEP_ROW * len(rows) + 8)
    longest = max(1e-12, *(high for _, _, high, _, _ in rows))  # never zero, as it divides
    scale = (WIDTH - max(text_width(amount) for *_, amount in rows) - _GAP) / longest
    for position, (label, low, high, style, amount) in enumerate(rows):
        y = _STEP_ROW * position
        canvas.text(0, y + FONT, fit_text(label, WIDTH))
        length = max((high - low) * scale, 1.5)  # a small change is still seen
        canvas.box(low * scale, y + FONT + 6, length, _STEP_BAR, style=style)
        canvas.text(high * scale + _GAP, y + FONT + 20, amount)
    return canvas.finish()


def _change_text(bar: WaterfallBar) -> str:
    share = percent_text(abs(bar.change) / bar.before if bar.before else None)
    return f"{'◀' if bar.change <= 0 else '▶'} {_signed_seconds_text(bar.change)} ({share})"


def _signed_seconds_text(seconds: float) -> str:
    return f"{'+' if seconds > 0 else '−'}{seconds_text(abs(seconds))}"


_ROW = 50
_BAR = 20
_EDGE = 8  # room for half a diamond at a bar's end


def memory_picture(info: MemoryInfo) -> str:
    """Predicted peaks in parts against the limit; a diamond where it was measured."""
    over = sum(info.over(bar) > 0 for bar in info.bars)
    first, limit = _first_bar_sentence(info.bars, bytes_text), bytes_text(info.limit_bytes or None)
    description = f"{len(info.bars)} candidates, {over} over the limit of {limit}. {first}"
    return _stacked_bars(
        "memory", "Peak memory per rank", description, info, to_text=bytes_text, limit=info.limit_bytes
    )


def time_picture(info: TimeInfo) -> str:
    """Predicted steps in parts; a diamond where it was measured."""
    description = f"{len(info.bars)} candidates. " + _first_bar_sentence(info.bars, seconds_text)
    return _stacked_bars("time", "Seconds per step", description, info, to_text=seconds_text)


def _stacked_bars(
    name: str, title: str, description: str, info: MemoryInfo | TimeInfo, *, to_text: Unit, limit: float = 0.0
) -> str:
    parts = {part: info.names[part] for part in used_parts(info)}
    legend = legend_rows([*parts.values()], WIDTH)
    top = _LINE * (len(legend) + 1) + 12
    canvas = Canvas(name, title, description, WIDTH, height=int(top + _ROW * len(info.bars) + 10))
    highest = max((_longest_value(bar) for bar in info.bars), default=0.0)
    # A limit far above every bar would press them flat: it is then named, but not drawn.
    draws_limit = 0 < limit <= 4 * highest
    scale = (WIDTH - _EDGE) / (max(highest, limit if draws_limit else 0.0) or 1.0)
    _draw_legend(canvas, legend, {name: f"p{part}" for part, name in parts.items()}, with_numbers=True)
    y = FONT + _LINE * len(legend)
    canvas.mark(7, y - FONT / 2 + 2, "diamond", style="measured")
    canvas.text(FONT + 7, y, "measured; bars are predicted")
    if limit:
        canvas.line(267, y - FONT, 267, y + 2, style="limit")
        canvas.text(260 + FONT + 7, y, f"limit {to_text(limit)}")
    for position, bar in enumerate(info.bars):
        y = top + _ROW * position
        _draw_bar(canvas, bar, y, scale, parts=parts, to_text=to_text)
        if draws_limit:  # across the bar only: a line through the labels would hide them
            canvas.line(limit * scale, y + FONT + 4, limit * scale, y + FONT + _BAR + 10, style="limit")
    return canvas.finish()


def _draw_bar(
    canvas: Canvas, bar: Bar, y: float, scale: float, *, parts: Mapping[int, str], to_text: Unit
) -> None:
    value = bar.measured.value if bar.measured is not None else None
    amount = to_text(bar.predicted) if value is None else f"{to_text(bar.predicted)} (◆ {to_text(value)})"
    role = " ✓" if bar.is_best else " (baseline)" if bar.is_baseline else ""
    style = "strong" if bar.is_best else ""
    room = canvas.width - FONT * 0.6 * (len(amount) + len(role) + 2)  # room beside the figure
    canvas.text(0, y + FONT, fit_text(f"#{bar.number} {bar.label}", room) + role, style=style)
    canvas.text(canvas.width, y + FONT, amount, style=style, anchor="end")
    # Parts lie side by side from the left, numbered where they are wide enough.
    x, top = 0.0, y + FONT + 6
    for number, (part, name) in enumerate(parts.items(), 1):
        length = bar.parts[part] * scale
        canvas.box(x, top, length, _BAR, style=f"p{part}", tip=f"{name}: {to_text(bar.parts[part])}")
        if length > FONT:  # there is room for its number
            canvas.text(x + length / 2, top + _BAR - 5, str(number), style="on", anchor="middle")
        x += length
    if value is not None:
        tip = f"measured {to_text(value)}"
        canvas.mark(value * scale, top + _BAR / 2, "diamond", style="measured", tip=tip)


def _draw_legend(
    canvas: Canvas, rows: list[list[tuple[float, str]]], styles: dict[str, str], *, with_numbers: bool = False
) -> None:
    for line, row in enumerate(rows):
        y = FONT + _LINE * line
        for x, label in row:
            canvas.box(x, y - FONT + 1, FONT + 2, FONT + 2, style=styles[label])
            if with_numbers:
                number = str(list(styles).index(label) + 1)  # as on the bars
                canvas.text(x + FONT / 2 + 1, y, number, style="on", anchor="middle")
            if label == _LATER:  # the mark of such passes
                canvas.box(x, y + 3 - _LAP, FONT + 2, _LAP, style="lap")
            canvas.text(x + FONT + 7, y, label)


def _longest_value(bar: Bar) -> float:
    value = bar.measured.value if bar.measured is not None else None
    return max(bar.predicted, value or 0.0)


def _first_bar_sentence(bars: Sequence[Bar], to_text: Unit) -> str:
    if not bars:
        return ""
    first = bars[0]
    suffix = f", measured {to_text(first.measured.value)}" if first.measured is not None else ""
    return f"First: {first.label}, predicted {to_text(first.predicted)}{suffix}."


_LEFT, _RIGHT = 34, 46  # margins for the ranks' numbers and their idle shares
_RANK_ROW, _RANK_BAR = 26, 20
MOST_ROWS = 16
"""Maximum number of ranks that are drawn. From more ranks, as many are chosen evenly."""

_THIN = 2.0  # narrower blocks are drawn as one with their neighbours
_LAP = 4  # height of the mark under a later stage's passes

_STYLES = {"F": "p0", "R": "p2", "B": "p1", "I": "p6", "W": "p4", "mixed": "p5"}
_LATER = "a later stage of the rank"
_MIXED = "several passes"


class _Span(NamedTuple):
    """A block as drawn; ``text`` is its micro-batch."""

    kind: str
    x: float
    width: float
    later: bool
    text: str


def timeline_picture(info: TimelineInfo) -> str:
    """Ranks from top to bottom, time from left to right; the empty parts of a row are idle."""
    rows = info.first(MOST_ROWS)
    scale = (WIDTH - _LEFT - _RIGHT) / (info.step_seconds or 1.0)  # units of the picture per second
    spans = [list(_merge_thin_blocks(row, scale)) for row in rows]
    legend = _timeline_legend(info, spans)
    top = _LINE * (len(legend) + 2)
    bottom = top + _RANK_ROW * len(rows)
    title, height = f"Pipeline: {info.schedule}", int(bottom + 26)
    canvas = Canvas("timeline", title, timeline_sentence(info), WIDTH, height=height)
    styles = {KIND_NAMES[kind]: style for kind, style in _STYLES.items() if kind in KIND_NAMES}
    styles |= {_MIXED: _STYLES["mixed"], "idle": "idle", _LATER: _STYLES["F"]}
    _draw_legend(canvas, legend, styles)
    canvas.text(0, top - 8, "rank", style="muted")
    canvas.text(WIDTH, top - 8, "idle", style="muted", anchor="end")
    for position, (row, row_spans) in enumerate(zip(rows, spans, strict=True)):
        y = top + _RANK_ROW * position
        canvas.text(_LEFT - 8, y + 15, str(row.rank), anchor="end")
        canvas.text(WIDTH, y + 15, percent_text(row.idle_share), anchor="end")
        canvas.box(_LEFT, y, WIDTH - _LEFT - _RIGHT, _RANK_BAR, style="idle")
        _draw_row(canvas, row_spans, y)
    _draw_axis(canvas, info, scale, bottom)
    return canvas.finish()


def _merge_thin_blocks(row: TimelineRow, scale: float) -> Iterator[_Span]:
    start = end = 0.0
    thin: set[str] = set()
    for block in row.blocks:
        x, length = _LEFT + block.start * scale, (block.end - block.start) * scale
        if not length:  # the first stage's backward for inputs, which it does not have
            continue
        if thin and (length >= _THIN or x > end + 1):  # wide enough itself, or after a gap
            yield _merged_span(thin, start, end)
            thin = set()
        if length >= _THIN:
            yield _Span(block.kind, x, length, block.lap > 0, str(block.micro_batch))
            continue
        start = start if thin else x
        end = x + length
        thin.add(block.kind)
    if thin:
        yield _merged_span(thin, start, end)


def _merged_span(kinds: set[str], start: float, end: float) -> _Span:
    return _Span(min(kinds) if len(kinds) == 1 else "mixed", start, end - start, False, "")


def _draw_row(canvas: Canvas, spans: Sequence[_Span], y: float) -> None:
    for kind, style in _STYLES.items():  # one shape for each style
        boxes = [(span.x, y, span.width, _RANK_BAR) for span in spans if span.kind == kind]
        if boxes:
            canvas.boxes(boxes, style=style)
    marks = [(span.x, y + _RANK_BAR - _LAP, span.width, _LAP) for span in spans if span.later]
    if marks:
        canvas.boxes(marks, style="lap")
    for span in spans:
        if span.text and span.width > FONT * 0.6 * len(span.text) + 3:  # it fits into the block
            canvas.text(span.x + span.width / 2, y + 14, span.text, style="on", anchor="middle")


def _draw_axis(canvas: Canvas, info: TimelineInfo, scale: float, y: float) -> None:
    for tick in nice_ticks(info.step_seconds, num=4):
        x = _LEFT + tick * scale
        if x <= canvas.width - _RIGHT + 1:  # the last tick may lie beyond the step
            canvas.line(x, y - (_RANK_ROW - _RANK_BAR), x, y, style="grid")
            canvas.text(x, y + 14, seconds_text(tick) if tick else "0", anchor="middle", style="muted")


def _timeline_legend(info: TimelineInfo, spans: Sequence[Sequence[_Span]]) -> list[list[tuple[float, str]]]:
    span_kinds = {span.kind for row in spans for span in row}
    kinds = [KIND_NAMES[kind] for kind in info.kinds if kind in span_kinds]
    mixed = [_MIXED] if "mixed" in span_kinds else []
    later = [_LATER] if any(span.later for row in spans for span in row) else []
    return legend_rows([*kinds, *mixed, "idle", *later], WIDTH)

"""Pictures of memory and time in parts: one stacked bar a candidate."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from atorch_ns.report._bars import Bar, MemoryInfo, TimeInfo
from atorch_ns.report._svg import FONT, Canvas, fitted, legend_rows
from atorch_ns.report._units import bytes_text, seconds_text

__all__ = ["memory_picture", "time_picture"]

_ROW = 50
_BAR = 20
_EDGE = 8  # room for half a diamond at a bar's end


def memory_picture(info: MemoryInfo, width: int, name: str) -> str:
    """Predicted peaks in parts against the limit; a diamond where it was measured."""
    over = sum(info.over(bar) > 0 for bar in info.bars)
    description = (
        f"{len(info.bars)} candidates, {over} of them over the limit of "
        f"{bytes_text(info.limit_bytes or None)}. " + _sentence(info.bars, bytes_text)
    )
    limit = ("limit", float(info.limit_bytes)) if info.limit_bytes else None
    return _stacked(name, "Peak memory per rank", description, info, width, bytes_text, limit)


def time_picture(info: TimeInfo, width: int, name: str) -> str:
    """Predicted steps in parts; a diamond where it was measured."""
    description = f"{len(info.bars)} candidates. " + _sentence(info.bars, seconds_text)
    return _stacked(name, "Seconds per step", description, info, width, seconds_text, None)


def _stacked(
    name: str,
    title: str,
    description: str,
    info: MemoryInfo | TimeInfo,
    width: int,
    shown: Callable[[float | None], str],
    limit: tuple[str, float] | None,
) -> str:
    used = [part for part in range(len(info.names)) if any(bar.parts[part] for bar in info.bars)]
    legend = legend_rows([info.names[part] for part in used], width)
    top = FONT * 1.6 * (len(legend) + 2) + 12
    canvas = Canvas(name, title, description, width, int(top + _ROW * len(info.bars) + 10))
    highest = max((_longest(bar) for bar in info.bars), default=0.0)
    # A limit far above every bar would press them flat: it is then named, but not drawn.
    drawn = limit is not None and limit[1] <= 4 * highest
    right = max(highest, limit[1] if drawn and limit else 0.0) or 1.0
    scale = (width - _EDGE) / right
    _draw_legend(canvas, legend, used, limit, shown)
    for position, bar in enumerate(info.bars):
        y = top + _ROW * position
        _draw_bar(canvas, bar, y, scale, used, info.names, shown)
        if drawn and limit is not None:  # beside the bar only: a line through the labels would hide them
            x = limit[1] * scale
            canvas.line(x, y + FONT + 4, x, y + FONT + _BAR + 10, style="limit")
    return canvas.finish()


def _draw_bar(
    canvas: Canvas,
    bar: Bar,
    y: float,
    scale: float,
    used: Sequence[int],
    names: Sequence[str],
    shown: Callable[[float | None], str],
) -> None:
    measured = bar.measured.value if bar.measured is not None else None
    amount = shown(bar.predicted) if measured is None else f"{shown(bar.predicted)} (◆ {shown(measured)})"
    role = " ✓" if bar.is_best else " (baseline)" if bar.is_baseline else ""
    style = "strong" if bar.is_best else ""
    room = canvas.width - FONT * 0.6 * (len(amount) + len(role) + 2)
    canvas.text(0, y + FONT, fitted(f"#{bar.number} {bar.label}", room) + role, style=style)
    canvas.text(canvas.width, y + FONT, amount, style=style, anchor="end")
    x, top = 0.0, y + FONT + 6
    for number, part in enumerate(used, 1):
        length = bar.parts[part] * scale
        canvas.box(x, top, length, _BAR, style=f"p{part}", tip=f"{names[part]}: {shown(bar.parts[part])}")
        if length > FONT:
            canvas.text(x + length / 2, top + _BAR - 5, str(number), style="on", anchor="middle")
        x += length
    if measured is not None:
        tip = f"measured {shown(measured)}"
        canvas.mark(measured * scale, top + _BAR / 2, "diamond", style="measured", tip=tip)


def _draw_legend(
    canvas: Canvas,
    rows: Sequence[Sequence[tuple[float, str]]],
    used: Sequence[int],
    limit: tuple[str, float] | None,
    shown: Callable[[float | None], str],
) -> None:
    number = 0
    for line, row in enumerate(rows):
        y = FONT * (1 + 1.6 * line)
        for x, label in row:
            canvas.box(x, y - FONT + 1, FONT + 2, FONT + 2, style=f"p{used[number]}")
            canvas.text(x + FONT / 2 + 1, y, str(number + 1), style="on", anchor="middle")
            canvas.text(x + FONT + 7, y, label)
            number += 1
    y = FONT * (1 + 1.6 * len(rows))
    canvas.mark(7, y - FONT / 2 + 2, "diamond", style="measured")
    canvas.text(FONT + 7, y, "measured; bars are predicted")
    if limit is not None:
        wide = canvas.width > 500
        x, y = (260.0, y) if wide else (0.0, y + FONT * 1.6)
        canvas.line(x + 7, y - FONT, x + 7, y + 2, style="limit")
        canvas.text(x + FONT + 7, y, f"{limit[0]} {shown(limit[1])}")


def _longest(bar: Bar) -> float:
    measured = bar.measured.value if bar.measured is not None else None
    return max(bar.predicted, measured or 0.0)


def _sentence(bars: Sequence[Bar], shown: Callable[[float | None], str]) -> str:
    """The first bar in words."""
    if not bars:
        return ""
    first = bars[0]
    measured = f", measured {shown(first.measured.value)}" if first.measured is not None else ""
    return f"First: {first.label}, predicted {shown(first.predicted)}{measured}."

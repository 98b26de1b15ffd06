"""Picture of the waterfall from the baseline to the winner."""

from __future__ import annotations

from atorch_ns.report._svg import FONT, Canvas, fitted, text_width
from atorch_ns.report._units import percent_text, seconds_text
from atorch_ns.report._waterfall import WaterfallBar, WaterfallInfo

__all__ = ["waterfall_picture"]

_ROW = 48
_BAR = 18
_GAP = 6  # between a bar and its figure


def waterfall_picture(info: WaterfallInfo, width: int, name: str) -> str:
    """The baseline's step, each change as a floating bar, and the winner's step."""
    changes = ", ".join(f"{bar.label} {_signed(bar.change)}" for bar in info.bars)
    description = (
        f"From {seconds_text(info.baseline_seconds)} to {seconds_text(info.winner_seconds)}: "
        f"{changes or 'the baseline won'}."
    )
    canvas = Canvas(
        name, "From the baseline to the winner", description, width, _ROW * (len(info.bars) + 2) + 8
    )
    longest = max(info.baseline_seconds, *(max(bar.before, bar.after) for bar in info.bars), 1e-12)
    amounts = [_amount(bar) for bar in info.bars]
    ends = (seconds_text(info.baseline_seconds), seconds_text(info.winner_seconds))
    scale = (width - max(map(text_width, (*amounts, *ends))) - _GAP) / longest
    _bar(canvas, 0, f"baseline: {info.baseline}", 0.0, info.baseline_seconds * scale, "total")
    canvas.text(info.baseline_seconds * scale + _GAP, FONT + 20, ends[0])
    for position, bar in enumerate(info.bars, 1):
        low, high = sorted((bar.before * scale, bar.after * scale))
        style = "faster" if bar.change <= 0 else "slower"
        note = "" if bar.source == "measured" else f" ({bar.source})"
        _bar(canvas, position, f"{bar.label}{note}", low, high, style)
        canvas.text(high + _GAP, _ROW * position + FONT + 20, amounts[position - 1])
    last = len(info.bars) + 1
    _bar(canvas, last, f"winner: {info.winner}", 0.0, info.winner_seconds * scale, "total")
    canvas.text(info.winner_seconds * scale + _GAP, _ROW * last + FONT + 20, ends[1])
    return canvas.finish()


def _bar(canvas: Canvas, position: int, label: str, low: float, high: float, style: str) -> None:
    y = _ROW * position
    canvas.text(0, y + FONT, fitted(label, canvas.width))
    canvas.box(low, y + FONT + 6, max(high - low, 1.5), _BAR, style=style)


def _amount(bar: WaterfallBar) -> str:
    share = percent_text(abs(bar.change) / bar.before if bar.before else None)
    return f"{'◀' if bar.change <= 0 else '▶'} {_signed(bar.change)} ({share})"


def _signed(seconds: float) -> str:
    return f"{'+' if seconds > 0 else '−'}{seconds_text(abs(seconds))}"

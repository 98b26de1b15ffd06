"""A small SVG writer. Colours are classes, which the page's style gives their values in light and dark."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from xml.sax.saxutils import escape, quoteattr

WIDTH = 440
"""Width of every picture, in its units; the page shows it 358 pixels wide on a phone, 680 on a desktop."""

FONT = 13
"""Height of text, in the units of the picture: legible on a phone, and not huge on a desktop."""

Unit = Callable[[float | None], str]
"""Writes a figure with its unit."""

_CHARACTER = 0.58  # mean width of a character over the font's height, for fitting labels


class Canvas:
    """A picture that grows by calls and is written once.

    Args:
        name: identifies the picture in its page; title and description get ids from it.
        title: title for people who hear the page.
        description: content in a sentence, with the figures that matter.
        width, height: size of the picture, in its units.
    """

    def __init__(self, name: str, title: str, description: str, width: int, *, height: int) -> None:
        self.width, self.height = width, height
        self._labels: list[tuple[float, float, float, float]] = []  # left, top, right, bottom
        self._parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
            f'height="{height}" role="img" aria-labelledby="{name}-title {name}-desc">',
            f'<title id="{name}-title">{escape(title)}</title>',
            f'<desc id="{name}-desc">{escape(description)}</desc>',
        ]

    def box(self, x: float, y: float, width: float, height: float, *, style: str, tip: str = "") -> None:
        """A rectangle; ``tip`` is shown when it is pointed at."""
        size = f'x="{x:.1f}" y="{y:.1f}" width="{max(width, 0):.1f}" height="{height:.1f}"'
        self._add_element("rect", size, style, tip)

    def boxes(self, corners: Iterable[tuple[float, float, float, float]], *, style: str) -> None:
        """Many rectangles of one style, each ``(x, y, width, height)``, written as one shape."""
        parts = (f"M{x:.1f} {y:.1f}h{wide:.1f}v{high:.1f}h-{wide:.1f}z" for x, y, wide, high in corners)
        self._add_element("path", f'd="{"".join(parts)}"', style)

    def line(self, x1: float, y1: float, x2: float, y2: float, *, style: str) -> None:
        """A straight line."""
        self._add_element("line", f'x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"', style)

    def path(self, points: Sequence[tuple[float, float]], *, style: str) -> None:
        """A line through points."""
        text = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        self._add_element("polyline", f'points="{text}" fill="none"', style)

    def mark(self, x: float, y: float, shape: str, *, style: str, size: float = 5, tip: str = "") -> None:
        """A ``circle``, ``square``, ``diamond`` or ``cross``: points that differ in more than colour."""
        if shape == "circle":
            self._add_element("circle", f'cx="{x:.1f}" cy="{y:.1f}" r="{size:.1f}"', style, tip)
        elif shape == "square":
            self.box(x - size, y - size, 2 * size, 2 * size, style=style, tip=tip)
        elif shape == "diamond":
            corners = ((x, y - size), (x + size, y), (x, y + size), (x - size, y))
            text = " ".join(f"{px:.1f},{py:.1f}" for px, py in corners)
            self._add_element("polygon", f'points="{text}"', style, tip)
        else:
            ends = f"M{x - size:.1f} {y - size:.1f}L{x + size:.1f} {y + size:.1f}"
            other = f"M{x - size:.1f} {y + size:.1f}L{x + size:.1f} {y - size:.1f}"
            self._add_element("path", f'd="{ends}{other}"', style, tip)

    def text(self, x: float, y: float, text: str, *, style: str = "", anchor: str = "start") -> None:
        """Text whose baseline is at ``y``; ``anchor`` is start, middle or end."""
        position = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"'
        self._parts.append(f'<text {position} class="{style}">{escape(text)}</text>')

    def label(self, x: float, y: float, text: str, *, reach: float = 7, rise: float = 0) -> None:
        """Text next to the point ``(x, y)``: on the first of its sides where no other label is, or nowhere.

        Args:
            reach: radius of the point's mark.
            rise: height of a label at the left or right above the point.
        """
        width = text_width(text)
        for left, base in (
            (x + reach, y + 4 - rise),  # right of the point
            (x - reach - width, y + 4 - rise),  # left of it
            (x - width / 2, y - reach - 2),  # above it
            (x - width / 2, y + reach + FONT - 2),  # below it
        ):
            box = (left, base - FONT - 1, left + width, base + 5)
            inside = box[0] >= 0 and box[1] >= 0 and box[2] <= self.width and box[3] <= self.height
            if inside and not any(_boxes_overlap(box, other) for other in self._labels):
                self._labels.append(box)
                self.text(left, base, text, style="muted")
                return

    def keep_free(self, left: float, top: float, right: float, bottom: float) -> None:
        """Keeps labels out of this area."""
        self._labels.append((left, top, right, bottom))

    def finish(self) -> str:
        """Returns the picture as SVG text."""
        return "\n".join([*self._parts, "</svg>"])

    def _add_element(self, tag: str, attributes: str, style: str, tip: str = "") -> None:
        start = f"<{tag} {attributes} class={quoteattr(style)}"
        self._parts.append(f"{start}><title>{escape(tip)}</title></{tag}>" if tip else f"{start}/>")


def _boxes_overlap(box: tuple[float, float, float, float], other: tuple[float, float, float, float]) -> bool:
    return box[0] < other[2] and other[0] < box[2] and box[1] < other[3] and other[1] < box[3]


def text_width(text: str) -> float:
    """Returns the approximate width of a text, rather too wide than too narrow."""
    wide = sum(not character.isascii() for character in text)  # arrows and marks are as wide as high
    return FONT * (0.7 * (len(text) - wide) + wide)


def fit_text(text: str, width: float) -> str:
    """The text, shortened to about this width."""
    room = max(1, int(width / (FONT * _CHARACTER)))
    return text if len(text) <= room else text[: room - 1].rstrip() + "…"


def legend_rows(names: Sequence[str], width: int) -> list[list[tuple[float, str]]]:
    """Layout of a legend: ``(x, name)`` of each entry by line, with room for a box before each."""
    rows: list[list[tuple[float, str]]] = [[]]
    x = 0.0
    for name in names:
        length = FONT + 20 + len(name) * FONT * 0.6  # box, gaps and text
        if x + length > width and rows[-1]:
            rows.append([])
            x = 0.0
        rows[-1].append((x, name))
        x += length
    return rows


def nice_ticks(highest: float, *, lowest: float = 0.0, num: int = 4) -> tuple[float, ...]:
    """Round numbers from ``lowest`` to just above ``highest``.

    Example:
        >>> nice_ticks(43.0)
        (0.0, 20.0, 40.0, 60.0)
    """
    span = highest - lowest
    if not span > 0 or not math.isfinite(span):  # one value, or NaN
        return (lowest, lowest + 1.0)
    rough = span / num
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= rough * 0.999)
    first = math.floor(lowest / step)
    last = math.ceil(highest / step - 1e-9)  # a value on a tick needs no further one
    return tuple(index * step for index in range(first, last + 1))

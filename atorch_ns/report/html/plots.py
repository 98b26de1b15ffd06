"""Pictures with two axes: the search's history, predicted against measured, time against memory."""

from __future__ import annotations

import math
from collections.abc import Sequence

from atorch_ns.report.html.svg import FONT, WIDTH, Canvas, Unit, nice_ticks, text_width
from atorch_ns.report.info.accuracy import AccuracyInfo
from atorch_ns.report.info.candidates import HistoryInfo, ParetoInfo, ParetoPoint
from atorch_ns.text import bytes_text, count_noun, number_text, percent_text, seconds_text

_FAR = 20.0  # an axis is logarithmic from this ratio of the highest value to the lowest

_MOST_TICKS = 7

_LEFT, _RIGHT, _TOP, _BOTTOM = 74, 36, 54, 44  # margins


class _Axes:
    """The frame of a plot: places of values, by the axes' ticks (logarithmic by :func:`_far_ticks`)."""

    def __init__(self, canvas: Canvas, across: Sequence[float], up: Sequence[float]) -> None:
        self._canvas, self._across, self._up = canvas, tuple(across), tuple(up)

    def x(self, value: float) -> float:
        """Horizontal position of a value."""
        return _LEFT + _axis_fraction(self._across, value) * (self._canvas.width - _LEFT - _RIGHT)

    def y(self, value: float) -> float:
        """Vertical position of a value."""
        bottom = self._canvas.height - _BOTTOM
        return bottom - _axis_fraction(self._up, value) * (self._canvas.height - _TOP - _BOTTOM)

    def draw(self, across: tuple[str, Unit], up: tuple[str, Unit]) -> None:
        """Grid, ticks and the axes' names."""
        canvas = self._canvas
        bottom = canvas.height - _BOTTOM
        for value in self._up:
            canvas.line(_LEFT, self.y(value), canvas.width - _RIGHT, self.y(value), style="grid")
            canvas.text(_LEFT - 6, self.y(value) + 4, up[1](value), anchor="end", style="muted")
        longest = max(text_width(across[1](value)) for value in self._across)
        # Figures need room: where they are wider than the distance of ticks, only every so many are shown.
        every = max(1, math.ceil((longest + 4) / (self.x(self._across[1]) - self.x(self._across[0]))))
        for value in self._across[::every]:
            canvas.line(self.x(value), _TOP, self.x(value), bottom, style="grid")
            canvas.text(self.x(value), bottom + 18, across[1](value), anchor="middle", style="muted")
        canvas.keep_free(0, bottom, canvas.width, canvas.height)  # figures of the axes are there
        canvas.keep_free(0, _TOP, _LEFT, bottom)
        name = f"{across[0]}{_scale_note(self._across)} →"
        canvas.text(canvas.width - _RIGHT, canvas.height - 8, name, anchor="end", style="muted")
        canvas.text(0, _TOP - 16, f"↑ {up[0]}{_scale_note(self._up)}", style="muted")


def history_picture(info: HistoryInfo) -> str:
    """Every trial's step, the best so far as a stair, failures as crosses above."""
    medians = [point.seconds for point in info.points if point.seconds is not None]
    upper_ends = [point.seconds + point.spread for point in info.points if point.seconds is not None]
    least = [point.seconds - point.spread for point in info.points if point.seconds is not None]
    if info.lower_bound_seconds is not None:
        least.append(info.lower_bound_seconds)
    best = min((point.best_seconds for point in info.points if point.best_seconds), default=None)
    num_errors = len(info.points) - len(medians)
    description = f"{count_noun(len(info.points), 'trial')}, {num_errors} failed; the best step was {seconds_text(best)}."
    canvas = Canvas("history", "Trials in their order", description, WIDTH, height=300)
    last = max((point.trial for point in info.points), default=1)
    step = max(1, round(last / 8))  # about 8 ticks
    up = _far_ticks(medians) or _linear_ticks([*least, *(value * 1.01 for value in upper_ends)], seconds_text)
    axes = _Axes(canvas, range(0, last + step + 1, step), up)
    axes.draw(("trial", lambda value: f"{value:.0f}"), ("step, measured", seconds_text))
    # The best so far goes down at each trial that is better.
    stair: list[tuple[float, float]] = []
    for point in info.points:
        if point.best_seconds is not None:
            if stair:
                stair.append((axes.x(point.trial), stair[-1][1]))  # across, then down
            stair.append((axes.x(point.trial), axes.y(point.best_seconds)))
    canvas.path(stair, style="stair")
    if info.lower_bound_seconds is not None:
        y = axes.y(info.lower_bound_seconds)
        canvas.line(_LEFT, y, WIDTH - _RIGHT, y, style="bound")
        canvas.text(WIDTH - _RIGHT, y - 5, "lower bound (predicted)", anchor="end", style="muted")
    for point in info.points:
        x, is_winner, spread = axes.x(point.trial), point.trial == info.best_trial, point.spread
        if point.seconds is None:
            canvas.mark(x, _TOP + 8, "cross", style="failed", tip=f"{point.label}: {point.status}")
            continue
        canvas.line(x, axes.y(point.seconds - spread), x, axes.y(point.seconds + spread), style="whisker")
        tip = f"trial {point.trial}: {point.label}: {seconds_text(point.seconds)} ±{seconds_text(spread)}"
        shape, style = ("diamond", "won") if is_winner else ("circle", "dot")
        canvas.mark(x, axes.y(point.seconds), shape, style=style, size=7 if is_winner else 4, tip=tip)
    canvas.text(0, FONT, "● trial   ◆ the winner   ✕ failed   ─ best so far")
    return canvas.finish()


def accuracy_picture(info: AccuracyInfo) -> str:
    """Predicted across, measured up; on the diagonal the prediction was right."""
    to_text = seconds_text if info.quantity == "time" else bytes_text
    merit = (
        f"rank correlation {number_text(info.correlation)}, median error {percent_text(info.median_error)}, "
        f"n={len(info.points)}"
    )
    title = f"{info.quantity.capitalize()}: predicted against measured"
    canvas = Canvas(f"accuracy-{info.quantity}", title, f"{title}: {merit}.", WIDTH, height=330)
    values = [value for point in info.points for value in (point.predicted, point.measured)]
    if info.quantity == "memory":
        ticks = _bytes_ticks(values)
    else:
        ticks = _far_ticks(values) or _linear_ticks(values, seconds_text)
    axes = _Axes(canvas, ticks, ticks)
    axes.draw(("predicted", to_text), ("measured", to_text))
    canvas.text(0, FONT, merit)
    canvas.line(axes.x(ticks[0]), axes.y(ticks[0]), axes.x(ticks[-1]), axes.y(ticks[-1]), style="diagonal")
    for point in info.points:
        x, y = axes.x(point.predicted), axes.y(point.measured)
        figures = f"predicted {to_text(point.predicted)}, measured {to_text(point.measured)}"
        canvas.mark(x, y, "circle", style="dot", size=4, tip=f"#{point.number} {point.label}: {figures}")
        canvas.label(x, y, f"#{point.number}", rise=-6)
    return canvas.finish()


def pareto_picture(info: ParetoInfo) -> str:
    """Step across, peak memory up; the front is a line that no candidate lies below."""
    front = info.front
    description = f"{len(info.points)} candidates, {len(front)} on the front of time and memory."
    canvas = Canvas("pareto", "Time against memory", description, WIDTH, height=340)
    peaks = [point.memory.value or 0.0 for point in info.points]
    draws_limit = 0 < info.limit_bytes <= 2 * max(peaks, default=1.0)  # a far limit would flatten the points
    up = _bytes_ticks([*peaks, info.limit_bytes] if draws_limit else peaks)
    times = [point.time.value or 0.0 for point in info.points]
    across = _far_ticks(times) or _linear_ticks(times, seconds_text)
    axes = _Axes(canvas, across, up)
    axes.draw(("step", seconds_text), ("peak memory per rank", bytes_text))
    if draws_limit:
        y = axes.y(info.limit_bytes)
        canvas.line(_LEFT, y, WIDTH - _RIGHT, y, style="limit")
        limit = f"limit {bytes_text(info.limit_bytes)}"
        canvas.text(WIDTH - _RIGHT, y - 4, limit, anchor="end")
        canvas.keep_free(WIDTH - _RIGHT - text_width(limit), y - 4 - FONT, WIDTH - _RIGHT, y)
    canvas.path([_point_position(axes, point) for point in front], style="stair")
    for point in sorted(info.points, key=lambda point: (point.on_front, point.is_best)):  # the winner on top
        x, y = _point_position(axes, point)
        is_measured = point.time.source == "measured"
        shape = "diamond" if point.is_best else "circle" if is_measured else "square"
        style = "won" if point.is_best else "dot" if is_measured else "hollow"
        tip = f"#{point.number} {point.label}: {point.time.as_seconds()}, {point.memory.as_bytes()}"
        canvas.mark(x, y, shape, style=style, size=7 if point.is_best else 4, tip=tip)
        if point.on_front:
            canvas.label(x, y, f"#{point.number}", reach=9, rise=9)
    canvas.text(0, FONT, "● measured   □ predicted   ◆ the winner   ─ front")
    return canvas.finish()


def _point_position(axes: _Axes, point: ParetoPoint) -> tuple[float, float]:
    return axes.x(point.time.value or 0.0), axes.y(point.memory.value or 0.0)


def _linear_ticks(values: Sequence[float], to_text: Unit) -> tuple[float, ...]:
    """Ticks from zero, or from below the least value where values lie close together far from zero."""
    low, high = min(values, default=0.0), max(values, default=1.0)
    if 0.7 * high < low < high:
        near = nice_ticks(high, lowest=low - 0.05 * (high - low))
        if len({to_text(tick) for tick in near}) == len(near):  # no two read alike
            return near
    return nice_ticks(high)


def _far_ticks(values: Sequence[float]) -> tuple[float, ...]:
    """Ticks of a logarithmic axis, where a linear one would show only the largest values; else none."""
    low, high = min(values, default=0.0), max(values, default=0.0)
    if low <= 0 or high < _FAR * low or not math.isfinite(high):
        return ()
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    ticks: list[float] = []
    for digits in ((1, 2, 5), (1, 3), (1,)):  # the most in each decade that are few enough in all
        every = [digit * 10.0**power for power in powers for digit in digits]
        first = max(at for at, tick in enumerate(every) if tick <= low * (1 + 1e-9))  # 1e-9 for rounding
        last = min(at for at, tick in enumerate(every) if tick >= high * (1 - 1e-9))
        ticks = every[first : last + 1]
        if len(ticks) <= _MOST_TICKS:
            break
    return tuple(ticks)


def _is_far(ticks: Sequence[float]) -> bool:
    return ticks[0] > 0 and ticks[-1] >= _FAR * ticks[0]


def _scale_note(ticks: Sequence[float]) -> str:
    return " (logarithmic)" if _is_far(ticks) else ""


def _axis_fraction(ticks: Sequence[float], value: float) -> float:
    first, last = ticks[0], ticks[-1]
    if _is_far(ticks):
        return math.log(max(value, first) / first) / math.log(last / first)  # lower values at its beginning
    return (value - first) / (last - first)


def _bytes_ticks(values: Sequence[float]) -> tuple[float, ...]:
    # Round in the binary unit that they are written in: 2 GiB rather than 2 GB.
    highest = max(values, default=1.0)
    unit = next((size for size in (2.0**40, 2.0**30, 2.0**20, 2.0**10) if highest >= size), 1.0)
    ticks = _linear_ticks([value / unit for value in values], lambda tick: bytes_text((tick or 0.0) * unit))
    return tuple(tick * unit for tick in ticks)

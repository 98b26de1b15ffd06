"""Labels beside points: none lies on another, none leaves the picture, and ticks can be told apart."""

from __future__ import annotations

import doctest
import re

import pytest

from atorch_ns.report.html import svg as svg_module
from atorch_ns.report.html.plots import _bytes_ticks, _linear_ticks
from atorch_ns.report.html.svg import Canvas, fit_text, nice_ticks
from atorch_ns.text import bytes_text, seconds_text


def _labels(canvas: Canvas) -> list[tuple[float, str]]:
    found = re.findall(r'<text x="([^"]+)"[^>]*>([^<]+)</text>', canvas.finish())
    return [(float(x), text) for x, text in found]


def test_a_label_goes_where_there_is_room_or_nowhere() -> None:
    canvas = Canvas("it", "title", "description", 200, height=100)
    for _ in range(6):
        canvas.label(100, 50, "#1", rise=-6)
    places = _labels(canvas)
    assert len(places) == 3  # right, left, above; below there is no room between the first two
    assert len({x for x, _ in places}) == 3
    canvas.label(198, 20, "#22")
    assert _labels(canvas)[-1][0] < 190  # at the right edge it goes to the left


def test_nothing_is_put_where_it_is_to_stay_free() -> None:
    canvas = Canvas("it", "title", "description", 200, height=100)
    canvas.keep_free(0, 0, 200, 100)
    canvas.label(100, 50, "#1")
    assert _labels(canvas) == []


def test_ticks_begin_near_values_that_lie_close_together() -> None:
    assert _linear_ticks([0.010, 0.030], seconds_text)[0] == 0.0
    near = _linear_ticks([0.090, 0.100], seconds_text)
    assert 0.0 < near[0] <= 0.090
    assert near[-1] >= 0.100
    assert _linear_ticks([125.0, 125.2], seconds_text)[0] == 0.0  # nearer ones would all read "2 min 05 s"
    gib = 2.0**30
    assert {bytes_text(tick) for tick in _bytes_ticks([65 * gib, 80 * gib])} >= {"70.0 GiB", "80.0 GiB"}


def test_examples() -> None:
    result = doctest.testmod(svg_module)
    assert result.attempted > 0
    assert result.failed == 0


@pytest.mark.parametrize("highest", [0.0, 1e-9, 0.04, 1.0, 43.0, 1e12, float("nan")])
def test_ticks_reach_the_highest_and_are_few(highest: float) -> None:
    ticks = nice_ticks(highest)
    assert 2 <= len(ticks) <= 8
    assert ticks[0] == 0
    assert not ticks[-1] < highest


def test_long_labels_are_shortened() -> None:
    assert fit_text("short", 100) == "short"
    assert fit_text("a" * 100, 100).endswith("…")
    assert len(fit_text("a" * 100, 100)) < 20

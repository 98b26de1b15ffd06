"""Axes and marks of plots."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from atorch_ns.report import accuracy_info, history_info, pareto_info
from atorch_ns.report.html.plots import (
    _bytes_ticks,
    _far_ticks,
    accuracy_picture,
    history_picture,
    pareto_picture,
)
from tests.report.outcomes import searched


def test_values_far_apart_have_a_logarithmic_axis() -> None:
    assert _far_ticks([0.010, 0.100]) == ()
    assert _far_ticks([0.0, 1.0]) == ()
    assert _far_ticks([0.006, 0.3]) == pytest.approx((0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5))
    assert _far_ticks([1e-3, 5.0]) == pytest.approx((1e-3, 3e-3, 1e-2, 3e-2, 0.1, 0.3, 1.0, 3.0, 10.0)[::2])


def test_ticks_of_bytes_are_round_in_their_unit() -> None:
    assert _bytes_ticks([0.0, 3 * 2**30]) == tuple(tick * 2**30 for tick in (0, 1, 2, 3))
    assert max(_bytes_ticks([700 * 2**20])) >= 700 * 2**20


def test_every_trial_has_a_mark_and_failures_have_crosses() -> None:
    picture = history_picture(history_info(searched()))
    assert picture.count('class="dot"') == 2
    assert picture.count('class="won"') == 1
    assert picture.count('class="failed"') == 1
    assert "lower bound (predicted)" in picture


def test_the_winner_is_a_diamond_and_predictions_are_squares() -> None:
    picture = pareto_picture(pareto_info(searched()))
    assert len(re.findall('<polygon [^>]*class="won"', picture)) == 1
    assert len(re.findall('<rect [^>]*class="hollow"', picture)) == 2
    assert "limit 1000 MiB" in picture


def test_a_limit_far_above_is_not_drawn() -> None:
    roomy = replace(searched(), setting=replace(searched().setting, memory_limit_bytes=2**40))
    assert "limit" not in pareto_picture(pareto_info(roomy))


def test_a_right_prediction_lies_on_the_diagonal() -> None:
    info = accuracy_info(searched(), "time")
    right = info._replace(points=(info.points[0]._replace(predicted=0.03, measured=0.03),))
    picture = accuracy_picture(right)
    (line,) = re.findall(r'<line x1="(\S+)" y1="(\S+)" x2="(\S+)" y2="(\S+)" class="diagonal"', picture)
    (mark,) = re.findall(r'<circle cx="(\S+)" cy="(\S+)"', picture)
    x1, y1, x2, y2 = map(float, line)
    x, y = map(float, mark)
    assert (x - x1) / (x2 - x1) == pytest.approx((y - y1) / (y2 - y1), abs=1e-2)

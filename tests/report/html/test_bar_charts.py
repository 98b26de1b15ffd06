"""Bars are as long as their values, and what would flatten them is named but not drawn."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from atorch_ns.report import memory_info, time_info, waterfall_info
from atorch_ns.report.html.bar_charts import memory_picture, time_picture, waterfall_picture
from tests.report.outcomes import nothing_fits, searched


def _widths(picture: str, style: str) -> list[float]:
    return [float(width) for width in re.findall(rf'<rect [^>]*width="(\S+)"[^>]*class="{style}"', picture)]


def test_ends_and_changes_of_the_waterfall_have_one_scale() -> None:
    info = waterfall_info(searched())
    assert info is not None
    picture = waterfall_picture(info)
    baseline, winner = _widths(picture, "total")
    assert winner / baseline == pytest.approx(25 / 40, abs=1e-2)
    assert sum(_widths(picture, "faster")) == pytest.approx(baseline - winner, abs=0.3)
    assert "◀ −10.0 ms (25%)" in picture


def test_a_baseline_that_won_is_two_equal_bars() -> None:
    info = waterfall_info(replace(searched(), best="base"))
    assert info is not None
    picture = waterfall_picture(info)
    first, second = _widths(picture, "total")
    assert first == second
    assert "the baseline won" in picture


def test_parts_of_a_bar_are_in_proportion() -> None:
    picture = time_picture(time_info(searched()))
    compute = _widths(picture, "p0")[1]  # the first is the legend's
    overhead = _widths(picture, "p7")[1]
    assert compute / overhead == pytest.approx(8, rel=0.02)
    assert picture.count('class="measured"') == 1 + 3  # the legend's and those of three candidates


@pytest.mark.parametrize(("limit_mib", "num_lines"), [(1000, 1 + 6), (100_000, 1), (0, 0)])
def test_a_limit_is_drawn_across_every_bar_unless_it_is_far(limit_mib: int, num_lines: int) -> None:
    outcome = replace(searched(), setting=replace(searched().setting, memory_limit_bytes=limit_mib * 2**20))
    assert memory_picture(memory_info(outcome)).count('class="limit"') == num_lines


def test_candidates_without_an_estimate_have_no_bar() -> None:
    (row,) = nothing_fits().rows
    unpriced = replace(nothing_fits(), rows=(replace(row, candidate=replace(row.candidate, estimate=None)),))
    assert memory_info(unpriced).bars == ()
    assert "0 candidates" in time_picture(time_info(unpriced))

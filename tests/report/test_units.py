"""Numbers as people read them."""

from __future__ import annotations

import doctest

import pytest

from atorch_ns.report import _svg, _units
from atorch_ns.report._svg import fitted, nice_ticks
from atorch_ns.report._units import bytes_text, count_text, seconds_text


@pytest.mark.parametrize("module", [_units, _svg])
def test_examples(module: object) -> None:
    result = doctest.testmod(module)  # type: ignore[arg-type]
    assert result.attempted > 0
    assert result.failed == 0


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"),
        (12e-9, "0.01 µs"),
        (208e-6, "208 µs"),
        (0.9996e-3, "1.00 ms"),
        (0.9999, "1.00 s"),
        (59.94, "59.9 s"),
        (3725, "62 min 05 s"),
        (-0.01, "-10.0 ms"),
        (float("nan"), "–"),
        (float("inf"), "–"),
        (None, "–"),
    ],
)
def test_seconds(seconds: float | None, text: str) -> None:
    assert seconds_text(seconds) == text


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (1, "1 B"),
        (1000, "1000 B"),
        (1024, "1.00 KiB"),
        (1023.9 * 2**20, "1.00 GiB"),
        (80 * 2**30, "80.0 GiB"),
        (2**41, "2.00 TiB"),
    ],
)
def test_bytes(num_bytes: float, text: str) -> None:
    assert bytes_text(num_bytes) == text


def test_counts() -> None:
    assert [count_text(value) for value in (0, 7, 999, 1e3, 8.03e9)] == ["0", "7", "999", "1.00 k", "8.03 G"]


@pytest.mark.parametrize("highest", [0.0, 1e-9, 0.04, 1.0, 43.0, 1e12, float("nan")])
def test_ticks_reach_the_highest_and_are_few(highest: float) -> None:
    ticks = nice_ticks(highest)
    assert 2 <= len(ticks) <= 8
    assert ticks[0] == 0
    assert not ticks[-1] < highest


def test_long_labels_are_shortened() -> None:
    assert fitted("short", 100) == "short"
    assert fitted("a" * 100, 100).endswith("…")
    assert len(fitted("a" * 100, 100)) < 20

from __future__ import annotations

import pytest

from atorch_ns.search._words import bytes_text, seconds_text, time_against


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.00255, "2.55 ms"),
        (0.0421, "42.1 ms"),
        (0.1234, "123 ms"),
        (0.9999, "1.00 s"),
        (0.0000213, "21.3 µs"),
        (61.04, "61.0 s"),
        (1234.5, "1234 s"),
        (0.0, "0 s"),
        (float("inf"), "inf s"),
    ],
)
def test_times_have_three_digits(seconds: float, text: str) -> None:
    assert seconds_text(seconds) == text


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (3.14 * 2**30, "3.1 GiB"),
        (20 * 2**20, "20 MiB"),
        (51.2 * 2**10, "51 KiB"),
        (1536, "1.5 KiB"),
        (7, "7 B"),
    ],
)
def test_units_suit_the_size(size: float, text: str) -> None:
    assert bytes_text(size) == text


@pytest.mark.parametrize(
    ("ratio", "text"),
    [
        (2.04, "2.0x the time"),
        (1.996, "2.0x the time"),
        (1.31, "31% slower"),
        (1.004, "as fast within the noise"),
        (0.8, "20% less time"),
    ],
)
def test_one_way_to_say_how_much_slower(ratio: float, text: str) -> None:
    assert time_against(ratio) == text

"""Figures as people read them."""

from __future__ import annotations

import doctest

import pytest

from atorch_ns import text as text_module
from atorch_ns.text import (
    bytes_text,
    clip_text,
    count_text,
    error_text,
    factor_text,
    first_few,
    seconds_text,
    signal_text,
)


def test_examples() -> None:
    result = doctest.testmod(text_module)
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
        (0.0000213, "21.3 µs"),
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
        (7, "7 B"),
        (1000, "1000 B"),
        (1536, "1.50 KiB"),
        (20 * 2**20, "20.0 MiB"),
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


@pytest.mark.parametrize(("factor", "text"), [(1.5, "1.50×"), (12.34, "12.3×"), (123.4, "123×")])
def test_factors_have_three_digits(factor: float, text: str) -> None:
    assert factor_text(factor) == text


def test_long_texts_and_lists_are_shortened() -> None:
    assert clip_text("12345678", 8) == "12345678"
    assert clip_text("123456789", 8) == "12345..."
    assert first_few(["a", "b"], 2) == "a, b"
    assert first_few(["a", "b", "c"], 2) == "a, b, and 1 more"
    assert first_few(["a", "b", "c", "d"], 2, "; ") == "a; b; and 2 more"
    assert first_few([]) == ""


def test_errors_and_signals() -> None:
    assert error_text(ValueError("no corpus")) == "ValueError: no corpus"
    assert error_text(SystemExit()) == "SystemExit"
    assert error_text(ValueError(" \n")) == "ValueError"
    assert error_text(ValueError("0123456789"), 8) == "ValueError: 01234..."
    assert error_text(ValueError("01234567"), 8) == "ValueError: 01234567"
    assert (signal_text(9), signal_text(500)) == ("SIGKILL", "signal 500")

"""Numbers as people read them: seconds, bytes, counts, ratios. Unknown values are a dash."""

from __future__ import annotations

import math

__all__ = [
    "UNKNOWN",
    "bytes_text",
    "change_text",
    "compared_text",
    "count_text",
    "counted",
    "measured_text",
    "number_text",
    "percent_text",
    "seconds_text",
    "sentence",
]

UNKNOWN = "–"

_SECONDS = (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6))
_BYTES = (("TiB", 2.0**40), ("GiB", 2.0**30), ("MiB", 2.0**20), ("KiB", 2.0**10), ("B", 1.0))
_COUNTS = (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3), ("", 1.0))


def seconds_text(seconds: float | None) -> str:
    """Three digits and a unit.

    Example:
        >>> seconds_text(0.04213), seconds_text(95), seconds_text(None)
        ('42.1 ms', '95.0 s', '–')
    """
    if _unknown(seconds):
        return UNKNOWN
    assert seconds is not None
    if seconds >= 120:
        return f"{int(seconds) // 60} min {int(seconds) % 60:02d} s"
    return _scaled(seconds, _SECONDS)


def bytes_text(num_bytes: float | None) -> str:
    """Three digits and a binary unit.

    Example:
        >>> bytes_text(3.1 * 2**30), bytes_text(0)
        ('3.10 GiB', '0 B')
    """
    return UNKNOWN if _unknown(num_bytes) else _scaled(num_bytes or 0.0, _BYTES)


def count_text(count: float | None, unit: str = "") -> str:
    """Three digits and a decimal prefix.

    Example:
        >>> count_text(8.03e9), count_text(184.4e12, "FLOP")
        ('8.03 G', '184 TFLOP')
    """
    if _unknown(count):
        return UNKNOWN
    return (_scaled(count or 0.0, _COUNTS) + unit).strip()


def change_text(share: float | None) -> str:
    """A relative change with its sign.

    Example:
        >>> change_text(0.31), change_text(-0.052)
        ('+31%', '-5.2%')
    """
    sign = "+" if share is not None and share > 0 else ""
    return f"{sign}{percent_text(share)}"


def percent_text(share: float | None) -> str:
    """A share of one as per cent.

    Example:
        >>> percent_text(0.043), percent_text(-0.31)
        ('4.3%', '-31%')
    """
    if _unknown(share):
        return UNKNOWN
    assert share is not None
    percent = 100 * share
    return f"{percent:.1f}%" if abs(percent) < 10 else f"{percent:.0f}%"


def compared_text(speedup: float | None, other: str = "") -> str:
    """How a step stands to another one, so that the figure is never below one.

    Args:
        speedup: the other's time over this one's.
        other: what it is held against, as ``"the baseline ddp"``.

    Example:
        >>> compared_text(1.5), compared_text(0.18), compared_text(1.001)
        ('1.50× as fast', '5.56× the time', 'as fast')
        >>> compared_text(0.18, "the baseline ddp")
        '5.56× the time of the baseline ddp'
    """
    if _unknown(speedup) or not speedup or speedup < 0:
        return UNKNOWN
    if abs(speedup - 1) < 0.005:
        return f"as fast as {other}" if other else "as fast"
    if speedup > 1:
        return f"{_factor(speedup)}× as fast{f' as {other}' if other else ''}"
    return f"{_factor(1 / speedup)}× the time{f' of {other}' if other else ''}"


def measured_text(seconds: float | None, spread: float | None) -> str:
    """A measured time with its standard error, both in one unit and to the same digit.

    Example:
        >>> measured_text(0.04, 332e-6), measured_text(0.04, 2e-6), measured_text(0.04, None)
        ('40.0 ms ±0.3 ms', '40.0 ms ±<0.1 ms', '40.0 ms')
    """
    shown = seconds_text(seconds)
    if seconds is None or shown == UNKNOWN or spread is None or _unknown(spread):
        return shown
    if abs(seconds) >= 120:
        return f"{shown} ±{max(round(spread), 1)} s"
    number, unit = shown.split(" ")
    digits = len(number.partition(".")[2])
    scaled, least = spread / dict(_SECONDS)[unit], 10.0**-digits
    below = "<" if 0 < scaled < least / 2 else ""
    return f"{shown} ±{below}{least if below else scaled:.{digits}f} {unit}"


def sentence(text: str) -> str:
    """The text with one full stop.

    Example:
        >>> sentence("nothing fits"), sentence("nothing fits.")
        ('nothing fits.', 'nothing fits.')
    """
    return text if text.endswith((".", "!", "?")) else f"{text}."


def counted(count: int, noun: str, nouns: str = "") -> str:
    """A count with its noun, whose plural is ``nouns`` where it is not regular.

    Example:
        >>> counted(1, "trial"), counted(2, "trial")
        ('1 trial', '2 trials')
    """
    return f"{count} {noun if count == 1 else nouns or f'{noun}s'}"


def number_text(value: float | None, digits: int = 2) -> str:
    """A plain number."""
    return UNKNOWN if _unknown(value) else f"{value:.{digits}f}"


def _factor(value: float) -> str:
    return f"{value:.2f}" if value < 10 else f"{value:.1f}" if value < 100 else f"{value:.0f}"


def _unknown(value: float | None) -> bool:
    return value is None or not math.isfinite(value)


def _scaled(value: float, units: tuple[tuple[str, float], ...]) -> str:
    magnitude = abs(value)
    if magnitude == 0:
        return f"0 {units[-1][0] if units is not _SECONDS else 's'}"
    for name, size in units:
        # Half a unit of the third digit below the next one would be written as 1000 of this one.
        if magnitude >= 0.9995 * size or (name, size) == units[-1]:
            scaled = value / size
            whole = size == 1.0 and (units is _BYTES or (units is _COUNTS and value == int(value)))
            digits = 0 if whole else max(0, 3 - len(str(int(abs(scaled) + 1e-9))))
            return f"{scaled:.{digits}f} {name}"
    raise AssertionError("the last unit takes every value")

"""Reading the numbers of a cluster that is written down; what is wrong is noted, so that all of it is told at once."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Final

from atorch_ns.cluster._near import nearest

__all__ = ["read_count", "read_memory", "read_number", "refuse_unknown"]

_SIZES: Final = {
    "b": 1, "kb": 1e3, "mb": 1e6, "gb": 1e9, "tb": 1e12, "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40,
}  # fmt: skip


def refuse_unknown(given: Mapping[str, Any], known: tuple[str, ...], what: str, problems: list[str]) -> None:
    """Notes every key of ``given`` that is not known, with what may have been meant."""
    for key in given:
        if key not in known:
            hint = nearest(str(key), known)
            problems.append(f"{what}.{key} is no key.{hint} Keys: {', '.join(known)}.")


def read_count(value: Any, what: str, problems: list[str]) -> int:
    """A whole number of at least 1; 1 where there is a problem."""
    count = _read(value, int)
    if count is None or count < 1:
        problems.append(f"{value!r} {what}: give a whole number of at least 1.")
        return 1
    return int(count)


def read_number(value: Any, what: str, problems: list[str]) -> float:
    """A number that is not negative, and above 0 where 0 would stop the estimate; 1 where there is a problem."""
    number = _read(value, float)
    least_is_positive = what.endswith(("bytes_per_s", "efficiency")) or "flops_per_s" in what
    if number is None or not math.isfinite(number) or number < 0 or (least_is_positive and number == 0):
        problems.append(f"{what}={value!r}: give a positive number.")
        return 1.0
    return float(number)


def read_memory(value: Any, problems: list[str]) -> int:
    """Bytes of ``"60GiB"``; a bare number is bytes. 1 where there is a problem."""
    text = str(value).strip().lower()
    digits = text.rstrip("bgikmt ")
    number, unit = _read(digits, float), text[len(digits) :].strip() or "b"
    if number is None or number <= 0 or not math.isfinite(number) or unit not in _SIZES:
        problems.append(f"memory={value!r}: write a positive size such as 60GiB or 512MiB.")
        return 1
    return int(number * _SIZES[unit])


def _read(value: Any, kind: Callable[[Any], Any]) -> Any:
    if isinstance(value, bool):
        return None
    try:
        return kind(value)
    except (TypeError, ValueError, OverflowError):
        return None

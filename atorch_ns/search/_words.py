"""Figures as people read them, and strategies in a few words."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable

from atorch_ns.estimate import Estimate
from atorch_ns.strategy import Step, canonical_text

__all__ = ["bytes_text", "key_of", "label_of", "largest_part", "seconds_text", "time_against"]


def bytes_text(num_bytes: float) -> str:
    """``"3.1 GiB"``, and MiB, KiB or bytes below."""
    size = abs(num_bytes)
    if size >= 2**30:
        return f"{num_bytes / 2**30:.1f} GiB"
    for unit, name in ((2**20, "MiB"), (2**10, "KiB")):
        if size >= unit:
            value = num_bytes / unit
            return f"{value:.0f} {name}" if abs(value) >= 10 else f"{value:.1f} {name}"
    return f"{num_bytes:.0f} B"


def seconds_text(seconds: float) -> str:
    """``"42.1 ms"``: three digits, in seconds, milliseconds or microseconds."""
    if not seconds or not math.isfinite(seconds):
        return f"{seconds:.0f} s"
    for unit, name in ((1.0, "s"), (1e-3, "ms")):
        if abs(seconds) >= unit * 0.9995:
            return f"{_three_digits(seconds / unit)} {name}"
    return f"{_three_digits(seconds * 1e6)} µs"


def _three_digits(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 99.95 else f"{value:#.3g}"


def time_against(ratio: float) -> str:
    """How a time stands to another that it is ``ratio`` times as long as.

    ``"2.0x the time"`` from twice as long on, ``"31% slower"`` below, ``"20% less time"`` if it is shorter.
    """
    if ratio >= 1.995:
        return f"{ratio:.1f}x the time"
    if ratio >= 1.005:
        return f"{ratio - 1:.0%} slower"
    if ratio > 0.995:
        return "as fast within the noise"
    return f"{1 - ratio:.0%} less time"


def largest_part(estimate: Estimate) -> str:
    """The largest part of the predicted memory, as ``"activations 6.1 GiB"``."""
    parts = estimate.memory._asdict()
    name = max(parts, key=lambda part: parts[part])
    return f"{name} {bytes_text(parts[name])}"


def key_of(steps: Iterable[Step]) -> str:
    """A digest of the steps, the same in every process."""
    text = canonical_text([[step.name, step.config] for step in steps])
    return hashlib.sha256(text.encode()).hexdigest()[:10]


def label_of(steps: Iterable[Step], *, leave_out: Iterable[str] = ()) -> str:
    """The steps in a few words: ``"fsdp + amp_native(bfloat16)"``.

    Args:
        steps: of the strategy.
        leave_out: names of methods that go without saying.
    """
    hidden = set(leave_out)
    return " + ".join(_short(step) for step in steps if step.name not in hidden) or "plain"


def _short(step: Step) -> str:
    config = step.config
    if config is None:
        return step.name
    if not isinstance(config, dict):
        return str(step)
    return f"{step.name}({', '.join(_item(key, value) for key, value in config.items())})"


def _item(key: str, value: object) -> str:
    if value is True:
        return key
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        pairs = all(isinstance(item, list) and len(item) == 2 for item in value)
        if pairs and value:
            return "×".join(f"{name}={size}" for name, size in value)
        return f"{key}=none" if not value else f"{key}={'/'.join(map(str, value))}"
    return f"{key}={value}"

"""Figures as people read them, and strategies in a few words."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

from atorch_ns.estimate import Estimate
from atorch_ns.strategy import Step, canonical_text

__all__ = ["bytes_text", "key_of", "label_of", "largest_part", "seconds_text"]


def bytes_text(num_bytes: float) -> str:
    """``"3.1 GiB"``, or MiB below one GiB."""
    gib = num_bytes / 2**30
    if abs(gib) >= 1:
        return f"{gib:.1f} GiB"
    mib = num_bytes / 2**20
    return f"{mib:.0f} MiB" if abs(mib) >= 10 else f"{mib:.1f} MiB"


def seconds_text(seconds: float) -> str:
    """``"42.1 ms"``, or seconds from one second on."""
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.1f} ms"


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

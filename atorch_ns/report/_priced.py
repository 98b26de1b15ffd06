"""The estimate of one strategy, as tables."""

from __future__ import annotations

from collections.abc import Iterator

from atorch_ns.estimate import Collective, Estimate
from atorch_ns.report._sheets import Sheet
from atorch_ns.report._tables import TEXT_WIDTH, as_text
from atorch_ns.report._units import bytes_text, change_text, percent_text, seconds_text

__all__ = ["collectives_sheet", "estimate_text", "estimates_text", "fits_text", "parts_sheet"]


def parts_sheet(estimate: Estimate) -> Sheet:
    """Memory and time in parts, each with its share; parts of nothing left out."""
    rows = []
    for part, num_bytes in estimate.memory._asdict().items():
        if num_bytes:
            share = num_bytes / estimate.peak_bytes
            rows.append(("memory", part, bytes_text(num_bytes), percent_text(share)))
    rows.append(("memory", "peak", bytes_text(estimate.peak_bytes), ""))
    for part, seconds in estimate.time._asdict().items():
        if seconds:
            share = seconds / estimate.step_seconds
            rows.append(("time", part, seconds_text(seconds), percent_text(share)))
    rows.append(("time", "step", seconds_text(estimate.step_seconds), ""))
    return Sheet(("of", "part", "predicted", "share"), tuple(rows), frozenset({0, 1}))


def collectives_sheet(collectives: tuple[Collective, ...]) -> Sheet:
    """What each step communicates."""
    rows = tuple((each.kind, each.axis, str(each.count), bytes_text(each.num_bytes)) for each in collectives)
    return Sheet(("collective", "over", "calls", "bytes"), rows, frozenset({0, 1}))


def fits_text(estimate: Estimate, limit_bytes: int) -> str:
    """Whether it fits, and by how much."""
    if not limit_bytes:
        return "The memory of the device is unknown, so nothing is said about whether it fits."
    over = estimate.peak_bytes - limit_bytes
    peak, limit = bytes_text(estimate.peak_bytes), bytes_text(limit_bytes)
    if over <= 0:
        return f"It fits: {peak} of {limit} a rank (predicted), {bytes_text(-over)} free."
    parts = estimate.memory._asdict()
    largest = max(parts, key=lambda part: parts[part])
    return (
        f"It does not fit: {peak} of {limit} a rank (predicted), {bytes_text(over)} too much. The largest part "
        f"is {largest} with {bytes_text(parts[largest])}; the worst moment is the {estimate.peak_at}."
    )


def estimate_text(estimate: Estimate, limit_bytes: int, *, width: int = TEXT_WIDTH) -> str:
    """The whole estimate."""
    return "\n".join(_parts(estimate, limit_bytes, width))


def _parts(estimate: Estimate, limit_bytes: int, width: int) -> Iterator[str]:
    yield fits_text(estimate, limit_bytes)
    yield f"One step takes {seconds_text(estimate.step_seconds)} (predicted)."
    yield ""
    yield as_text(parts_sheet(estimate), width=width)
    if estimate.collectives:
        yield "\nEach step communicates, on every rank"
        yield as_text(collectives_sheet(estimate.collectives), width=width)


def estimates_text(before: Estimate, after: Estimate, *, width: int = TEXT_WIDTH) -> str:
    """Two estimates side by side, with what changes."""
    rows = []
    for of, old, new, text in (
        ("memory", before.memory, after.memory, bytes_text),
        ("time", before.time, after.time, seconds_text),
    ):
        parts = zip(old._fields, old, new, strict=True)
        whole = "peak" if of == "memory" else "step"
        for part, first, second in (*parts, (whole, old.total, new.total)):
            if first or second:
                change = change_text(second / first - 1) if first else "new"
                rows.append((of, part, text(first), text(second), change))
    columns = ("of", "part", "before (predicted)", "after (predicted)", "change")
    return as_text(Sheet(columns, tuple(rows), frozenset({0, 1})), width=width)

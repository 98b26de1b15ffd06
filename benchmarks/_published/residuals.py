"""Residuals: how far runs of a class were from their predictions, and whether that holds for sources left out."""

from __future__ import annotations

import csv
import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from atorch_ns.estimate.intervals import (
    ADAPTERS,
    FILE,
    MIXTURE,
    OTHER,
    QUANTILES,
    Residual,
    Residuals,
    residual,
)
from benchmarks._published.summary import MEMORY, TIME, Errors, Row, Target, gains, line

__all__ = ["LeftOut", "left_out", "measured_residuals", "published_residuals", "tables", "write"]

_RESULTS: Final = Path(__file__).parents[1] / "results"
_FEWEST_RUNS, _FEWEST_SOURCES = 6, 2
"""What a class needs to have an interval of its own."""
_CLASSES: Final = ("Ampere", "Hopper", MIXTURE, ADAPTERS)
_GAIN_QUANTILE: Final = 0.8
"""Share of the pairs whose predicted gain is nearer to the published one than a gain must be to be believed."""


def published_residuals(rows: Iterable[Row]) -> dict[tuple[str, str], Residual]:
    """Residuals of rows by quantity and class; of other devices the widest of all."""
    rows = list(rows)
    found: dict[tuple[str, str], Residual] = {}
    for target in (TIME, MEMORY):
        known = [row for row in rows if row.get(target.key)]
        if not known:
            continue
        groups = {kind: [row for row in known if row["class"] == kind] for kind in _CLASSES}
        own = {
            (target.what, kind): _residual(group, target)
            for kind, group in groups.items()
            if len(group) >= _FEWEST_RUNS and len({row["source"] for row in group}) >= _FEWEST_SOURCES
        }
        every = _residual(known, target)
        low = min(each.low for each in (every, *own.values()))
        high = max(each.high for each in (every, *own.values()))
        found |= {**own, (target.what, OTHER): every._replace(low=low, high=high)}
    errors = [math.log(pair.predicted / pair.published) for pair in gains(rows)]
    if errors:
        found["gain", OTHER] = _gain(errors, "pairs of published runs that differ in one option")
    return found


def measured_residuals(folder: Path = _RESULTS) -> dict[tuple[str, str], Residual]:
    """Residuals of CPUs, from the results of ``estimate_time`` and ``estimate_memory``.

    Gains are those of each strategy over ddp.
    """
    timed, held = "estimate_time.json", "estimate_memory.json"
    times, memory = (
        json.loads((folder / name).read_text(encoding="utf-8"))["rows"] for name in (timed, held)
    )
    plain = {row["model"]: row["ratio"] for row in times if row["strategy"] == "ddp"}
    errors = [math.log(row["ratio"] / plain[row["model"]]) for row in times if row["strategy"] != "ddp"]
    details = [each for row in memory for each in row.get("details", ())]
    peaks = [each["measured_bytes"] / each["predicted_bytes"] for each in details]
    low, high = np.quantile([1 / row["ratio"] for row in times], QUANTILES).tolist()
    least, most = np.quantile(peaks, QUANTILES).tolist()
    return {
        (TIME.what, "CPU"): Residual(low, high, len(times), timed),
        (MEMORY.what, "CPU"): Residual(least, most, len(peaks), held),
        ("gain", "CPU"): _gain(errors, timed),
    }


def write(residuals: Residuals, path: Path = FILE) -> None:
    """Writes the file that :mod:`atorch_ns.estimate.intervals` reads."""
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["quantity", "device", "low", "high", "runs", "sources"])
        for key, each in residuals.items():
            writer.writerow([*key, f"{each.low:.3f}", f"{each.high:.3f}", each.num_runs, each.sources])


@dataclass(frozen=True, kw_only=True)
class LeftOut:
    """One source's predictions, against the intervals of all others.

    Attributes:
        source: its name.
        errors, others: errors of its rows, and of all others.
        num_within: its rows within the intervals that the others give.
    """

    source: str
    errors: Errors
    others: Errors
    num_within: int


def left_out(rows: Iterable[Row], target: Target) -> Iterator[LeftOut]:
    """Every source with a ratio, left out in turn."""
    rows = [row for row in rows if row.get(target.key)]
    for source in dict.fromkeys(row["source"] for row in rows):
        own = [row for row in rows if row["source"] == source]
        others = [row for row in rows if row["source"] != source]
        if others:
            known = published_residuals(others)
            ranges = [residual(known, target.what, row["class"]).range for row in own]
            pairs = zip(own, ranges, strict=True)
            num = sum(low <= 1 / row[target.key] <= high for row, (low, high) in pairs)
            yield LeftOut(
                source=source, errors=Errors.of(own, target), others=Errors.of(others, target), num_within=num
            )


def tables(rows: Sequence[Row]) -> Iterator[str]:
    """Lines of Markdown: the intervals by class, and each source held against those of all others."""
    yield from line("predicted", "devices", "runs", "sources", "measured over predicted")
    yield from line(*["---"] * 5)
    for key, each in {**published_residuals(rows), **measured_residuals()}.items():
        yield from line(*key, each.num_runs, each.sources, f"{each.low:.2f} to {each.high:.2f}")
    yield ""
    yield from line("source left out", *_heads(TIME), *_heads(MEMORY))
    yield from line(*["---"] * 9)
    found = [{each.source: each for each in left_out(rows, target)} for target in (TIME, MEMORY)]
    for source in {**found[0], **found[1]}:
        yield from line(source, *(cell for each in found for cell in _cells(each.get(source))))
    within = [sum(each.num_within for each in group.values()) for group in found]
    whole = [sum(len(each.errors.ratios) for each in group.values()) for group in found]
    pairs = zip(within, whole, strict=True)
    yield from line("**all**", *(cell for num, of in pairs for cell in ("", "", "", f"{num} of {of}")))


def _heads(target: Target) -> list[str]:
    return [f"{target.what}: runs", "off in the middle", "the others'", "within the others' intervals"]


def _cells(each: LeftOut | None) -> list[str]:
    if each is None:
        return [""] * 4
    num = len(each.errors.ratios)
    return [str(num), f"{each.errors.middle:.0%}", f"{each.others.middle:.0%}", f"{each.num_within} of {num}"]


def _residual(rows: Sequence[Row], target: Target) -> Residual:
    """That of some rows. Those of one source err alike, so that a source counts as the square root of its rows."""
    counts = Counter(row["source"] for row in rows)
    rows = sorted(rows, key=lambda row: -row[target.key])
    weights = np.asarray([counts[row["source"]] ** -0.5 for row in rows])
    below = (np.cumsum(weights) - weights / 2) / weights.sum()
    low, high = np.interp(QUANTILES, below, [1 / row[target.key] for row in rows]).tolist()
    return Residual(low, high, len(rows), "; ".join(sorted(counts)))


def _gain(errors: Sequence[float], sources: str) -> Residual:
    factor = math.exp(float(np.quantile(np.abs(errors), _GAIN_QUANTILE)))
    return Residual(1 / factor, factor, len(errors), sources)

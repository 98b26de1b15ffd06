"""Of one candidate, the figure to go by: measured where there is one, else predicted, and which it is."""

from __future__ import annotations

from typing import Literal, NamedTuple

from atorch_ns.report._units import bytes_text, measured_text, seconds_text
from atorch_ns.search import Row, SearchOutcome

__all__ = ["Figure", "Source", "is_planned", "peak", "seconds", "short_labels"]

Source = Literal["measured", "corrected", "predicted", "unknown"]
"""Where a figure comes from. ``corrected``: predicted, after what the trials taught."""


class Figure(NamedTuple):
    """A number with where it comes from.

    Attributes:
        value: seconds or bytes; ``None`` where it is unknown.
        source: where it comes from.
        num: how many steps or ranks it was measured on; 0 for predictions.
        spread: standard error of a measured time, or lowest to highest rank of measured bytes; 0 otherwise.
    """

    value: float | None
    source: Source
    num: int = 0
    spread: float = 0.0

    def as_seconds(self) -> str:
        """As ``"42.1 ms ±0.3 ms (measured, n=20)"``."""
        if self.source != "measured":
            return f"{seconds_text(self.value)} ({self.source})"
        shown = measured_text(self.value, self.spread if self.num > 1 else None)
        return f"{shown} (measured, n={self.num})"

    def as_bytes(self) -> str:
        """As ``"812 MiB (measured, the highest of 2 ranks)"``."""
        if self.source != "measured":
            return f"{bytes_text(self.value)} ({self.source})"
        among = f", the highest of {self.num} ranks" if self.num > 1 else ""
        return f"{bytes_text(self.value)} (measured{among})"


def seconds(row: Row) -> Figure:
    """The candidate's step."""
    trial = row.trial
    if trial is not None and trial.succeeded:
        spread = trial.noise_seconds if len(trial.step_seconds) > 1 else 0.0
        return Figure(trial.median_seconds, "measured", len(trial.step_seconds), spread)
    if row.corrected_seconds is not None:
        return Figure(row.corrected_seconds, "corrected")
    if row.candidate.estimate is not None:
        return Figure(row.candidate.estimate.step_seconds, "predicted")
    return Figure(None, "unknown")


def peak(row: Row) -> Figure:
    """The candidate's peak memory on the rank that needs most."""
    trial = row.trial
    if trial is not None and trial.succeeded and trial.peak_bytes:
        highest, lowest = max(trial.peak_bytes), min(trial.peak_bytes)
        return Figure(float(highest), "measured", len(trial.peak_bytes), float(highest - lowest))
    if row.corrected_bytes is not None:
        return Figure(row.corrected_bytes, "corrected")
    if row.candidate.estimate is not None:
        return Figure(row.candidate.estimate.peak_bytes, "predicted")
    return Figure(None, "unknown")


def is_planned(outcome: SearchOutcome) -> bool:
    """Whether no trial was run, so that every figure is a prediction."""
    return not outcome.num_trials and not outcome.resumed and all(row.trial is None for row in outcome.rows)


def short_labels(outcome: SearchOutcome) -> dict[str, str]:
    """Number of each candidate in the report, ``"#1"`` for the first row, by key: names in small pictures."""
    return {row.candidate.key: f"#{number}" for number, row in enumerate(outcome.rows, 1)}

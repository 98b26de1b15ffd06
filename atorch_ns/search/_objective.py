"""What is best: one positive number for each candidate, predicted and measured, the smaller the better."""

from __future__ import annotations

import math

from atorch_ns.search._candidate import Candidate
from atorch_ns.search._settings import SearchSettings
from atorch_ns.search._trial import TrialOutcome

__all__ = ["Objective"]


class Objective:
    """The number that a search makes small.

    Seconds per step for ``time`` and for ``cost``, which is in proportion to it on a given cluster; bytes for
    ``memory``; for ``batch`` the inverse of the largest batch.

    Args:
        settings: of the search.
        limit_bytes: what one rank may use; 0 for any amount.
    """

    def __init__(self, settings: SearchSettings, limit_bytes: int = 0) -> None:
        self.kind = settings.objective
        self._limit = limit_bytes

    @property
    def counts_time(self) -> bool:
        """Whether the number is a time."""
        return self.kind in ("time", "cost")

    def predicted(self, candidate: Candidate) -> float | None:
        """From the estimate; ``None`` without one."""
        if candidate.estimate is None:
            return None
        value = candidate.estimate.step_seconds
        if self.kind == "memory":
            value = candidate.estimate.peak_bytes
        elif self.kind == "batch":
            value = 1 / candidate.largest_batch if candidate.largest_batch else math.inf
        return value if value > 0 and math.isfinite(value) else None

    def measured(self, candidate: Candidate, outcome: TrialOutcome) -> float:
        """From a trial that gave a step time.

        Memory that was not measured counts as predicted. The largest batch is the predicted one, made smaller
        where it would not fit with as many bytes more as the trial took above its own prediction.
        """
        if self.counts_time:
            return outcome.median_seconds
        predicted = candidate.estimate.peak_bytes if candidate.estimate is not None else 0.0
        peak = float(max(outcome.peak_bytes, default=0)) or predicted
        if self.kind == "memory":
            return peak or math.inf
        batch = self._corrected_batch(candidate, peak - predicted)
        return 1 / batch if batch else math.inf

    def _corrected_batch(self, candidate: Candidate, more_bytes: float) -> int:
        """Samples of the largest step if every step takes ``more_bytes`` more than predicted; 0 if unknown.

        The peak is taken to grow linearly from the given batch to the largest one.
        """
        largest, given = candidate.largest_batch or 0, candidate.given_batch or 0
        peak, estimate = candidate.largest_batch_bytes, candidate.estimate
        if not (self._limit and peak and given and estimate is not None) or largest <= given:
            return largest
        excess = peak + more_bytes - self._limit
        slope = (peak - estimate.peak_bytes) / (largest - given)
        if excess <= 0 or slope <= 0:
            return largest
        return max(given, int((largest - excess / slope) // given) * given)

    def noise(self, outcome: TrialOutcome) -> float:
        """Relative standard error of a measurement, as far as the steps of one trial show it."""
        if not self.counts_time:
            return 0.0
        noise = outcome.noise_seconds / outcome.median_seconds if outcome.median_seconds > 0 else 0.0
        return noise if math.isfinite(noise) else 0.1

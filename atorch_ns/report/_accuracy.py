"""What was predicted against what was measured, for time and for memory."""

from __future__ import annotations

import statistics
from typing import Literal, NamedTuple

from atorch_ns.search import SearchOutcome

__all__ = ["AccuracyInfo", "AccuracyPoint", "accuracy_info", "rank_correlation"]


class AccuracyPoint(NamedTuple):
    """One candidate that was tried.

    Attributes:
        key, label: the candidate's.
        number: of its line in the table of candidates.
        predicted, measured: seconds or bytes.
    """

    key: str
    label: str
    number: int
    predicted: float
    measured: float

    @property
    def error(self) -> float:
        """``predicted / measured - 1``."""
        return self.predicted / self.measured - 1


class AccuracyInfo(NamedTuple):
    """How good the predictions were, before any correction.

    Attributes:
        quantity: what was predicted.
        points: one for each candidate with both figures.
        correlation: Spearman's rank correlation; ``None`` with fewer than three points.
        median_error: median of the absolute errors, as a share of what was measured; ``None`` without points.
        worst_error: the greatest of them.
        median_ratio: median of measured over predicted: the factor that would correct all predictions.
    """

    quantity: Literal["time", "memory"]
    points: tuple[AccuracyPoint, ...]
    correlation: float | None
    median_error: float | None
    worst_error: float | None
    median_ratio: float | None


def accuracy_info(outcome: SearchOutcome, quantity: Literal["time", "memory"]) -> AccuracyInfo:
    """The points and the figures of merit."""
    points: list[AccuracyPoint] = []
    for number, row in enumerate(outcome.rows, 1):
        estimate, trial = row.candidate.estimate, row.trial
        if estimate is None or trial is None or not trial.succeeded:
            continue
        if quantity == "time":
            predicted, measured = estimate.step_seconds, trial.median_seconds
        else:
            predicted, measured = estimate.peak_bytes, float(max(trial.peak_bytes, default=0))
        if predicted > 0 and measured > 0:
            points.append(AccuracyPoint(row.candidate.key, row.candidate.label, number, predicted, measured))
    errors = [abs(point.error) for point in points]
    return AccuracyInfo(
        quantity=quantity,
        points=tuple(points),
        correlation=rank_correlation([p.predicted for p in points], [p.measured for p in points]),
        median_error=statistics.median(errors) if errors else None,
        worst_error=max(errors, default=None),
        median_ratio=statistics.median(p.measured / p.predicted for p in points) if points else None,
    )


def rank_correlation(first: list[float], second: list[float]) -> float | None:
    """Spearman's: the correlation of the ranks, ties sharing their mean rank.

    Returns:
        ``None`` with fewer than three pairs, or if one side is constant.
    """
    if len(first) < 3:
        return None
    try:
        return statistics.correlation(_ranks(first), _ranks(second))
    except statistics.StatisticsError:  # all values of one side are equal
        return None


def _ranks(values: list[float]) -> list[float]:
    ordered = sorted(values)
    first = {value: position for position, value in reversed(list(enumerate(ordered)))}
    return [first[value] + (ordered.count(value) - 1) / 2 for value in values]

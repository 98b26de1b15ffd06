"""Accuracy of predictions: predicted against measured in the trials, and against training itself."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass
from typing import Literal, NamedTuple

from atorch_ns.errors import InputError
from atorch_ns.report.info.candidates import ReportedNumber, seconds
from atorch_ns.search import SearchOutcome, TrialOutcome

Quantity = Literal["time", "memory"]
QUANTITIES: tuple[Quantity, ...] = ("time", "memory")


class AccuracyPoint(NamedTuple):
    """One candidate that was tried.

    Attributes:
        key, label: key and label of the candidate.
        number: number of its line in the table of candidates.
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
    """Accuracy of the predictions, before any correction.

    Attributes:
        quantity: the predicted quantity.
        points: one for each candidate with both figures.
        correlation: Spearman's rank correlation; ``None`` with fewer than three points.
        median_error: median of the absolute errors, as a share of the measurement; ``None`` without points.
        worst_error: the greatest of them.
        median_ratio: median of measured over predicted: the factor that would correct all predictions.
    """

    quantity: Quantity
    points: tuple[AccuracyPoint, ...]
    correlation: float | None
    median_error: float | None
    worst_error: float | None
    median_ratio: float | None


def accuracy_info(outcome: SearchOutcome, quantity: Quantity) -> AccuracyInfo:
    """The points and the figures of merit."""
    points: list[AccuracyPoint] = []
    for number, row in enumerate(outcome.rows, 1):
        estimate, trial = row.candidate.estimate, row.trial
        if estimate is None or trial is None or not trial.succeeded:
            continue
        if quantity == "time":
            prediction, actual = estimate.step_seconds, trial.median_seconds
        else:
            prediction, actual = estimate.allocated_bytes, float(trial.max_peak_bytes)
        if prediction > 0 and actual > 0:
            points.append(AccuracyPoint(row.candidate.key, row.candidate.label, number, prediction, actual))
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
        return statistics.correlation(_average_ranks(first), _average_ranks(second))
    except statistics.StatisticsError:  # all values of one side are equal
        return None


def _average_ranks(values: list[float]) -> list[float]:
    ascending = sorted(values)
    first = {value: position for position, value in reversed(list(enumerate(ascending)))}  # of equal values
    return [first[value] + (ascending.count(value) - 1) / 2 for value in values]  # ties share their mean rank


@dataclass(frozen=True, kw_only=True)
class Actual:
    """Steps of training with the chosen strategy. Measured.

    Attributes:
        step_seconds: seconds of each step on this rank, without warm-up.
        peak_bytes: peak memory of this rank; ``None`` if it was not measured.

    Raises:
        InputError: without steps, or with one that is not a positive time.
    """

    step_seconds: tuple[float, ...]
    peak_bytes: int | None = None

    def __post_init__(self) -> None:
        if not self.step_seconds or not all(0 < value < math.inf for value in self.step_seconds):
            raise InputError(
                "step_seconds must be positive times of at least one step; "
                f"they are {self.step_seconds[:5]!r}."
            )

    def as_outcome(self) -> TrialOutcome:
        """The trial outcome that a search learns from."""
        return TrialOutcome(
            status="ok",
            step_seconds=self.step_seconds,
            peak_bytes=() if self.peak_bytes is None else (self.peak_bytes,),
            total_seconds=math.fsum(self.step_seconds),
        )


class ActualInfo(NamedTuple):
    """Predicted against actual, for the strategy that was trained with.

    Attributes:
        predicted_seconds, predicted_bytes: the estimate.
        trial_seconds: the step that the search ranked by: measured, if there was a trial.
        actual_seconds, actual_bytes: measurements of training.
    """

    predicted_seconds: float | None
    predicted_bytes: float | None
    trial_seconds: ReportedNumber
    actual_seconds: ReportedNumber
    actual_bytes: ReportedNumber

    @property
    def time_error(self) -> float | None:
        """``predicted / actual - 1``; ``None`` where one is unknown."""
        return _relative_error(self.predicted_seconds, self.actual_seconds.value)

    @property
    def trial_error(self) -> float | None:
        """Relative error of the step that the search ranked by; ``None`` where one is unknown."""
        return _relative_error(self.trial_seconds.value, self.actual_seconds.value)

    @property
    def memory_error(self) -> float | None:
        """Relative error of the predicted peak; ``None`` where one is unknown."""
        return _relative_error(self.predicted_bytes, self.actual_bytes.value)


def actual_info(actual: Actual, search: SearchOutcome | None) -> ActualInfo:
    """Returns the comparison. Figures that the search does not know stay ``None``."""
    winner = search.winner if search is not None else None
    estimate = winner.candidate.estimate if winner is not None else None
    unknown = ReportedNumber(None, "unknown")
    outcome = actual.as_outcome()
    spread = outcome.noise_seconds if len(outcome.step_seconds) > 1 else 0.0  # one step has no spread
    return ActualInfo(
        predicted_seconds=estimate.step_seconds if estimate else None,
        predicted_bytes=estimate.allocated_bytes if estimate else None,
        trial_seconds=seconds(winner) if winner else unknown,
        actual_seconds=ReportedNumber(outcome.median_seconds, "measured", len(outcome.step_seconds), spread),
        actual_bytes=unknown
        if actual.peak_bytes is None
        else ReportedNumber(float(actual.peak_bytes), "measured", 1),
    )


def _relative_error(prediction: float | None, actual: float | None) -> float | None:
    return prediction / actual - 1 if prediction is not None and actual else None

"""The trials in the order they were run, and the best so far."""

from __future__ import annotations

import math
from typing import NamedTuple

from atorch_ns.report._measures import peak, seconds
from atorch_ns.search import Row, SearchOutcome, TrialStatus

__all__ = ["HistoryInfo", "HistoryPoint", "history_info"]


class HistoryPoint(NamedTuple):
    """One trial.

    Attributes:
        trial: 1 for the first.
        key, label: the candidate's.
        status: how the trial ended.
        seconds: median step (measured); ``None`` if it gave none.
        spread: standard error of that median, in seconds.
        num_steps: timed steps.
        best_seconds: median step of the best candidate up to here; ``None`` if none could be used yet.
        best_trial: its number; 0 for none.
        total_seconds: what the trial took, set-up included.
    """

    trial: int
    key: str
    label: str
    status: TrialStatus
    seconds: float | None
    spread: float
    num_steps: int
    best_seconds: float | None
    total_seconds: float
    best_trial: int = 0


class HistoryInfo(NamedTuple):
    """The history of a search.

    Attributes:
        points: in the order of the trials.
        lower_bound_seconds: no candidate is expected below this; ``None`` where unknown.
        best_trial: number of the winner's trial; 0 if it was not tried.
    """

    points: tuple[HistoryPoint, ...]
    lower_bound_seconds: float | None
    best_trial: int


def history_info(outcome: SearchOutcome) -> HistoryInfo:
    """The history's data.

    The best so far is by the objective of the search. What is over the limit or was disqualified is never
    the best, and nothing is better than the winner once that was tried: of candidates that noise cannot tell
    apart, the simplest is chosen and not the shortest median.
    """
    points: list[HistoryPoint] = []
    winner = outcome.winner
    best: Row | None = None
    for row in sorted(outcome.rows, key=lambda row: row.trial_number):
        trial = row.trial
        if trial is None or row.trial_number == 0:
            continue
        value = trial.median_seconds if trial.succeeded else None
        if value is not None and row.fate != "failed" and _fits(row, outcome.setting.memory_limit_bytes):
            rivals = [each for each in (best, row) if each is not None]
            best = winner if winner in rivals else min(rivals, key=lambda each: _value(each, outcome))
        points.append(
            HistoryPoint(
                trial=row.trial_number,
                key=row.candidate.key,
                label=row.candidate.label,
                status=trial.status,
                seconds=value,
                spread=trial.noise_seconds if len(trial.step_seconds) > 1 else 0.0,
                num_steps=len(trial.step_seconds),
                best_seconds=best.trial.median_seconds if best is not None and best.trial else None,
                total_seconds=trial.total_seconds,
                best_trial=best.trial_number if best is not None else 0,
            )
        )
    return HistoryInfo(tuple(points), outcome.lower_bound_seconds, winner.trial_number if winner else 0)


def _fits(row: Row, limit_bytes: int) -> bool:
    held = max(row.trial.peak_bytes, default=0) if row.trial is not None else 0
    return not limit_bytes or held <= limit_bytes


def _value(row: Row, outcome: SearchOutcome) -> float:
    """What the search makes small, measured where it can be."""
    objective = outcome.settings.objective
    held = peak(row).value or math.inf
    if objective == "memory":
        return held
    if objective == "batch":
        estimate, batch = row.candidate.estimate, row.candidate.largest_batch
        ratio = held / estimate.peak_bytes if estimate is not None and estimate.peak_bytes else 1.0
        return ratio / batch if batch else math.inf
    return seconds(row).value or math.inf

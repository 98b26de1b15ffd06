"""The trials in the order they were run, and the best so far."""

from __future__ import annotations

from typing import NamedTuple

from atorch_ns.search import SearchOutcome, TrialStatus

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
        best_seconds: shortest median of this trial and those before it; ``None`` if none succeeded yet.
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
    """The history's data."""
    points: list[HistoryPoint] = []
    best: float | None = None
    for row in sorted(outcome.rows, key=lambda row: row.trial_number):
        trial = row.trial
        if trial is None or row.trial_number == 0:
            continue
        value = trial.median_seconds if trial.succeeded else None
        if value is not None:
            best = value if best is None else min(best, value)
        points.append(
            HistoryPoint(
                trial=row.trial_number,
                key=row.candidate.key,
                label=row.candidate.label,
                status=trial.status,
                seconds=value,
                spread=trial.noise_seconds if len(trial.step_seconds) > 1 else 0.0,
                num_steps=len(trial.step_seconds),
                best_seconds=best,
                total_seconds=trial.total_seconds,
            )
        )
    winner = outcome.winner
    return HistoryInfo(tuple(points), outcome.lower_bound_seconds, winner.trial_number if winner else 0)

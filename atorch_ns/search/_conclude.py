"""From the state of a search to its outcome: every candidate with its figures, its fate and the reason."""

from __future__ import annotations

import math

import numpy as np

from atorch_ns.search._candidate import Candidate
from atorch_ns.search._knowledge import Knowledge
from atorch_ns.search._ledger import Entry, Ledger
from atorch_ns.search._nearest_miss import nearest_miss
from atorch_ns.search._objective import Objective
from atorch_ns.search._outcome import Row, SearchOutcome, Setting
from atorch_ns.search._probing import Probing
from atorch_ns.search._reasons import Reasons
from atorch_ns.search._settings import SearchSettings
from atorch_ns.search._standing import step_noise

__all__ = ["conclude", "pareto"]

ORDER = {"won": 0, "lost": 1, "untried": 2, "failed": 3, "pruned": 4}


def conclude(
    setting: Setting,
    settings: SearchSettings,
    knowledge: Knowledge,
    ledger: Ledger,
    probing: Probing,
    objective: Objective,
    *,
    stop_reason: str,
    seconds: float,
    cut_short: bool = False,
    over: bool = False,
) -> SearchOutcome:
    """The outcome as of now.

    Args:
        setting, settings: of the search.
        knowledge: all that follows from its trials.
        ledger, probing: the trials and probes.
        objective: what is best.
        stop_reason: why it ended, as a sentence; empty while it goes on.
        seconds: that it took.
        cut_short: whether it was ended, so that a choice by prediction stands in for one that was measured.
        over: whether no trial or probe will follow.
    """
    limit = setting.memory_limit_bytes
    winner = knowledge.winner
    unmeasured = None
    if cut_short and winner is None and not probing.rejected:
        unmeasured = _best_predicted(knowledge, ledger, objective)
    reasons = Reasons(
        knowledge, objective, limit, stop_reason, batch=setting.global_batch, unmeasured=unmeasured
    )
    rows = _rows(knowledge, ledger, probing, reasons)
    best = winner.candidate if winner is not None else unmeasured
    bound = knowledge.lower_bound(settings.win_probability, settings.seed) if objective.counts_time else None
    ended = stop_reason if settings.probe and over else ""
    check = probing.check(winner.candidate.key if winner is not None else None, ended=ended)
    return SearchOutcome(
        setting=setting,
        settings=settings,
        rows=tuple(sorted(rows, key=lambda row: _order(row, knowledge))),
        best=best.key if best is not None else None,
        stop_reason=stop_reason,
        num_trials=ledger.num_run,
        seconds=seconds,
        noise=step_noise(knowledge.ranked),
        lower_bound_seconds=bound,
        gap=None if bound is None or winner is None else max(0.0, 1 - bound / winner.value),
        pareto=pareto(rows),
        nearest_miss="" if best is not None else nearest_miss(knowledge, ledger, limit),
        resumed=ledger.num_resumed,
        checks=() if check is None else (check,),
    )


def _best_predicted(knowledge: Knowledge, ledger: Ledger, objective: Objective) -> Candidate | None:
    """The baseline, or what is predicted best, of what fits and was not tried; ``None`` if there is none.

    ``None`` as well where trials have failed for another reason than memory: the same may happen to others.
    """
    if any(entry.judged and key not in knowledge.short_of_memory for key, entry in ledger):
        return None
    free = [knowledge.candidates[index] for index in knowledge.open]
    free = [one for one in free if _without_a_fault(ledger.get(one.key))]
    plain = next((one for one in free if one.is_baseline), None)
    return plain or min(free, key=lambda one: objective.predicted(one) or math.inf, default=None)


def _without_a_fault(entry: Entry | None) -> bool:
    """Whether nothing is known against it: not tried, or ended before it could show anything."""
    return entry is None or (not entry.outcomes and all(one.status == "cancelled" for one in entry.lost))


def _rows(knowledge: Knowledge, ledger: Ledger, probing: Probing, reasons: Reasons) -> list[Row]:
    tried = len(ledger) > 0
    sizes = knowledge.bytes if tried else None
    rows = []
    for index, one in enumerate(knowledge.candidates):
        entry = ledger.get(one.key)
        fate, reason = reasons.of(index, entry, probing.rejected.get(one.key))
        priced = tried and one.estimate is not None
        rows.append(
            Row(
                candidate=one,
                fate=fate,
                reason=reason,
                trial=entry.merged if entry is not None else None,
                trial_number=entry.number if entry is not None else 0,
                corrected_seconds=math.exp(knowledge.seconds.mean[index]) if priced else None,
                corrected_bytes=math.exp(sizes.mean[index]) if priced and sizes is not None else None,
            )
        )
    return rows


def _order(row: Row, knowledge: Knowledge) -> tuple[float | str, ...]:
    measured = row.trial is not None and row.trial.succeeded
    seconds = math.inf
    if measured and row.trial is not None:
        seconds = row.trial.median_seconds
    elif row.corrected_seconds is not None:
        seconds = row.corrected_seconds
    elif row.candidate.estimate is not None:
        seconds = row.candidate.estimate.step_seconds
    return (ORDER[row.fate], seconds, len(row.candidate.steps), row.candidate.key)


def pareto(rows: list[Row]) -> tuple[str, ...]:
    """Keys of the rows that no other beats in both time and memory, the fastest first.

    Measured figures where there are any, predictions elsewhere; what failed or was pruned does not count.
    """
    points = [
        (*figures, row.candidate.key)
        for row in rows
        if row.fate in ("won", "lost", "untried") and (figures := _figures(row)) is not None
    ]
    front: list[str] = []
    least = np.inf
    for _, memory, key in sorted(points):
        if memory < least:
            front.append(key)
            least = memory
    return tuple(front)


def _figures(row: Row) -> tuple[float, float] | None:
    """Seconds and bytes; ``None`` where one of them is unknown."""
    estimate = row.candidate.estimate
    seconds = row.corrected_seconds or (estimate.step_seconds if estimate is not None else None)
    memory = row.corrected_bytes or (estimate.peak_bytes if estimate is not None else None)
    if row.trial is not None and row.trial.succeeded:
        seconds = row.trial.median_seconds
        memory = max(row.trial.peak_bytes, default=0) or memory
    if not seconds or not memory:
        return None
    return float(seconds), float(memory)

"""Conclusion: the outcome of a search, with the figures, the fate and the reason of every candidate."""

from __future__ import annotations

import math
from collections.abc import Iterable

from atorch_ns.search.knowledge import Knowledge
from atorch_ns.search.objective import SearchSettings
from atorch_ns.search.outcome import Row, SearchOutcome, SearchSetting, SingleProcess
from atorch_ns.search.ranking import Preferred, prefer, step_noise
from atorch_ns.search.reasons import Reasons, nearest_miss
from atorch_ns.search.trial import CandidateTrials, TrialOutcome

ORDER = {"won": 0, "lost": 1, "untried": 2, "failed": 3, "pruned": 4}  # of rows, by fate


def conclude(
    setting: SearchSetting,
    settings: SearchSettings,
    knowledge: Knowledge,
    *,
    stop_reason: str,
    seconds: float,
    cut_short: bool,
    over: bool,
) -> SearchOutcome:
    """The outcome as of now.

    Args:
        stop_reason: why it ended, as a sentence; empty while it goes on.
        seconds: time that it took.
        cut_short: whether it was cancelled, so that a choice by prediction replaces a measured one.
        over: whether no trial or check will follow.
    """
    winner = knowledge.winner
    predicted_best = None
    if cut_short and winner is None and not knowledge.ledger.rejected:
        predicted_best = _best_predicted(knowledge)
    reasons = Reasons(knowledge, stop_reason, batch=setting.global_batch, predicted_best=predicted_best)
    rows = _build_rows(knowledge, reasons)
    best = winner.candidate if winner is not None else predicted_best and predicted_best.candidate
    lower_bound = None
    if knowledge.objective.counts_time:  # the bound is in seconds
        lower_bound = knowledge.lower_bound(settings.win_probability, settings.seed)
    probe = check = single = None
    if winner is not None:
        if (trial := knowledge.ledger.singles.get(winner.candidate.key)) is not None:
            single = SingleProcess(trial=trial, is_as_fast=knowledge.is_as_fast(trial))
        probe = knowledge.ledger.probes.get(winner.candidate.key)
        check = _numerics_check(probe, stop_reason=stop_reason if settings.probe and over else "")
    return SearchOutcome(
        setting=setting,
        settings=settings,
        rows=tuple(sorted(rows, key=_row_order)),
        best=best.key if best is not None else None,
        stop_reason=stop_reason,
        num_trials=knowledge.ledger.num_run,
        seconds=seconds,
        noise=step_noise(knowledge.ranked),
        lower_bound_seconds=lower_bound,
        gap=None if lower_bound is None or winner is None else max(0.0, 1 - lower_bound / winner.value),
        pareto=pareto(rows),
        nearest_miss="" if best is not None else nearest_miss(knowledge),
        resumed=knowledge.ledger.num_resumed,
        checks=() if check is None else (check,),
        beside=knowledge.beside,
        numerics_passed=probe is not None and probe.status == "ok",
        single_process=single,
    )


def _numerics_check(probe: TrialOutcome | None, *, stop_reason: str) -> str | None:
    what = "numerics against one process, with SGD"
    if probe is None:  # ``stop_reason`` says why the search was over before it
        return f"{what}: could not be run: {stop_reason}" if stop_reason else None
    if probe.status == "ok":
        detail = f" ({probe.reason})" if probe.reason else ""
        return f"{what}: passed{detail}"
    if probe.status == "wrong":
        return f"{what}: failed: {probe.reason}"
    # A check that could not run proves nothing, so it does not rule the candidate out.
    status = "not done in time" if probe.status == "hung" else probe.status
    return f"{what}: could not be run: {status}: {probe.reason}"


def _best_predicted(knowledge: Knowledge) -> Preferred | None:
    ledger, objective = knowledge.ledger, knowledge.objective
    if any(entry.judged and key not in knowledge.short_of_memory for key, entry in ledger):
        return None  # a failure for a reason other than memory may recur for others
    free = [knowledge.candidates[index] for index in knowledge.open]
    free = [candidate for candidate in free if _without_a_fault(ledger.get(candidate.key))]
    plain = next((candidate for candidate in free if candidate.is_baseline), None)
    if plain is not None:
        return Preferred(plain)
    free.sort(key=lambda candidate: objective.predicted(candidate) or math.inf)
    return prefer(free, objective, knowledge.limit_for_tensors) if free else None


def _without_a_fault(entry: CandidateTrials | None) -> bool:
    # Not tried, or ended before it could show anything.
    return entry is None or (not entry.outcomes and all(trial.status == "cancelled" for trial in entry.lost))


def _build_rows(knowledge: Knowledge, reasons: Reasons) -> list[Row]:
    has_trials = len(knowledge.ledger) > 0  # before, nothing corrects a prediction
    sizes = knowledge.bytes if has_trials else None
    rows = []
    for index, candidate in enumerate(knowledge.candidates):
        entry = knowledge.ledger.get(candidate.key)
        fate, reason = reasons.of(index)
        is_corrected = has_trials and candidate.estimate is not None
        row = Row(
            candidate=candidate,
            fate=fate,
            reason=reason,
            trial=entry.merged if entry is not None else None,
            trial_number=entry.number if entry is not None else 0,
            corrected_seconds=math.exp(knowledge.seconds.mean[index]) if is_corrected else None,
            corrected_bytes=max(0.0, math.exp(sizes.mean[index]) - knowledge.unpredicted_bytes)
            if is_corrected and sizes is not None
            else None,
        )
        rows.append(row)
    return rows


def _row_order(row: Row) -> tuple[float | str, ...]:
    candidate, seconds = row.candidate, row.corrected_seconds  # measured, else corrected, else predicted
    if row.trial is not None and row.trial.succeeded:
        seconds = row.trial.median_seconds
    elif seconds is None:
        seconds = candidate.predicted_seconds
    return (ORDER[row.fate], math.inf if seconds is None else seconds, len(candidate.steps), candidate.key)


def pareto(rows: Iterable[Row]) -> tuple[str, ...]:
    """Keys of the rows that no other beats in both time and memory, the fastest first.

    Figures are measured where possible, else predicted. Failed and pruned rows do not count.
    """
    points = [
        (*figures, row.candidate.key)
        for row in rows
        if row.fate in ("won", "lost", "untried") and (figures := _seconds_and_bytes(row)) is not None
    ]
    front: list[str] = []
    least = math.inf
    for _, memory, key in sorted(points):
        if memory < least:  # less than all faster rows need
            front.append(key)
            least = memory
    return tuple(front)


def _seconds_and_bytes(row: Row) -> tuple[float, float] | None:
    seconds = row.corrected_seconds or row.candidate.predicted_seconds
    memory = row.corrected_bytes or row.candidate.predicted_bytes
    if row.trial is not None and row.trial.succeeded:
        seconds = row.trial.median_seconds
        memory = row.trial.max_peak_bytes or memory
    if not seconds or not memory:  # one of them is unknown
        return None
    return float(seconds), float(memory)

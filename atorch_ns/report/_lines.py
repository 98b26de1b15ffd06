"""The events of a search as plain lines."""

from __future__ import annotations

from collections.abc import Iterator

from atorch_ns.report._progress import Progress
from atorch_ns.report._units import bytes_text, counted, measured_text, seconds_text
from atorch_ns.report._verdict import setting_text, verdict
from atorch_ns.search import (
    Candidate,
    Ended,
    Event,
    Note,
    Priced,
    Profiling,
    Row,
    TrialEnded,
    TrialOutcome,
    TrialStarted,
)

__all__ = ["event_lines", "predicted_text", "trial_text"]

_SHOWN = 8


def event_lines(event: Event, progress: Progress, *, verbose: bool) -> Iterator[str]:
    """What is said of an event that ``progress`` has already taken note of."""
    match event:
        case Profiling():
            yield f"profiling {event.model} on fake tensors"
        case Priced():
            yield from _priced_lines(event, verbose)
        case TrialStarted():
            expected = "" if progress.probing else f" {predicted_text(event.candidate)}"
            yield f"{progress.doing} …{expected}"
        case TrialEnded() if progress.probing:
            passed = event.outcome.status == "ok"
            result = "the same as in one process" if passed else trial_text(event.outcome)
            yield f"numerics of {event.candidate.label}: {result}"
        case TrialEnded():
            best = progress.candidates.get(event.best or "")
            so_far = f"; best so far {best.label}, {seconds_text(progress.best_seconds())}" if best else ""
            if best is not None and best.key == event.candidate.key:
                so_far = "; the best so far"
            yield f"trial {event.number}: {event.candidate.label}: {trial_text(event.outcome)}{so_far}"
        case Note():
            yield event.text
        case Ended():
            yield from verdict(event.outcome)
            shown = (row for row in event.outcome.rows if row.fate in ("lost", "failed"))
            yield from (_loser_text(row) for row in shown if verbose or row.trial is not None)


def predicted_text(candidate: Candidate) -> str:
    """As ``"predicted 42.1 ms, 812 MiB"``."""
    if candidate.estimate is None:
        return "not priced"
    time, memory = candidate.estimate.step_seconds, candidate.estimate.peak_bytes
    return f"predicted {seconds_text(time)}, {bytes_text(memory)}"


def trial_text(outcome: TrialOutcome) -> str:
    """As ``"42.1 ms ±0.3 ms (measured, n=12), 812 MiB"``, or how it failed and why."""
    if not outcome.succeeded:
        where = f" on rank {outcome.rank}" if outcome.rank is not None else ""
        log = f" (log: {outcome.log})" if outcome.log else ""
        return f"{outcome.status}{where}: {outcome.reason or 'no reason given'}{log}"
    num = len(outcome.step_seconds)
    shown = measured_text(outcome.median_seconds, outcome.noise_seconds if num > 1 else None)
    held = f", peak {bytes_text(max(outcome.peak_bytes))}" if outcome.peak_bytes else ""
    early = ", stopped early" if outcome.status == "stopped early" else ""
    return f"{shown} (measured, n={num}{early}){held}"


def _priced_lines(event: Priced, verbose: bool) -> Iterator[str]:
    setting, candidates = event.setting, event.candidates
    pruned = [candidate for candidate in candidates if candidate.pruned is not None]
    took = f"profile {seconds_text(setting.profile_seconds)}, prices {seconds_text(setting.estimate_seconds)}"
    yield setting_text(setting)
    yield f"{counted(len(candidates), 'candidate')}, {len(pruned)} of them pruned ({took}):"
    kept = [candidate for candidate in candidates if candidate.pruned is None]
    baseline = [candidate for candidate in kept if candidate.is_baseline]
    others = [candidate for candidate in kept if not candidate.is_baseline]
    shown = others if verbose else others[:_SHOWN]
    for candidate in (*baseline, *shown):
        role = " (baseline)" if candidate.is_baseline else ""
        yield f"  {candidate.label}{role}: {predicted_text(candidate)}"
    if len(shown) < len(others):
        yield f"  … and {len(others) - len(shown)} more"
    if verbose:
        for candidate in pruned:
            reason = candidate.pruned.reason if candidate.pruned else ""
            yield f"  pruned: {candidate.label}: {reason}"


def _loser_text(row: Row) -> str:
    return f"  {row.fate}: {row.candidate.label}: {row.reason}"

"""Candidates ranked by prediction alone, with the reason of each, as a search would report them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from atorch_ns.search import Candidate, Row, SearchSettings

__all__ = ["nearest_miss", "offline_rows", "pareto_front"]


def offline_rows(candidates: Sequence[Candidate], settings: SearchSettings) -> tuple[Row, ...]:
    """The candidates in their order, those that can be used first."""
    usable = [candidate for candidate in candidates if candidate.pruned is None]
    pruned = [candidate for candidate in candidates if candidate.pruned is not None]
    rows = [
        Row(
            candidate=candidate,
            fate="won" if position == 0 else "untried",
            reason=_reason(candidate, usable[0], settings),
        )
        for position, candidate in enumerate(usable)
    ]
    rows += [
        Row(candidate=candidate, fate="pruned", reason=candidate.pruned.reason if candidate.pruned else "")
        for candidate in pruned
    ]
    return tuple(rows)


def _reason(candidate: Candidate, best: Candidate, settings: SearchSettings) -> str:
    if candidate is best:
        goals = {
            "time": "the shortest predicted step",
            "memory": "the least predicted memory",
            "batch": "the largest batch that is predicted to fit",
            "cost": "the lowest predicted cost per token",
        }
        return goals[settings.objective]
    mine, other = candidate.estimate, best.estimate
    if mine is None or other is None or not other.step_seconds:
        return "not priced"
    ratio = mine.step_seconds / other.step_seconds
    time_part = f"{ratio:.2f}× the best's step" if ratio >= 1.005 else "as fast as the best"
    share = mine.peak_bytes / other.peak_bytes - 1 if other.peak_bytes else 0.0
    memory_part = f", {abs(share):.0%} {'more' if share > 0 else 'less'} memory" if abs(share) >= 0.01 else ""
    return f"predicted {time_part}{memory_part}"


def pareto_front(rows: Iterable[Row]) -> tuple[str, ...]:
    """Keys of the candidates that no other beats in both time and memory, the fastest first."""
    priced = [(row.candidate.estimate, row.candidate.key) for row in rows if row.fate != "pruned"]
    known = sorted(
        (figures.step_seconds, figures.peak_bytes, key) for figures, key in priced if figures is not None
    )
    front: list[str] = []
    least = float("inf")
    for _, num_bytes, key in known:
        if num_bytes < least:
            least = num_bytes
            front.append(key)
    return tuple(front)


def nearest_miss(rows: Iterable[Row]) -> str:
    """The candidate that is over the limit by least, with its reason."""
    over = [row for row in rows if row.candidate.estimate and row.candidate.pruned and row.fate == "pruned"]
    over = [row for row in over if row.candidate.pruned and row.candidate.pruned.kind == "memory"]
    if not over:
        return ""
    nearest = min(over, key=lambda row: row.candidate.estimate.peak_bytes if row.candidate.estimate else 0.0)
    return f"{nearest.candidate.label} {nearest.reason}"

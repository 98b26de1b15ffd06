"""The nearest miss: where nothing runs, which candidate came nearest and what would help."""

from __future__ import annotations

from atorch_ns.search._candidate import Candidate
from atorch_ns.search._knowledge import Knowledge
from atorch_ns.search._ledger import Entry, Ledger
from atorch_ns.search._words import bytes_text, largest_part

__all__ = ["UNEXPLAINED", "nearest_miss"]

UNEXPLAINED = "its predicted and measured memory does not explain"
"""Said of a trial that ran out of memory far below the limit."""

STATES = ("parameters", "gradients", "optimizer")


def nearest_miss(knowledge: Knowledge, ledger: Ledger, limit_bytes: int) -> str:
    """One sentence: what came nearest, what it lacks, what to do. Empty if there are no candidates."""
    found = (_over(one, knowledge, ledger, limit_bytes) for one in knowledge.candidates)
    over = [miss for miss in found if miss is not None]
    other = [
        (one, entry)
        for one in knowledge.candidates
        if (entry := ledger.get(one.key)) is not None and not entry.merged.succeeded
    ]
    unexplained = any(
        entry.merged.status != "out of memory" or one.key not in knowledge.short_of_memory
        for one, entry in other
    )
    if over and not (unexplained and all(ledger.get(one.key) is None for _, _, one in over)):
        excess, rank, nearest = min(over, key=lambda miss: (miss[0], miss[2].key))
        where = f"rank {rank}" if rank is not None else "every rank"
        predicted = "" if ledger.get(nearest.key) is not None else ", predicted"
        need = f"needs {bytes_text(excess)} more on {where} than {bytes_text(limit_bytes)}{predicted}"
        part = f" ({largest_part(nearest.estimate)})" if nearest.estimate is not None else ""
        return f"{nearest.label} comes nearest: it {need}{part}; {_advice(nearest, knowledge, ledger)}"
    if other:
        one, entry = other[0]
        why = entry.merged.reason or entry.merged.status
        if entry.merged.status == "out of memory":
            why = f"out of memory, which {UNEXPLAINED}: {entry.merged.reason or 'no message'}"
        kinds = {entry.merged.status for _, entry in other}
        same = " All trials ended so." if len(other) > 1 and len(kinds) == 1 else ""
        return f"{one.label} ended: {why}.{same} See its log: {entry.merged.log or 'none was kept'}"
    return ""


def _over(
    one: Candidate, knowledge: Knowledge, ledger: Ledger, limit_bytes: int
) -> tuple[float, int | None, Candidate] | None:
    """By how many bytes a candidate misses the limit, and on which rank; ``None`` if that is not its trouble."""
    entry = ledger.get(one.key)
    predicted = one.estimate.peak_bytes if one.estimate is not None else 0.0
    if entry is None:
        if one.pruned is not None and one.pruned.kind == "memory" and limit_bytes:
            return predicted - limit_bytes, None, one
        return None
    if entry.merged.status == "out of memory" and one.key not in knowledge.short_of_memory:
        return None
    return _measured_over(entry, predicted, limit_bytes, one)


def _measured_over(
    entry: Entry, predicted: float, limit_bytes: int, one: Candidate
) -> tuple[float, int | None, Candidate] | None:
    outcome = entry.merged
    peak = max(outcome.peak_bytes, default=0)
    if outcome.status == "out of memory":
        return max(peak, predicted, limit_bytes) - limit_bytes, outcome.rank, one
    if outcome.succeeded and limit_bytes and peak > limit_bytes:
        return peak - limit_bytes, outcome.peak_bytes.index(peak), one
    return None


def _advice(nearest: Candidate, knowledge: Knowledge, ledger: Ledger) -> str:
    if nearest.pruned is not None and nearest.pruned.hint:
        return nearest.pruned.hint
    has = {name for name, _ in nearest.steps}
    smaller = [
        one
        for one in knowledge.candidates
        if one.pruned is None
        and ledger.get(one.key) is None
        and one.key not in knowledge.learned
        and one.estimate is not None
        and nearest.estimate is not None
        and one.estimate.peak_bytes < nearest.estimate.peak_bytes
    ]
    if smaller:
        best = min(smaller, key=lambda one: one.estimate.peak_bytes if one.estimate else 0.0)
        new = [name for name, _ in best.steps if name not in has]
        return f"try {' and '.join(new) or best.label}, which was not tried"
    if nearest.estimate is not None:
        memory = nearest.estimate.memory._asdict()
        if sum(memory[name] for name in STATES) > sum(memory.values()) / 2:
            return (
                "use more ranks to divide parameters and optimizer states over, or devices with more memory"
            )
        return "use a smaller global batch or shorter samples, or devices with more memory"
    return "use a smaller global batch, more ranks, or devices with more memory"

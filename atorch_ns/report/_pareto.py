"""Time against memory of every candidate, and the front that no other candidate beats."""

from __future__ import annotations

from typing import NamedTuple

from atorch_ns.report._measures import Figure, peak, seconds
from atorch_ns.search import SearchOutcome

__all__ = ["ParetoInfo", "ParetoPoint", "pareto_info"]


class ParetoPoint(NamedTuple):
    """One candidate.

    Attributes:
        key, label: the candidate's.
        number: of its line in the table of candidates.
        time: seconds.
        memory: bytes on the rank that needs most.
        on_front: whether no other beats it in both.
        is_best: whether it won.
    """

    key: str
    label: str
    number: int
    time: Figure
    memory: Figure
    on_front: bool
    is_best: bool


class ParetoInfo(NamedTuple):
    """The candidates with both figures.

    Attributes:
        points: in the order of the table of candidates.
        limit_bytes: what one rank may use.
    """

    points: tuple[ParetoPoint, ...]
    limit_bytes: int

    @property
    def front(self) -> tuple[ParetoPoint, ...]:
        """The front, the fastest first."""
        return tuple(sorted((p for p in self.points if p.on_front), key=lambda p: p.time.value or 0.0))


def pareto_info(outcome: SearchOutcome) -> ParetoInfo:
    """The points' data. Candidates that amount to another, or that failed, are left out."""
    points = []
    front = set(outcome.pareto)
    for number, row in enumerate(outcome.rows, 1):
        time, memory = seconds(row), peak(row)
        kind = row.candidate.pruned.kind if row.candidate.pruned else ""
        if time.value is None or memory.value is None or row.fate == "failed" or kind == "same":
            continue
        key = row.candidate.key
        points.append(
            ParetoPoint(key, row.candidate.label, number, time, memory, key in front, key == outcome.best)
        )
    return ParetoInfo(tuple(points), outcome.setting.memory_limit_bytes)

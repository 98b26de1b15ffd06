"""Every candidate in one line: what it is, what it costs, what became of it, and why."""

from __future__ import annotations

from typing import NamedTuple

from atorch_ns.report._measures import Figure, is_planned, peak, seconds
from atorch_ns.search import Fate, Row, SearchOutcome

__all__ = ["CandidateLine", "CandidatesInfo", "candidates_info", "fate_text"]

_MARKS: dict[Fate, str] = {"won": "✓", "lost": "–", "failed": "✗", "pruned": "○", "untried": "·"}


class CandidateLine(NamedTuple):
    """One candidate.

    Attributes:
        number: from 1, in the order of the report.
        key, label: the candidate's.
        fate: what became of it; :func:`fate_text` has it in words.
        is_baseline: whether it is what others are held against.
        on_front: whether no other candidate beats it in both time and memory.
        predicted_seconds, predicted_bytes: before any trial; ``None`` where it could not be priced.
        time: the step to go by, in seconds.
        memory: the peak to go by, in bytes.
        speedup: the baseline's step over this one's, measured against measured or else predicted against
            predicted; ``None`` where it failed or is unknown.
        limit_share: ``memory`` as a share of the limit; ``None`` where unknown.
        trial_number: 1 for the first trial, 0 if it was not tried.
        reason: why, in one sentence.
        pruned_kind: why it was not worth a trial, in one word; empty if it was.
    """

    number: int
    key: str
    label: str
    fate: Fate
    is_baseline: bool
    on_front: bool
    predicted_seconds: float | None
    predicted_bytes: float | None
    time: Figure
    memory: Figure
    speedup: float | None
    limit_share: float | None
    trial_number: int
    reason: str
    pruned_kind: str


class CandidatesInfo(NamedTuple):
    """The table of candidates.

    Attributes:
        lines: the winner first.
        limit_bytes: what one rank may use.
        planned: whether no trial was run, so that all stand by prediction.
    """

    lines: tuple[CandidateLine, ...]
    limit_bytes: int
    planned: bool = False

    def first(self, num: int | None) -> CandidatesInfo:
        """The first lines, and the baseline wherever it stands; all for ``None``."""
        kept = self.lines if num is None else self.lines[:num]
        baseline = tuple(line for line in self.lines[len(kept) :] if line.is_baseline)
        return self._replace(lines=(*kept, *baseline))

    @property
    def considered(self) -> tuple[CandidateLine, ...]:
        """Those that were not pruned."""
        return tuple(line for line in self.lines if line.fate != "pruned")

    @property
    def pruned(self) -> tuple[CandidateLine, ...]:
        """Those that were."""
        return tuple(line for line in self.lines if line.fate == "pruned")


def candidates_info(outcome: SearchOutcome) -> CandidatesInfo:
    """The table's data, in the order of the outcome's rows."""
    limit = outcome.setting.memory_limit_bytes
    front = set(outcome.pareto)
    baseline = outcome.baseline
    lines = tuple(_line(number, row, baseline, limit, front) for number, row in enumerate(outcome.rows, 1))
    return CandidatesInfo(lines, limit, is_planned(outcome))


def _line(number: int, row: Row, baseline: Row | None, limit: int, front: set[str]) -> CandidateLine:
    candidate, memory = row.candidate, peak(row)
    estimate = candidate.estimate
    return CandidateLine(
        number=number,
        key=candidate.key,
        label=candidate.label,
        fate=row.fate,
        is_baseline=candidate.is_baseline,
        on_front=candidate.key in front,
        predicted_seconds=estimate.step_seconds if estimate else None,
        predicted_bytes=estimate.peak_bytes if estimate else None,
        time=seconds(row),
        memory=memory,
        speedup=_speedup(row, baseline),
        limit_share=memory.value / limit if memory.value is not None and limit else None,
        trial_number=row.trial_number,
        reason=row.reason or (candidate.pruned.reason if candidate.pruned else ""),
        pruned_kind=candidate.pruned.kind if candidate.pruned else "",
    )


def _speedup(row: Row, baseline: Row | None) -> float | None:
    if baseline is None or row.fate == "failed":
        return None
    mine, other = seconds(row), seconds(baseline)
    if other.source == "measured" and mine.source not in ("measured", "corrected"):
        estimates = row.candidate.estimate, baseline.candidate.estimate
        if estimates[0] is None or estimates[1] is None:
            return None
        return _ratio(estimates[1].step_seconds, estimates[0].step_seconds)
    return _ratio(other.value, mine.value)


def _ratio(over: float | None, under: float | None) -> float | None:
    return over / under if over and under else None


def fate_text(line: CandidateLine, *, planned: bool = False) -> str:
    """A mark and a word, so that neither colour nor the mark alone carries it.

    Where all stand by prediction, nobody won and nobody waits for a trial.

    Example: ``"✓ won"``, ``"○ pruned (memory)"``.
    """
    kind = f" ({line.pruned_kind})" if line.fate == "pruned" and line.pruned_kind else ""
    word = {"won": "chosen", "untried": "not chosen"}.get(line.fate, line.fate) if planned else line.fate
    return f"{_MARKS[line.fate]} {word}{kind}"

"""Candidates of a search: their figures, their order of trial, and the front of time and memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

from atorch_ns.estimate.intervals import Range
from atorch_ns.search import Fate, Row, SearchOutcome, TrialStatus
from atorch_ns.text import bytes_text, first_few, measured_text, range_text, seconds_text

Source = Literal["measured", "corrected", "predicted", "unknown"]
"""Source of a figure. ``corrected``: predicted, with a correction learned from the trials."""


class ReportedNumber(NamedTuple):
    """A number with where it comes from.

    Attributes:
        value: seconds or bytes; ``None`` where it is unknown.
        source: source of the number.
        num: number of steps or ranks that it was measured on; 0 for predictions.
        spread: standard error of a measured time, or lowest to highest rank of measured bytes; 0 otherwise.
        interval: interval of a prediction; ``None`` otherwise.
    """

    value: float | None
    source: Source
    num: int = 0
    spread: float = 0.0
    interval: Range | None = None

    def as_seconds(self) -> str:
        """The time as text: ``"42.1 ms ±0.3 ms (measured, n=20)"``."""
        if self.source != "measured":
            return f"{seconds_text(self.value)} ({self._interval_text(seconds_text)}{self.source})"
        text = measured_text(self.value, self.spread if self.num > 1 else None)
        return f"{text} (measured, n={self.num})"

    def as_bytes(self) -> str:
        """The memory as text: ``"812 MiB (measured, the highest of 2 ranks)"``."""
        if self.source != "measured":
            return f"{bytes_text(self.value)} ({self._interval_text(bytes_text)}{self.source})"
        among = f", the highest of {self.num} ranks" if self.num > 1 else ""
        return f"{bytes_text(self.value)} (measured{among})"

    def _interval_text(self, text: Callable[[float], str]) -> str:
        if self.value is None or self.interval is None:
            return ""
        within = range_text(self.value, self.interval, text)
        return f"{within}, " if within else ""


def seconds(row: Row) -> ReportedNumber:
    """The candidate's step."""
    trial = row.trial
    if trial is not None and trial.succeeded:
        spread = trial.noise_seconds if len(trial.step_seconds) > 1 else 0.0
        return ReportedNumber(trial.median_seconds, "measured", len(trial.step_seconds), spread)
    estimate = row.candidate.estimate
    if estimate is None or row.corrected_seconds is not None:
        return _without_trial(row.corrected_seconds)
    return ReportedNumber(estimate.step_seconds, "predicted", interval=estimate.step_seconds_interval)


def peak(row: Row) -> ReportedNumber:
    """The candidate's peak memory on the rank that needs most."""
    trial = row.trial
    if trial is not None and trial.succeeded and trial.peak_bytes:
        highest, lowest = max(trial.peak_bytes), min(trial.peak_bytes)
        return ReportedNumber(float(highest), "measured", len(trial.peak_bytes), float(highest - lowest))
    estimate = row.candidate.estimate
    if estimate is None or row.corrected_bytes is not None:
        return _without_trial(row.corrected_bytes)
    return ReportedNumber(estimate.peak_bytes, "predicted", interval=estimate.peak_bytes_interval)


def _without_trial(value: float | None) -> ReportedNumber:
    return ReportedNumber(value, "unknown" if value is None else "corrected")


def is_planned(outcome: SearchOutcome) -> bool:
    """Returns whether every figure is a prediction because no trial was run."""
    return not outcome.num_trials and not outcome.resumed and all(row.trial is None for row in outcome.rows)


_FEW_TWINS = 3  # candidates of equal predictions that a line names

_MARKS: dict[Fate, str] = {"won": "✓", "lost": "–", "failed": "✗", "pruned": "○", "untried": "·"}


class CandidateLine(NamedTuple):
    """One candidate.

    Attributes:
        number: number from 1, in the order of the report.
        key, label: key and label of the candidate.
        fate: result of the candidate; :func:`fate_text` gives it as text.
        is_best, is_baseline: whether it won; whether others are compared with it.
        on_front: whether no other candidate beats it in both time and memory.
        predicted_seconds, predicted_bytes: before any trial; ``None`` where it could not be priced.
        allocated_bytes: part of ``predicted_bytes`` that tensors need, as trials measure.
        seconds_interval, bytes_interval: intervals of these predictions.
        time, memory: best known step in seconds, best known peak in bytes.
        speedup: the baseline's step over this one's, measured against measured or else predicted against
            predicted; ``None`` where it failed or is unknown.
        limit_share: ``memory`` as a share of the limit; ``None`` where unknown.
        trial_number: 1 for the first trial, 0 if it was not tried.
        reason: reason of the fate, in one sentence.
        pruned_kind: reason for which it was pruned, in one word; empty if it was not.
    """

    number: int
    key: str
    label: str
    fate: Fate
    is_best: bool
    is_baseline: bool
    on_front: bool
    predicted_seconds: float | None
    predicted_bytes: float | None
    allocated_bytes: float | None
    seconds_interval: Range | None
    bytes_interval: Range | None
    time: ReportedNumber
    memory: ReportedNumber
    speedup: float | None
    limit_share: float | None
    trial_number: int
    reason: str
    pruned_kind: str


class CandidatesInfo(NamedTuple):
    """The table of candidates.

    Attributes:
        lines: lines of candidates, the winner first.
        limit_bytes: bytes that one rank may use.
        planned: whether all figures are predictions because no trial was run.
    """

    lines: tuple[CandidateLine, ...]
    limit_bytes: int
    planned: bool = False

    def first(self, num: int | None) -> CandidatesInfo:
        """The first lines, and the baseline wherever it stands; all for ``None``."""
        first_lines = self.lines if num is None else self.lines[:num]
        baseline = tuple(line for line in self.lines[len(first_lines) :] if line.is_baseline)
        return self._replace(lines=(*first_lines, *baseline))

    def without_twins(self) -> CandidatesInfo:
        """Without untried lines predicted as an untried one before, whose reason tells their changes."""
        first: dict[tuple[float, float], CandidateLine] = {}
        changes: dict[int, list[str]] = {}  # by the number of the line that is kept
        lines = []
        for line in self.lines:
            seconds, size = line.predicted_seconds, line.predicted_bytes
            # A twin is an untried line with the predictions of an earlier one; that one's reason names it.
            if seconds is not None and size is not None and not line.trial_number:
                like = first.setdefault((seconds, size), line)  # the first of equal predictions
                if like is not line and line.fate == "untried" and not line.is_baseline:
                    changes.setdefault(like.number, []).append(_label_change(like.label, line.label))
                    continue
            lines.append(line)
        return self._replace(lines=tuple(_with_twins(line, changes.get(line.number, ())) for line in lines))

    @property
    def considered(self) -> tuple[CandidateLine, ...]:
        """Candidates that were not pruned."""
        return tuple(line for line in self.lines if line.fate != "pruned")

    @property
    def pruned(self) -> tuple[CandidateLine, ...]:
        """Candidates that were pruned."""
        return tuple(line for line in self.lines if line.fate == "pruned")


def _with_twins(line: CandidateLine, changes: Sequence[str]) -> CandidateLine:
    if not changes:
        return line
    reason = f"{line.reason}; predicted the same: {first_few(changes, _FEW_TWINS, '; ')}"
    return line._replace(reason=reason.removeprefix("; "))


def _label_change(before: str, after: str) -> str:
    # Labels are methods joined by +: "with x", "with x in place of y", or "without y".
    old, new = before.split(" + "), after.split(" + ")
    removals = [part for part in old if part not in new]
    come = " + ".join(part for part in new if part not in old)
    if not removals:
        return f"with {come}"
    return f"with {come} in place of {' + '.join(removals)}" if come else f"without {' + '.join(removals)}"


def candidates_info(outcome: SearchOutcome) -> CandidatesInfo:
    """The table's data, in the order of the outcome's rows."""
    limit = outcome.setting.memory_limit_bytes
    lines = tuple(_candidate_line(outcome, number, row) for number, row in enumerate(outcome.rows, 1))
    return CandidatesInfo(lines, limit, is_planned(outcome))


def _candidate_line(outcome: SearchOutcome, number: int, row: Row) -> CandidateLine:
    candidate, memory, limit = row.candidate, peak(row), outcome.setting.memory_limit_bytes
    estimate = candidate.estimate
    return CandidateLine(
        number=number,
        key=candidate.key,
        label=candidate.label,
        fate=row.fate,
        is_best=candidate.key == outcome.best,
        is_baseline=candidate.is_baseline,
        on_front=candidate.key in outcome.pareto,
        predicted_seconds=estimate.step_seconds if estimate else None,
        predicted_bytes=estimate.peak_bytes if estimate else None,
        allocated_bytes=estimate.allocated_bytes if estimate else None,
        seconds_interval=estimate.step_seconds_interval if estimate else None,
        bytes_interval=estimate.peak_bytes_interval if estimate else None,
        time=seconds(row),
        memory=memory,
        speedup=_speedup_over_baseline(row, outcome.baseline),
        limit_share=memory.value / limit if memory.value is not None and limit else None,
        trial_number=row.trial_number,
        reason=row.reason or (candidate.pruned.reason if candidate.pruned else ""),
        pruned_kind=candidate.pruned.kind if candidate.pruned else "",
    )


def _speedup_over_baseline(row: Row, baseline: Row | None) -> float | None:
    if baseline is None or row.fate == "failed":
        return None
    step, reference = seconds(row), seconds(baseline)
    if reference.source == "measured" and step.source not in ("measured", "corrected"):
        estimates = row.candidate.estimate, baseline.candidate.estimate  # predicted on both sides
        if estimates[0] is None or estimates[1] is None:
            return None
        return _safe_ratio(estimates[1].step_seconds, estimates[0].step_seconds)
    return _safe_ratio(reference.value, step.value)


def _safe_ratio(over: float | None, under: float | None) -> float | None:
    return over / under if over and under else None


def fate_text(line: CandidateLine, *, planned: bool = False) -> str:
    """A mark and a word, so that neither colour nor the mark alone carries it.

    Where all stand by prediction, nobody won and nobody waits for a trial.

    Example: ``"✓ won"``, ``"○ pruned (memory)"``.
    """
    kind = f" ({line.pruned_kind})" if line.fate == "pruned" and line.pruned_kind else ""
    word = {"won": "chosen", "untried": "not chosen"}.get(line.fate, line.fate) if planned else line.fate
    return f"{_MARKS[line.fate]} {word}{kind}"


class HistoryPoint(NamedTuple):
    """One trial.

    Attributes:
        trial: number of the trial, from 1.
        key, label: key and label of the candidate.
        status: end of the trial.
        seconds: median step (measured); ``None`` if it gave none.
        spread: standard error of that median, in seconds.
        num_steps: timed steps.
        best_seconds: median step of the best candidate up to here; ``None`` if none could be used yet.
        best_trial: number of the trial of that candidate; 0 for none.
        total_seconds: seconds of the trial, set-up included.
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
        points: trials in their order.
        lower_bound_seconds: no candidate is expected below this; ``None`` where unknown.
        best_trial: number of the winner's trial; 0 if it was not tried.
    """

    points: tuple[HistoryPoint, ...]
    lower_bound_seconds: float | None
    best_trial: int


def history_info(outcome: SearchOutcome) -> HistoryInfo:
    """The history's data.

    The best so far is by the search's objective, within the limit and not disqualified. Nothing beats
    the winner once tried: the simplest of candidates that differ by noise wins, not the shortest median.
    """
    points: list[HistoryPoint] = []
    winner, limit = outcome.winner, outcome.setting.memory_limit_bytes or math.inf  # 0 for no limit
    best: Row | None = None
    for row in sorted(outcome.rows, key=lambda row: row.trial_number):
        trial = row.trial
        if trial is None or row.trial_number == 0:
            continue
        value = trial.median_seconds if trial.succeeded else None
        # Trials that failed or took more than the limit are shown, but are never the best so far.
        if value is not None and row.fate != "failed" and trial.max_peak_bytes <= limit:
            rivals = [each for each in (best, row) if each is not None]
            best = winner if winner in rivals else min(rivals, key=lambda each: _row_objective(each, outcome))
        point = HistoryPoint(
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
        points.append(point)
    return HistoryInfo(tuple(points), outcome.lower_bound_seconds, winner.trial_number if winner else 0)


def _row_objective(row: Row, outcome: SearchOutcome) -> float:
    objective = outcome.settings.objective
    num_bytes = peak(row).value or math.inf  # unknown values rank last
    if objective == "memory":
        return num_bytes
    if objective == "batch":
        estimate, batch = row.candidate.estimate, row.candidate.largest_batch
        ratio = num_bytes / estimate.allocated_bytes if estimate and estimate.allocated_bytes else 1.0
        return ratio / batch if batch else math.inf  # the largest batch, corrected by measured memory
    return seconds(row).value or math.inf


ParetoPoint = CandidateLine
"""A candidate whose time and memory are known."""


class ParetoInfo(NamedTuple):
    """The candidates whose time and memory are known.

    Attributes:
        points: candidates in the order of their table.
        limit_bytes: bytes that one rank may use.
    """

    points: tuple[ParetoPoint, ...]
    limit_bytes: int

    @property
    def front(self) -> tuple[ParetoPoint, ...]:
        """The front, the fastest first."""
        return tuple(sorted((p for p in self.points if p.on_front), key=lambda p: p.time.value or 0.0))


def pareto_info(outcome: SearchOutcome) -> ParetoInfo:
    """The points' data. Candidates that amount to another, or that failed, are left out."""
    lines = candidates_info(outcome).lines
    usable = [line for line in lines if line.fate != "failed" and line.pruned_kind != "same"]
    points = tuple(line for line in usable if None not in (line.time.value, line.memory.value))
    return ParetoInfo(points, outcome.setting.memory_limit_bytes)

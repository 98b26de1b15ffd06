"""Ranking: the choice among measured candidates, with their errors, and among predicted ones."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from atorch_ns.estimate import Intervals
from atorch_ns.search.objective import Objective
from atorch_ns.search.residual_model import DRIFT
from atorch_ns.search.space.candidate import Candidate
from atorch_ns.search.trial import Ledger, TrialOutcome
from atorch_ns.strategy import MODEL_AXES
from atorch_ns.text import bytes_text, compared_text, interval_text, percent_text, seconds_text

Steps = Sequence[tuple[str, Any]]

SAME_WITHIN = 0.02  # a simpler strategy is not preferred if it is worse by more, whatever the noise
CONFIDENCE = 0.95  # one-sided confidence at which two candidates are taken to differ
CONFIDENCE_Z = statistics.NormalDist().inv_cdf(CONFIDENCE)  # in standard errors of the difference


@dataclass(frozen=True)
class RankedCandidate:
    """A candidate that was measured and may be chosen.

    Attributes:
        value: measured value of the objective.
        error: relative standard error of the value, drift between trials included.
        outcome: all its trials as one.
        num_trials: number of its trials.
    """

    candidate: Candidate
    value: float
    error: float
    outcome: TrialOutcome
    num_trials: int


def drift(ledger: Ledger, objective: Objective) -> float:
    """Relative standard deviation between trials of one candidate, from repeated candidates.

    The prior of two per cent counts as much as two repetitions.
    """
    if not objective.counts_time:
        return 0.0
    squares, number = 2 * DRIFT**2, 2  # the prior; a variance pooled over candidates is added to it
    for _, entry in ledger:
        medians = [math.log(outcome.median_seconds) for outcome in entry.outcomes if outcome.succeeded]
        if len(medians) > 1:
            squares += statistics.variance(medians) * (len(medians) - 1)
            number += len(medians) - 1
    return math.sqrt(squares / number)


def rank_candidates(
    candidates: Mapping[str, Candidate], ledger: Ledger, objective: Objective, limit_bytes: int
) -> list[RankedCandidate]:
    """The candidates that ran and fit, best first."""
    between = drift(ledger, objective)
    ranking = []
    for key, entry in ledger:
        if key not in candidates or not entry.judged or not (outcome := entry.merged).succeeded:
            continue
        if limit_bytes and outcome.max_needed_bytes > limit_bytes:
            continue  # it ran because the system does not enforce the limit
        value = objective.measured(candidates[key], outcome)
        if not (math.isfinite(value) and value > 0):
            continue
        number = len(entry.outcomes)
        error = math.hypot(objective.noise(outcome), between / math.sqrt(number))  # repetition averages drift
        ranking.append(RankedCandidate(candidates[key], value, error, outcome, number))
    return sorted(ranking, key=lambda result: (result.value, result.candidate.key))


def tied_with_best(ranking: list[RankedCandidate]) -> list[RankedCandidate]:
    """Returns the candidates that are as good as the first, including the first.

    The baseline may be worse only within the noise, others also by at most 2 %. The best of many is
    partly luck: against the baseline, the confidence holds for all of them together (Bonferroni).
    """
    baseline_z = statistics.NormalDist().inv_cdf(1 - (1 - CONFIDENCE) / max(1, len(ranking) - 1))
    best = ranking[0]

    def as_good(result: RankedCandidate) -> bool:
        error = math.hypot(result.error * result.value, best.error * best.value)
        if result.candidate.is_baseline:
            return result.value - best.value <= baseline_z * error
        return result.value - best.value <= min(CONFIDENCE_Z * error, SAME_WITHIN * best.value)

    return [result for result in ranking if as_good(result)]


def choose(ranking: list[RankedCandidate], objective: Objective) -> RankedCandidate | None:
    """Chooses the baseline, else the simplest, among candidates that noise cannot tell from the best.

    Simpler means fewer methods, fewer settings, less memory. For the largest batch, speed decides instead.
    """
    if not ranking:
        return None
    peers = tied_with_best(ranking)
    plain = next((result for result in peers if result.candidate.is_baseline), None)
    if plain is not None:
        return plain
    if objective.kind == "batch":
        return min(peers, key=lambda result: (result.outcome.median_seconds, result.candidate.key))
    return min(peers, key=_measured_complexity)


def noise(ranking: Iterable[RankedCandidate]) -> float:
    """Median relative standard error of all trials that ran, drift between trials included; 0 before any."""
    errors = [result.error for result in ranking]
    return statistics.median(errors) if errors else 0.0


def step_noise(ranking: Iterable[RankedCandidate]) -> float:
    """Median of ``noise_seconds / median_seconds`` over trials, from their steps alone, as in every ``±``."""
    errors = [result.outcome.noise_seconds / result.outcome.median_seconds for result in ranking]
    finite_errors = [error for error in errors if math.isfinite(error)]
    return statistics.median(finite_errors) if finite_errors else 0.0


def _measured_complexity(entry: RankedCandidate) -> tuple[float, ...]:
    steps = entry.candidate.steps
    # Fewer methods, then fewer settings, then less memory; the value breaks ties.
    settings = sum(len(config) for _, config in steps if isinstance(config, Mapping))
    peak = entry.outcome.max_peak_bytes
    if not peak and entry.candidate.estimate is not None:
        peak = int(entry.candidate.estimate.peak_bytes)
    return (len(steps), settings, peak, entry.value)


class Preferred(NamedTuple):
    """The candidate that predictions alone choose.

    Attributes:
        reason: why it is not the first by prediction, with both figures; empty if it is.
    """

    candidate: Candidate
    reason: str = ""


def prefer(
    usable: Sequence[Candidate], objective: Objective, limit_bytes: int, plain: Iterable[str] = ()
) -> Preferred:
    """Chooses by predictions alone, as far as they are reliable. If time does not count, takes the first.

    A plan whose interval of memory ends above the limit is not preferred to one that fits for sure, unless
    their intervals of time are apart. Of plans slower by no more than :func:`unsure_gain` the simplest is
    taken: the fewest axes that divide the model, no pipeline, the fewest methods.

    Args:
        usable: candidates that may fit, best first; at least one.
        objective: the objective to minimise.
        limit_bytes: bytes that one rank may use; 0 for any amount.
        plain: methods of the plain strategy, which do not count.
    """
    first = best = usable[0]
    if not objective.counts_time or first.estimate is None:
        return Preferred(first)
    sure = [candidate for candidate in usable if fits_surely(candidate, limit_bytes)]
    if sure and sure[0] is not first and _predicted_interval(sure[0])[0] <= _predicted_interval(first)[1]:
        best, usable = sure[0], sure  # intervals of steps overlap, so the sure one may be as fast
    elif sure and sure[0] is first:
        usable = sure  # a simpler one must fit for sure, too
    assert best.estimate is not None
    intervals, shortest = best.estimate.intervals, best.estimate.step_seconds
    margins = {candidate.key: unsure_gain(candidate.steps, best.steps, intervals) for candidate in usable}
    near = [each for each in usable if (each.predicted_seconds or math.inf) <= shortest * margins[each.key]]
    names = frozenset(plain)
    simplest = min(near, key=lambda candidate: _predicted_complexity(candidate, names))
    reasons = [] if best is first else [_sure_reason(simplest, first, limit_bytes)]
    if simplest is not best:
        reasons.append(
            f"simpler than {best.label}, which is predicted to be {_speedup_text(best, simplest)}; between plans this different, a "
            f"gain of up to {percent_text(margins[simplest.key] - 1)} is not reliable (from {intervals.num_pairs} pairs of runs)"
        )
    return Preferred(simplest, "; ".join(reasons))


def unsure_gain(steps: Steps, other: Steps, intervals: Intervals) -> float:
    """The factor up to which a predicted gain of one strategy over another on one cluster is not believed.

    ``intervals.gain`` is for one method or config that differs. Errors are taken as independent, so they grow
    with the square root of the number of differences.
    """
    mine, others = dict(steps), dict(other)
    # A method in place of another counts as one difference.
    num_changes = sum(name in others and config != others[name] for name, config in mine.items())
    number = num_changes + max(len(mine.keys() - others.keys()), len(others.keys() - mine.keys()))
    return math.pow(intervals.gain, math.sqrt(number))


def fits_surely(candidate: Candidate, limit_bytes: int) -> bool:
    """Returns whether the whole interval of its memory is within the limit."""
    estimate = candidate.estimate
    return not limit_bytes or estimate is None or estimate.peak_bytes_interval[1] <= limit_bytes


def _sure_reason(choice: Candidate, first: Candidate, limit_bytes: int) -> str:
    assert first.estimate is not None
    peak = interval_text(first.estimate.peak_bytes, first.estimate.peak_bytes_interval, bytes_text)
    return (
        f"sure to fit, unlike {first.label}, which is predicted to need {peak} of {bytes_text(limit_bytes)} and to be "
        f"{_speedup_text(first, choice)}"
    )


def _speedup_text(candidate: Candidate, other: Candidate) -> str:
    # ``"1.10× as fast (2.64 ms against 2.90 ms)"``
    mine, theirs = candidate.predicted_seconds or math.inf, other.predicted_seconds or math.inf
    return f"{compared_text(theirs / mine)} ({seconds_text(mine)} against {seconds_text(theirs)})"


def _predicted_interval(candidate: Candidate) -> tuple[float, float]:
    return (math.inf, math.inf) if candidate.estimate is None else candidate.estimate.step_seconds_interval


def _predicted_complexity(candidate: Candidate, plain: frozenset[str]) -> tuple[float, ...]:
    # Axes that divide the model, a pipeline, methods beyond the plain ones, all axes; then time.
    model_axes = [name for name, size in candidate.axes if size > 1 and name in MODEL_AXES]
    methods = sum(name not in plain for name, _ in candidate.steps)
    axes = sum(size > 1 for _, size in candidate.axes)
    return (len(model_axes), "pipeline" in model_axes, methods, axes, candidate.predicted_seconds or math.inf)

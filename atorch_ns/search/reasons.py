"""Reasons: why each candidate won, lost, failed or was not tried, in one sentence with its numbers."""

from __future__ import annotations

import math

from atorch_ns.estimate import Estimate
from atorch_ns.search.knowledge import Knowledge
from atorch_ns.search.ranking import Preferred, RankedCandidate, tied_with_best
from atorch_ns.search.space.candidate import Candidate, Fate, largest_part
from atorch_ns.search.trial import CandidateTrials
from atorch_ns.text import bytes_text, count_noun, factor_text, interval_text, seconds_text

UNEXPLAINED = "its predicted and measured memory does not explain"  # of running out far below the limit

STATES = ("parameters", "gradients", "optimizer")  # parts of memory that more ranks divide


def nearest_miss(knowledge: Knowledge) -> str:
    """Names the nearest candidate, its shortfall and the remedy in one sentence. Empty without candidates."""
    ledger, limit_bytes = knowledge.ledger, knowledge.limit_bytes
    misses = (_bytes_over_limit(candidate, knowledge) for candidate in knowledge.candidates)
    over = [miss for miss in misses if miss is not None]
    other = [
        (candidate, entry)
        for candidate in knowledge.candidates
        if (entry := ledger.get(candidate.key)) is not None and not entry.merged.succeeded
    ]
    has_other_cause = any(
        entry.merged.status != "out of memory" or candidate.key not in knowledge.short_of_memory
        for candidate, entry in other
    )
    # A predicted miss does not explain trials that failed for another reason than memory.
    if over and not (has_other_cause and all(ledger.get(candidate.key) is None for _, _, candidate in over)):
        excess, rank, nearest = min(over, key=lambda miss: (miss[0], miss[2].key))
        where = f"rank {rank}" if rank is not None else "every rank"
        notes = [] if ledger.get(nearest.key) is not None else ["predicted"]
        if nearest.estimate is not None:
            notes.append(f"largest part: {largest_part(nearest.estimate)}")
        more = f"{bytes_text(excess)} more" if excess >= 1 else "more"  # else it was ended when it asked
        need = f"needs {more} on {where} than the limit of {bytes_text(limit_bytes)}"
        part = f" ({'; '.join(notes)})" if notes else ""
        return f"Nearest: {nearest.label} {need}{part}; {_memory_advice(nearest, knowledge)}"
    if other:
        candidate, entry = other[0]  # the first in the order of candidates
        why = entry.merged.reason or entry.merged.status
        if entry.merged.status == "out of memory":
            why = f"out of memory, which {UNEXPLAINED}: {entry.merged.reason or 'no message'}"
        kinds = {entry.merged.status for _, entry in other}
        same = " All trials ended the same way." if len(other) > 1 and len(kinds) == 1 else ""
        return f"{candidate.label} ended: {why}.{same} Log: {entry.merged.log or 'none was kept'}"
    return ""


def _bytes_over_limit(
    candidate: Candidate, knowledge: Knowledge
) -> tuple[float, int | None, Candidate] | None:
    # The bytes by which a candidate misses the limit, and on which rank.
    entry, limit_bytes = knowledge.ledger.get(candidate.key), knowledge.limit_bytes
    predicted_bytes = candidate.predicted_bytes or 0.0
    if entry is None:
        short = candidate.pruned is not None and candidate.pruned.kind == "memory" and limit_bytes
        return (predicted_bytes - limit_bytes, None, candidate) if short else None  # predicted, of every rank
    outcome = entry.merged
    peak = outcome.max_needed_bytes
    if outcome.status == "out of memory" and candidate.key in knowledge.short_of_memory:
        return max(peak, predicted_bytes, limit_bytes) - limit_bytes, outcome.rank, candidate
    if outcome.succeeded and limit_bytes and peak > limit_bytes:
        return peak - limit_bytes, outcome.needed_bytes.index(peak), candidate
    return None


def _memory_advice(nearest: Candidate, knowledge: Knowledge) -> str:
    if nearest.pruned is not None and nearest.pruned.hint:
        return nearest.pruned.hint
    has = {name for name, _ in nearest.steps}
    peak, options = nearest.predicted_bytes or 0.0, [knowledge.candidates[index] for index in knowledge.open]
    options = [candidate for candidate in options if knowledge.ledger.get(candidate.key) is None]
    smaller = [candidate for candidate in options if (candidate.predicted_bytes or math.inf) < peak]
    if smaller:
        best = min(smaller, key=lambda candidate: candidate.predicted_bytes or 0.0)
        new = [name for name, _ in best.steps if name not in has]
        return f"try {' and '.join(new) or best.label}, which was not tried"
    if nearest.estimate is not None:
        memory = nearest.estimate.memory._asdict()
        if sum(memory[name] for name in STATES) > sum(memory.values()) / 2:
            return "divide parameters and optimizer states over more ranks, or use devices with more memory"
        return "use a smaller global batch or shorter samples, or devices with more memory"
    return "use a smaller global batch, more ranks, or devices with more memory"


class Reasons:
    """Explains each candidate's outcome in a sentence.

    Args:
        knowledge: all that follows from the trials.
        stop_reason: why the search ended, for candidates that were not tried.
        batch: samples in a trial's step; 0 if unknown.
        predicted_best: the choice by prediction, if the search ended before anything was measured.
    """

    def __init__(
        self, knowledge: Knowledge, stop_reason: str, *, batch: int, predicted_best: Preferred | None
    ) -> None:
        self._batch = batch
        self._predicted_best = predicted_best
        self._knowledge = knowledge
        self._objective = knowledge.objective
        self._limit = knowledge.limit_bytes
        self._stop_reason = stop_reason
        self._results = {result.candidate.key: result for result in knowledge.ranked}
        self._wrong_numerics = knowledge.ledger.rejected
        self._winner = knowledge.winner

    def of(self, index: int) -> tuple[Fate, str]:
        """Returns fate and reason of the candidate with that index in the knowledge."""
        entry = self._knowledge.ledger.get(self._knowledge.candidates[index].key)
        fate, reason = self._fate_and_reason(index, entry)
        if entry is None or not entry.lost or not entry.outcomes:
            return fate, reason
        last = entry.lost[-1]  # an attempt that ended through no fault of the candidate
        why = f"{last.status}: {last.reason}" if last.reason else last.status
        return fate, f"{reason}; after {count_noun(len(entry.lost), 'failed attempt')}: {why}"

    def _fate_and_reason(self, index: int, entry: CandidateTrials | None) -> tuple[Fate, str]:
        candidate = self._knowledge.candidates[index]
        if candidate.key in self._wrong_numerics:
            return "failed", self._wrong_numerics[candidate.key]
        result = self._results.get(candidate.key)
        if result is not None:
            if self._winner is not None and candidate.key == self._winner.candidate.key:
                return "won", self._reason_for_win(result)
            return "lost", self._reason_for_loss(result)
        if entry is not None and entry.judged:
            return "failed", self._failure_reason(entry, candidate)
        if self._predicted_best is not None and candidate is self._predicted_best.candidate:
            trial = f"; its trial: {entry.merged.reason or entry.merged.status}" if entry is not None else ""
            return "won", self._chosen_unmeasured(*self._predicted_best) + trial
        if candidate.pruned is not None:
            hint = f"; {candidate.pruned.hint}" if candidate.pruned.hint else ""
            return "pruned", candidate.pruned.reason + hint
        if candidate.key in self._knowledge.learned:
            return "pruned", self._knowledge.learned[candidate.key]
        if entry is not None and self._stop_reason:
            return "failed", f"{self._failure_reason(entry, candidate)}; not tried again: {self._stop_reason}"
        return "untried", self._reason_for_skip(index, candidate)

    def _reason_for_win(self, entry: RankedCandidate) -> str:
        text = self._value_text(entry)
        if self._objective.kind != "batch":
            text += f", measured over {len(entry.outcome.step_seconds)} steps"
        ranking = self._knowledge.ranked
        if ranking[0].candidate.key != entry.candidate.key:  # chosen as simpler, or as the baseline
            better = ranking[0]
            return (
                f"{text}; {better.candidate.label} ({self._value_text(better)}) is not better beyond the noise, "
                f"and this one {self._why_preferred(entry)}"
            )
        plain = next((other for other in ranking if other.candidate.is_baseline), None)
        if plain is not None and plain is not entry:
            return f"{text}; the baseline {self._worse_text(plain, entry)} ({self._value_text(plain)})"
        return text

    def _reason_for_loss(self, entry: RankedCandidate) -> str:
        winner = self._winner
        if winner is None:
            return self._value_text(entry)
        comparison = f"{self._value_text(entry)} against {self._value_text(winner)}"
        if self._objective.kind != "batch":
            comparison = f"measured {comparison}"
        if entry in tied_with_best(self._knowledge.ranked):
            why = f"{winner.candidate.label} {self._why_preferred(winner)}"
            return f"not better beyond the noise ({comparison}), and {why}"
        return f"{self._worse_text(entry, winner)} ({comparison})".removeprefix("is ")

    def _why_preferred(self, winner: RankedCandidate) -> str:
        if winner.candidate.is_baseline:
            return "is the baseline"
        return "is faster" if self._objective.kind == "batch" else "is simpler"

    def _worse_text(self, entry: RankedCandidate, winner: RankedCandidate) -> str:
        ratio = entry.value / winner.value
        if self._objective.kind == "memory":
            return f"needs {ratio - 1:.0%} more memory" if ratio >= 1.005 else "needs about as much memory"
        if self._objective.kind == "batch":
            return "holds a smaller batch" if ratio > 1 else "holds the same batch"
        return time_against(ratio)

    def _chosen_unmeasured(self, candidate: Candidate, reason: str) -> str:
        figures = (
            f"; predicted {_predicted_text(candidate.estimate)}" if candidate.estimate is not None else ""
        )
        what = "it is predicted to be the best that fits"
        if candidate.is_baseline or reason:
            what = (
                "it is the baseline" if candidate.is_baseline else f"it is preferred by prediction: {reason}"
            )
        cause = f" ({self._stop_reason})" if self._stop_reason else ""
        return f"the search ended before anything was measured{cause}, and {what}{figures}"

    def _failure_reason(self, entry: CandidateTrials, candidate: Candidate) -> str:
        outcome = entry.merged
        if outcome.succeeded:
            peak = outcome.max_needed_bytes
            if self._limit and peak > self._limit:
                rank = outcome.needed_bytes.index(peak)
                return f"needs {bytes_text(peak)}, over the limit of {bytes_text(self._limit)} (measured on rank {rank})"
            return f"gave no usable measurement: {outcome.median_seconds} s"
        where = f" on rank {outcome.rank}" if outcome.rank is not None else ""
        why = f": {outcome.reason}" if outcome.reason else ""
        # A failed trial that its candidate did not cause is repeated once, and counts if it ends so again.
        again = ", twice" if len(entry.lost) > 1 and not entry.outcomes else ""
        log = f" (log: {outcome.log})" if outcome.log else ""
        odd = ""
        if outcome.status == "out of memory" and outcome.while_applying:
            odd = " while the strategy was being applied, before the first step"
        elif outcome.status == "out of memory" and candidate.key not in self._knowledge.short_of_memory:
            predicted_size = bytes_text(candidate.predicted_bytes or 0.0)
            odd = f", which {UNEXPLAINED} (predicted {predicted_size} of {bytes_text(self._limit)})"
        return f"{outcome.status}{again}{where}{odd}{why}{log}"

    def _reason_for_skip(self, index: int, candidate: Candidate) -> str:
        note = f"not tried: {self._stop_reason}" if self._stop_reason else "not tried yet"
        if candidate.estimate is None:
            return note
        if self._objective.kind == "batch" and candidate.largest_batch:
            return f"predicted to hold {candidate.largest_batch} samples; {note}"
        if self._winner is None or not self._objective.counts_time:
            return f"predicted {_predicted_text(candidate.estimate)}; {note}"
        posterior = self._knowledge.posterior
        seconds = math.exp(posterior.mean[index])
        best = seconds_text(self._winner.value)
        against = f"{seconds_text(seconds)} ± {posterior.deviation[index]:.0%} against {best}"
        return f"predicted to {time_against(seconds / self._winner.value, take='take', be='be')} ({against}); {note}"

    def _value_text(self, entry: RankedCandidate) -> str:
        if self._objective.counts_time:
            noise = entry.outcome.noise_seconds
            spread = f" ± {seconds_text(noise)}" if math.isfinite(noise) else ""
            return f"{seconds_text(entry.value)}{spread}"
        if self._objective.kind == "memory":
            return bytes_text(entry.value)
        trial = f"a trial of {self._batch} samples" if self._batch else "a trial"
        return f"a batch of {1 / entry.value:.0f} samples, predicted from {trial}"


def _predicted_text(estimate: Estimate) -> str:
    return interval_text(estimate.step_seconds, estimate.step_seconds_interval, seconds_text)


def time_against(ratio: float, *, take: str = "takes", be: str = "is") -> str:
    """Describes a time that is ``ratio`` times as long as another.

    ``"takes 2.00× as long"`` from twice as long on, ``"is 31% slower"`` below, ``"takes 20% less time"`` if shorter.
    """
    if ratio >= 1.995:
        return f"{take} {factor_text(ratio)} as long"
    if ratio >= 1.005:
        return f"{be} {ratio - 1:.0%} slower"
    if ratio > 0.995:
        return f"{be} as fast within the noise"
    return f"{take} {1 - ratio:.0%} less time"

"""Why each candidate won, lost, failed or was left: one sentence with its numbers."""

from __future__ import annotations

import math

from atorch_ns.search._candidate import Candidate, Fate
from atorch_ns.search._knowledge import Knowledge
from atorch_ns.search._ledger import Entry
from atorch_ns.search._nearest_miss import UNEXPLAINED
from atorch_ns.search._objective import Objective
from atorch_ns.search._standing import Standing, tied_with
from atorch_ns.search._words import bytes_text, seconds_text, time_against

__all__ = ["Reasons"]


class Reasons:
    """The sentences of one search.

    Args:
        knowledge: of the moment.
        objective: what is best.
        limit_bytes: what one rank may use.
        stop_reason: why the search ended, for those that were not tried.
        batch: samples in a trial's step.
        unmeasured: what is chosen by prediction, since the search ended before anything was measured.
    """

    def __init__(
        self,
        knowledge: Knowledge,
        objective: Objective,
        limit_bytes: int,
        stop_reason: str,
        *,
        batch: int = 0,
        unmeasured: Candidate | None = None,
    ) -> None:
        self._batch = batch
        self._unmeasured = unmeasured
        self._knowledge = knowledge
        self._objective = objective
        self._limit = limit_bytes
        self._stop_reason = stop_reason
        self._standings = {one.candidate.key: one for one in knowledge.ranked}
        self._winner = knowledge.winner

    def of(self, index: int, entry: Entry | None, rejected: str | None) -> tuple[Fate, str]:
        """Fate and reason of the candidate with that index.

        Args:
            index: in the knowledge's candidates.
            entry: its trials.
            rejected: why a check ruled it out; ``None`` if none did.
        """
        fate, reason = self._of(index, entry, rejected)
        if entry is None or not entry.lost or not entry.outcomes:
            return fate, reason
        last, number = entry.lost[-1], len(entry.lost)
        why = f"{last.status}: {last.reason}" if last.reason else last.status
        return fate, f"{reason}; after {number} failed attempt{'s' if number > 1 else ''}: {why}"

    def _of(self, index: int, entry: Entry | None, rejected: str | None) -> tuple[Fate, str]:
        candidate = self._knowledge.candidates[index]
        if rejected is not None:
            return "failed", rejected
        standing = self._standings.get(candidate.key)
        if standing is not None:
            if self._winner is not None and candidate.key == self._winner.candidate.key:
                return "won", self._won(standing)
            return "lost", self._lost(standing)
        if entry is not None and entry.judged:
            return "failed", self._failed(entry, candidate)
        if candidate is self._unmeasured:
            begun = f"; its trial: {entry.merged.reason}" if entry is not None else ""
            return "won", self._chosen_unmeasured(candidate) + begun
        if candidate.pruned is not None:
            hint = f"; {candidate.pruned.hint}" if candidate.pruned.hint else ""
            return "pruned", candidate.pruned.reason + hint
        if candidate.key in self._knowledge.learned:
            return "pruned", self._knowledge.learned[candidate.key]
        if entry is not None and self._stop_reason:
            return "failed", f"{self._failed(entry, candidate)}; not tried again: {self._stop_reason}"
        return "untried", self._untried(index, candidate)

    def _won(self, one: Standing) -> str:
        text = self._shown(one)
        if self._objective.kind != "batch":
            text += f", measured over {len(one.outcome.step_seconds)} steps"
        ranked = self._knowledge.ranked
        if ranked[0].candidate.key != one.candidate.key:
            better = ranked[0]
            why = f"this {self._why_preferred(one)}"
            return f"{text}; {better.candidate.label} ({self._shown(better)}) is not better beyond the noise, and {why}"
        plain = next((other for other in ranked if other.candidate.is_baseline), None)
        if plain is not None and plain is not one:
            return f"{text}; the baseline {self._worse(plain, one)} ({self._shown(plain)})"
        return text

    def _lost(self, one: Standing) -> str:
        winner = self._winner
        if winner is None:
            return self._shown(one)
        shown = f"{self._shown(one)} against {self._shown(winner)}"
        if self._objective.kind != "batch":
            shown = f"measured {shown}"
        if one in tied_with(self._knowledge.ranked[0], self._knowledge.ranked):
            why = f"{winner.candidate.label} {self._why_preferred(winner)}"
            return f"not better beyond the noise ({shown}), and {why}"
        return f"{self._worse(one, winner)} ({shown})".removeprefix("is ").removeprefix("takes ")

    def _why_preferred(self, winner: Standing) -> str:
        """Why it is taken where noise cannot tell it from the best."""
        if winner.candidate.is_baseline:
            return "is the baseline"
        return "is faster" if self._objective.kind == "batch" else "is simpler"

    def _worse(self, one: Standing, winner: Standing) -> str:
        """How much worse one is than the winner, as a verb and its object."""
        ratio = one.value / winner.value
        if self._objective.kind == "memory":
            return f"needs {ratio - 1:.0%} more memory" if ratio >= 1.005 else "needs about as much memory"
        if self._objective.kind == "batch":
            return "holds a smaller batch" if ratio > 1 else "holds the same batch"
        words = time_against(ratio)
        return f"{'takes' if words.endswith(' time') else 'is'} {words}"

    def _chosen_unmeasured(self, one: Candidate) -> str:
        predicted = ""
        if one.estimate is not None:
            predicted = f"; predicted {seconds_text(one.estimate.step_seconds)}"
        what = "it is the baseline" if one.is_baseline else "it is predicted to be the best that fits"
        ended = f" ({self._stop_reason})" if self._stop_reason else ""
        return f"the search was ended before anything was measured{ended}, and {what}{predicted}"

    def _failed(self, entry: Entry, candidate: Candidate) -> str:
        outcome = entry.merged
        if outcome.succeeded:
            peak = max(outcome.peak_bytes, default=0)
            if self._limit and peak > self._limit:
                rank = outcome.peak_bytes.index(peak)
                return f"needs {bytes_text(peak)} of {bytes_text(self._limit)} (measured on rank {rank})"
            return f"gave no usable figures: {outcome.median_seconds} s"
        where = f" on rank {outcome.rank}" if outcome.rank is not None else ""
        why = f": {outcome.reason}" if outcome.reason else ""
        again = ", twice" if len(entry.lost) > 1 and not entry.outcomes else ""
        log = f" (log: {outcome.log})" if outcome.log else ""
        odd = ""
        if outcome.status == "out of memory" and candidate.key not in self._knowledge.short_of_memory:
            needed = candidate.estimate.peak_bytes if candidate.estimate is not None else 0.0
            odd = f", which {UNEXPLAINED} (predicted {bytes_text(needed)} of {bytes_text(self._limit)})"
        return f"{outcome.status}{again}{where}{odd}{why}{log}"

    def _untried(self, index: int, candidate: Candidate) -> str:
        note = f"not tried: {self._stop_reason}" if self._stop_reason else "not tried yet"
        if candidate.estimate is None:
            return note
        if self._objective.kind == "batch" and candidate.largest_batch:
            return f"predicted to hold {candidate.largest_batch} samples; {note}"
        if self._winner is None or not self._objective.counts_time:
            return f"predicted {seconds_text(candidate.estimate.step_seconds)}; {note}"
        belief = self._knowledge.belief
        seconds = math.exp(belief.mean[index])
        against = f"{seconds_text(seconds)} ± {belief.deviation[index]:.0%} against {seconds_text(self._winner.value)}"
        return f"predicted {time_against(seconds / self._winner.value)} ({against}); {note}"

    def _shown(self, one: Standing) -> str:
        if self._objective.counts_time:
            noise = one.outcome.noise_seconds
            spread = f" ± {seconds_text(noise)}" if math.isfinite(noise) else ""
            return f"{seconds_text(one.value)}{spread}"
        if self._objective.kind == "memory":
            return bytes_text(one.value)
        trial = f"a trial of {self._batch} samples" if self._batch else "a trial"
        return f"a batch of {1 / one.value:.0f} samples, predicted from {trial}"

"""Why each candidate won, lost, failed or was left: one sentence with its numbers."""

from __future__ import annotations

import math

from atorch_ns.search._candidate import Candidate, Fate
from atorch_ns.search._knowledge import Knowledge
from atorch_ns.search._ledger import Entry
from atorch_ns.search._objective import Objective
from atorch_ns.search._standing import Standing, tied_with
from atorch_ns.search._words import bytes_text, seconds_text

__all__ = ["Reasons"]


class Reasons:
    """The sentences of one search.

    Args:
        knowledge: of the moment.
        objective: what is best.
        limit_bytes: what one rank may use.
        stop_reason: why the search ended, for those that were not tried.
    """

    def __init__(
        self, knowledge: Knowledge, objective: Objective, limit_bytes: int, stop_reason: str
    ) -> None:
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
        candidate = self._knowledge.candidates[index]
        if rejected is not None:
            return "failed", rejected
        standing = self._standings.get(candidate.key)
        if standing is not None:
            if self._winner is not None and candidate.key == self._winner.candidate.key:
                return "won", self._won(standing)
            return "lost", self._lost(standing)
        if entry is not None and entry.judged:
            return "failed", self._failed(entry)
        if candidate.pruned is not None:
            hint = f"; {candidate.pruned.hint}" if candidate.pruned.hint else ""
            return "pruned", candidate.pruned.reason + hint
        if candidate.key in self._knowledge.learned:
            return "pruned", self._knowledge.learned[candidate.key]
        return "untried", self._untried(index, candidate)

    def _won(self, one: Standing) -> str:
        text = f"{self._shown(one)}, measured over {len(one.outcome.step_seconds)} steps"
        ranked = self._knowledge.ranked
        if ranked[0].candidate.key != one.candidate.key:
            better = ranked[0]
            why = "it is the plain strategy" if one.candidate.is_baseline else "it is simpler"
            return f"{text}; {better.candidate.label} ({self._shown(better)}) is not better beyond the noise, and {why}"
        plain = next((other for other in ranked if other.candidate.is_baseline), None)
        if plain is not None and plain is not one:
            return f"{text}; {self._ratio(plain.value / one.value)} the plain strategy ({self._shown(plain)})"
        return text

    def _lost(self, one: Standing) -> str:
        winner = self._winner
        if winner is None:
            return self._shown(one)
        shown = f"measured {self._shown(one)} against {self._shown(winner)}"
        if one in tied_with(self._knowledge.ranked[0], self._knowledge.ranked):
            return f"not better beyond the noise ({shown}), and {winner.candidate.label} is simpler"
        worse = one.value / winner.value - 1
        if self._objective.kind == "memory":
            return f"needs {worse:.0%} more memory ({shown})"
        if self._objective.kind == "batch":
            return f"holds a smaller batch ({shown})"
        return f"{worse:.0%} slower ({shown})"

    def _failed(self, entry: Entry) -> str:
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
        return f"{outcome.status}{again}{where}{why}{log}"

    def _untried(self, index: int, candidate: Candidate) -> str:
        entry_note = f"not tried: {self._stop_reason}" if self._stop_reason else "not tried yet"
        if candidate.estimate is None:
            return entry_note
        if self._winner is None or not self._objective.counts_time:
            return f"predicted {seconds_text(candidate.estimate.step_seconds)}; {entry_note}"
        belief = self._knowledge.belief
        seconds = math.exp(belief.mean[index])
        against = f"{seconds_text(seconds)} ± {belief.deviation[index]:.0%} against {seconds_text(self._winner.value)}"
        ratio = seconds / self._winner.value
        if ratio >= 1.995:
            return f"predicted {ratio:.1f}x slower ({against})"
        if ratio >= 1:
            return f"predicted {ratio - 1:.0%} slower ({against}); {entry_note}"
        return f"predicted {1 - ratio:.0%} faster ({against}); {entry_note}"

    def _shown(self, one: Standing) -> str:
        if self._objective.counts_time:
            return f"{seconds_text(one.value)} ± {seconds_text(one.error * one.value)}"
        if self._objective.kind == "memory":
            return bytes_text(one.value)
        return f"{1 / one.value:.0f} samples in {seconds_text(one.outcome.median_seconds)}"

    def _ratio(self, ratio: float) -> str:
        words = {"memory": "less memory than", "batch": "the batch of"}
        if self._objective.kind == "memory":
            return f"{1 - 1 / ratio:.0%} {words['memory']}"
        if self._objective.kind == "batch":
            return f"{ratio:.2f} times {words['batch']}"
        return f"{ratio:.2f}x as fast as"

"""Ledger: what every trial of a search gave, candidate by candidate."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from atorch_ns.search._trial import TrialOutcome

__all__ = ["Entry", "Ledger"]

NOT_ITS_FAULT = ("died", "cancelled")
"""Ends that say nothing of the candidate until they come twice."""


@dataclass
class Entry:
    """The trials of one candidate.

    Attributes:
        number: of its first trial.
        outcomes: in the order in which they came, without those that were no fault of the candidate.
        lost: outcomes that were no fault of the candidate.
        resumed: trials among the outcomes that an earlier search ran.
    """

    number: int
    outcomes: list[TrialOutcome] = field(default_factory=list)
    lost: list[TrialOutcome] = field(default_factory=list)
    resumed: int = 0

    @property
    def merged(self) -> TrialOutcome:
        """All its trials as one: steps of all, the largest peaks; a failure counts above a success."""
        if not self.outcomes:
            return self.lost[-1]
        failed = [one for one in self.outcomes if not one.succeeded]
        if failed or len(self.outcomes) == 1:
            return (failed or self.outcomes)[-1]
        last = self.outcomes[-1]
        peaks = [one.peak_bytes for one in self.outcomes if len(one.peak_bytes) == len(last.peak_bytes)]
        return replace(
            last,
            status="ok" if any(one.status == "ok" for one in self.outcomes) else last.status,
            step_seconds=tuple(step for one in self.outcomes for step in one.step_seconds),
            peak_bytes=tuple(max(ranks) for ranks in zip(*peaks, strict=True)),
            setup_seconds=max(one.setup_seconds for one in self.outcomes),
            total_seconds=sum(one.total_seconds for one in self.outcomes),
        )

    @property
    def judged(self) -> bool:
        """Whether it needs no further attempt."""
        return bool(self.outcomes) or len(self.lost) > 1


class Ledger:
    """The trials of a search by candidate."""

    def __init__(self) -> None:
        self._entries: dict[str, Entry] = {}
        self.num_run = 0
        self.num_resumed = 0

    def add(self, key: str, outcome: TrialOutcome, *, resumed: bool = False) -> None:
        """Notes a trial."""
        if resumed:
            self.num_resumed += 1
        else:
            self.num_run += 1
        entry = self._entries.setdefault(key, Entry(self.num_run + self.num_resumed))
        entry.resumed += resumed
        (entry.lost if outcome.status in NOT_ITS_FAULT else entry.outcomes).append(outcome)

    def get(self, key: str) -> Entry | None:
        """The trials of a candidate; ``None`` before its first."""
        return self._entries.get(key)

    def judged(self, key: str) -> bool:
        """Whether a candidate needs no (further) trial."""
        entry = self._entries.get(key)
        return entry is not None and entry.judged

    def attempts(self, key: str) -> int:
        """Trials of a candidate that ended through no fault of its own."""
        entry = self._entries.get(key)
        return len(entry.lost) if entry is not None else 0

    def __iter__(self) -> Iterator[tuple[str, Entry]]:
        return iter(self._entries.items())

    def __len__(self) -> int:
        return len(self._entries)

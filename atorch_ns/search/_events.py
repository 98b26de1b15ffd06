"""What a search tells while it runs, for tables that people watch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from atorch_ns.search._candidate import Candidate
from atorch_ns.search._outcome import SearchOutcome, Setting
from atorch_ns.search._trial import TrialOutcome, TrialTask

__all__ = ["Ended", "Event", "Note", "Observer", "Priced", "Profiling", "TrialEnded", "TrialStarted"]


@dataclass(frozen=True)
class Profiling:
    """The model is being profiled."""

    model: str


@dataclass(frozen=True)
class Priced:
    """The candidates are known and priced."""

    setting: Setting
    candidates: tuple[Candidate, ...]


@dataclass(frozen=True)
class TrialStarted:
    """A trial begins on all ranks."""

    number: int
    candidate: Candidate
    task: TrialTask


@dataclass(frozen=True)
class TrialEnded:
    """A trial has ended; ``best`` is the key of the best candidate so far."""

    number: int
    candidate: Candidate
    outcome: TrialOutcome
    best: str | None


@dataclass(frozen=True)
class Note:
    """Something that a person should know: a rank waited for, a resumed history."""

    text: str


@dataclass(frozen=True)
class Ended:
    """The search is over."""

    outcome: SearchOutcome


Event = Profiling | Priced | TrialStarted | TrialEnded | Note | Ended


class Observer(Protocol):
    """Is told every event, on rank 0, in order; must not raise and not wait."""

    def __call__(self, event: Event) -> None:
        """Takes note of an event."""

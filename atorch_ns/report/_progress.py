"""How a search stands: what its events have said so far. The data that the live table and the log draw."""

from __future__ import annotations

import time
from collections.abc import Callable

from atorch_ns.report._units import seconds_text
from atorch_ns.search import (
    Candidate,
    Ended,
    Event,
    Note,
    Priced,
    Profiling,
    SearchOutcome,
    Setting,
    TrialEnded,
    TrialOutcome,
    TrialStarted,
)

__all__ = ["Progress"]


class Progress:
    """Takes note of events and answers how far the search is.

    Args:
        clock: seconds, monotonic.
        time_limit_s: of the search, for the line that says how much is left.

    Attributes:
        doing: what goes on now, in words.
        setting: what is searched for; ``None`` before the candidates are priced.
        candidates: by key, in the order of the estimate.
        trials: the last outcome of each candidate that was tried, by key.
        running: the candidate whose trial runs.
        number: of the last trial that began.
        probing: whether the last trial compares numerics instead of taking times.
        best: key of the best candidate so far.
        notes: what a person should know.
        outcome: of the whole search, once it is over.
    """

    def __init__(
        self, *, clock: Callable[[], float] = time.monotonic, time_limit_s: float | None = None
    ) -> None:
        self._clock = clock
        self._began = clock()
        self._doing_since = self._began
        self._time_limit_s = time_limit_s
        self.doing = "starting"
        self.setting: Setting | None = None
        self.candidates: dict[str, Candidate] = {}
        self.trials: dict[str, TrialOutcome] = {}
        self.running: Candidate | None = None
        self.number = 0
        self.best: str | None = None
        self.notes: list[str] = []
        self.outcome: SearchOutcome | None = None
        self.probing = False

    @property
    def elapsed_s(self) -> float:
        """Seconds since the beginning."""
        return self._clock() - self._began

    @property
    def doing_for_s(self) -> float:
        """Seconds since what goes on now began."""
        return self._clock() - self._doing_since

    def elapsed_text(self) -> str:
        """As ``"12.3 s of 120 s"``."""
        limit = f" of {seconds_text(self._time_limit_s)}" if self._time_limit_s else ""
        return f"{seconds_text(self.elapsed_s)}{limit}"

    def best_seconds(self) -> float | None:
        """Median step of the best candidate so far (measured)."""
        trial = self.trials.get(self.best or "")
        return trial.median_seconds if trial is not None and trial.succeeded else None

    def note(self, event: Event) -> None:
        """Takes note of an event."""
        match event:
            case Profiling():
                self._now(f"profiling {event.model}")
            case Priced():
                self.setting = event.setting
                self.candidates = {candidate.key: candidate for candidate in event.candidates}
                self._now("preparing the trials")
            case TrialStarted():
                self.running, self.number = event.candidate, event.number
                self.probing = event.task.kind == "probe"
                what = "checking the numerics of" if self.probing else f"trial {event.number}:"
                again = f" (attempt {event.task.attempt + 1})" if event.task.attempt else ""
                self._now(f"{what} {event.candidate.label}{again}")
            case TrialEnded():
                if not self.probing or event.outcome.status != "ok":  # a probe gives no step time
                    self.trials[event.candidate.key] = event.outcome
                self.candidates.setdefault(event.candidate.key, event.candidate)
                self.running, self.best = None, event.best
                self._now("choosing the next trial")
            case Note():
                self.notes.append(event.text)
            case Ended():
                self.running, self.outcome, self.best = None, event.outcome, event.outcome.best
                self._now("done")

    def _now(self, doing: str) -> None:
        self.doing, self._doing_since = doing, self._clock()

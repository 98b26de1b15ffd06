"""A search's events at a rank whose coordinator is in another process."""

from __future__ import annotations

import json
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

from atorch_ns.errors import InputError
from atorch_ns.search import (
    Candidate,
    Ended,
    Event,
    Note,
    Priced,
    Profiling,
    TrialEnded,
    TrialOutcome,
    TrialStarted,
    TrialTask,
    from_json,
    to_json,
)

_KINDS: dict[str, type[Any]] = {
    kind.__name__: kind for kind in (Profiling, Priced, TrialStarted, TrialEnded, Note, Ended)
}


def event_to_json(event: Event) -> bytes:
    """An event with its kind: ``{"kind": "Note", "event": {"text": …}}``."""
    return to_json({"kind": type(event).__name__, "event": event}).encode()


def event_from_json(data: bytes) -> Event:
    """What :func:`event_to_json` wrote.

    Raises:
        InputError: it is something else.
    """
    try:
        document = json.loads(data)
        kind, text = _KINDS[document["kind"]], json.dumps(document["event"])
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(f"this is no event: {type(error).__name__}: {error}") from None
    event: Event = from_json(kind, text)
    return event


_MAX_LOGGED = 10_000
_MAX_AT_ONCE = 20
_LOGGER = logging.getLogger(__name__)

OutcomeHook = Callable[[TrialTask, TrialOutcome], None]
"""Is given every merged outcome with its task, as the search knows them: the history's door."""


class EventLog:
    """All events of a search, by number, as long as they are few. Thread-safe."""

    def __init__(self) -> None:
        self._events: list[Event] = []

    def add(self, event: Event) -> None:
        """Adds an event; those that came after very many are dropped."""
        if len(self._events) < _MAX_LOGGED:
            self._events.append(event)

    def after(self, number: int) -> list[Event]:
        """Some of the events that follow the first ``number``."""
        return self._events[max(0, number) : max(0, number) + _MAX_AT_ONCE]


class EventQueue:
    """Keeps events and outcomes until somebody has time to hand them on. Thread-safe.

    What an observer or a hook raises ends nothing: it is logged once, and becomes a note.
    """

    def __init__(
        self,
        candidates: Sequence[Candidate],
        on_event: Callable[[Event], None] | None,
        on_outcome: OutcomeHook | None,
        log: EventLog,
    ) -> None:
        self._log = log
        self._candidates = {candidate.key: candidate for candidate in candidates}
        self._on_event = on_event
        self._on_outcome = on_outcome
        self._waiting: deque[Callable[[], None]] = deque()
        self._handing_on = threading.Lock()
        self._number = 0
        self._complained: set[str] = set()

    def put(self, event: Event) -> None:
        """Adds an event."""
        self._log.add(event)
        if (observer := self._on_event) is not None:
            self._waiting.append(lambda: self._safely("the observer", lambda: observer(event)))

    def started(self, task: TrialTask) -> None:
        """Adds the start of a trial."""
        self._number += 1
        self.put(TrialStarted(number=self._number, candidate=self._candidate(task), task=task))

    def ended(self, task: TrialTask, outcome: TrialOutcome, best: str | None) -> None:
        """Adds the end of the trial that started last, and its outcome for the history."""
        if (hook := self._on_outcome) is not None:
            self._waiting.append(lambda: self._safely("the history", lambda: hook(task, outcome)))
        candidate = self._candidate(task)
        self.put(TrialEnded(number=self._number, candidate=candidate, outcome=outcome, best=best))

    def hand_on(self) -> None:
        """Tells everything that waits, unless another thread is doing so already."""
        while self._waiting and self._handing_on.acquire(blocking=False):
            try:
                while self._waiting:
                    self._waiting.popleft()()
            finally:
                self._handing_on.release()

    def _candidate(self, task: TrialTask) -> Candidate:
        known = self._candidates.get(task.key)
        return known or Candidate(key=task.key, steps=task.steps, label=task.key)

    def _safely(self, whose: str, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception as error:
            if whose in self._complained:
                return
            self._complained.add(whose)
            _LOGGER.warning("%s of the search fails; the search goes on", whose, exc_info=True)
            if whose != "the observer":
                self.put(
                    Note(f"{whose} fails ({type(error).__name__}: {error}); the search goes on without it")
                )


class EventStream:
    """Hands events to an observer, each once and in order. Thread-safe.

    What the observer raises ends nothing: it is logged once.

    Args:
        on_event: the observer.
    """

    def __init__(self, on_event: Callable[[Event], None]) -> None:
        self._on_event = on_event
        self._lock = threading.Lock()
        self._complained = False
        self.num_events = 0

    def start_again(self) -> None:
        """The next events are those of another coordinator, which counts anew."""
        with self._lock:
            self.num_events = 0

    def take(self, events: Iterable[bytes], number: int) -> int:
        """Hands on the events after the first ``number``; returns how many were new."""
        with self._lock:
            new = list(events)[max(0, self.num_events - number) :]
            for data in new:
                self._safely(partial(self._tell, data))
            self.num_events += len(new)
            return len(new)

    def note(self, event: Event) -> None:
        """Tells something that this rank has to say."""
        with self._lock:
            self._safely(partial(self._on_event, event))

    def _tell(self, data: bytes) -> None:
        self._on_event(event_from_json(data))

    def _safely(self, tell: Callable[[], None]) -> None:
        try:
            tell()
        except Exception:
            if not self._complained:
                _LOGGER.warning("the observer of the search fails; the search goes on", exc_info=True)
            self._complained = True

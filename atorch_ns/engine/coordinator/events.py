"""Events of a search: their JSON, the queue of a coordinator, and the stream of a rank in another process."""

from __future__ import annotations

import json
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from atorch_ns.errors import InputError
from atorch_ns.search import (
    Candidate,
    Ended,
    Event,
    Priced,
    Profiling,
    SearchNote,
    TrialEnded,
    TrialOutcome,
    TrialStarted,
    TrialTask,
    from_json,
    to_json,
)
from atorch_ns.text import error_text

_KINDS: dict[str, type[Any]] = {
    "Note": SearchNote,  # its name on the wire: engines and ranks may be of different versions
    **{kind.__name__: kind for kind in (Profiling, Priced, TrialStarted, TrialEnded, Ended)},
}


def event_to_json(event: Event) -> bytes:
    """An event with its kind: ``{"kind": "Note", "event": {"text": …}}``."""
    kind = next(kind for kind, cls in _KINDS.items() if cls is type(event))
    return to_json({"kind": kind, "event": event}).encode()


def event_from_json(data: bytes) -> Event:
    """Reads JSON from :func:`event_to_json`.

    Raises:
        InputError: it is something else.
    """
    try:
        document = json.loads(data)
        kind, text = _KINDS[document["kind"]], json.dumps(document["event"])
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(f"this is not an event: {error_text(error)}") from None
    event: Event = from_json(kind, text)
    return event


_MAX_LOGGED = 10_000  # events that observers in other processes can fetch
_MAX_AT_ONCE = 20  # events in the answer to one heartbeat
_LOGGER = logging.getLogger(__name__)


class SafeObserver:
    """An observer whose exceptions end nothing: the first is logged."""

    def __init__(self, observer: Callable[[Event], None]) -> None:
        self._observer = observer
        self._has_failed = False

    def __call__(self, event: Event | bytes) -> None:
        """Gives the observer an event, or the event of this JSON."""
        try:
            self._observer(event_from_json(event) if isinstance(event, bytes) else event)
        except Exception:
            if not self._has_failed:
                _LOGGER.warning("the observer of the search failed; the search continues", exc_info=True)
            self._has_failed = True


class EventQueue:
    """The events of a search: by number, and in order for the observer once a thread is free. Thread-safe."""

    def __init__(
        self, candidates: Sequence[Candidate], on_event: Callable[[Event], None] | None = None
    ) -> None:
        self._candidates = {candidate.key: candidate for candidate in candidates}
        self._observer = None if on_event is None else SafeObserver(on_event)
        self._log: list[Event] = []
        self._waiting: deque[Event] = deque()
        self._delivering = threading.Lock()
        self._num_trials = 0

    def put(self, event: Event) -> None:
        """Adds an event; the log drops those that come after very many."""
        if len(self._log) < _MAX_LOGGED:
            self._log.append(event)
        if self._observer is not None:
            self._waiting.append(event)

    def put_start(self, task: TrialTask) -> None:
        """Adds the start of a trial."""
        self._num_trials += 1
        self.put(TrialStarted(number=self._num_trials, candidate=self._find_candidate(task), task=task))

    def put_end(self, task: TrialTask, outcome: TrialOutcome, best: str | None) -> None:
        """Adds the end of the trial that started last."""
        candidate = self._find_candidate(task)
        self.put(TrialEnded(number=self._num_trials, candidate=candidate, outcome=outcome, best=best))

    def after(self, number: int) -> list[Event]:
        """Up to twenty of the events that follow the first ``number``."""
        return self._log[max(0, number) : max(0, number) + _MAX_AT_ONCE]

    def deliver(self) -> None:
        """Gives the observer all waiting events, unless another thread is doing so already."""
        # An event may be put between the last look and the release, so it looks once more.
        while self._observer is not None and self._waiting and self._delivering.acquire(blocking=False):
            try:
                while self._waiting:
                    self._observer(self._waiting.popleft())
            finally:
                self._delivering.release()

    def _find_candidate(self, task: TrialTask) -> Candidate:
        candidate = self._candidates.get(task.key)
        # A candidate that is not in the table is shown by its key.
        return candidate or Candidate(key=task.key, steps=task.steps, label=task.key)


class EventStream:
    """Gives an observer the events of a coordinator in another process, once and in order. Thread-safe."""

    def __init__(self, on_event: Callable[[Event], None]) -> None:
        self._observer = SafeObserver(on_event)
        self._lock = threading.Lock()
        self.num_events = 0

    def start_again(self) -> None:
        """Begins anew: the next events are those of another coordinator."""
        with self._lock:
            self.num_events = 0

    def take(self, events: Iterable[bytes], number: int) -> int:
        """Delivers those of the events after the first ``number`` that are new; returns how many."""
        with self._lock:
            # Two heartbeats at the same time may have asked for the same events.
            new = list(events)[max(0, self.num_events - number) :]
            for data in new:
                self._observer(data)
            self.num_events += len(new)
            return len(new)

    def note(self, event: Event) -> None:
        """Delivers an event of this rank's own."""
        with self._lock:
            self._observer(event)

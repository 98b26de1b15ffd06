"""A search's events at a rank whose coordinator is in another process."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable
from functools import partial

from atorch_ns.engine._event_json import event_from_json
from atorch_ns.search import Event

__all__ = ["EventStream"]

_LOGGER = logging.getLogger(__name__)


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

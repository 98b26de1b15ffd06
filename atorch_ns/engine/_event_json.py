"""Events as JSON, for those who watch a search from another process."""

from __future__ import annotations

import json
from typing import Any

from atorch_ns.errors import InputError
from atorch_ns.search import (
    Ended,
    Event,
    Note,
    Priced,
    Profiling,
    TrialEnded,
    TrialStarted,
    from_json,
    to_json,
)

__all__ = ["event_from_json", "event_to_json"]

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

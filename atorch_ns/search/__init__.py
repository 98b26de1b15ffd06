"""Search: which strategies there are, which of them is tried next, when it is enough, and which is best.

Everything here is pure: no process, socket or device. Times come in by :meth:`Search.tell`.
"""

from __future__ import annotations

from atorch_ns.search._candidate import Candidate, Fate, Pruned
from atorch_ns.search._events import (
    Ended,
    Event,
    Note,
    Observer,
    Priced,
    Profiling,
    TrialEnded,
    TrialStarted,
)
from atorch_ns.search._outcome import Row, SearchOutcome, Setting
from atorch_ns.search._settings import SearchSettings
from atorch_ns.search._trial import StopRule, TrialOutcome, TrialStatus, TrialTask

__all__ = [
    "Candidate",
    "Ended",
    "Event",
    "Fate",
    "Note",
    "Observer",
    "Priced",
    "Profiling",
    "Pruned",
    "Row",
    "SearchOutcome",
    "SearchSettings",
    "Setting",
    "StopRule",
    "TrialEnded",
    "TrialOutcome",
    "TrialStarted",
    "TrialStatus",
    "TrialTask",
]

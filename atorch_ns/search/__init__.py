"""Search: which strategies there are, which of them is tried next, when it is enough, and which is best.

Everything here is pure but for the file of :class:`History`: no process, socket or device. Times come in by
:meth:`Search.tell`.
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
from atorch_ns.search._history import History
from atorch_ns.search._json import from_json, outcome_from_json, outcome_to_json, to_json
from atorch_ns.search._outcome import Row, SearchOutcome, Setting
from atorch_ns.search._read_history import StudyRecord, TrialRecord, read_history
from atorch_ns.search._search import Known, Recorder, Search
from atorch_ns.search._select import Limits, memory_limit
from atorch_ns.search._settings import SearchSettings
from atorch_ns.search._space import Space, explore, find_candidates
from atorch_ns.search._trial import StopRule, TrialOutcome, TrialStatus, TrialTask
from atorch_ns.search._wishes import read_wishes

__all__ = [
    "Candidate",
    "Ended",
    "Event",
    "Fate",
    "History",
    "Known",
    "Limits",
    "Note",
    "Observer",
    "Priced",
    "Profiling",
    "Pruned",
    "Recorder",
    "Row",
    "Search",
    "SearchOutcome",
    "SearchSettings",
    "Setting",
    "Space",
    "StopRule",
    "StudyRecord",
    "TrialEnded",
    "TrialOutcome",
    "TrialRecord",
    "TrialStarted",
    "TrialStatus",
    "TrialTask",
    "explore",
    "find_candidates",
    "from_json",
    "memory_limit",
    "outcome_from_json",
    "outcome_to_json",
    "read_history",
    "read_wishes",
    "to_json",
]

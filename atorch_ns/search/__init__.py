"""Search: the space of strategies, the choice of the next trial, the end of the search and its outcome.

Everything here is pure but for the file of :class:`History`: no process, socket or device. Times come in by
:meth:`Search.tell`.
"""

from atorch_ns.search.history.history import History, StudyRecord, TrialRecord, read_history, tried_strategies
from atorch_ns.search.objective import SearchSettings
from atorch_ns.search.outcome import (
    Ended,
    Event,
    Observer,
    Priced,
    Profiling,
    Row,
    SearchNote,
    SearchOutcome,
    SearchSetting,
    TrialEnded,
    TrialStarted,
    from_json,
    outcome_from_json,
    outcome_to_json,
    to_json,
)
from atorch_ns.search.search import Search
from atorch_ns.search.space.candidate import Candidate, Fate
from atorch_ns.search.space.constraints import read_constraints
from atorch_ns.search.space.limits import memory_limit
from atorch_ns.search.space.space import explore
from atorch_ns.search.trial import BesideTensors, StopRule, TrialOutcome, TrialStatus, TrialTask

__all__ = [
    "BesideTensors", "Candidate", "Ended", "Event", "Fate", "History", "Observer", "Priced", "Profiling", "Row",
    "Search", "SearchNote", "SearchOutcome", "SearchSetting", "SearchSettings", "StopRule", "StudyRecord", "TrialEnded",
    "TrialOutcome", "TrialRecord", "TrialStarted", "TrialStatus", "TrialTask", "explore", "from_json", "memory_limit",
    "outcome_from_json", "outcome_to_json", "read_constraints", "read_history", "to_json", "tried_strategies",
]  # fmt: skip

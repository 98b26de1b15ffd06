"""Why a strategy was chosen: the data of a search, then tables, pictures and pages drawn from it.

Data first, picture second: ``x_info`` functions turn a search's outcome into named tuples, which tests check
to the number; tables, pictures and the page only draw them.
"""

from __future__ import annotations

from atorch_ns.report._accuracy import AccuracyInfo, AccuracyPoint, accuracy_info
from atorch_ns.report._actual import Actual, ActualInfo, actual_info
from atorch_ns.report._bars import Bar, MemoryInfo, TimeInfo, memory_info, time_info
from atorch_ns.report._candidates import CandidateLine, CandidatesInfo, candidates_info
from atorch_ns.report._explain import explain_search, explain_why
from atorch_ns.report._explain_methods import explain_method, explain_strategy
from atorch_ns.report._history import HistoryInfo, HistoryPoint, history_info
from atorch_ns.report._observers import LineLog, LiveTable, SearchView, observer_for
from atorch_ns.report._operators import OperatorLine, OperatorsInfo, operators_info, operators_text
from atorch_ns.report._pareto import ParetoInfo, ParetoPoint, pareto_info
from atorch_ns.report._priced import estimate_text, estimates_text
from atorch_ns.report._report import TrainingReport
from atorch_ns.report._text import search_text
from atorch_ns.report._timeline import TimelineBlock, TimelineInfo, TimelineRow, timeline_info
from atorch_ns.report._timeline_text import timeline_text
from atorch_ns.report._verdict import setting_text, verdict
from atorch_ns.report._waterfall import PartChange, WaterfallBar, WaterfallInfo, waterfall_info

__all__ = [
    "AccuracyInfo",
    "AccuracyPoint",
    "Actual",
    "ActualInfo",
    "Bar",
    "CandidateLine",
    "CandidatesInfo",
    "HistoryInfo",
    "HistoryPoint",
    "LineLog",
    "LiveTable",
    "MemoryInfo",
    "OperatorLine",
    "OperatorsInfo",
    "ParetoInfo",
    "ParetoPoint",
    "PartChange",
    "SearchView",
    "TimeInfo",
    "TimelineBlock",
    "TimelineInfo",
    "TimelineRow",
    "TrainingReport",
    "WaterfallBar",
    "WaterfallInfo",
    "accuracy_info",
    "actual_info",
    "candidates_info",
    "estimate_text",
    "estimates_text",
    "explain_method",
    "explain_search",
    "explain_strategy",
    "explain_why",
    "history_info",
    "memory_info",
    "observer_for",
    "operators_info",
    "operators_text",
    "pareto_info",
    "search_text",
    "setting_text",
    "time_info",
    "timeline_info",
    "timeline_text",
    "verdict",
    "waterfall_info",
]

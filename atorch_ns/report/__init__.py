"""Report: why a strategy was chosen, as data, tables, pictures and pages.

Data first, picture second: ``x_info`` functions turn a search's outcome into named tuples, which tests check
to the number; tables, pictures and the page only draw them.
"""

from atorch_ns.report.info.accuracy import (
    AccuracyInfo,
    AccuracyPoint,
    Actual,
    ActualInfo,
    accuracy_info,
    actual_info,
)
from atorch_ns.report.info.breakdown import (
    Bar,
    MemoryInfo,
    TimeInfo,
    TimelineBlock,
    TimelineInfo,
    TimelineRow,
    memory_info,
    time_info,
    timeline_info,
)
from atorch_ns.report.info.candidates import (
    CandidateLine,
    CandidatesInfo,
    HistoryInfo,
    HistoryPoint,
    ParetoInfo,
    ParetoPoint,
    candidates_info,
    history_info,
    pareto_info,
)
from atorch_ns.report.info.explain import explain_method, explain_search, explain_strategy, explain_why
from atorch_ns.report.info.operators import OperatorLine, OperatorsInfo, operators_info
from atorch_ns.report.info.verdict import (
    PartChange,
    WaterfallBar,
    WaterfallInfo,
    setting_text,
    verdict,
    waterfall_info,
)
from atorch_ns.report.live.observers import LineLog, LiveTable, SearchView, observer_for
from atorch_ns.report.report import TrainingReport
from atorch_ns.report.text.text import (
    estimate_text,
    estimates_text,
    operators_text,
    search_text,
    timeline_text,
)

__all__ = [
    "AccuracyInfo", "AccuracyPoint", "Actual", "ActualInfo", "Bar", "CandidateLine", "CandidatesInfo",
    "HistoryInfo", "HistoryPoint", "LineLog", "LiveTable", "MemoryInfo", "OperatorLine", "OperatorsInfo",
    "ParetoInfo", "ParetoPoint", "PartChange", "SearchView", "TimeInfo", "TimelineBlock", "TimelineInfo",
    "TimelineRow", "TrainingReport", "WaterfallBar", "WaterfallInfo", "accuracy_info", "actual_info",
    "candidates_info", "estimate_text", "estimates_text", "explain_method", "explain_search", "explain_strategy",
    "explain_why", "history_info", "memory_info", "observer_for", "operators_info", "operators_text", "pareto_info",
    "search_text", "setting_text", "time_info", "timeline_info", "timeline_text", "verdict", "waterfall_info",
]  # fmt: skip

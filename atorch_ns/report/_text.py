"""The report as plain text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from atorch_ns.job import Report
from atorch_ns.report._accuracy import accuracy_info
from atorch_ns.report._actual import ActualInfo
from atorch_ns.report._bars import Bar, memory_info, time_info
from atorch_ns.report._candidates import CandidateLine, CandidatesInfo, candidates_info, fate_text
from atorch_ns.report._history import history_info
from atorch_ns.report._sheets import (
    accuracy_sheet,
    candidates_sheet,
    history_sheet,
    memory_sheet,
    time_sheet,
    waterfall_sheet,
)
from atorch_ns.report._tables import TEXT_WIDTH, as_text
from atorch_ns.report._timeline import TimelineInfo
from atorch_ns.report._timeline_text import timeline_text
from atorch_ns.report._units import change_text, counted
from atorch_ns.report._verdict import setting_text, verdict
from atorch_ns.report._waterfall import waterfall_info
from atorch_ns.search import SearchOutcome

__all__ = ["actual_lines", "report_text", "search_text"]


def report_text(
    applied: Report | None,
    search: SearchOutcome | None,
    actual: ActualInfo | None,
    timeline: TimelineInfo | None = None,
    *,
    top: int | None = None,
) -> str:
    """What was applied, the search behind it, and how it turned out.

    Args:
        applied, search, actual, timeline: what there is of them.
        top: candidates shown at most; ``None`` for all.
    """
    parts = []
    if applied is not None:
        parts.append(str(applied))
    if search is not None:
        parts.append(search_text(search, top=top))
    if timeline is not None:
        parts.append(timeline_text(timeline))
    if actual is not None:
        parts.append("\n".join(actual_lines(actual)))
    return "\n\n".join(parts) or "nothing was applied and nothing was searched"


def search_text(outcome: SearchOutcome, *, width: int = TEXT_WIDTH, top: int | None = None) -> str:
    """Verdict, candidates and the tables behind them.

    Args:
        outcome: of the search.
        width: characters of a line.
        top: candidates shown at most; ``None`` for all. What is left out is counted.
    """
    return "\n".join(_search_parts(outcome, width, top))


def _search_parts(outcome: SearchOutcome, width: int, top: int | None) -> Iterator[str]:
    yield setting_text(outcome.setting)
    yield from (f"  {sentence}" for sentence in verdict(outcome))
    yield from _candidate_parts(candidates_info(outcome), width, top)
    memory, times = memory_info(outcome, limit=top or 12), time_info(outcome, limit=top or 12)
    yield f"\nPeak memory per rank in parts (predicted){_and_measured(memory.bars)}"
    yield as_text(memory_sheet(memory), width=width)
    yield f"\nStep time in parts (predicted){_and_measured(times.bars)}"
    yield as_text(time_sheet(times), width=width)
    history = history_info(outcome)
    if history.points:
        yield "\nTrials in their order"
        yield as_text(history_sheet(history), width=width)
        yield "\nPredicted against measured"
        yield as_text(
            accuracy_sheet(accuracy_info(outcome, name) for name in ("time", "memory")), width=width
        )
    fall = waterfall_info(outcome)
    if fall is not None and fall.bars:
        yield f"\nFrom the baseline ({fall.baseline}) to the winner"
        yield as_text(waterfall_sheet(fall), width=width)
    for title, lines in (("Self-checks", outcome.checks), ("Assumed", outcome.setting.notes)):
        if lines:
            yield f"\n{title}"
            yield from (f"  {line}" for line in lines)


def _candidate_parts(info: CandidatesInfo, width: int, top: int | None) -> Iterator[str]:
    listed, usable = counted(len(info.lines), "candidate"), len(info.considered)
    yield f"\n{listed} listed: {usable} can be used, {len(info.pruned)} pruned"
    shown = info.first(top)
    yield as_text(candidates_sheet(shown), width=width)
    hidden = len(info.lines) - len(shown.lines)
    if hidden:
        kinds = Counter(_kind(line, planned=info.planned) for line in info.lines if line not in shown.lines)
        counts = ", ".join(f"{count} {kind}" for kind, count in kinds.most_common())
        yield f"  and {hidden} more: {counts}"


def _kind(line: CandidateLine, *, planned: bool) -> str:
    if line.fate == "pruned":
        return f"pruned ({line.pruned_kind})" if line.pruned_kind else "pruned"
    return fate_text(line, planned=planned).partition(" ")[2]


def _and_measured(bars: tuple[Bar, ...]) -> str:
    return ", and measured" if any(bar.measured is not None for bar in bars) else ""


def actual_lines(info: ActualInfo) -> tuple[str, ...]:
    """Predicted against actual in words."""
    lines = ["Predicted against actual", f"  step: {info.actual_seconds.as_seconds()} in training"]
    if info.trial_seconds.value is not None:
        shown, error = info.trial_seconds.as_seconds(), change_text(info.trial_error)
        lines.append(f"    the search went by {shown}: off by {error}")
    if info.predicted_seconds is not None:
        lines.append(f"    the estimate alone was off by {change_text(info.time_error)}")
    if info.actual_bytes.value is not None:
        lines.append(f"  peak: {info.actual_bytes.as_bytes()} in training")
        lines.append(f"    the estimate was off by {change_text(info.memory_error)}")
    return tuple(lines)

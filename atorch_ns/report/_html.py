"""report.html: the whole report as one page that needs no network and no script."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from atorch_ns.job import Report
from atorch_ns.report._accuracy import accuracy_info
from atorch_ns.report._actual import ActualInfo
from atorch_ns.report._bars import memory_info, time_info
from atorch_ns.report._breaks import breakable, kept_together
from atorch_ns.report._candidates import CandidateLine, CandidatesInfo, candidates_info
from atorch_ns.report._fall import waterfall_picture
from atorch_ns.report._history import history_info
from atorch_ns.report._measures import is_planned
from atorch_ns.report._pareto import pareto_info
from atorch_ns.report._plots import accuracy_picture, history_picture, pareto_picture
from atorch_ns.report._sheets import (
    Sheet,
    accuracy_sheet,
    candidates_sheet,
    history_sheet,
    memory_sheet,
    pareto_sheet,
    time_sheet,
    waterfall_sheet,
)
from atorch_ns.report._stacked import memory_picture, time_picture
from atorch_ns.report._template import PAGE, STYLE
from atorch_ns.report._text import actual_lines
from atorch_ns.report._timeline import TimelineInfo
from atorch_ns.report._timeline_picture import MOST_ROWS, timeline_picture
from atorch_ns.report._timeline_text import timeline_sentence, timeline_sheet
from atorch_ns.report._verdict import setting_text, verdict
from atorch_ns.report._waterfall import waterfall_info
from atorch_ns.search import SearchOutcome

__all__ = ["Figure", "report_figures", "report_html"]

_WIDE, _NARROW = 860, 358
"""Widths of the two forms of each picture: the page shows the one that is legible where it is read."""

_SHOWN = 12
"""Candidates that are not folded away, besides those that were tried."""

_LONG_TITLE = 60
"""A longer strategy has only its methods' names in the title: the first sentence has all of it."""

_PLANNED = "Every figure is a prediction."
_TRIED = "Predicted before any trial; measured in trials, with the number of steps and the standard error."


class Figure(NamedTuple):
    """A picture in its two forms, each the text of an SVG, and what is written below."""

    name: str
    wide: Any
    narrow: Any
    caption: str


class _Section(NamedTuple):
    name: str
    title: str
    figures: tuple[Figure, ...]
    table: Sheet | None


def report_html(
    applied: Report | None,
    search: SearchOutcome | None,
    actual: ActualInfo | None,
    timeline: TimelineInfo | None = None,
) -> str:
    """The page. Everything that users wrote is escaped."""
    from jinja2 import Environment, StrictUndefined
    from markupsafe import Markup

    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=False)
    environment.filters |= {"breakable": breakable, "kept_together": kept_together}
    page = environment.from_string(PAGE)
    values: dict[str, Any] = {
        "title": _title(applied, search),
        "style": Markup(STYLE),  # a constant of this package
        "setting": "",
        "sentences": (),
        "applied": _applied_sheet(applied) if applied is not None else None,
        "notes": applied.notes if applied is not None else (),
        "actual": actual_lines(actual)[1:] if actual is not None else (),
        "candidates": None,
        "candidates_note": "",
        "folded": (),
        "best": "",
        "sections": (),
        "lists": (),
        "settings": (),
    }
    if search is not None:
        values |= _search_values(search)
    if timeline is not None:
        values["sections"] = (*values["sections"], _timeline_section(timeline))
    return page.render(values)


def report_figures(search: SearchOutcome | None, timeline: TimelineInfo | None) -> tuple[Figure, ...]:
    """The pictures of the page, in its order."""
    sections = list(_sections(search)) if search is not None else []
    if timeline is not None:
        sections.append(_timeline_section(timeline))
    return tuple(figure for section in sections for figure in section.figures)


def _search_values(search: SearchOutcome) -> dict[str, Any]:
    info = candidates_info(search)
    best = next((str(line.number) for line in info.lines if line.key == search.best), "")
    shown = tuple(line for line in info.considered if _worth_a_line(line))
    lists = (("Self-checks", search.checks), ("Assumed", search.setting.notes))
    settings = {**search.settings.model_dump(), "fingerprint": search.setting.fingerprint}
    return {
        "setting": setting_text(search.setting),
        "sentences": verdict(search),
        "candidates": candidates_sheet(info._replace(lines=shown)).without_unknown(),
        "candidates_note": _PLANNED if info.planned else _TRIED,
        "folded": tuple(_folded(info, shown)),
        "best": best,
        "sections": tuple(_sections(search)),
        "lists": tuple((heading, lines) for heading, lines in lists if lines),
        "settings": tuple((name.replace("_", " "), str(value)) for name, value in settings.items()),
    }


def _worth_a_line(line: CandidateLine) -> bool:
    return line.number <= _SHOWN or line.trial_number > 0 or line.is_baseline


def _folded(info: CandidatesInfo, shown: tuple[CandidateLine, ...]) -> Iterator[tuple[str, Sheet]]:
    """Tables that are closed until they are asked for: what was not tried, and what was pruned."""
    rest = tuple(line for line in info.considered if line not in shown)
    more = "more that were not chosen" if info.planned else "more that were not tried"
    for title, lines in ((more, rest), ("pruned, each with its reason", info.pruned)):
        if lines:
            sheet = candidates_sheet(info._replace(lines=lines)).without_unknown()
            yield f"{len(lines)} {title}", sheet


def _sections(search: SearchOutcome) -> Iterator[_Section]:
    memory, time = memory_info(search), time_info(search)
    caption = "Bars are predicted parts, numbered as in the legend"
    caption += "." if is_planned(search) else "; a diamond is what was measured."
    yield _Section(
        "memory",
        "Memory per rank",
        (_figure("memory", lambda width, name: memory_picture(memory, width, name), caption),),
        memory_sheet(memory),
    )
    yield _Section(
        "time",
        "Time of a step",
        (_figure("time", lambda width, name: time_picture(time, width, name), caption),),
        time_sheet(time),
    )
    fall = waterfall_info(search)
    if fall is not None:
        note = "Which change brought how much"
        note += (
            " (predicted)." if is_planned(search) else ". Measured where both ends of a link were measured."
        )
        figure = _figure("waterfall", lambda width, name: waterfall_picture(fall, width, name), note)
        yield _Section("waterfall", "From the baseline to the winner", (figure,), waterfall_sheet(fall))
    pareto = pareto_info(search)
    note = "Below and left of the line there is no candidate."
    figure = _figure("pareto", lambda width, name: pareto_picture(pareto, width, name), note)
    yield _Section("pareto", "Time against memory", (figure,), pareto_sheet(pareto))
    history = history_info(search)
    if history.points:
        note = "Medians of the timed steps with their standard errors."
        figure = _figure("history", lambda width, name: history_picture(history, width, name), note)
        yield _Section("history", "The search", (figure,), history_sheet(history))
        yield _accuracy_section(search)


def _accuracy_section(search: SearchOutcome) -> _Section:
    infos = tuple(accuracy_info(search, quantity) for quantity in ("time", "memory"))
    figures = []
    for info in infos:
        note = f"{info.quantity.capitalize()}. On the dashed diagonal the prediction was right."

        def draw(width: int, name: str, info: Any = info) -> str:
            return accuracy_picture(info, width, name)

        figures.append(_figure(f"accuracy-{info.quantity}", draw, note))
    return _Section("accuracy", "Predicted against measured", tuple(figures), accuracy_sheet(infos))


def _timeline_section(info: TimelineInfo) -> _Section:
    note = f"{timeline_sentence(info)} Numbers are micro-batches."
    if len(info.rows) > MOST_ROWS:
        note += f" {MOST_ROWS} of the {len(info.rows)} ranks are drawn."
    figure = _figure("timeline", lambda width, name: timeline_picture(info, width, name), note)
    return _Section("timeline", "The pipeline's step", (figure,), timeline_sheet(info))


def _figure(name: str, draw: Callable[[int, str], str], caption: str) -> Figure:
    from markupsafe import Markup

    # The pictures escape what they are given; everything else in them is this package's own.
    wide = Markup(draw(_WIDE, f"{name}-wide"))
    narrow = Markup(draw(_NARROW, f"{name}-narrow"))
    return Figure(name, wide, narrow, caption)


def _title(applied: Report | None, search: SearchOutcome | None) -> str:
    if search is not None:
        if search.winner is None:
            return f"{search.setting.model}: no strategy could be chosen"
        candidate = search.winner.candidate
        names = " → ".join(name for name, _ in candidate.steps)
        chosen = candidate.label if len(candidate.label) <= _LONG_TITLE else names
        return f"{search.setting.model}: {chosen}"
    return str(applied.strategy) if applied is not None else "Nothing was applied"


def _applied_sheet(applied: Report) -> Sheet:
    rows = tuple((row.name, row.why, row.settings) for row in applied.rows)
    return Sheet(("method", "why", "settings"), rows, frozenset({0, 1, 2}))

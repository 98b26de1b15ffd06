"""Page of a report, report.html: one file that needs no network and no script."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from atorch_ns.job import Report
from atorch_ns.report.html.bar_charts import (
    MOST_ROWS,
    memory_picture,
    time_picture,
    timeline_picture,
    waterfall_picture,
)
from atorch_ns.report.html.plots import accuracy_picture, history_picture, pareto_picture
from atorch_ns.report.html.template import PAGE, STYLE
from atorch_ns.report.info.accuracy import ActualInfo, accuracy_info
from atorch_ns.report.info.breakdown import TimelineInfo, memory_info, time_info
from atorch_ns.report.info.candidates import (
    CandidateLine,
    CandidatesInfo,
    candidates_info,
    history_info,
    is_planned,
    pareto_info,
)
from atorch_ns.report.info.verdict import setting_text, verdict, waterfall_info
from atorch_ns.report.text.tables import (
    Table,
    accuracy_table,
    candidates_table,
    history_table,
    memory_table,
    pareto_table,
    time_table,
    timeline_table,
    waterfall_table,
)
from atorch_ns.report.text.text import actual_lines, timeline_sentence
from atorch_ns.search import SearchOutcome

if TYPE_CHECKING:
    from markupsafe import Markup

LONGEST_PIECE = 24
"""Characters that stay together: the width of the narrowest column of words."""

_AFTER = re.compile(r"(?<=\w\()(?=\S)|(?<=[,;])(?=\S)|(?<=\w[/.])(?=[^\W\d])")
_BEFORE_UNIT = re.compile(r"(?<=\d) (?=[A-Za-zµ])")
_INSIDE = re.compile(r"(?<=[_=:\-])(?=\w)|(?<=[a-z0-9])(?=[A-Z])")

_SHOWN = 12
"""Candidates that are not folded away, besides those that were tried."""

_LONG_TITLE = 60
"""A longer strategy has only its methods' names in the title: the first sentence has all of it."""

_PLANNED = "Every figure is a prediction."
_TRIED = "Predicted before any trial; measured in trials, with the number of steps and the standard error."


class Figure(NamedTuple):
    """A picture, the text of an SVG, and what is written below."""

    name: str
    picture: Markup
    caption: str


class _Section(NamedTuple):
    name: str
    title: str
    figures: tuple[Figure, ...]
    table: Table | None


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
        "applied": _applied_table(applied) if applied is not None else None,
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
        "candidates": candidates_table(info._replace(lines=shown)).without_unknown(),
        "candidates_note": _PLANNED if info.planned else _TRIED,
        "folded": tuple(_folded(info, shown)),
        "best": best,
        "sections": tuple(_sections(search)),
        "lists": tuple((heading, lines) for heading, lines in lists if lines),
        "settings": tuple((name.replace("_", " "), str(value)) for name, value in settings.items()),
    }


def _worth_a_line(line: CandidateLine) -> bool:
    return line.number <= _SHOWN or line.trial_number > 0 or line.is_baseline


def _folded(info: CandidatesInfo, shown: tuple[CandidateLine, ...]) -> Iterator[tuple[str, Table]]:
    """Tables that are closed until they are asked for: what was not tried, and what was pruned."""
    rest = tuple(line for line in info.considered if line not in shown)
    more = "more that were not chosen" if info.planned else "more that were not tried"
    for title, lines in ((more, rest), ("pruned, each with its reason", info.pruned)):
        if lines:
            table = candidates_table(info._replace(lines=lines)).without_unknown()
            yield f"{len(lines)} {title}", table


def _sections(search: SearchOutcome) -> Iterator[_Section]:
    memory, time = memory_info(search), time_info(search)
    caption = "Bars are predicted parts, numbered as in the legend"
    caption += "." if is_planned(search) else "; a diamond is what was measured."
    yield _Section(
        "memory",
        "Memory per rank",
        (_figure("memory", memory_picture(memory), caption),),
        memory_table(memory),
    )
    yield _Section(
        "time",
        "Time of a step",
        (_figure("time", time_picture(time), caption),),
        time_table(time),
    )
    fall = waterfall_info(search)
    if fall is not None:
        note = "Which change brought how much"
        note += (
            " (predicted)." if is_planned(search) else ". Measured where both ends of a link were measured."
        )
        figure = _figure("waterfall", waterfall_picture(fall), note)
        yield _Section("waterfall", "From the baseline to the winner", (figure,), waterfall_table(fall))
    pareto = pareto_info(search)
    note = "Below and left of the line there is no candidate."
    figure = _figure("pareto", pareto_picture(pareto), note)
    yield _Section("pareto", "Time against memory", (figure,), pareto_table(pareto))
    history = history_info(search)
    if history.points:
        note = "Medians of the timed steps with their standard errors."
        figure = _figure("history", history_picture(history), note)
        yield _Section("history", "The search", (figure,), history_table(history))
        yield _accuracy_section(search)


def _accuracy_section(search: SearchOutcome) -> _Section:
    infos = tuple(accuracy_info(search, quantity) for quantity in ("time", "memory"))
    figures = []
    for info in infos:
        note = f"{info.quantity.capitalize()}. On the dashed diagonal the prediction was right."
        figures.append(_figure(f"accuracy-{info.quantity}", accuracy_picture(info), note))
    return _Section("accuracy", "Predicted against measured", tuple(figures), accuracy_table(infos))


def _timeline_section(info: TimelineInfo) -> _Section:
    note = f"{timeline_sentence(info)} Numbers are micro-batches."
    if len(info.rows) > MOST_ROWS:
        note += f" {MOST_ROWS} of the {len(info.rows)} ranks are drawn."
    figure = _figure("timeline", timeline_picture(info), note)
    return _Section("timeline", "The pipeline's step", (figure,), timeline_table(info))


def _figure(name: str, picture: str, caption: str) -> Figure:
    from markupsafe import Markup

    # The pictures escape what they are given; everything else in them is this package's own.
    return Figure(name, Markup(picture), caption)


def _title(applied: Report | None, search: SearchOutcome | None) -> str:
    if search is not None:
        if search.winner is None:
            return f"{search.setting.model}: no strategy could be chosen"
        candidate = search.winner.candidate
        names = " → ".join(name for name, _ in candidate.steps)
        chosen = candidate.label if len(candidate.label) <= _LONG_TITLE else names
        return f"{search.setting.model}: {chosen}"
    return str(applied.strategy) if applied is not None else "Nothing was applied"


def _applied_table(applied: Report) -> Table:
    rows = tuple((row.name, row.why, row.settings) for row in applied.rows)
    return Table(("method", "why", "settings"), rows, frozenset({0, 1, 2}))


def breakable(text: str) -> Markup:
    """The text, escaped, with ``<wbr/>`` wherever a line may end besides at spaces; no line begins with a plus."""
    from markupsafe import Markup

    return Markup("<wbr/>").join(pieces(text.replace(" + ", "\u00a0+ ")))


def kept_together(text: str) -> str:
    """Figures whose numbers stay on one line with their units."""
    return _BEFORE_UNIT.sub("\u00a0", text)


def pieces(text: str) -> list[str]:
    """The text in pieces that stay together at spaces only.

    A line may end after an opening parenthesis, a comma, a dot or a slash. Only a word that is longer than
    :data:`LONGEST_PIECE` is divided, at underscores and capitals where it has them.
    """
    return [part for piece in _AFTER.split(text) for part in _short(piece)]


def _short(piece: str) -> list[str]:
    words = re.split(r"(?<=\s)", piece)
    found = [""]
    for word in words:
        first, *more = _divided(word) if len(word.strip()) > LONGEST_PIECE else [word]
        found[-1] += first
        found += more
    return found


def _divided(word: str) -> list[str]:
    """Parts of a long word, each as long as may be."""
    found: list[str] = []
    for part in _INSIDE.split(word):
        if found and len(found[-1]) + len(part.rstrip()) <= LONGEST_PIECE:
            found[-1] += part
        else:
            found += [part[at : at + LONGEST_PIECE] for at in range(0, len(part), LONGEST_PIECE)]
    return found

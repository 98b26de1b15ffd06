"""Page of a report, report.html: one file that needs no network and no script."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
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
from atorch_ns.report.info.accuracy import QUANTITIES, ActualInfo, accuracy_info
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


def _read_file(name: str) -> str:
    return Path(__file__).with_name(name).read_text(encoding="utf-8")


_COLOURS, _PICTURES = _read_file("colours.css"), _read_file("pictures.css")

STYLE = _COLOURS + _read_file("layout.css") + _PICTURES + _read_file("print.css")
"""Style of the page."""

SVG_STYLE = f"{_COLOURS}{_PICTURES}.ground {{ fill: var(--bg); }}\n"
"""Style of a picture in a file of its own."""

PAGE = _read_file("page.html")
"""The page, a template of Jinja."""


LONGEST_PIECE = 24
"""Characters that stay together: the width of the narrowest column of text."""

_AFTER = re.compile(r"(?<=\w\()(?=\S)|(?<=[,;])(?=\S)|(?<=\w[/.])(?=[^\W\d])")  # a line may end there
_BEFORE_UNIT = re.compile(r"(?<=\d) (?=[A-Za-zµ])")  # the space in 1.5 GiB
_INSIDE = re.compile(r"(?<=[_=:\-])(?=\w)|(?<=[a-z0-9])(?=[A-Z])")  # of a long word: after my_, before Name

_SHOWN = 12  # candidates that are not folded away, besides those that were tried

_LONG_TITLE = 60  # characters: a longer strategy has only its methods' names in the title

_PLANNED = "Every figure is a prediction."
_TRIED = "Predictions predate all trials. Measurements show the number of steps and the standard error."


class Figure(NamedTuple):
    """A picture as SVG, with users' text escaped, and the caption below it."""

    name: str
    picture: str
    caption: str


class _Section(NamedTuple):
    name: str
    title: str
    figures: tuple[Figure, ...]
    table: Table


def report_html(
    report: Report | None,
    search: SearchOutcome | None,
    actual: ActualInfo | None,
    timeline: TimelineInfo | None = None,
) -> str:
    """The page. Everything that users wrote is escaped."""
    from jinja2 import Environment, StrictUndefined

    environment = Environment(autoescape=True, undefined=StrictUndefined)
    environment.filters |= {"breakable": breakable, "kept_together": kept_together}
    return environment.from_string(PAGE).render(
        title=_page_title(report, search),
        style=STYLE,
        applied=None if report is None else _applied_table(report),
        notes=() if report is None else report.notes,
        actual=() if actual is None else actual_lines(actual)[1:],
        search=None if search is None else _search_values(search),
        sections=tuple(_build_sections(search, timeline)),
    )


def report_figures(search: SearchOutcome | None, timeline: TimelineInfo | None) -> tuple[Figure, ...]:
    """The pictures of the page, in its order."""
    return tuple(figure for section in _build_sections(search, timeline) for figure in section.figures)


def _search_values(search: SearchOutcome) -> dict[str, Any]:
    info = candidates_info(search)

    visible = tuple(line for line in info.considered if _worth_a_line(line))
    lists = (("Self-checks", search.checks), ("Assumed", search.setting.notes))
    settings = {**search.settings.model_dump(), "fingerprint": search.setting.fingerprint}
    return {
        "setting": setting_text(search.setting),
        "sentences": verdict(search),
        "candidates": candidates_table(info._replace(lines=visible)).without_unknown(),
        "candidates_note": _PLANNED if info.planned else _TRIED,
        "folded": tuple(_collapsed_tables(info, visible)),
        "best": next((str(line.number) for line in info.lines if line.is_best), ""),
        "lists": tuple((heading, lines) for heading, lines in lists if lines),
        "settings": tuple((name.replace("_", " "), str(value)) for name, value in settings.items()),
    }


def _worth_a_line(line: CandidateLine) -> bool:
    return line.number <= _SHOWN or line.trial_number > 0 or line.is_baseline


def _collapsed_tables(info: CandidatesInfo, first: tuple[CandidateLine, ...]) -> Iterator[tuple[str, Table]]:
    rest = tuple(line for line in info.considered if line not in first)
    more = "more that were not chosen" if info.planned else "more that were not tried"
    for title, lines in ((more, rest), ("pruned, each with its reason", info.pruned)):
        if lines:
            table = candidates_table(info._replace(lines=lines)).without_unknown()
            yield f"{len(lines)} {title}", table


def _build_sections(search: SearchOutcome | None, timeline: TimelineInfo | None) -> Iterator[_Section]:
    if search is not None:
        yield from _search_sections(search)
    if timeline is not None:
        note = f"{timeline_sentence(timeline)} Numbers are micro-batches."
        if len(timeline.rows) > MOST_ROWS:
            note += f" {MOST_ROWS} of the {len(timeline.rows)} ranks are shown."
        table = timeline_table(timeline)
        yield _figure_section(
            "timeline", "The pipeline's step", timeline_picture(timeline), note, table=table
        )


def _search_sections(search: SearchOutcome) -> Iterator[_Section]:
    memory, time, pareto = memory_info(search), time_info(search), pareto_info(search)
    caption = "Bars are predicted parts, numbered as in the legend"
    caption += "." if is_planned(search) else "; diamonds are measurements."
    yield _figure_section(
        "memory", "Memory per rank", memory_picture(memory), caption, table=memory_table(memory)
    )
    yield _figure_section("time", "Step time", time_picture(time), caption, table=time_table(time))
    waterfall = waterfall_info(search)
    if waterfall is not None:
        both = ". A gain is measured where both its ends were measured"
        source = " (predicted)" if is_planned(search) else both
        note, table = f"The gain of each change{source}.", waterfall_table(waterfall)
        yield _figure_section(
            "waterfall", "From the baseline to the winner", waterfall_picture(waterfall), note, table=table
        )
    note = "No candidate is below and to the left of the line."
    yield _figure_section(
        "pareto", "Time against memory", pareto_picture(pareto), note, table=pareto_table(pareto)
    )
    history = history_info(search)
    if history.points:
        note = "Median step times with their standard errors."
        yield _figure_section(
            "history", "The search", history_picture(history), note, table=history_table(history)
        )
        infos = tuple(accuracy_info(search, quantity) for quantity in QUANTITIES)
        note = "A point on the dashed diagonal was predicted exactly."
        figures = (
            Figure(
                f"accuracy-{each.quantity}", accuracy_picture(each), f"{each.quantity.capitalize()}. {note}"
            )
            for each in infos
        )
        yield _Section("accuracy", "Predicted against measured", tuple(figures), accuracy_table(infos))


def _figure_section(name: str, title: str, picture: str, caption: str, *, table: Table) -> _Section:
    return _Section(name, title, (Figure(name, picture, caption),), table)


def _page_title(report: Report | None, search: SearchOutcome | None) -> str:
    if search is not None:
        if search.winner is None:
            return f"{search.setting.model}: no strategy could be chosen"
        candidate = search.winner.candidate
        names = " → ".join(name for name, _ in candidate.steps)
        strategy_text = candidate.label if len(candidate.label) <= _LONG_TITLE else names
        return f"{search.setting.model}: {strategy_text}"
    return str(report.strategy) if report is not None else "Nothing was applied"


def _applied_table(report: Report) -> Table:
    rows = tuple((row.name, row.why, row.settings) for row in report.rows)
    return Table(("method", "why", "settings"), rows, frozenset({0, 1, 2}))


def breakable(text: str) -> Markup:
    """The text, escaped, with ``<wbr/>`` where lines may end besides at spaces; none begins with a plus."""
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
    return [part for piece in _AFTER.split(text) for part in _split_long_words(piece)]


def _split_long_words(piece: str) -> list[str]:
    parts = [""]
    for word in re.split(r"(?<=\s)", piece):  # words with the spaces behind them
        first, *more = _split_word(word) if len(word.strip()) > LONGEST_PIECE else [word]
        parts[-1] += first
        parts += more
    return parts


def _split_word(word: str) -> list[str]:
    parts: list[str] = []
    for part in _INSIDE.split(word):
        if parts and len(parts[-1]) + len(part.rstrip()) <= LONGEST_PIECE:  # as long as may be
            parts[-1] += part
        else:
            parts += [part[at : at + LONGEST_PIECE] for at in range(0, len(part), LONGEST_PIECE)]
    return parts

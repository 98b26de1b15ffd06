"""Sheets as text: tables of a fixed width, the same on a terminal and in a file."""

from __future__ import annotations

from io import StringIO
from typing import TYPE_CHECKING

from atorch_ns.report._sheets import Sheet

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["TEXT_WIDTH", "as_text", "rich_table"]

TEXT_WIDTH = 140
"""Characters of a line where there is no terminal to ask."""

_GAP = 3
_LEAST_WORDS = 24


def rich_table(sheet: Sheet, *, width: int = TEXT_WIDTH) -> Table:
    """A sheet for a rich console. What is too long is folded, never cut.

    A last column of words, which are sentences, stands under the first one of words, so that there is room.
    """
    from rich import box
    from rich.table import Table
    from rich.text import Text

    sheet = sheet.without_unknown()
    columns, rows = (
        _with_sentences_under_names(sheet) if sheet.ends_in_sentences else (sheet.columns, sheet.rows)
    )
    numbers = {position for position in range(len(columns)) if position not in sheet.words}
    lengths = {at: max(len(columns[at]) // 2, *(len(row[at]) for row in rows), 1) for at in numbers}
    words = len(columns) - len(numbers)
    roomy = sum(lengths.values()) + len(columns) * _GAP + words * _LEAST_WORDS <= width
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1))
    for position, name in enumerate(columns):
        # A number is not broken while words can give way.
        least = lengths[position] if position in numbers and roomy else None
        justify = "right" if position in numbers else "left"
        table.add_column(name, justify=justify, overflow="fold", min_width=least)  # type: ignore[arg-type]
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    return table


def as_text(sheet: Sheet, *, width: int = TEXT_WIDTH) -> str:
    """A sheet as plain text, without colours and without spaces at the ends of lines."""
    from rich.console import Console

    stream = StringIO()
    console = Console(file=stream, width=width, no_color=True, force_terminal=False, highlight=False)
    console.print(rich_table(sheet, width=width))
    return "\n".join(line.rstrip() for line in stream.getvalue().splitlines()).strip("\n")


def _with_sentences_under_names(sheet: Sheet) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    at, last = min(sheet.words), len(sheet.columns) - 1
    columns = list(sheet.columns[:last])
    columns[at] = f"{columns[at]}, and {sheet.columns[last]}"
    rows = []
    for row in sheet.rows:
        cells = list(row[:last])
        cells[at] = f"{cells[at]}\n  {row[last]}" if row[last] else cells[at]
        rows.append(tuple(cells))
    return tuple(columns), rows

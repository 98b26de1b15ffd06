"""What a benchmark found: rows of numbers with their spread, written as JSON and as one Markdown table."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["Column", "Findings", "Spread", "write"]


@dataclass(frozen=True, kw_only=True)
class Spread:
    """A sample of measurements in a few numbers.

    Attributes:
        n: how many.
        median: the middle.
        p25: a quarter lies below.
        p75: a quarter lies above.
        smallest: the minimum.
        largest: the maximum.
        low: the median lies above this, and
        high: below this, with 95 % confidence (from the order of the values alone).
    """

    n: int
    median: float
    p25: float
    p75: float
    smallest: float
    largest: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread:
        """Summarises at least one value."""
        ordered = sorted(values)
        n = len(ordered)
        quarters = statistics.quantiles(ordered, n=4, method="inclusive") if n > 1 else ordered * 3
        reach = 0.98 * math.sqrt(n)  # of a binomial(n, 1/2), as ranks around the middle
        return cls(
            n=n,
            median=statistics.median(ordered),
            p25=quarters[0],
            p75=quarters[2],
            smallest=ordered[0],
            largest=ordered[-1],
            low=ordered[max(0, math.floor((n - 1) / 2 - reach))],
            high=ordered[min(n - 1, math.ceil((n - 1) / 2 + reach))],
        )

    def text(self, digits: int) -> str:
        """``median (p25..p75)``."""
        return f"{self.median:.{digits}f} ({self.p25:.{digits}f}..{self.p75:.{digits}f})"

    def text_with_confidence(self, digits: int) -> str:
        """``median [low, high]``."""
        return f"{self.median:.{digits}f} [{self.low:.{digits}f}, {self.high:.{digits}f}]"


@dataclass(frozen=True, kw_only=True)
class Column:
    """A column of the table.

    Attributes:
        title: its heading.
        key: of a row. Keys that no column names are in the JSON only.
        digits: after the point, for floats and spreads.
        confidence: show a spread by the confidence of its median rather than by its quartiles.
    """

    title: str
    key: str
    digits: int = 3
    confidence: bool = False

    def text(self, row: Mapping[str, Any]) -> str:
        """What stands in the table for ``row``."""
        value = row.get(self.key)
        if isinstance(value, Spread):
            return value.text_with_confidence(self.digits) if self.confidence else value.text(self.digits)
        if isinstance(value, bool):
            return "yes" if value else "**no**"
        if isinstance(value, float):
            return f"{value:.{self.digits}f}"
        return "" if value is None else str(value)


@dataclass(frozen=True, kw_only=True)
class Findings:
    """One benchmark's result.

    Attributes:
        name: of the files.
        title: the heading.
        text: what was measured and how, and what the columns mean; Markdown.
        columns: of the table, from left to right.
        rows: a mapping each; values are numbers, texts, booleans and spreads.
        settings: what decides the numbers, such as the model's size.
    """

    name: str
    title: str
    text: str
    columns: Sequence[Column]
    rows: Sequence[Mapping[str, Any]]
    settings: Mapping[str, Any] = field(default_factory=dict)

    def markdown(self, context: Mapping[str, Any]) -> str:
        """The page, with ``context`` (date, machine, versions) under the table."""
        widths = [max(len(c.title), *(len(c.text(row)) for row in self.rows), 3) for c in self.columns]
        lines = [
            _line([c.title for c in self.columns], widths),
            _line(["-" * width for width in widths], widths),
            *(_line([c.text(row) for c in self.columns], widths) for row in self.rows),
        ]
        facts = [f"- {key}: {_flat(value)}" for key, value in {**self.settings, **context}.items()]
        return "\n".join([f"# {self.title}", "", self.text.strip(), "", *lines, "", *facts, ""])

    def as_json(self, context: Mapping[str, Any]) -> str:
        """Everything, for programs."""
        rows = [
            {key: asdict(value) if isinstance(value, Spread) else value for key, value in row.items()}
            for row in self.rows
        ]
        whole = {"benchmark": self.name, "settings": dict(self.settings), **context, "rows": rows}
        return json.dumps(whole, indent=2, ensure_ascii=False) + "\n"


def write(findings: Findings, folder: Path, context: Mapping[str, Any]) -> list[Path]:
    """Writes ``NAME.json`` and ``NAME.md`` into ``folder``, which is made if need be; returns their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{findings.name}.json", folder / f"{findings.name}.md"]
    paths[0].write_text(findings.as_json(context), encoding="utf-8")
    paths[1].write_text(findings.markdown(context), encoding="utf-8")
    return paths


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    return "| " + " | ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)) + " |"


def _flat(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {item}" for key, item in value.items())
    return str(value)

"""Strategies as people name them on a command line."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from atorch_ns.errors import InputError, StrategyFileError

if TYPE_CHECKING:
    from atorch_ns.report import TrainingReport
    from atorch_ns.strategy import Strategy

__all__ = ["read_report_or_strategy", "read_strategy"]


def read_strategy(text: str) -> Strategy:
    """A file (of a strategy, or of a report, which holds one), JSON text, or names with commas between them.

    Raises:
        StrategyError: if it is none of these.
    """
    from atorch_ns.strategy import Strategy

    if text.lstrip()[:1] in ("[", "{"):
        return Strategy.load(text)
    if Path(text).exists():
        report, strategy = read_report_or_strategy(Path(text))
        return report.strategy if report is not None else strategy or Strategy()
    if Path(text).suffix or "/" in text:
        return Strategy.load(text)
    names = [name.strip() for name in text.split(",")]
    return Strategy(name for name in names if name)


def read_report_or_strategy(path: Path) -> tuple[TrainingReport | None, Strategy | None]:
    """Whichever of the two a file holds; the other is ``None``.

    Raises:
        InputError, StrategyError: if it holds neither.
    """
    from atorch_ns.report import TrainingReport
    from atorch_ns.strategy import Strategy

    if not path.exists():
        raise StrategyFileError("no such file", source=str(path))
    if path.suffix.lower() == ".html":
        raise InputError(f"{path} is the page; give the report.json beside it.")
    try:
        document = json.loads(path.read_bytes())
    except OSError as error:
        raise StrategyFileError(f"cannot be read: {error.strerror or error}", source=str(path)) from None
    except ValueError:
        return None, Strategy.load(path)
    if isinstance(document, Mapping) and document.get("kind") == "atorch_ns report":
        return TrainingReport.load(path), None
    return None, Strategy.load(path)

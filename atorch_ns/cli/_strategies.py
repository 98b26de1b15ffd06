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

__all__ = ["check_strategy_is_there", "read_report_or_strategy", "read_strategy"]


def read_strategy(text: str, option: str = "") -> Strategy:
    """A file (of a strategy, or of a report, which holds one), JSON text, or names with commas between them.

    Args:
        text: as the user wrote it.
        option: where, for messages: ``--strategy``; empty for an argument.

    Raises:
        StrategyError: if it is none of these.
    """
    from atorch_ns.strategy import Strategy

    if text.lstrip()[:1] in ("[", "{"):
        return Strategy.load(text)
    if Path(text).exists():
        report, strategy = read_report_or_strategy(Path(text))
        return report.strategy if report is not None else strategy or Strategy()
    check_strategy_is_there(text, option)
    names = [name.strip() for name in text.split(",")]
    return Strategy(name for name in names if name)


def check_strategy_is_there(text: str, option: str = "") -> None:
    """Whether what looks like a file is one.

    Args:
        text: as the user wrote it.
        option: where, for messages: ``--strategy``; empty for an argument.

    Raises:
        StrategyFileError: if it is not there.
    """
    is_file = text.lstrip()[:1] not in ("[", "{") and (Path(text).suffix or "/" in text)
    if is_file and not Path(text).exists():
        raise StrategyFileError(
            f"no such strategy file. Methods by name: {option} fsdp,checkpoint".replace("  ", " "),
            source=text,
        )


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

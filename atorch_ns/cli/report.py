"""``atorch-ns report`` and ``explain``: a report as text or page, and the reasons of a choice."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from atorch_ns.cli._options import AsJson
from atorch_ns.cli._planning import one_node, print_json, read_report_or_strategy, say, terminal_columns
from atorch_ns.errors import InputError

if TYPE_CHECKING:
    from atorch_ns.report import TrainingReport
    from atorch_ns.strategy import Strategy


def report(
    file: Annotated[Path, typer.Argument(help="File report.json.")],
    html: Annotated[Path | None, typer.Option(help="File for the page, which needs no network.")] = None,
    text: Annotated[Path | None, typer.Option(help="File for the whole text.")] = None,
    as_json: AsJson = False,
) -> None:
    """Print a report, or write it as a web page.

    Example: atorch-ns report report.json --html report.html
    """
    from atorch_ns.report import TrainingReport

    document = TrainingReport.load(file)
    for path in (html, text):
        if path is not None:
            document.save(path)
            say(f"report written to {path}")
    if as_json:
        typer.echo(document.to_json(), nl=False)
    elif html is None and text is None:
        typer.echo(document.to_text(width=terminal_columns()))


def explain(
    file: Annotated[Path, typer.Argument(help="File report.json, or a strategy file.")],
    why: Annotated[
        str | None, typer.Option(help="Name of a method, or key, number (#3) or label of a candidate.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Explain why a strategy was chosen, or why a method or candidate was not.

    Example: atorch-ns explain report.json --why fsdp
    """
    from atorch_ns.strategy import Strategy

    document = read_report_or_strategy(file)
    if isinstance(document, Strategy):
        lines = _strategy_lines(document, why)
    else:
        lines = _report_lines(document, why, str(file))
    if as_json:
        print_json({"schema": 1, "file": str(file), "why": why, "lines": lines})
    else:
        typer.echo("\n".join(lines))


def _report_lines(report: TrainingReport, why: str | None, name: str) -> tuple[str, ...]:
    from atorch_ns.report import explain_search, explain_why

    if report.search is None:
        if why is not None:
            raise InputError(f"{name} is from a run with a given strategy, so no others were compared.")
        return tuple(str(report).splitlines())
    return explain_search(report.search) if why is None else explain_why(report.search, why)


def _strategy_lines(strategy: Strategy, why: str | None) -> tuple[str, ...]:
    from atorch_ns.method import load_registry
    from atorch_ns.report import explain_method, explain_strategy

    requires, registry = strategy.requires, load_registry()
    cluster = one_node(requires.world_size or 1, requires.device or "cpu")  # as where it was found
    if why is None:
        return explain_strategy(strategy, cluster, registry)
    return explain_method(strategy, why, cluster, registry)

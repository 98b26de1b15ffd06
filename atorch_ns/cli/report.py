"""``atorch-ns report``: a report as text or as a page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from atorch_ns.cli._options import AsJson
from atorch_ns.cli._planning import say

__all__ = ["report"]


def report(
    file: Annotated[Path, typer.Argument(help="A report.json.")],
    html: Annotated[
        Path | None,
        typer.Option(help="Write the page here: one file that needs no network."),
    ] = None,
    text: Annotated[
        Path | None,
        typer.Option(help="Write the whole text here."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Print a report, or write it as a page.

    Example: atorch-ns report report.json --html report.html
    """
    from atorch_ns.report import TrainingReport

    loaded = TrainingReport.load(file)
    for path in (html, text):
        if path is not None:
            loaded.save(path)
            say(f"report written to {path}")
    if as_json:
        typer.echo(loaded.to_json(), nl=False)
    elif html is None and text is None:
        typer.echo(str(loaded))

"""The command ``atorch-ns``. One file a verb; ``--help`` imports no torch."""

from __future__ import annotations

import sys

import typer

from atorch_ns.cli import methods, strategy
from atorch_ns.errors import AtorchError

__all__ = ["app", "main"]

app = typer.Typer(
    name="atorch-ns",
    help="Strategies for training PyTorch models: see them, check them, compare them.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command("methods")(methods.methods)
app.add_typer(strategy.app, name="strategy")


@app.callback(invoke_without_command=True)
def _root(version: bool = typer.Option(False, "--version", help="Print the version and exit.")) -> None:
    if version:
        from atorch_ns._version import __version__

        typer.echo(__version__)
        raise typer.Exit


def main() -> None:
    """Runs the command. Exit codes: 0 ok, 1 failed, 2 usage."""
    try:
        app()
    except AtorchError as error:
        typer.echo(f"atorch-ns: {error}", err=True)
        sys.exit(1)

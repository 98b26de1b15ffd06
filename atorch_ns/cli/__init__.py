"""The command ``atorch-ns``. One file a verb; ``--help`` imports no torch."""

from __future__ import annotations

import sys

import typer

from atorch_ns.cli import diff, engine, estimate, explain, methods, plan, report, strategy
from atorch_ns.errors import (
    AtorchError,
    BackendError,
    CoordinatorError,
    InputError,
    LayoutError,
    MissingPackageError,
    SearchError,
    StrategyError,
)

__all__ = ["app", "exit_code", "main"]

app = typer.Typer(
    name="atorch-ns",
    help="Strategies for training PyTorch models: see them, check them, compare them.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command("plan")(plan.plan)
app.command("estimate")(estimate.estimate)
app.command("explain")(explain.explain)
app.command("report")(report.report)
app.command("diff")(diff.diff)
app.command("methods")(methods.methods)
app.add_typer(strategy.app, name="strategy")
app.add_typer(engine.app, name="engine")


@app.callback(invoke_without_command=True)
def _root(
    version: bool = typer.Option(False, "--version", help="Print the version and exit."),
    debug: bool = typer.Option(False, "--debug", help="Show the traceback of a failure. Also after a verb."),
) -> None:
    if version:
        from atorch_ns._version import __version__

        typer.echo(__version__)
        raise typer.Exit


def exit_code(error: BaseException) -> int:
    """1 failed, 2 usage, 3 infeasible, 4 environment.

    A strategy is an option or a file like any other: one that cannot be read or used is wrong usage.
    """
    if isinstance(error, SearchError):
        return 3
    if isinstance(error, (BackendError, CoordinatorError, MissingPackageError)):
        return 4
    return 2 if isinstance(error, (InputError, LayoutError, StrategyError)) else 1


def main() -> None:
    """Runs the command. Exit codes: 0 ok, 1 failed, 2 usage, 3 infeasible, 4 environment."""
    arguments = [argument for argument in sys.argv[1:] if argument != "--debug"]
    debug = len(arguments) < len(sys.argv) - 1
    try:
        app(args=arguments)
    except Exception as error:
        if debug:
            raise
        known = isinstance(error, AtorchError)
        text = str(error) if known else f"unexpected {type(error).__name__}: {error}. --debug shows where."
        typer.echo(f"atorch-ns: {text}", err=True)
        sys.exit(exit_code(error))

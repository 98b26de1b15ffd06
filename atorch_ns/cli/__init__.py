"""The command ``atorch-ns``. One file per subcommand; ``--help`` imports no torch."""

from __future__ import annotations

import inspect
import sys

import typer

from atorch_ns.cli import (
    calibrate,
    doctor,
    engine,
    estimate,
    history,
    launch,
    methods,
    plan,
    report,
    search,
    strategy,
    train,
    verify,
)
from atorch_ns.cli._failures import describe, exit_code, failure_record, split_debug, usage_error, wants_json

__all__ = [
    "app", "exit_code", "main",
]  # fmt: skip

app = typer.Typer(
    name="atorch-ns",
    help="Finds, checks and explains strategies for training PyTorch models.",
    no_args_is_help=True,
    add_completion=False,  # main() prints errors itself
    pretty_exceptions_enable=False,
)
app.command("search")(search.search)
app.command("plan")(plan.plan)
app.command("estimate")(estimate.estimate)
app.command("verify")(verify.verify)
# Options behind a launched script are the script's; options that train does not know override its YAML file.
app.command("launch", context_settings={"allow_interspersed_args": False})(launch.launch)
app.command("train", context_settings={"allow_extra_args": True, "ignore_unknown_options": True})(train.train)
app.command("explain")(report.explain)
app.command("report")(report.report)
app.command("diff")(estimate.diff)
app.command("history")(history.history)
app.command("methods")(methods.methods)
app.add_typer(strategy.app, name="strategy")
app.command("calibrate")(calibrate.calibrate)
app.command("doctor")(doctor.doctor)
app.command("env")(doctor.env)
app.add_typer(engine.app, name="engine")
for _command in [
    *app.registered_commands,
    *strategy.app.registered_commands,
    *engine.app.registered_commands,
]:
    # Typer keeps the line breaks of later paragraphs, which are wrong on a terminal of another width.
    _paragraphs = inspect.cleandoc(_command.callback.__doc__ or "").split("\n\n") if _command.callback else []
    _command.help = "\n\n".join(" ".join(paragraph.split()) for paragraph in _paragraphs)


@app.callback(invoke_without_command=True)
def _root_command(
    version: bool = typer.Option(False, "--version", help="Print the version and exit."),
    debug: bool = typer.Option(
        False, "--debug", help="Show the traceback of a failure. Also accepted after a command."
    ),
) -> None:
    if version:
        from atorch_ns._version import __version__

        typer.echo(__version__)
        raise typer.Exit


def main() -> None:
    """Runs the command. Exit codes: 0 ok, 1 failed, 2 usage, 3 infeasible, 4 environment."""
    arguments, debug = split_debug(sys.argv[1:])
    as_json = wants_json(arguments)
    try:
        app(args=arguments)
    except SystemExit as end:
        usage = usage_error(end)
        if as_json and usage is not None:
            typer.echo(failure_record(usage, 2))
        raise
    except Exception as error:
        if as_json:
            typer.echo(failure_record(describe(error), exit_code(error)))
        if debug:
            raise
        typer.echo(f"atorch-ns: {describe(error)}", err=True)
        sys.exit(exit_code(error))

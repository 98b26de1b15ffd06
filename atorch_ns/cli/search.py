"""``atorch-ns search``: the fully automatic mode, on ranks of this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from atorch_ns.capture.user_code import constraint, gibibytes
from atorch_ns.cli import _options as options
from atorch_ns.cli._on_ranks import on_ranks
from atorch_ns.cli._planning import all_or_problems, make_settings, say


def search(
    model: options.Model = None,
    sample: options.Sample = None,
    loss: options.Loss = None,
    optimizer: options.Optimizer = "torch.optim.AdamW",
    nproc: Annotated[int, typer.Option("--nproc", "-n", help="Ranks on this machine.")] = 2,
    time_limit: Annotated[float, typer.Option(help="Time limit of the search, in seconds.")] = 300.0,
    max_trials: Annotated[int | None, typer.Option(help="Most trials. Default: no limit.")] = None,
    batch: options.Batch = None,
    objective: options.Objective = "time",
    memory_limit: options.MemoryLimit = None,
    exclude: options.Exclude = None,
    include: options.Include = None,
    save: Annotated[Path | None, typer.Option(help="File for the strategy, JSON or YAML by suffix.")] = None,
    report: options.ReportFile = None,
    history: Annotated[
        Path | None,
        typer.Option(help="File to append every trial to. A search that was interrupted continues from it."),
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the search.")] = 0,
    input_format: options.InputFormatOption = "auto",
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Show every candidate.")] = False,
    as_json: options.AsJson = False,
) -> None:
    """Search for the best strategy with short trials on this machine. The exit code is 3 if none works.

    Progress and the verdict go to standard error, the strategy to standard output. Logs of failed trials are
    in the folder NAME.logs beside the report, the strategy or the history. Ctrl-C ends the search with the
    best strategy so far, or with code 130 if there is none yet. A second Ctrl-C ends the command at once.

    Example: atorch-ns search --model train.py:build --sample train.py:sample --loss train.py:loss --save strategy.json
    """
    options.check_named(model=model, sample=sample)
    problems = []
    if time_limit <= 0:
        problems.append(f"--time-limit={time_limit:g}: the time limit must be positive.")
    if max_trials is not None and max_trials < 1:
        problems.append(f"--max-trials={max_trials}: at least one trial is needed.")
    if batch is not None and batch < 1:
        problems.append(f"--batch={batch}: the global batch must be at least 1.")
    if optimizer.lower() == "none":
        problems.append("--optimizer=none: trials run training steps, which need an optimizer.")
    problems += options.unwritable(save=save, report=report, history=history)  # before ranks start
    all_or_problems(
        lambda: options.refuse(problems),
        lambda: make_settings(objective=objective, memory_limit=memory_limit),
    )
    settings = {
        "objective": objective,
        "time_limit_s": time_limit,
        "max_trials": max_trials,
        "memory_limit_gib": gibibytes(memory_limit),
        "seed": seed,
    }
    neighbour = report or save  # a history brings its own folder of logs
    request = {
        "model": model,
        "sample": sample,
        "loss": loss,
        "optimizer": optimizer,
        "input_format": input_format,
        "batch": batch,
        "exclude": [constraint(text) for text in exclude or ()],
        "include": [constraint(text) for text in include or ()],
        "settings": settings,
        "history": None if history is None else str(history.absolute()),
        "save": None if save is None else str(save.absolute()),
        "report": None if report is None else str(report.absolute()),
        "logs": None if neighbour is None else str(neighbour.absolute().with_suffix(".logs")),
        "verbose": verbose,
    }
    result = on_ranks("search", request, nproc=nproc, as_json=as_json, patient=True)
    if as_json:
        typer.echo(result["report"], nl=False)
    else:  # the progress output of the search ends with the reason for the choice
        typer.echo(result["strategy"])
    for what, path in (("strategy", save), ("report", report), ("trials", history)):
        if path is not None:
            say(f"{what} written to {path}")

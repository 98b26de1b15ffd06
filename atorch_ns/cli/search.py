"""``atorch-ns search``: the fully automatic mode, on ranks of this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from atorch_ns.cli._objects import gibibytes, wish
from atorch_ns.cli._on_ranks import check_named, on_ranks
from atorch_ns.cli._options import AsJson, InputFormat, Loss, MemoryLimit, Model, Optimizer, Sample
from atorch_ns.cli._outputs import unwritable
from atorch_ns.cli._planning import make_settings, say
from atorch_ns.errors import InputError

__all__ = ["search"]


def search(
    model: Model = None,
    sample: Sample = None,
    loss: Loss = None,
    optimizer: Optimizer = "torch.optim.AdamW",
    nproc: Annotated[int, typer.Option("--nproc", "-n", help="Ranks to search on, on this machine.")] = 2,
    time_limit: Annotated[float, typer.Option(help="Seconds for the whole search.")] = 300.0,
    max_trials: Annotated[
        int | None, typer.Option(help="Trials at most. Without it, as many as it takes.")
    ] = None,
    batch: Annotated[
        int | None,
        typer.Option(help="Samples in one step over all ranks. Without it, the sample's on every rank."),
    ] = None,
    objective: Annotated[str, typer.Option(help="time, memory, batch or cost.")] = "time",
    memory_limit: MemoryLimit = None,
    exclude: Annotated[
        list[str] | None,
        typer.Option(help="A method or group that may not be there; repeatable."),
    ] = None,
    include: Annotated[
        list[str] | None,
        typer.Option(help="A method or group that must be there, or NAME=CONFIG in JSON; repeatable."),
    ] = None,
    save: Annotated[
        Path | None, typer.Option(help="Write the strategy here, JSON or YAML by suffix.")
    ] = None,
    report: Annotated[
        Path | None, typer.Option(help="Write the whole report here: .html, .json or .txt.")
    ] = None,
    history: Annotated[
        Path | None, typer.Option(help="Append every trial to this file; a search that was ended goes on.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the search.")] = 0,
    input_format: InputFormat = "auto",
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Show every candidate.")] = False,
    as_json: AsJson = False,
) -> None:
    """Search for the best strategy by short trials on local ranks. The exit code is 3 if none can be used.

    Progress and the verdict go to standard error, the strategy to standard output. Logs of failed trials are in the
    folder NAME.logs beside the report, the strategy or the history. Ctrl-C ends the search with the best strategy so
    far, or with code 130 if nothing was measured yet; a second one ends it all.

    Example: atorch-ns search --model train.py:build --sample train.py:sample --loss train.py:loss --save strategy.json
    """
    check_named(model=model, sample=sample)
    problems = []
    if time_limit <= 0:
        problems.append(f"--time-limit={time_limit:g}: the time limit must be positive.")
    if max_trials is not None and max_trials < 1:
        problems.append(f"--max-trials={max_trials}: at least one trial is needed.")
    if batch is not None and batch < 1:
        problems.append(f"--batch={batch}: the global batch must be at least 1.")
    if optimizer.lower() == "none":
        problems.append("--optimizer=none: trials run training steps, which need an optimizer.")
    problems += unwritable(save=save, report=report, history=history)
    if problems:
        raise InputError("\n".join(problems))
    make_settings(objective=objective, memory_limit=memory_limit)
    settings = {
        "objective": objective,
        "time_limit_s": time_limit,
        "max_trials": max_trials,
        "memory_limit_gib": gibibytes(memory_limit),
        "seed": seed,
    }
    beside = report or save  # a history brings its own
    request = {
        "model": model,
        "sample": sample,
        "loss": loss,
        "optimizer": optimizer,
        "input_format": input_format,
        "batch": batch,
        "exclude": [wish(text) for text in exclude or ()],
        "include": [wish(text) for text in include or ()],
        "settings": settings,
        "history": None if history is None else str(history.absolute()),
        "save": None if save is None else str(save.absolute()),
        "report": None if report is None else str(report.absolute()),
        "logs": None if beside is None else str(beside.absolute().with_suffix(".logs")),
        "verbose": verbose,
    }
    found = on_ranks("search", request, nproc=nproc, as_json=as_json, patient=True)
    if as_json:
        typer.echo(found["report"], nl=False)
    else:  # why it was chosen stands at the end of what was said while the search ran
        typer.echo(found["strategy"])
    for what, path in (("strategy", save), ("report", report), ("trials", history)):
        if path is not None:
            say(f"{what} written to {path}")

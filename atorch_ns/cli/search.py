"""``atorch-ns search``: the fully automatic mode, on ranks of this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from atorch_ns.cli._objects import gibibytes, wish
from atorch_ns.cli._on_ranks import check_named, on_ranks
from atorch_ns.cli._options import AsJson, InputFormat, Loss, MemoryLimit, Model, Optimizer, Sample
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

    Progress is shown while it runs. Ctrl-C ends the search with the best strategy so far; a second one ends it all.

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
    for option, path in (("save", save), ("report", report), ("history", history)):
        if path is not None and not path.absolute().parent.is_dir():
            problems.append(f"--{option}={path}: the folder {path.parent} does not exist.")
        elif path is not None and path.is_dir():
            problems.append(f"--{option}={path} is a folder; name a file in it.")
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
        "verbose": verbose,
    }
    found = on_ranks("search", request, nproc=nproc)
    if as_json:
        typer.echo(found["report"], nl=False)
    else:
        typer.echo(f"{found['strategy']}\n{found['text']}")
    for what, path in (("strategy", save), ("report", report), ("trials", history)):
        if path is not None:
            say(f"{what} written to {path}")

"""``atorch-ns doctor``: what on this machine is in the way of a job."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from atorch_ns.cli._options import AsJson
from atorch_ns.errors import InputError

__all__ = ["doctor"]

_MARKS = {"pass": ("✓ pass", "green"), "warn": ("! warn", "yellow"), "fail": ("✗ fail", "red")}


def doctor(
    nproc: Annotated[int, typer.Option("--nproc", "-n", help="Ranks that are started and must talk.")] = 2,
    folder: Annotated[Path, typer.Option(help="Where checkpoints are to be written.")] = Path(),
    timeout: Annotated[float, typer.Option(help="Seconds that one check may take.")] = 60.0,
    only: Annotated[
        list[str] | None, typer.Option(help="A check's name, to run only that; repeatable.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Check ports, limits, backends, packages, dtypes, collectives, disk and compiler. The exit code is 4 if one fails.

    What is not in order comes with the line that mends it.

    Example: atorch-ns doctor --nproc 2
    """
    from atorch_ns.doctor import CHECKS, Place, examine

    problems = []
    if nproc < 1:
        problems.append(f"--nproc={nproc}: at least one process is needed.")
    if timeout <= 0:
        problems.append(f"--timeout={timeout:g}: the time limit must be positive.")
    unknown = [name for name in only or () if name not in CHECKS]
    if unknown:
        problems.append(f"--only={unknown[0]!r} is no check. There are {', '.join(CHECKS)}.")
    if problems:
        raise InputError("\n".join(problems))
    place = Place(num_ranks=nproc, folder=folder, timeout_s=timeout)
    found = []
    for finding in examine(place, names=tuple(only or ())):
        found.append(finding)
        if as_json:
            continue
        mark, colour = _MARKS[finding.verdict]
        typer.echo(f"{typer.style(mark, fg=colour)}  {finding.check}: {finding.text}")
        if finding.fix:
            typer.echo(f"        fix: {finding.fix}")
    counts = {verdict: sum(each.verdict == verdict for each in found) for verdict in _MARKS}
    if as_json:
        document = {"schema": 1, "counts": counts, "findings": [finding.as_json() for finding in found]}
        typer.echo(json.dumps(document, indent=1, ensure_ascii=False))
    else:
        typer.echo(f"\n{counts['pass']} passed, {counts['warn']} warnings, {counts['fail']} failed")
    if counts["fail"]:
        raise typer.Exit(4)

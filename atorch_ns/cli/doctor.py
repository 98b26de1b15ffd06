"""``atorch-ns doctor`` and ``env``: checks of machines, and a machine's description for an issue."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from atorch_ns.cli._options import AsJson, refuse
from atorch_ns.cli._planning import print_json
from atorch_ns.text import bytes_text

if TYPE_CHECKING:
    from atorch_ns.doctor import Finding

_MARKS = {"pass": ("✓ pass", "green"), "warn": ("! warn", "yellow"), "fail": ("✗ fail", "red")}


def doctor(
    nproc: Annotated[
        int | None,
        typer.Option("--nproc", "-n", help="Ranks to start for the check of collectives. Default: 2."),
    ] = None,
    folder: Annotated[Path, typer.Option(help="Folder for checkpoints, whose disk is checked.")] = Path(),
    timeout: Annotated[float, typer.Option(help="Time limit of one check, in seconds.")] = 60.0,
    only: Annotated[list[str] | None, typer.Option(help="Name of a check to run alone. Repeatable.")] = None,
    as_json: AsJson = False,
) -> None:
    """Check this machine: ports, limits, backends, packages, dtypes, collectives, disk, compiler. The exit code
    is 4 if a check fails.

    Each problem comes with the command that fixes it. Under torchrun on several nodes, it checks all nodes and
    their links, and names the node that fails or is slow.

    Example: atorch-ns doctor --nproc 2
    """
    from atorch_ns.doctor import CHECKS, NODE_CHECKS, Place, Who, examine, examine_nodes

    who = Who.detect()
    names = (*CHECKS, *(name for name in NODE_CHECKS if name not in CHECKS))
    problems = []
    if nproc is not None and nproc < 1:
        problems.append(f"--nproc={nproc}: at least one process is needed.")
    if nproc is not None and who is not None:
        problems.append(f"--nproc={nproc}: the launcher has started the ranks that talk. Leave it out here.")
    if timeout <= 0:
        problems.append(f"--timeout={timeout:g}: the time limit must be positive.")
    unknown = [name for name in only or () if name not in names]
    if unknown:
        problems.append(f"--only={unknown[0]!r} is not a check. There are {', '.join(names)}.")
    alone = [name for name in only or () if name in names and name not in CHECKS]
    if alone and who is None:
        problems.append(
            f"--only={alone[0]!r} is about several nodes. Start doctor on each by torchrun: "
            "torchrun --nnodes=2 ... -m atorch_ns.cli doctor."
        )
    refuse(problems)
    machine = Place(num_ranks=nproc or 2, folder=folder, timeout_s=timeout)
    if who is None:
        _print_findings(examine(machine, names=tuple(only or ())), as_json)
    elif who.rank == 0:
        _print_findings(examine_nodes(machine, who, only or names), as_json)
    elif any(finding.verdict == "fail" for finding in examine_nodes(machine, who, only or names)):
        raise typer.Exit(4)  # rank 0 says why


def _print_findings(findings: Iterator[Finding], as_json: bool) -> None:
    results = []
    for finding in findings:
        results.append(finding)
        if as_json:
            continue
        mark, colour = _MARKS[finding.verdict]
        typer.echo(f"{typer.style(mark, fg=colour)}  {finding.check}: {finding.text}")
        if finding.fix:
            typer.echo(f"        fix: {finding.fix}")
    counts = {verdict: sum(each.verdict == verdict for each in results) for verdict in _MARKS}
    if as_json:
        print_json({"schema": 1, "counts": counts, "findings": [finding.as_json() for finding in results]})
    else:
        typer.echo(f"\n{counts['pass']} passed, {counts['warn']} warnings, {counts['fail']} failed")
    if counts["fail"]:
        raise typer.Exit(4)


def env(as_json: AsJson = False) -> None:
    """Print versions, devices and limits for an issue, without secrets, host names or paths.

    Example: atorch-ns env
    """
    from atorch_ns.doctor import environment

    facts = environment()
    if as_json:
        print_json(facts)
        return
    for title, value in facts.items():
        if title != "schema":
            typer.echo("\n".join(_item_lines(title, value)))


def _item_lines(title: str, value: Any) -> list[str]:
    if isinstance(value, list) and any(isinstance(each, dict) for each in value):  # such as the GPUs
        return [line for number, each in enumerate(value) for line in _item_lines(f"{title}[{number}]", each)]
    if not isinstance(value, dict):
        return [f"{title}: {_value_text(title, value)}"]
    return [
        f"{title}:",
        *(f"  {key.removesuffix('_bytes')}: {_value_text(key, each)}" for key, each in value.items()),
    ]


def _value_text(key: str, value: Any) -> str:
    if value is None:
        return "no limit" if key.endswith(("_bytes", "_cores", "_files")) or key == "open_files" else "none"
    if key.endswith("_bytes"):
        return bytes_text(value)
    if isinstance(value, bool):
        return "yes" if value else "no"
    return ", ".join(map(str, value)) or "none" if isinstance(value, list) else str(value)

"""``atorch-ns launch``: a script on several processes, by torchrun."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from atorch_ns.cli._planning import say
from atorch_ns.errors import InputError

__all__ = ["launch"]


def launch(
    target: Annotated[
        list[str], typer.Argument(metavar="SCRIPT [ARGS]...", help="The script, and what it is given.")
    ],
    nproc: Annotated[
        str, typer.Option("--nproc", "-n", help="Processes on this node: a number, auto, cpu or gpu.")
    ] = "1",
    nnodes: Annotated[
        str, typer.Option(help="Nodes: a number, or MIN:MAX for a group that may grow and shrink.")
    ] = "1",
    rendezvous: Annotated[
        str | None, typer.Option(help="host:port of one node, where several nodes meet.")
    ] = None,
    node_rank: Annotated[
        int | None, typer.Option(help="This node among several. Without it, they are numbered as they come.")
    ] = None,
    max_restarts: Annotated[int, typer.Option(help="How often a group that failed is started anew.")] = 0,
    threads: Annotated[
        int | None,
        typer.Option(
            help="OMP_NUM_THREADS of a process. Without it, its share of the cores, unless it is set."
        ),
    ] = None,
    module: Annotated[
        bool, typer.Option("--module", "-m", help="SCRIPT is a module's name, as in python -m.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the line on standard output, and run nothing.")
    ] = False,
) -> None:
    """Run a script on several processes by torchrun, whose line is printed; plain torchrun always works too.

    Options come before the script; everything after it is the script's. Signals are passed on, and the exit code
    is the script's own.

    Example: atorch-ns launch --nproc 2 script.py
    """
    from atorch_ns.launch import Launch, num_usable_cores

    asked = Launch(
        target=tuple(target),
        nproc=nproc,
        nnodes=nnodes,
        node_rank=node_rank,
        rendezvous=rendezvous,
        max_restarts=max_restarts,
        threads=threads,
        module=module,
    )
    _check_script(target[0], module)
    variables = asked.environment(os.environ, num_cores=num_usable_cores())
    line = asked.line(variables)
    if dry_run:
        typer.echo(line)
        return
    say(line)
    # In the place of this process: signals and the exit code need nobody to carry them.
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(sys.executable, asked.command, {**os.environ, **variables})


def _check_script(name: str, module: bool) -> None:
    if module or Path(name).is_file():
        return
    why = "is a folder" if Path(name).is_dir() else "is not there"
    raise InputError(
        f"the script {name} {why}. Give a Python file, or --module with a module's name. Options of atorch-ns "
        "come before the script."
    )

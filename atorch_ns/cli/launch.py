"""``atorch-ns launch``: a script on several processes, by torchrun."""

from __future__ import annotations

import importlib.util
import os
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from atorch_ns.cli._planning import say
from atorch_ns.errors import BackendError, InputError

if TYPE_CHECKING:
    from atorch_ns.processes import Launch


def check_script(name: str, module: bool) -> None:
    """Raises an :class:`InputError` if the script or module is not there."""
    if module:
        _check_module(name)
        return
    if Path(name).is_file():
        return
    why = "is a folder" if Path(name).is_dir() else "is not there"
    raise InputError(
        f"the script {name} {why}. Give a Python file, or --module with a module's name. Options of atorch-ns "
        "come before the script."
    )


def check_here(options: Launch) -> None:
    """Checks of this machine: its GPUs, and the host name of the rendezvous.

    Raises:
        BackendError: if it has no GPU to count.
        InputError: if the host of the rendezvous does not resolve here, where this node may keep the
            rendezvous. Another node may come before the name is known.
    """
    if options.nproc == "gpu":
        import torch

        if not torch.cuda.is_available():
            raise BackendError("--nproc=gpu: torch finds no GPU here. Give a number, or --nproc cpu.")
    endpoint = options.rendezvous_endpoint
    if endpoint is None or options.node_rank not in (None, 0):
        return
    try:
        socket.getaddrinfo(*endpoint)
    except socket.gaierror as error:
        raise InputError(
            f"--rendezvous={options.rendezvous}: the host {endpoint[0]!r} is not known here ({error.strerror}). Give the name "
            "or address of one node that all nodes can reach."
        ) from None


def _check_module(name: str) -> None:
    folder = str(Path.cwd())
    if folder not in sys.path:
        sys.path.insert(0, folder)  # as python -m does
    try:
        spec = importlib.util.find_spec(name)
    except (ModuleNotFoundError, ValueError):
        spec = None
    except Exception:  # a parent package that raises: the script's own error, with its place
        return
    if spec is None:
        raise InputError(f"there is no module {name!r} here ({folder}) or on Python's path.")


def launch(
    target: Annotated[
        list[str], typer.Argument(metavar="SCRIPT [ARGS]...", help="Script and its arguments.")
    ],
    nproc: Annotated[
        str, typer.Option("--nproc", "-n", help="Processes on this node: a number, auto, cpu or gpu.")
    ] = "1",
    nnodes: Annotated[
        str, typer.Option(help="Nodes: a number, or MIN:MAX for a group that may grow and shrink.")
    ] = "1",
    rendezvous: Annotated[
        str | None, typer.Option(help="host:port of the node where all nodes meet.")
    ] = None,
    node_rank: Annotated[
        int | None,
        typer.Option(
            help="Number of this node, if the number of nodes is fixed. Default: the order of arrival."
        ),
    ] = None,
    max_restarts: Annotated[int, typer.Option(help="Restarts after a failure.")] = 0,
    threads: Annotated[
        int | None,
        typer.Option(
            help="OMP_NUM_THREADS of a process. Default: the variable, else its share of the cores."
        ),
    ] = None,
    module: Annotated[
        bool, typer.Option("--module", "-m", help="SCRIPT is the name of a module, as in python -m.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the command line and run nothing.")
    ] = False,
) -> None:
    """Run a script on several processes with torchrun, and print the command. Plain torchrun works too.

    Options come before the script. Everything after it belongs to the script. Signals are passed on. The exit
    code is that of the process that failed first (torchrun itself returns 1). A signal gives 128 plus its
    number, such as 130 for Ctrl-C.

    Example: atorch-ns launch --nproc 2 script.py
    """
    from atorch_ns.processes import Launch, num_usable_cores, run_torchrun

    options = Launch(
        target=tuple(target),
        nproc=nproc,
        nnodes=nnodes,
        node_rank=node_rank,
        rendezvous=rendezvous,
        max_restarts=max_restarts,
        threads=threads,
        module=module,
    )
    check_script(target[0], module)
    if not dry_run:
        check_here(options)
    variables = options.environment(os.environ, num_cores=num_usable_cores())
    line = options.shell_command(variables)
    if dry_run:
        typer.echo(line)
        return
    say(line)
    code = run_torchrun(options.arguments, variables)
    if code:
        raise typer.Exit(code)

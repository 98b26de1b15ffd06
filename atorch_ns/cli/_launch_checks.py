"""What torchrun would find out late, or say in a traceback: found before it is started."""

from __future__ import annotations

import importlib.util
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from atorch_ns.errors import BackendError, InputError

if TYPE_CHECKING:
    from atorch_ns.launch import Launch

__all__ = ["check_here", "check_script"]


def check_script(name: str, module: bool) -> None:
    """Whether there is something to run.

    Raises:
        InputError: if the script or the module is not there.
    """
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


def check_here(asked: Launch) -> None:
    """What depends on this machine: its GPUs, and the names that it knows.

    Raises:
        BackendError: if it has no GPU to count.
        InputError: if the rendezvous has a name that means nothing here. Only where this node may keep the rendezvous:
            another node may come before the name is known.
    """
    if asked.nproc == "gpu":
        import torch

        if not torch.cuda.is_available():
            raise BackendError("--nproc=gpu: torch finds no GPU here. Give a number, or --nproc cpu.")
    place = asked.meeting_place
    if place is None or asked.node_rank not in (None, 0):
        return
    try:
        socket.getaddrinfo(*place)
    except socket.gaierror as error:
        raise InputError(
            f"--rendezvous={asked.rendezvous}: the host {place[0]!r} is not known here ({error.strerror}). Give the name "
            "or address of one node that all reach."
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
        raise InputError(f"there is no module {name!r} here ({folder}) or where Python looks.")

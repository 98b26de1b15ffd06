"""The processes that a test started."""

from __future__ import annotations

import psutil

from tests.warm import warm_servers

__all__ = ["child_processes"]

_KEPT = ("multiprocessing.resource_tracker", "compile_worker")
"""Helpers that Python and torch start once and keep for the life of the process."""


def child_processes(*, recursive: bool = False) -> set[psutil.Process]:
    """Those that this process started and that still run; a zombie nobody waited for counts.

    The warm server does not, nor what it has forked: that ends with the program that stands for it, which counts.
    """
    children = set(psutil.Process().children(recursive=recursive))
    for server in [child for child in children if child.pid in warm_servers]:
        children -= {server, *server.children(recursive=True)}
    return {child for child in children if _counts(child)}


def _counts(process: psutil.Process) -> bool:
    try:
        command = " ".join(process.cmdline())
    except psutil.ZombieProcess:
        return True
    except psutil.NoSuchProcess:
        return False
    return not any(name in command for name in _KEPT)

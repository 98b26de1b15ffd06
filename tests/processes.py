"""The processes that a test started."""

from __future__ import annotations

import psutil

__all__ = ["child_processes"]

_KEPT = ("multiprocessing.resource_tracker", "compile_worker")
"""Helpers that Python and torch start once and keep for the life of the process."""


def child_processes(*, recursive: bool = False) -> set[psutil.Process]:
    """Those that this process started and that still run; a zombie nobody waited for counts."""
    return {child for child in psutil.Process().children(recursive=recursive) if _counts(child)}


def _counts(process: psutil.Process) -> bool:
    try:
        command = " ".join(process.cmdline())
    except psutil.ZombieProcess:
        return True
    except psutil.NoSuchProcess:
        return False
    return not any(name in command for name in _KEPT)

"""Running a function on forked ranks, or in one process as a plain script would."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from atorch_ns.method import load_registry
from atorch_ns.testing import run_ranks

__all__ = ["barrier", "keeping_bytecode", "on_ranks"]

T = TypeVar("T")
_LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def on_ranks(function: Callable[..., T], num_ranks: int, *args: Any, timeout_s: float = 900.0) -> list[T]:
    """Calls ``function(*args)`` in ``num_ranks`` processes forked from this one; values by rank.

    With one rank there is no process group and no trace of a launcher. What ranks import is imported here
    first, so that no rank has to.
    """
    load_registry()
    if num_ranks > 1:
        return run_ranks(function, num_ranks, args=args, timeout_s=timeout_s)

    def alone() -> T:
        for name in _LAUNCHER:
            os.environ.pop(name, None)
        return function(*args)

    return run_ranks(alone, 1, timeout_s=timeout_s, init_process_group=False)


def barrier() -> None:
    """Waits for the other ranks, if there are any."""
    if dist.is_initialized():
        dist.barrier()


def keeping_bytecode() -> dict[str, str]:
    """The environment for a fresh interpreter that, as by default, keeps what it compiles for the next one."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}

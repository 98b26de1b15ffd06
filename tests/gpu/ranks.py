"""Functions on fresh processes with one GPU each, joined by NCCL.

A process that has used CUDA cannot fork others that use it, so these are spawned, and a test file that is run with
``-m gpu`` may use the GPU itself as well.
"""

from __future__ import annotations

import os
import tempfile
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

__all__ = ["needs_gpus", "on_gpus"]


def needs_gpus(count: int) -> None:
    """Skips the test where there are fewer."""
    found = torch.cuda.device_count()
    if found < count:
        pytest.skip(f"needs {count} CUDA devices, and there are {found}")


def on_gpus(function: Callable[..., Any], num_ranks: int, *args: Any, timeout_s: float = 300.0) -> list[Any]:
    """What ``function(*args)`` returns on each rank, in order; it must be importable, and its results picklable.

    Raises:
        AssertionError: with the traceback of the first rank that failed, or if one did not end in time.
    """
    needs_gpus(num_ranks)
    context = mp.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            context.Process(target=_rank, args=(function, args, rank, num_ranks, folder, timeout_s))
            for rank in range(num_ranks)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join(timeout_s)
        late = [rank for rank, process in enumerate(processes) if process.is_alive()]
        for process in processes:
            if process.is_alive():
                process.kill()
            process.join()
        found = [_result(Path(folder) / f"{rank}.pt") for rank in range(num_ranks)]
    for rank, (ok, value) in enumerate(found):
        assert ok, f"rank {rank} failed{f' (late: {late})' if late else ''}:\n{value}"
    return [value for _, value in found]


def _result(path: Path) -> tuple[bool, Any]:
    if not path.exists():
        return False, "it ended, or was ended, without a word"
    found: tuple[bool, Any] = torch.load(path, weights_only=False)
    return found


def _rank(
    function: Callable[..., Any],
    args: Sequence[Any],
    rank: int,
    num_ranks: int,
    folder: str,
    timeout_s: float,
) -> None:
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(num_ranks), LOCAL_WORLD_SIZE=str(num_ranks)
    )
    torch.cuda.set_device(rank)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=num_ranks,
        timeout=timedelta(seconds=timeout_s),
    )
    try:
        outcome = (True, function(*args))
    except BaseException:
        outcome = (False, traceback.format_exc())
    torch.save(outcome, Path(folder) / f"{rank}.pt")
    if outcome[0]:
        dist.barrier()
    os._exit(0)  # a process with a device mesh may abort while Python ends

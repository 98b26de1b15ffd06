"""How many bytes a training job holds: by its tensors, by torch's allocator, by the operating system."""

from __future__ import annotations

import ctypes
import gc
import json
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile

from atorch_ns.job import inner_optimizer

__all__ = ["Allocated", "StateBytes", "allocated", "resident", "state_bytes", "storage_bytes"]

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class StateBytes:
    """What one rank keeps of a model in training, in bytes; a storage counts once."""

    parameters: int
    gradients: int
    optimizer: int

    @property
    def total(self) -> int:
        """All three."""
        return self.parameters + self.gradients + self.optimizer


def state_bytes(model: nn.Module, optimizer: torch.optim.Optimizer) -> StateBytes:
    """Read after a step, before gradients are cleared."""
    parameters = list(model.parameters())
    return StateBytes(
        parameters=storage_bytes(parameters),
        gradients=storage_bytes(parameter.grad for parameter in parameters if parameter.grad is not None),
        optimizer=storage_bytes(_state_tensors(optimizer)),
    )


def _state_tensors(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    optimizer = inner_optimizer(optimizer)
    optimizer = getattr(optimizer, "optim", optimizer)  # of those that keep this rank's part in another one
    for state in optimizer.state.values():
        yield from (value for value in state.values() if isinstance(value, torch.Tensor))


def storage_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of the memory behind ``tensors`` on this rank, whole storages, each once."""
    storages: dict[int, int] = {}
    for tensor in tensors:
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        storage = local.detach().untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


@dataclass(frozen=True, kw_only=True)
class Allocated:
    """What torch's CPU allocator gave while a function ran, in bytes.

    Attributes:
        peak: the most that was alive at once, of what was allocated since the start.
        kept: what of it is alive at the end.
    """

    peak: int
    kept: int


def allocated(function: Callable[[], T]) -> tuple[T, Allocated]:
    """Calls ``function`` under torch's profiler, which sees every allocation, also of temporaries in C++."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as trace:
        torch.empty(1)  # an event to count from, if nothing else happens
        value = function()
        gc.collect()
        torch.empty(1)  # an event that tells the total at the end
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        trace.export_chrome_trace(str(path))
        events: list[dict[str, Any]] = json.loads(path.read_bytes())["traceEvents"]
    memory = sorted((event for event in events if event["name"] == "[memory]"), key=lambda event: event["ts"])
    # A total of the process, not of this thread: gradient and communication threads free tensors too.
    totals = [event["args"]["Total Allocated"] for event in memory]
    start = totals[0] - memory[0]["args"]["Bytes"]
    return value, Allocated(peak=max(totals) - start, kept=totals[-1] - start)


def resident(function: Callable[[], T]) -> tuple[T, int]:
    """Calls ``function``; the second value is how far the process's resident memory rose meanwhile, in bytes.

    Linux only. Freed memory goes back to the system at once, or the number would be that of glibc's habits.
    """
    _return_freed_memory()
    gc.collect()
    before = _status_bytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak is counted from here
    value = function()
    return value, _status_bytes("VmHWM") - before


def _return_freed_memory() -> None:
    libc = ctypes.CDLL(None)
    for parameter in (-1, -3):  # M_TRIM_THRESHOLD, M_MMAP_THRESHOLD
        libc.mallopt(parameter, 65536)
    libc.malloc_trim(0)


def _status_bytes(key: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * 1024
    raise KeyError(key)

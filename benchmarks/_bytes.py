"""How many bytes a training job holds: by its tensors, by the storages made meanwhile, by the operating system."""

from __future__ import annotations

import ctypes
import gc
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from atorch_ns.job.optimizer.step_optimizer import inner_optimizer

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
        storage = _local(tensor).detach().untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


@dataclass(frozen=True, kw_only=True)
class Allocated:
    """What tensors took while a function ran, in bytes.

    Attributes:
        peak: the most that was alive at once, of what was made since the start.
        kept: what of it is alive at the end.
    """

    peak: int
    kept: int


def allocated(function: Callable[[], T]) -> tuple[T, Allocated]:
    """Calls ``function`` and follows the storage of every tensor that an operator of torch makes meanwhile.

    A storage counts until the last reference is gone, on whatever thread. What libraries take without an
    operator (buffers inside a collective) is not seen; nothing is counted for meta tensors.
    """
    with _Storages() as storages:
        value = function()
    gc.collect()
    return value, Allocated(peak=storages.peak, kept=storages.alive())


class _Storages(TorchDispatchMode):
    """The storages made while it is active, and the largest sum of their sizes."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak = 0
        self._made: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = {id(storage) for storage in _storages((args, kwargs))}
        result = func(*args, **(kwargs or {}))
        for storage in _storages(result):
            if id(storage) not in before and id(storage) not in self._made:
                key = id(storage)
                self._made[key] = weakref.ref(storage, partial(self._forget, key))
        self.peak = max(self.peak, self.alive())
        return result

    def _forget(self, key: int, _: object) -> None:
        self._made.pop(key, None)

    def alive(self) -> int:
        """Bytes of those that still exist; a storage can also be resized to nothing."""
        storages = [reference() for reference in list(self._made.values())]
        return sum(storage.nbytes() for storage in storages if storage is not None)


def _storages(tree: Any) -> list[torch.UntypedStorage]:
    tensors = (_local(leaf) for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor))
    return [tensor.untyped_storage() for tensor in tensors if not tensor.is_meta]


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


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

"""torch.cuda as a name for the processor: lets code that was written for CUDA and NCCL run on CPUs and gloo."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["cuda_as_cpu"]

_CPU = torch.device("cpu")
_NOTHING = ("set_device", "synchronize", "empty_cache", "reset_peak_memory_stats", "manual_seed")
_ZERO = ("max_memory_allocated", "memory_allocated")


class _Stream:
    """A stream that is always done."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        return _nothing


class _Properties:
    total_memory = 80 * 2**30
    """Bytes: what is asked for is only recorded."""


def _nothing(*_: Any, **__: Any) -> None:
    pass


def _zero(*_: Any, **__: Any) -> int:
    return 0


def _cpu(*_: Any, **__: Any) -> torch.device:
    return _CPU


def _properties(*_: Any, **__: Any) -> type[_Properties]:
    return _Properties


def _itself(tensor: Any, *_: Any, **__: Any) -> Any:
    return tensor


def cuda_as_cpu() -> None:
    """Replaces what the process would ask of CUDA, and joins the other ranks by gloo if there is a launcher."""
    cuda: Any = torch.cuda
    for names, stand_in in ((_NOTHING, _nothing), (_ZERO, _zero)):
        for name in names:
            setattr(cuda, name, stand_in)
    cuda.current_device, cuda.get_device_properties = _cpu, _properties
    cuda.Stream = cuda.stream = cuda.default_stream = cuda.current_stream = _Stream
    moved: tuple[Any, ...] = (torch.Tensor, torch.nn.Module)
    for kind in moved:
        kind.cuda = _itself
    if "RANK" in os.environ and not dist.is_initialized():
        dist.init_process_group("gloo")

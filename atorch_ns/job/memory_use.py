"""Memory of a training job: bytes of its states, and advice against fragmentation."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

import torch

from atorch_ns.job.optimizer.step_optimizer import inner_optimizer
from atorch_ns.job.result import Result
from atorch_ns.profile import plain_tensors
from atorch_ns.text import bytes_text, count_noun

_UNUSED_SHARE: Final = 0.2
_UNUSED_BYTES: Final = 2**30
_ALLOCATOR_VARIABLES: Final = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""The variable's name since torch 2.9, and the older name, which still works."""


@dataclass(frozen=True, kw_only=True)
class StateBytes:
    """Memory that a rank holds after a training step, in bytes. A shared storage counts once.

    Attributes:
        parameters: parameters of the model.
        gradients: gradients of parameters, or of their fp32 masters.
        optimizer: the optimizer's states and fp32 master weights.
        buffers: buffers of the model.
    """

    parameters: int
    gradients: int
    optimizer: int
    buffers: int = 0

    @property
    def total(self) -> int:
        """The sum of all four fields."""
        return self.parameters + self.gradients + self.optimizer + self.buffers


@dataclass(frozen=True, kw_only=True)
class PeakMemory:
    """Memory that a rank held in a training step.

    Attributes:
        peak_bytes: the largest number of bytes in use at the same time.
        states: bytes still held after the step.
    """

    peak_bytes: int
    states: StateBytes


def state_bytes(result: Result) -> StateBytes:
    """Memory that a job holds. Call it after a step, before gradients are cleared."""
    parameters = list(result.model.parameters())
    optim = None if result.optim is None else inner_optimizer(result.optim)
    targets = [] if optim is None else [p for group in optim.param_groups for p in group["params"]]
    states = [] if optim is None else _state_tensors(optim)
    weights = _storage_bytes(parameters)
    gradients = _storage_bytes(tensor.grad for tensor in (*parameters, *targets) if tensor.grad is not None)
    # Masters are updated instead of parameters, as are flat partitions with memory of their own.
    optimizer = {key: size for key, size in _storage_bytes((*targets, *states)).items() if key not in weights}
    return StateBytes(
        parameters=sum(weights.values()),
        gradients=sum(gradients.values()),
        optimizer=sum(optimizer.values()),
        buffers=sum(_storage_bytes(result.model.buffers()).values()),
    )


def _state_tensors(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    optimizer = getattr(optimizer, "optim", optimizer)  # optimizers that wrap the one of this rank's part
    values = (value for state in optimizer.state.values() for value in state.values())
    return [value for value in values if isinstance(value, torch.Tensor)]


def _storage_bytes(tensors: Iterable[torch.Tensor]) -> dict[int, int]:
    storages: dict[int, int] = {}
    for part in itertools.chain.from_iterable(map(plain_tensors, tensors)):
        storage = part.detach().untyped_storage()
        if storage.nbytes():
            storages[storage.data_ptr()] = storage.nbytes()  # views and tied tensors count once
    return storages


def fragmentation_advice(stats: Mapping[str, int], environment: Mapping[str, str] = os.environ) -> str | None:
    """Advice to set ``expandable_segments``, with figures, or ``None`` if little is lost or it is set.

    Much is lost if a fifth of reserved memory and over 1 GiB were never used, or an allocation was retried.

    Args:
        stats: result of ``torch.cuda.memory_stats()``.
        environment: environment variables.
    """
    reserved_bytes = stats.get("reserved_bytes.all.peak", 0)
    unused_bytes = max(0, reserved_bytes - stats.get("allocated_bytes.all.peak", 0))
    num_retries = stats.get("num_alloc_retries", 0)
    settings = ",".join(environment.get(name, "") for name in _ALLOCATOR_VARIABLES)
    is_high = num_retries > 0 or unused_bytes > max(_UNUSED_BYTES, _UNUSED_SHARE * reserved_bytes)
    if not is_high or "expandable_segments:True" in settings.replace(" ", ""):
        return None
    retry_text = f", and retried {count_noun(num_retries, 'allocation')}" if num_retries else ""
    return (
        f"the CUDA allocator holds {bytes_text(unused_bytes)} of {bytes_text(reserved_bytes)} that tensors "
        f"never use (measured){retry_text}: set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True before the program starts"
    )

"""Estimate: what a plan is predicted to cost, in parts.

The functions of this folder are pure: a profile, a cluster and plans in, bytes and seconds out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from atorch_ns.estimate.intervals import UNKNOWN, Intervals, Range


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Size of one training step, over all ranks.

    Attributes:
        global_batch: samples in a step.
        num_tokens: tokens in a sample; 1 where there is no sequence.
    """

    global_batch: int
    num_tokens: int = 1


class MemoryParts(NamedTuple):
    """Bytes on one rank at the step's worst moment. Its device must have their sum.

    Attributes:
        parameters: weights as they are kept between steps, and buffers.
        gradients: gradients of parameters, communication buckets included.
        optimizer: states and fp32 master weights.
        activations: tensors that are saved for the backward pass.
        temporaries: gathered parameters, casts, workspaces of operators, the optimizer's temporaries.
        reserve: kept by torch's allocator beyond tensors' need (CUDA), or by a method whatever the model.
        outside: held on the device beside torch's allocator: CUDA's context, NCCL's buffers.
    """

    parameters: float
    gradients: float
    optimizer: float
    activations: float
    temporaries: float
    reserve: float
    outside: float = 0.0

    @property
    def total(self) -> float:
        """The sum of all parts."""
        return sum(self)


class TimeParts(NamedTuple):
    """Seconds of one step on the slowest rank, without time that overlaps with computation.

    Attributes:
        compute: forward and backward pass.
        recompute: recomputing activations.
        gather: gathering parameters, where nothing hides it.
        reduce: reducing gradients, where nothing hides it.
        optimizer: the optimizer's update.
        offload: transfers between device and host, exposed.
        bubble: a pipeline's ranks waiting for each other.
        overhead: launching operators and collectives, data, the step's own work.
        exchange: sending activations between ranks that hold parts of the model or of a sample.
    """

    compute: float
    recompute: float
    gather: float
    reduce: float
    optimizer: float
    offload: float
    bubble: float
    overhead: float
    exchange: float = 0.0

    @property
    def total(self) -> float:
        """Seconds of one step."""
        return sum(self)


@dataclass(frozen=True)
class Collective:
    """Collectives of one kind that one rank takes part in during one step.

    Attributes:
        kind: ``"all_reduce"``, ``"all_gather"``, ``"reduce_scatter"``, ``"broadcast"``.
        axis: the mesh axis, ``"data"`` for all ranks that see different data.
        count: the number of calls.
        num_bytes: bytes of the whole tensors of all calls (of the gathered result, or the reduced input).
    """

    kind: str
    axis: str
    count: int
    num_bytes: int


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """Predicted cost of one plan. All figures are predictions.

    Attributes:
        memory: bytes per rank at the worst moment.
        time: seconds per step.
        peak_at: the worst moment, in words: ``"backward of model.layers.0"``.
        collectives: collectives of each step.
        intervals: uncertainty of the figures, as factors.
        notes: parts of the strategy that were added, changed or left out for the cluster, in words.
    """

    memory: MemoryParts
    time: TimeParts
    peak_at: str = ""
    collectives: tuple[Collective, ...] = ()
    intervals: Intervals = UNKNOWN
    notes: tuple[str, ...] = ()

    @property
    def allocated_bytes(self) -> float:
        """Peak bytes of tensors on one rank, as counted by ``torch.cuda.max_memory_allocated`` and trials."""
        return self.reserved_bytes - self.memory.reserve

    @property
    def reserved_bytes(self) -> float:
        """Bytes that torch holds for them, as ``torch.cuda.max_memory_reserved`` counts."""
        return self.peak_bytes - self.memory.outside

    @property
    def least_bytes(self) -> float:
        """Least bytes to run: ``peak_bytes`` less the memory that torch's allocator can give back."""
        return self.allocated_bytes + self.memory.outside

    @property
    def peak_bytes(self) -> float:
        """Bytes that a rank's device must have, also outside torch (CPU: tensors). Limits apply to them."""
        return self.memory.total

    @property
    def step_seconds(self) -> float:
        """Seconds of one step."""
        return self.time.total

    @property
    def peak_bytes_interval(self) -> Range:
        """Bytes between which eight of ten runs of this class lie."""
        low, high = self.intervals.memory
        return low * self.peak_bytes, high * self.peak_bytes

    @property
    def step_seconds_interval(self) -> Range:
        """Seconds between which eight of ten runs of this class lie."""
        low, high = self.intervals.time
        return low * self.step_seconds, high * self.step_seconds

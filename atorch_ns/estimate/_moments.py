"""The moments of a step at which memory can be at its most, and what plans have in common at each.

Between the ends of a run of equal blocks memory changes by the same amount from block to block, so only the
first and the last block of each run can be the worst.

Legend: R plans of one kind, s a segment, j one of its blocks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from atorch_ns.estimate._activations import Activations, Place
from atorch_ns.estimate._parts import Parts
from atorch_ns.estimate._shards import Parameters
from atorch_ns.estimate._states import KeptBytes, Shares
from atorch_ns.estimate._units import DTYPE_BYTES
from atorch_ns.profile import Trace
from atorch_ns.strategy import Plan

__all__ = ["Kind", "Moment", "moment_names", "places"]


class Moment(NamedTuple):
    """Bytes beyond what is kept between steps, at one moment.

    Attributes:
        name: index into :func:`moment_names`.
        gradients: [R] of parameters, communication buckets included.
        activations: [R] saved for the backward pass, and what operators need.
        temporaries: [R] gathered parameters, casts, buffers of collectives.
    """

    name: int
    gradients: np.ndarray
    activations: np.ndarray
    temporaries: np.ndarray


def moment_names(trace: Trace) -> tuple[str, ...]:
    """The moments in words: forward and backward pass of the first and the last block of each segment, and the
    optimizer's step."""
    names = []
    for segment in trace.segments:
        first, last = (segment.paths[0], segment.paths[-1]) if segment.paths else (segment.name, segment.name)
        names += [f"{way} of {path}" for way in ("forward", "backward") for path in (first, last)]
    return (*names, "the optimizer's step")


def places(kind: Kind) -> Iterator[tuple[int, Place, int, int]]:
    """``(s, j, forward, backward)``: the ends of each run, with the indices of their moments.

    Where plans have different numbers of blocks, ``j`` is [R]; it means nothing where a rank has none.
    """
    for s, count in enumerate(kind.parts.counts):
        if isinstance(count, np.ndarray):
            if not count.any():
                continue
            yield s, np.zeros_like(count), 4 * s, 4 * s + 2
            if (count > 1).any():
                yield s, count - 1, 4 * s + 1, 4 * s + 3
            continue
        for which, j in enumerate(sorted({0, count - 1})):
            end = which if count > 1 else 1
            yield s, j, 4 * s + end, 4 * s + 2 + end


@dataclass(frozen=True)
class Kind:
    """R plans of one kind, with everything that their moments are made of.

    Attributes:
        plan: what they have in common.
        trace: of the model.
        activations: of a micro-batch.
        parameters: of the model.
        shares: [K, P] how states are divided, for K numbers of ranks.
        kept: [K] bytes of states.
        row: [R] which of the K numbers of ranks.
        degree: [R] ranks that states are divided over.
        num_ranks: [R] ranks that see different data.
        micro_batches: [R].
        parts: [R] which part of the model a rank has.
        expanded: for each segment how many of its blocks stand in ``parameters`` one by one.
        is_cpu: whether collectives are gloo's, which copies what it reduces and gathers.
    """

    plan: Plan
    trace: Trace
    activations: Activations
    parameters: Parameters
    shares: Shares
    kept: KeptBytes
    row: np.ndarray
    degree: np.ndarray
    num_ranks: np.ndarray
    micro_batches: np.ndarray
    parts: Parts
    expanded: tuple[int, ...]
    is_cpu: bool

    @property
    def offloads(self) -> bool:
        """Whether states stay in a memory that is not the device's."""
        return self.plan.offload and not self.is_cpu

    @property
    def offloads_optimizer(self) -> bool:
        """Whether the optimizer's states stay in a memory that is not the device's."""
        return self.offloads or (self.plan.offload_optimizer and not self.is_cpu)

    @property
    def accumulates(self) -> np.ndarray:
        """[R] whether gradients of earlier micro-batches are there, to which others are added."""
        return self.parts.accumulates

    def whole(self, s: int, itemsize: int | None = None, *, trainable: bool = True) -> np.ndarray | float:
        """Bytes of one block's parameters, not divided over data, in an item size or their own."""
        mine = self._mine(s, trainable)
        sizes = self.parameters.itemsize if itemsize is None else itemsize
        total = (self.parameters.elements * sizes * mine).sum(axis=-1) / self.expanded[s]
        return float(total) if total.ndim == 0 else np.asarray(total[self.row])

    def divided(self, s: int, itemsize: int | None = None, *, trainable: bool = True) -> np.ndarray:
        """[R] bytes of a rank's part of one block's parameters, padding included."""
        mine = self._mine(s, trainable)
        sizes = self.parameters.itemsize if itemsize is None else itemsize
        share = self.shares.gradients if trainable else self.shares.parameters
        return np.asarray((share.stored * (sizes * mine)).sum(axis=-1)[self.row] / self.expanded[s])

    def _mine(self, s: int, trainable: bool) -> np.ndarray:
        """[P] or [K, P] whether a parameter is one of the segment's."""
        mine = (self.parameters.segment == s) & (self.parameters.copies > 0)
        return np.asarray(mine & self.parameters.trainable if trainable else mine)

    def total(self, of: Sequence[np.ndarray | float]) -> np.ndarray | float:
        """The sum of ``of`` (a value for a block of each segment) over all blocks of the rank."""
        return self.parts.total(of)

    def later(self, s: int, j: Place, of: Sequence[np.ndarray | float]) -> np.ndarray | float:
        """The sum of ``of`` (a value for a block of each segment) over all that runs forward after a place."""
        counts = self.parts.counts
        rest = sum(value * count for value, count in zip(of[s + 1 :], counts[s + 1 :], strict=True))
        return rest + of[s] * (counts[s] - 1 - j)

    def last_moment(self) -> int:
        """The optimizer's step."""
        return 4 * len(self.trace.segments)

    def step_temporaries(self) -> np.ndarray:
        """[R] what the optimizer needs while it steps."""
        spec = self.trace.optimizer
        if spec is None or self.offloads_optimizer:
            return np.zeros(len(self.row))
        updated = self.parameters.itemsize
        if self.plan.master_dtype is not None:
            updated = np.maximum(updated, DTYPE_BYTES[self.plan.master_dtype])
        held = self.shares.optimizer.elements * (updated * self.parameters.trainable)
        copies = self.parameters.copies
        everything = (held * copies).sum(axis=-1)
        held = held * (copies > 0)
        if self.plan.updates_copy:  # the optimizer sees one vector
            largest = everything
        elif self.plan.shard_layout == "parameters":  # a share counts whole parameters, as a mean over copies
            largest = ((held > 0) * (self.parameters.elements * updated)).max(axis=1, initial=0.0)
        else:
            largest = held.max(axis=1, initial=0.0)
        temporaries = spec.parameter_temporaries * largest + spec.temporary_copies * everything
        return np.asarray(temporaries[self.row])

"""Activations: bytes that the forward pass saves for the backward pass, and the other needs of each segment.

Legend: R plans of one kind, s a segment, j one of its blocks.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import numpy as np

from atorch_ns.estimate.model_shard import ModelShard, is_recomputed, saved_results
from atorch_ns.pipeline import BUFFERS
from atorch_ns.profile import Growth, PhaseCost, SegmentCost, Trace
from atorch_ns.strategy import Plan

GradientLife = Literal["none", "keeping", "passing"]
"""Lifetime of a parameter's gradient in the stretch that makes it: none, to its end, or until handed on."""


@dataclass(frozen=True)
class SegmentBytes:
    """Bytes of one block of each segment, in one precision, on the ranks of R plans.

    Attributes:
        costs: the costs of each segment.
        parts: the part of the model that a rank holds.
        num_samples: [R] samples in a micro-batch of one rank.
        num_tokens: tokens in a sample.
    """

    costs: tuple[SegmentCost, ...]
    parts: ModelShard
    num_samples: np.ndarray
    num_tokens: int

    def value(self, growth: Growth, s: int) -> np.ndarray:
        """Bytes of ``growth`` in segment ``s`` on a rank, [R]."""
        whole = growth.at(self.num_samples, self.num_tokens)
        # What does not grow with tokens, as gradients of weights, is the same on all ranks along `sequence`.
        whole = whole + growth.constant * (self.parts.positions(s) * self.parts.of_gradients(s) - 1)
        return np.asarray(whole * self.parts.share(s, growth.divided, growth.words))

    @cached_property
    def outputs(self) -> tuple[np.ndarray, ...]:
        """[R] bytes that each segment hands to the next."""
        return tuple(self.value(cost.output, s) for s, cost in enumerate(self.costs))

    @cached_property
    def incoming(self) -> tuple[np.ndarray, ...]:
        """Further bytes that are alive when the backward pass begins."""
        return tuple(self.value(cost.incoming, s) for s, cost in enumerate(self.costs))

    @cached_property
    def saved(self) -> tuple[np.ndarray, ...]:
        """Bytes that are saved for the backward pass."""
        return tuple(
            self.value(cost.saved, s)
            - self._let_go(s)
            # Megatron's sequence parallelism keeps the gathered inputs of column layers.
            + self.parts.gathered_inputs(s) * cost.output.at(self.num_samples, self.num_tokens)
            for s, cost in enumerate(self.costs)
        )

    def _let_go(self, s: int) -> np.ndarray | float:
        # [R] bytes of the first block's input that other ranks along ``sequence`` keep.
        segments = self.parts.trace.segments
        if segments[s].is_block or s + 1 == len(segments) or not segments[s + 1].is_block:
            return 0.0
        # Each rank goes on with its part of the sample; bytes that do not grow with it stay.
        output = replace(self.costs[s].output, constant=0.0)
        return self.value(output, s) * (1.0 - 1.0 / np.asarray(self.parts.positions(s + 1)))

    @cached_property
    def until_return(self) -> np.ndarray:
        """[R] bytes that a rank's segments hold and free before their backward pass."""
        each = (
            count * self.value(cost.held, s)
            for s, (cost, count) in enumerate(zip(self.costs, self.parts.counts, strict=True))
        )
        return np.asarray(sum(each, np.zeros(self.num_samples.shape)))

    @cached_property
    def forward_peaks(self) -> tuple[np.ndarray, ...]:
        """Peak bytes of a forward pass."""
        return tuple(
            self._max_of_lines(cost.forward.peaks or (cost.forward.peak,), s)
            for s, cost in enumerate(self.costs)
        )

    def backward_peak(self, s: int, gradients: GradientLife) -> np.ndarray:
        """[R] peak bytes of a backward pass of segment ``s``."""
        if (s, gradients) not in self._backward_peaks:
            lines = _peak_lines(self.costs[s].backward, gradients)
            self._backward_peaks[s, gradients] = self._max_of_lines(lines, s)
        return self._backward_peaks[s, gradients]

    @cached_property
    def _backward_peaks(self) -> dict[tuple[int, GradientLife], np.ndarray]:
        return {}

    def _max_of_lines(self, lines: Iterable[Growth], s: int) -> np.ndarray:
        values = (self.value(line, s) for line in lines)
        return np.asarray(functools.reduce(np.maximum, values, np.zeros(self.num_samples.shape)))


def _peak_lines(phase: PhaseCost, gradients: GradientLife) -> tuple[Growth, ...]:
    lines = {"none": (), "keeping": phase.peaks_keeping, "passing": phase.peaks_passing}[gradients]
    return lines or phase.peaks or (phase.peak,)


Place = int | np.ndarray
"""A number of blocks: the same for all plans, or [R]."""

COMPILED_SAVED = 0.78
"""Share of activations that a compiled block keeps: AOTAutograd's min-cut partitioner recomputes element-wise
operators whose results no matrix product reads (``aot_eager`` and ``inductor``). It is that of Llama's and
GPT-2's blocks; a block without products of activations (an MLP with one GELU) keeps all."""

_COMPILERS = ("inductor", "aot_eager")  # backends that run AOTAutograd's partitioner

RNG_STATE_BYTES = 5056
"""``torch.get_rng_state()`` of the CPU: recomputation keeps one per block, and one more while it runs."""


@dataclass(frozen=True)
class Activations:
    """Bytes of activations under R plans of one kind.

    A place ``j`` within a segment is one number for all plans, or [R].

    Attributes:
        plan: the plan that they have in common.
        bytes: bytes of one block of each segment.
        offloads: whether the inputs of recomputation are kept outside the device's memory.
    """

    plan: Plan
    trace: Trace
    bytes: SegmentBytes
    offloads: bool = False

    @property
    def parts(self) -> ModelShard:
        """The part of the model that a rank has."""
        return self.bytes.parts

    @property
    def costs(self) -> tuple[SegmentCost, ...]:
        """The costs of each segment in the plan's precision."""
        return self.bytes.costs

    def before(self, s: int, j: Place) -> np.ndarray:
        """[R] bytes kept by all blocks that run before block ``j`` of segment ``s``."""
        return np.asarray(self._before_segment[s] + self._kept_bytes(s, j))

    def everything(self) -> np.ndarray:
        """[R] bytes kept by a whole forward pass."""
        return self._before_segment[-1]

    def received(self, micro_batches: np.ndarray) -> np.ndarray:
        """[R] bytes of a pipeline stage's receive buffers, in both directions."""
        if not self.parts.is_cut:
            return self._zero_bytes
        first = last = self._zero_bytes
        # From the last segment to the first: the first one that the rank has decides what it receives.
        for s in reversed(range(len(self.costs))):
            before = self.bytes.outputs[s - 1] if s else self._zero_bytes
            # A rank that has only some of a run's blocks may begin inside the run.
            is_inside = self.parts.counts[s] < self.trace.segments[s].count
            inner = self.bytes.outputs[s] if self.trace.segments[s].is_block else before
            first = np.where(
                self.parts.has(s), np.where(is_inside & (s > 0), np.maximum(before, inner), before), first
            )
        for s in range(len(self.costs)):  # the last segment that it has decides what it sends
            last = np.where(self.parts.has(s), self.bytes.outputs[s], last)
        buffers = np.minimum(micro_batches, BUFFERS)
        return np.asarray(buffers * (first * self.parts.receives + last * self.parts.sends))

    def forward(self, s: int, j: Place) -> np.ndarray:
        """[R] bytes at the worst moment of a forward pass."""
        return np.asarray(self.before(s, j) + self.bytes.forward_peaks[s] + self._brought_back(s, j))

    def forward_moments(self, s: int, j: Place) -> list[tuple[np.ndarray, np.ndarray | float]]:
        """Worst moments of a forward pass, each with the bytes of autocast's copies of parameters.

        Autocast's cache is cleared when the model returns: at the loss, only copies saved for later remain.
        """
        if s < len(self.trace.segments) - 1:
            return [(self.forward(s, j), self.casts_made(s, j))]
        return [(self.before(s, j), self.casts_made(s, j)), (self.forward(s, j), self.casts_saved(s, j))]

    def entering_backward(self, s: int, j: Place) -> np.ndarray:
        """[R] bytes when a backward pass begins, with the gradient of its output."""
        return np.asarray(self.before(s, j + 1) + self.bytes.incoming[s])

    def backward(self, s: int, j: Place, gradients: GradientLife) -> np.ndarray:
        """[R] bytes at the worst moment of a backward pass, recomputation included."""
        alive = self.entering_backward(s, j)
        peak = self.bytes.backward_peak(s, gradients)
        recomputes = self.recomputes(s, j)
        if recomputes is False:
            return np.asarray(alive + peak)
        checkpoint = self.bytes.outputs[s] + self._kept_inside(s)
        again = self.bytes.saved[s] - checkpoint  # saved anew before the backward pass of the block
        # Recomputation stops as soon as everything saved is there again, so its output is not made.
        running = self.bytes.forward_peaks[s] - checkpoint
        # Of blocks that are recomputed as one, those before this one keep all that they have saved again.
        more = (self._start_positions[s] + j) % self.plan.recomputation.chunk * self.bytes.saved[s]
        worst = np.maximum(np.maximum(running, again), again + peak) + more
        return np.asarray(
            alive + np.where(recomputes, RNG_STATE_BYTES + worst + self._brought_back(s, j), peak)
        )

    def _brought_back(self, s: int, j: Place) -> np.ndarray | float:
        """[R] bytes of the input of a block that is recomputed from host memory, while the block runs."""
        if not self.offloads or self.recomputes(s, j) is False:
            return 0.0
        return np.where(self.recomputes(s, j), self.bytes.outputs[s], 0.0)

    def leaving_backward(self, s: int, j: Place) -> np.ndarray:
        """[R] bytes when a backward pass is over, with the gradient of its input."""
        if not self.parts.is_cut:
            if np.any(np.asarray(j) > 0):
                return self.entering_backward(s, j - 1)
            return self.entering_backward(s - 1, self.parts.counts[s - 1] - 1) if s else self._zero_bytes
        # In a stage, the block before may be of any earlier segment that the rank has, or on another rank.
        within = self.entering_backward(s, j - 1) if np.any(np.asarray(j) > 0) else self._zero_bytes
        before = self._zero_bytes
        for index in range(s):
            before = np.where(
                self.parts.has(index), self.entering_backward(index, self.parts.counts[index] - 1), before
            )
        return np.asarray(np.where(np.asarray(j) > 0, within, before))

    def recomputes(self, s: int, j: Place) -> bool | np.ndarray:
        """Returns whether block ``j`` of segment ``s`` is recomputed."""
        if not self._is_recomputable[s]:
            return False
        position = self._start_positions[s] + j
        return (
            position % self.plan.recomputation.every == 0
            if self._recomputed_prefix_length is None
            else position < self._recomputed_prefix_length
        )

    def casts_made(self, s: int, j: Place) -> np.ndarray | float:
        """Bytes of autocast's copies of parameters when block ``j`` runs forward: the cache keeps all."""
        counts = self.parts.counts
        return sum(self._cast_bytes[i] * counts[i] for i in range(s)) + self._cast_bytes[s] * (j + 1)

    def casts_saved(self, s: int, j: Place) -> np.ndarray | float:
        """Bytes of these copies when it runs backward, of it and of unrecomputed blocks still to come."""
        total: np.ndarray | float = 0.0
        for index in range(s + 1):
            count = self.parts.counts[index] if index < s else j + 1
            total = total + self._cast_bytes[index] * (count - self._num_recomputed(index, count))
        return total + self._cast_bytes[s] * self.recomputes(s, j)

    def _kept_bytes(self, s: int, count: Place) -> np.ndarray:  # [R] by the first ``count`` blocks
        again = self._num_recomputed(s, count)
        num_bytes = (count - again) * self._share_saved(s) * self.bytes.saved[s]
        if np.any(again):
            # A chunk of recomputed blocks keeps a random state, and its input unless that is in host memory.
            output = 0.0 if self.offloads else self.bytes.outputs[s]
            chunks = np.ceil(again / self.plan.recomputation.chunk)
            num_bytes = num_bytes + chunks * (output + RNG_STATE_BYTES) + again * self._kept_inside(s)
        return np.asarray(num_bytes)

    def _share_saved(self, s: int) -> float:
        segments = self.trace.segments
        # Blocks alone are compiled, or the whole model where it has none.
        is_compiled = segments[s].is_block or not any(segment.is_block for segment in segments)
        if not is_compiled or self.plan.compiler not in _COMPILERS:
            return 1.0
        return COMPILED_SAVED if any(each.name == "aten.mul" for each in self.costs[s].operators) else 1.0

    def _kept_inside(self, s: int) -> np.ndarray | float:
        """Bytes of operator results that selective recomputation keeps of a block beside its output."""
        results = saved_results(self.plan, self.costs[s])
        is_compiled = self.plan.compiler in _COMPILERS and self.trace.segments[s].is_block
        # A compiled graph keeps only those results that its backward pass reads.
        growths = (each.read_again if is_compiled else each.size for each in results)
        return sum((self.bytes.value(growth, s) for growth in growths), 0.0)

    def _num_recomputed(self, s: int, count: Place) -> Place:
        if not self._is_recomputable[s]:
            return 0
        every, start = self.plan.recomputation.every, self._start_positions[s]
        if self._recomputed_prefix_length is not None:
            return np.asarray(np.clip(self._recomputed_prefix_length - start, 0, count))
        # Multiples of n among the positions [start, start + count).
        return -(-(start + count) // every) - (-(-start // every))

    @cached_property
    def _recomputed_prefix_length(self) -> np.ndarray | None:
        # [R] how many of the rank's first blocks are recomputed; ``None`` where it is every n-th.
        share = self.parts.recomputed_share(self.plan)
        if share is None:
            return None
        able = sum(c for c, flag in zip(self.parts.counts, self._is_recomputable, strict=True) if flag)
        return np.asarray(np.floor(share * able + 0.5))  # rounded as the pipeline does (num_recomputed)

    @cached_property
    def _zero_bytes(self) -> np.ndarray:
        return np.zeros(self.bytes.num_samples.shape)

    @cached_property
    def _cast_bytes(self) -> tuple[np.ndarray | float, ...]:  # autocast's copies of one block's parameters
        return tuple(
            cost.cast_parameters * (self.parts.of_parameters(s) if cost.cast_parameters else 1.0)
            for s, cost in enumerate(self.costs)
        )

    @cached_property
    def _before_segment(self) -> tuple[np.ndarray, ...]:
        before = [self._zero_bytes]  # one more than there are segments: the last is of all
        for s, count in enumerate(self.parts.counts):
            before.append(before[-1] + self._kept_bytes(s, count))
        return tuple(before)

    @cached_property
    def _is_recomputable(self) -> tuple[bool, ...]:
        return tuple(is_recomputed(self.plan, segment) for segment in self.trace.segments)

    @cached_property
    def _start_positions(self) -> tuple[Place, ...]:
        positions: list[Place] = []
        total: Place = 0
        for count, flag in zip(self.parts.counts, self._is_recomputable, strict=True):
            positions.append(total)  # recomputable blocks before the segment
            total = total + (count if flag else 0)
        return tuple(positions)

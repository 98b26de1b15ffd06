"""What is saved for the backward pass, and what one stretch of it needs beyond that.

Legend: R plans of one kind, s a segment, j one of its blocks.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np

from atorch_ns.estimate._units import cost_of, matches
from atorch_ns.profile import Growth, PhaseCost, Segment, SegmentCost, Trace
from atorch_ns.strategy import Plan

__all__ = ["COMPILED_SAVED", "Activations", "GradientLife"]

GradientLife = Literal["none", "keeping", "passing"]
"""How long a gradient of a parameter counts inside the stretch that makes it: not at all, to its end, or until
it has been handed on."""

COMPILED_SAVED = 0.78
"""Share of activations that a compiled block keeps: AOTAutograd's min-cut partitioner, with ``aot_eager`` and
``inductor`` alike, recomputes element-wise operators whose results no matrix product reads. It is that of Llama's
and GPT-2's blocks; a block without products of activations (an MLP with one GELU) keeps all."""

_COMPILERS = ("inductor", "aot_eager")

RNG_STATE_BYTES = 5056
"""``torch.get_rng_state()`` of the CPU: recomputation keeps one for each block, and one more while it runs."""


@dataclass(frozen=True)
class Activations:
    """Bytes of activations under R plans of one kind.

    Attributes:
        plan: what they have in common.
        trace: of the model.
        num_samples: [R] in a micro-batch of one rank.
        num_tokens: in a sample.
    """

    plan: Plan
    trace: Trace
    num_samples: np.ndarray
    num_tokens: int

    @cached_property
    def costs(self) -> tuple[SegmentCost, ...]:
        """Of each segment, in the plan's precision."""
        return tuple(cost_of(self.plan, segment) for segment in self.trace.segments)

    def value(self, growth: Growth) -> np.ndarray:
        """[R] of a growth."""
        return np.asarray(growth.at(self.num_samples, self.num_tokens))

    def largest(self, lines: Iterable[Growth]) -> np.ndarray:
        """[R] the largest of several growths; 0 of none."""
        return np.asarray(functools.reduce(np.maximum, map(self.value, lines), self._zeros))

    def before(self, s: int, j: int) -> np.ndarray:
        """[R] kept by everything that runs before block ``j`` of segment ``s``."""
        return np.asarray(self._before_segment[s] + self._kept(s, j))

    def forward(self, s: int, j: int) -> np.ndarray:
        """[R] at the worst moment of a forward pass."""
        return np.asarray(self.before(s, j) + self._forward_peaks[s])

    def forward_moments(self, s: int, j: int) -> list[tuple[np.ndarray, int]]:
        """Worst moments of a forward pass, each with the bytes of autocast's copies of parameters.

        The cache of autocast is cleared when the model returns. The last stretch ends with the loss: then only
        what is saved for the backward pass is left of the copies.
        """
        if s < len(self.trace.segments) - 1:
            return [(self.forward(s, j), self.casts_made(s, j))]
        return [(self.before(s, j), self.casts_made(s, j)), (self.forward(s, j), self.casts_saved(s, j))]

    def entering_backward(self, s: int, j: int) -> np.ndarray:
        """[R] when a backward pass begins: the gradient of its output is there."""
        return np.asarray(self.before(s, j + 1) + self.value(self.costs[s].incoming))

    def backward(self, s: int, j: int, gradients: GradientLife) -> np.ndarray:
        """[R] at the worst moment of a backward pass, recomputation included."""
        cost = self.costs[s]
        alive = self.entering_backward(s, j)
        peak = self.largest(_lines(cost.backward, gradients))
        if not self.recomputes(s, j):
            return np.asarray(alive + peak)
        kept = self.value(cost.output) + self._kept_inside(s)
        again = self._saved[s] - kept
        # Recomputation stops as soon as everything saved is there again, so its output is not made.
        running = self._forward_peaks[s] - kept
        worst = np.maximum(np.maximum(running, again), again + peak)
        return np.asarray(alive + RNG_STATE_BYTES + worst)

    def leaving_backward(self, s: int, j: int) -> np.ndarray:
        """[R] when a backward pass is over: the gradient of its input is there."""
        if j > 0:
            return self.entering_backward(s, j - 1)
        if s > 0:
            return self.entering_backward(s - 1, self.trace.segments[s - 1].count - 1)
        return self._zeros

    def recomputes(self, s: int, j: int) -> bool:
        """Whether block ``j`` of segment ``s`` is recomputed."""
        if not self._recomputable[s]:
            return False
        return (self._position[s] + j) % self.plan.recompute_every == 0

    def casts_made(self, s: int, j: int) -> int:
        """Bytes of autocast's copies of parameters when block ``j`` runs forward: the cache keeps all."""
        costs, segments = self.costs, self.trace.segments
        return sum(costs[i].cast_parameters * segments[i].count for i in range(s)) + (
            costs[s].cast_parameters * (j + 1)
        )

    def casts_saved(self, s: int, j: int) -> int:
        """The same when it runs backward: those of what was not recomputed and comes later, and its own."""
        total = 0
        for index in range(s + 1):
            count = self.trace.segments[index].count if index < s else j + 1
            own = count - self._num_recomputed(index, count)
            total += self.costs[index].cast_parameters * own
        return total + self.costs[s].cast_parameters * self.recomputes(s, j)

    def _kept(self, s: int, count: int) -> np.ndarray:
        """[R] what the first ``count`` blocks of a segment keep."""
        if count == 0:
            return self._zeros
        again = self._num_recomputed(s, count)
        kept = (count - again) * self._share_saved(s) * self._saved[s]
        if again:
            output = self.value(self.costs[s].output)
            kept = kept + again * (output + RNG_STATE_BYTES + self._kept_inside(s))
        return kept

    def _share_saved(self, s: int) -> float:
        segments = self.trace.segments
        compiled = segments[s].is_block or not any(segment.is_block for segment in segments)
        if not compiled or self.plan.compiler not in _COMPILERS:
            return 1.0
        return COMPILED_SAVED if any(each.name == "aten.mul" for each in self.costs[s].operators) else 1.0

    def _kept_inside(self, s: int) -> np.ndarray | float:
        """What selective recomputation keeps of a block: the share of operators' results that it saves."""
        if self.plan.recompute != "selective":
            return 0.0
        cost = self.costs[s]
        saved = {name.removesuffix(".default") for name in self.plan.saved_operators}
        total = sum(float(self.value(each.moved).max()) for each in cost.operators)
        kept = sum(float(self.value(each.moved).max()) for each in cost.operators if each.name in saved)
        share = kept / total if total else 0.0
        return np.asarray(share * np.maximum(self.value(cost.saved) - self.value(cost.output), 0.0))

    def _num_recomputed(self, s: int, count: int) -> int:
        if not self._recomputable[s] or count == 0:
            return 0
        every, start = self.plan.recompute_every, self._position[s]
        return -(-(start + count) // every) - (-(-start // every))

    @cached_property
    def _zeros(self) -> np.ndarray:
        return np.zeros(self.num_samples.shape)

    @cached_property
    def _saved(self) -> tuple[np.ndarray, ...]:
        return tuple(self.value(cost.saved) for cost in self.costs)

    @cached_property
    def _forward_peaks(self) -> tuple[np.ndarray, ...]:
        return tuple(self.largest(cost.forward.peaks or (cost.forward.peak,)) for cost in self.costs)

    @cached_property
    def _before_segment(self) -> tuple[np.ndarray, ...]:
        """For each segment what everything before it keeps."""
        before = [self._zeros]
        for s, segment in enumerate(self.trace.segments):
            before.append(before[-1] + self._kept(s, segment.count))
        return tuple(before)

    @cached_property
    def _recomputable(self) -> tuple[bool, ...]:
        return tuple(_is_recomputed(self.plan, segment) for segment in self.trace.segments)

    @cached_property
    def _position(self) -> tuple[int, ...]:
        """For each segment how many recomputable blocks come before it."""
        positions, total = [], 0
        for segment, chosen in zip(self.trace.segments, self._recomputable, strict=True):
            positions.append(total)
            total += segment.count if chosen else 0
        return tuple(positions)


def _is_recomputed(plan: Plan, segment: Segment) -> bool:
    if plan.recompute == "none" or not segment.is_block:
        return False
    return plan.recomputed is None or any(matches(selector, segment) for selector in plan.recomputed)


def _lines(phase: PhaseCost, gradients: GradientLife) -> tuple[Growth, ...]:
    if gradients == "keeping":
        return phase.peaks_keeping or phase.peaks or (phase.peak,)
    if gradients == "passing":
        return phase.peaks_passing or phase.peaks or (phase.peak,)
    return phase.peaks or (phase.peak,)

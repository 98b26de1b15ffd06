"""Bytes of one block of each segment: what it saves, hands on, and needs while it runs.

Legend: R plans of one kind, s a segment.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np

from atorch_ns.estimate._parts import Parts
from atorch_ns.profile import Growth, PhaseCost, SegmentCost

__all__ = ["GradientLife", "SegmentBytes"]

GradientLife = Literal["none", "keeping", "passing"]
"""How long a gradient of a parameter counts inside the stretch that makes it: not at all, to its end, or until
it has been handed on."""


@dataclass(frozen=True)
class SegmentBytes:
    """Bytes of one block of each segment, in one precision, on the ranks of R plans.

    Attributes:
        costs: of each segment.
        parts: which part of the model a rank has.
        num_samples: [R] in a micro-batch of one rank.
        num_tokens: in a sample.
    """

    costs: tuple[SegmentCost, ...]
    parts: Parts
    num_samples: np.ndarray
    num_tokens: int

    def value(self, growth: Growth, s: int) -> np.ndarray:
        """[R] of a growth of segment ``s``."""
        whole = growth.at(self.num_samples, self.num_tokens)
        return np.asarray(whole * self.parts.share(s, growth.divided, growth.words))

    @cached_property
    def outputs(self) -> tuple[np.ndarray, ...]:
        """What is handed to the next one."""
        return tuple(self.value(cost.output, s) for s, cost in enumerate(self.costs))

    @cached_property
    def incoming(self) -> tuple[np.ndarray, ...]:
        """What is alive beside it when the backward pass begins."""
        return tuple(self.value(cost.incoming, s) for s, cost in enumerate(self.costs))

    @cached_property
    def saved(self) -> tuple[np.ndarray, ...]:
        """What is saved for the backward pass."""
        return tuple(
            self.value(cost.saved, s)
            + self.parts.gathered_inputs(s) * cost.output.at(self.num_samples, self.num_tokens)
            for s, cost in enumerate(self.costs)
        )

    @cached_property
    def forward_peaks(self) -> tuple[np.ndarray, ...]:
        """The most of a forward pass."""
        return tuple(
            self._largest(cost.forward.peaks or (cost.forward.peak,), s) for s, cost in enumerate(self.costs)
        )

    def backward_peak(self, s: int, gradients: GradientLife) -> np.ndarray:
        """[R] the most of a backward pass of segment ``s``."""
        if (s, gradients) not in self._backward_peaks:
            lines = _lines(self.costs[s].backward, gradients)
            self._backward_peaks[s, gradients] = self._largest(lines, s)
        return self._backward_peaks[s, gradients]

    @cached_property
    def _backward_peaks(self) -> dict[tuple[int, GradientLife], np.ndarray]:
        return {}

    def _largest(self, lines: Iterable[Growth], s: int) -> np.ndarray:
        values = (self.value(line, s) for line in lines)
        return np.asarray(functools.reduce(np.maximum, values, np.zeros(self.num_samples.shape)))


def _lines(phase: PhaseCost, gradients: GradientLife) -> tuple[Growth, ...]:
    if gradients == "keeping":
        return phase.peaks_keeping or phase.peaks or (phase.peak,)
    if gradients == "passing":
        return phase.peaks_passing or phase.peaks or (phase.peak,)
    return phase.peaks or (phase.peak,)

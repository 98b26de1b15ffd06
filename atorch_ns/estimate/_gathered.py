"""Bytes of the units of a plan that gathers parameters: gathered, reduced, waiting.

Legend: R plans of one kind, s a segment, j one of its blocks.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from atorch_ns.estimate._activations import Place
from atorch_ns.estimate._moments import Kind
from atorch_ns.estimate._units import DTYPE_BYTES, units_of

__all__ = ["UnitBytes"]


class UnitBytes:
    """Bytes of one block of each segment, whether it is a unit or belongs to the root.

    Attributes:
        units: segments whose blocks are units.
        gathered: [R] for each segment its parameters as they are gathered, padding included.
        gradients: for each segment its gradients as backward makes them.
        waiting: for each segment gradients that wait for the last micro-batch.
        reduced: [R] for each segment its gradients as they are reduced, padding included.
        reduced_part: [R] a rank's part of these.
        part: [R] the same in the dtype of the parameters; 0 where it leaves the device.
        root: [R] what is gathered of the root.
        alone: [R] whether there is one rank, which gathers nothing.
        casts_part: whether a rank's part is cast after the reduction.
    """

    def __init__(self, kind: Kind) -> None:
        plan, every = kind.plan, range(len(kind.trace.segments))
        gathers = None if plan.gather_dtype is None else DTYPE_BYTES[plan.gather_dtype]
        reduces = gathers if plan.reduce_dtype is None else DTYPE_BYTES[plan.reduce_dtype]
        self._kind = kind
        self._counts = kind.parts.counts
        self._none = np.zeros(len(kind.row))
        self.units = {unit.segment for unit in units_of(plan, kind.trace) if not unit.is_root}
        self.alone = kind.degree == 1
        self.gathered = [kind.divided(s, gathers, trainable=False) * kind.degree for s in every]
        self.gradients = [kind.whole(s, gathers) for s in every]
        self.waiting = [kind.whole(s, reduces) for s in every]
        self.reduced_part = [kind.divided(s, reduces) for s in every]
        self.reduced = [part * kind.degree for part in self.reduced_part]
        self.part = [kind.divided(s) * (not kind.offloads) for s in every]
        self.root = self.of_root(self.gathered)
        self.casts_part = plan.reduce_dtype is not None

    def of_root(
        self, of: Sequence[np.ndarray] | Sequence[np.ndarray | float], *, after: int = -1
    ) -> np.ndarray:
        """[R] the sum of ``of`` over the root's segments, those after a segment only."""
        total = self._none
        for s, count in enumerate(self._counts):
            if s not in self.units and s > after:
                total = total + of[s] * count
        return total

    def reduced_after(self, s: int, j: Place) -> np.ndarray:
        """[R] parts of gradients of the units that run forward after a place: these are reduced already."""
        total = self._none
        for index in self.units:
            if index >= s:
                count = self._counts[index] - 1 - j if index == s else self._counts[index]
                total = total + self.part[index] * count
        return total

    def waiting_upto(self, s: int, j: Place) -> np.ndarray:
        """[R] gradients of earlier micro-batches that have not been reduced: all up to a place, and the root's."""
        total = self.of_root(self.waiting)
        for index in self.units:
            if index <= s:
                total = total + self.waiting[index] * (self._counts[index] if index < s else j + 1)
        return np.asarray(total * self._kind.accumulates)

    def kept_gathered(self, s: int, j: Place) -> np.ndarray:
        """[R] what stays gathered of the units up to a place, this one included; in a pipeline, which comes back
        to them with the next micro-batch, of all."""
        total = self._none
        if not self._kind.plan.keeps_gathered:
            return total
        stays = self._kind.parts.sizes.pipeline > 1
        for index in self.units:
            count, upto = self._counts[index], j + 1 if index == s else self._counts[index] * (index < s)
            total = total + self.gathered[index] * np.where(stays, count, upto)
        return total

    def buffer(self, s: int) -> np.ndarray:
        """[R] the buffer that a unit is gathered into."""
        return np.where(self.alone, 0.0, self.gathered[s])

    def of_neighbour(self, of: Sequence[np.ndarray], s: int, j: Place, way: int) -> np.ndarray:
        """[R] ``of`` the unit that runs forward next (``way`` is 1) or ran before (-1); 0 without one."""
        value = self._none
        ahead = sorted(
            (index for index in self.units if (index - s) * way > 0), key=lambda index: -abs(index - s)
        )
        for index in ahead:
            value = np.where(np.asarray(self._counts[index]) > 0, of[index], value)
        if s in self.units:
            place = np.asarray(j) + way
            value = np.where((place >= 0) & (place < self._counts[s]), of[s], value)
        return np.asarray(value)

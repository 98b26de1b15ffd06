"""Moments of plans that gather parameters unit by unit, as ``fully_shard`` does, and bytes of their units.

``fully_shard`` gathers a unit's parameters into one buffer and copies them into their own memory. The buffer
is released when the next unit's parameters have arrived (forward) or at once (backward, where the next unit
is fetched before the present one computes). A unit's gradients are copied into a buffer that is reduced, and
kept until the next unit reduces. The rest, the root, is gathered throughout, and its gradients are reduced
last. Experts that an axis divides are a unit inside their block's, over the ranks that have the same ones; a
rank that has its experts alone computes with them as they are. Where micro-batches accumulate, whole
gradients wait for the last one, or a rank's part of all is kept from the first one on and added to. On a CPU,
gloo gathers into a copy of the buffer, and reduces one.

Legend: R plans of one kind, s a segment, j one of its blocks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from atorch_ns.estimate.memory.activations import Place
from atorch_ns.estimate.memory.moments import Moment, PlanGroup, places
from atorch_ns.estimate.model_shard import DTYPE_BYTES, units_of


class Layer:
    """[R] bytes of one block of each segment, of its own parameters or of those of its experts.

    Args:
        which: [P] or [K, P], whether each parameter is one of them.
        ranks: [R] ranks that they are divided over; 0 where no unit gathers them.
        itemsizes: bytes of an element as gathered and as reduced; ``None`` for those of the parameter.

    Attributes:
        gathered: gathered parameters, padding included.
        buffer: of the buffer that they are gathered into.
        further_copies: of a further copy of those divided along another dimension than the first.
        gradients: gradients as the backward pass produces them.
        reduced: gradients as they are reduced, padding included.
        part: a rank's part of these in the dtype of the parameters; 0 where it leaves the device.
        reducing: all that a reduction has at once, with gloo's copy.
    """

    def __init__(
        self, kind: PlanGroup, which: np.ndarray, ranks: np.ndarray, *, itemsizes: Sequence[int | None]
    ) -> None:
        gathers, reduces = itemsizes
        every = range(len(kind.trace.segments))
        is_turned = np.asarray(which & kind.shares.parameters.is_turned)
        self.gathered = [kind.divided(s, gathers, trainable=False, times=which) * ranks for s in every]
        self.buffer = [each * (ranks > 1) for each in self.gathered]
        again = ranks * (ranks > 1)
        sizes = [kind.divided(s, gathers, trainable=False, times=is_turned) for s in every if is_turned.any()]
        self.further_copies = [size * again for size in sizes or (0.0 for _ in every)]
        self.gradients = [kind.whole(s, gathers, times=which) for s in every]
        parts = [kind.divided(s, reduces, times=which) for s in every]
        self.reduced = [each * ranks for each in parts]
        self.part = [kind.divided(s, times=which) * (not kind.offloads) for s in every]
        casts = kind.plan.sharding.reduce_dtype is not None  # a rank's part, after the reduction
        self.reducing = [self.reduced[s] * (1 + kind.is_cpu) + parts[s] + self.part[s] * casts for s in every]


class UnitBytes:
    """Bytes of one block of each segment, whether it is a unit or belongs to the root.

    Attributes:
        units: segments whose blocks are units.
        layers: the block, and inside of it its experts where they are units of their own.
        gathered: [R] gathered parameters of each segment with all layers, padding included.
        gradients: gradients of each segment with all layers.
        waiting: unreduced gradients of each segment, kept until the last micro-batch.
        part: [R] a rank's part of each segment; 0 where it leaves the device.
        stays: [R] whether all stay gathered for the passes of a pipeline.
        root: [R] gathered parameters of the root.
        reduces_each: [R] whether gradients are reduced after every micro-batch.
    """

    def __init__(self, kind: PlanGroup) -> None:
        plan, every = kind.plan, range(len(kind.trace.segments))
        gathers = None if plan.sharding.gather_dtype is None else DTYPE_BYTES[plan.sharding.gather_dtype]
        reduces = gathers if plan.sharding.reduce_dtype is None else DTYPE_BYTES[plan.sharding.reduce_dtype]
        self._kind = kind
        self._counts = kind.parts.counts
        self._none = np.zeros(len(kind.row))
        self.units = {unit.segment for unit in units_of(plan, kind.trace) if not unit.is_root}
        is_inner, copies = kind.parameters.is_expert, kind.parts.sizes.num_copies
        # A rank that has its experts alone makes them a unit only to cast or move them.
        copies = copies * ((copies > 1) | (gathers is not None) | plan.offload)
        units = ((~is_inner, kind.degree), (is_inner, copies))[: 1 + int(is_inner.any())]
        self.layers = [Layer(kind, *unit, itemsizes=(gathers, reduces)) for unit in units]
        self.gathered = [sum(layer.gathered[s] for layer in self.layers) for s in every]
        self.gradients = [kind.whole(s, gathers) for s in every]
        self.part = [sum(layer.part[s] for layer in self.layers) for s in every]
        self.waiting = [kind.whole(s, reduces) for s in every]
        self.stays = plan.sharding.keeps_gathered & (kind.parts.sizes.pipeline > 1)
        self.root = self.of_root(self.gathered)
        self.reduces_each = bool(plan.sharding.reduces_each) & (kind.parts.sizes.pipeline == 1)

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
        """[R] bytes of reduced gradient shards of units that run forward after a place. Of all units and the
        root, if each micro-batch is reduced and there were earlier ones."""
        total = self._none
        for index in self.units:
            if index >= s:
                count = self._counts[index] - 1 - j if index == s else self._counts[index]
                total = total + self.part[index] * count
        everything = self._kind.parts.total(self.part)
        return np.where(self.reduces_each & self._kind.parts.accumulates, everything, total)

    def waiting_upto(self, s: int, j: Place) -> np.ndarray:
        """[R] bytes of earlier micro-batches' unreduced gradients, of units up to a place and of the root."""
        total = self.of_root(self.waiting)
        for index in self.units:
            if index <= s:
                total = total + self.waiting[index] * (self._counts[index] if index < s else j + 1)
        return np.asarray(total * (self._kind.parts.accumulates & ~self.reduces_each))

    def kept_gathered(self, s: int, j: Place) -> np.ndarray:
        """[R] bytes that stay gathered: of units up to a place, or of all in a pipeline, for later passes."""
        total = self._none
        if not self._kind.plan.sharding.keeps_gathered:
            return total
        for index in self.units:
            # ``upto``: this unit's blocks up to the place, all of earlier units, none of later ones.
            count, upto = self._counts[index], j + 1 if index == s else self._counts[index] * (index < s)
            total = total + self.gathered[index] * np.where(self.stays, count, upto)
        return total

    def last_copies(self, s: int) -> np.ndarray:
        """[R] bytes of the buffer that the last unit of a block is gathered into, and of further copies."""
        block, *inside = (layer.buffer[s] + layer.further_copies[s] for layer in self.layers)
        return np.asarray(np.where(self.layers[-1].buffer[s] > 0, inside[0], block)) if inside else block

    def reducing(self, s: int, j: Place) -> np.ndarray:
        """[R] gradients that the unit which ran backward before is reducing."""
        return self.of_neighbour(self.layers[0].reduced, s, j, 1)

    def of_neighbour(self, of: Sequence[np.ndarray], s: int, j: Place, way: int) -> np.ndarray:
        """[R] ``of`` for the unit that runs forward next (``way`` is 1) or ran before (-1); 0 without one."""
        value = self._none
        # The farthest first, so that the nearest unit with a block on the rank is written last and wins.
        ahead = sorted(
            (index for index in self.units if (index - s) * way > 0), key=lambda index: -abs(index - s)
        )
        for index in ahead:
            value = np.where(np.asarray(self._counts[index]) > 0, of[index], value)
        if s in self.units:  # nearest of all is the neighbour in the same run of blocks
            position = np.asarray(j) + way
            value = np.where((position >= 0) & (position < self._counts[s]), of[s], value)
        return np.asarray(value)


def sharded_moments(kind: PlanGroup) -> Iterator[Moment]:
    """Moments with gathered parameters, gradients that wait for reduction, and buffers of collectives."""
    sizes = UnitBytes(kind)
    yield from _forward_moments(kind, sizes)
    for s, j, _, name in places(kind):
        # Reduced parts of later units, the root's whole gradients so far, and those of earlier micro-batches.
        gradients = (
            sizes.reduced_after(s, j) + sizes.of_root(sizes.gradients, after=s) + sizes.waiting_upto(s, j)
        )
        if s in sizes.units:
            yield from _unit_backward(kind, sizes, (s, j, name), gradients)
            yield from _unit_reduction(kind, sizes, (s, j, name), gradients)
        else:  # the root's: gathered throughout, beside the reduction of the unit that ran before
            temporaries = sizes.root + sizes.kept_gathered(s, j) + sizes.reducing(s, j)
            alive = kind.activations.backward(s, j, "keeping")
            yield Moment(name, gradients, alive, temporaries)
    yield from _final_moments(kind, sizes)


def _forward_moments(kind: PlanGroup, sizes: UnitBytes) -> Iterator[Moment]:
    acts, gloo = kind.activations, float(kind.is_cpu)
    counts = kind.parts.counts
    end = (len(counts) - 1, counts[-1] - 1)
    waiting = sizes.waiting_upto(*end) + sizes.reduced_after(*end)
    gathers = ~sizes.stays  # the first pass of a pipeline does too, but holds less than later ones
    # ``before`` is the buffer of the gather before, which is released when the next unit has arrived.
    before = sizes.of_root(sizes.layers[0].buffer) * gathers
    for s, j, name, _ in places(kind):
        resident = sizes.kept_gathered(s, j)
        if s not in sizes.units:
            yield Moment(name, waiting, acts.forward(s, j), sizes.root + resident + before)
            continue
        # ``resident`` counts this unit, whose parameters are added below.
        gathered_bytes = sizes.root + resident - sizes.gathered[s] * kind.plan.sharding.keeps_gathered
        for layer in sizes.layers:
            buffer = layer.buffer[s] * gathers
            # It is gathered, and then copied into its own memory.
            yield Moment(name, waiting, acts.before(s, j), gathered_bytes + before + buffer * (1 + gloo))
            gathered_bytes = gathered_bytes + layer.gathered[s]
            before = np.where((buffer > 0) & kind.parts.has(s), buffer, before)
            yield Moment(
                name, waiting, acts.before(s, j), gathered_bytes + before + layer.further_copies[s] * gathers
            )
        yield Moment(name, waiting, acts.forward(s, j), gathered_bytes + before)  # it computes


def _unit_backward(
    kind: PlanGroup, sizes: UnitBytes, position: tuple[int, Place, int], gradients: np.ndarray
) -> Iterator[Moment]:
    s, j, name = position
    acts, keeps = kind.activations, kind.plan.sharding.keeps_gathered
    base = sizes.root + sizes.reducing(s, j)
    present = sizes.kept_gathered(s, j) if keeps else sizes.gathered[s]
    ahead = _prefetched_bytes(kind, sizes, s, j)
    if not keeps:  # its own gather
        yield Moment(name, gradients, acts.entering_backward(s, j), base + present + sizes.last_copies(s))
    fetch = ahead * (1 + kind.is_cpu)  # the next unit's gather starts before this one computes
    yield Moment(name, gradients, acts.entering_backward(s, j), base + present + fetch)
    yield Moment(name, gradients, acts.backward(s, j, "keeping"), base + present + ahead)


def _unit_reduction(
    kind: PlanGroup, sizes: UnitBytes, position: tuple[int, Place, int], gradients: np.ndarray
) -> Iterator[Moment]:
    s, j, name = position
    after = kind.activations.leaving_backward(s, j)
    resident = sizes.kept_gathered(s, j) - sizes.gathered[s] * kind.plan.sharding.keeps_gathered
    base = sizes.root + resident + _prefetched_bytes(kind, sizes, s, j)
    for depth, layer in reversed(list(enumerate(sizes.layers))):
        gathered_bytes = base + sum(around.gathered[s] for around in sizes.layers[:depth])
        # Gradients are copied into the buffer, then the buffer is reduced.
        yield Moment(name, gradients + layer.gradients[s] + layer.reduced[s], after, gathered_bytes)
        yield Moment(name, gradients + layer.reducing[s], after, gathered_bytes)
        gradients = gradients + layer.part[s]


def _final_moments(kind: PlanGroup, sizes: UnitBytes) -> Iterator[Moment]:
    unit_gradients = sizes.reduced_after(-1, 0)  # those of all units
    name = next(backward for _, _, _, backward in places(kind))
    every = range(len(kind.trace.segments))
    both = [sum(layer.gradients[s] + layer.reduced[s] for layer in sizes.layers) for s in every]
    reducing = [sum(layer.reducing[s] for layer in sizes.layers) for s in every]
    # The root is reduced last, in the same two moments as a unit.
    yield Moment(name, unit_gradients + sizes.of_root(both), 0.0, 0.0)
    yield Moment(name, unit_gradients + sizes.of_root(reducing), 0.0, 0.0)
    gradients = kind.kept.gradients[kind.row] * (not kind.offloads)
    yield Moment(kind.last_moment(), gradients, 0.0, kind.step_temporaries())


def _prefetched_bytes(kind: PlanGroup, sizes: UnitBytes, s: int, j: Place) -> np.ndarray:
    # The unit that the backward pass comes to next is on its way.
    if kind.plan.sharding.keeps_gathered:
        return np.zeros(len(kind.row))
    return sizes.of_neighbour(sizes.layers[0].buffer, s, j, -1)

"""Moments of plans that gather parameters unit by unit: ``fully_shard`` and FullyShardedDataParallel.

``fully_shard`` gathers a unit's parameters into one buffer and copies them out of it into their own memory. The
buffer of a forward pass is released when the next unit's parameters have arrived, in the backward pass at once;
there the next unit is fetched before the present one computes. A unit's gradients are copied into a buffer that
is reduced, and kept until the next unit reduces. What belongs to no unit, the root, is gathered throughout, and
its gradients are reduced last. FullyShardedDataParallel gathers into the parameters' memory itself.

On a CPU, gloo gathers into a copy of the buffer, and reduces one.

Legend: R plans of one kind, s a segment, j one of its blocks.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from atorch_ns.estimate._activations import Place
from atorch_ns.estimate._gathered import UnitBytes
from atorch_ns.estimate._moments import Kind, Moment, places

__all__ = ["sharded_moments"]


def sharded_moments(kind: Kind) -> Iterator[Moment]:
    """What is gathered, what waits for its reduction, and what of collectives' buffers is alive."""
    sizes = UnitBytes(kind)
    yield from _forward(kind, sizes)
    for s, j, _, name in places(kind):
        gradients = (
            sizes.reduced_after(s, j) + sizes.of_root(sizes.gradients, after=s) + sizes.waiting_upto(s, j)
        )
        if s in sizes.units:
            yield from _unit_backward(kind, sizes, (s, j, name), gradients)
            yield from _unit_reduction(kind, sizes, (s, j, name), gradients)
        else:
            temporaries = sizes.root + sizes.kept_gathered(s, j) + _last_reduced(kind, sizes, s, j)
            alive = kind.activations.backward(s, j, "keeping")
            yield Moment(name, gradients, alive, temporaries)
    yield from _end(kind, sizes)


def _forward(kind: Kind, sizes: UnitBytes) -> Iterator[Moment]:
    acts, flat, gloo = kind.activations, _is_flat(kind), float(kind.is_cpu)
    counts = kind.parts.counts
    waiting = sizes.waiting_upto(len(counts) - 1, counts[-1] - 1)
    before = np.where(sizes.alone, 0.0, sizes.root) * (not flat)
    for s, j, name, _ in places(kind):
        kept = sizes.kept_gathered(s, j)
        if s not in sizes.units:
            yield Moment(name, waiting, acts.forward(s, j), sizes.root + kept + before)
            continue
        own, buffer = sizes.gathered[s], sizes.buffer(s)
        held = sizes.root + (kept - own if kind.plan.keeps_gathered else 0.0)
        start = acts.before(s, j)
        if flat:
            fetching, arrived = own, own
        else:
            fetching, arrived = np.where(np.asarray(j) == 0, before, buffer) + buffer, buffer + own
            before = np.where(kind.parts.has(s), buffer, before)
        yield Moment(name, waiting, start, held + fetching + gloo * buffer)
        yield Moment(name, waiting, acts.forward(s, j), held + arrived)


def _unit_backward(
    kind: Kind, sizes: UnitBytes, place: tuple[int, Place, int], gradients: np.ndarray
) -> Iterator[Moment]:
    s, j, name = place
    acts, keeps = kind.activations, kind.plan.keeps_gathered
    held = sizes.root + _last_reduced(kind, sizes, s, j)
    present = sizes.kept_gathered(s, j) if keeps else sizes.gathered[s]
    ahead = _fetched(kind, sizes, s, j)
    if not keeps and not _is_flat(kind):
        yield Moment(name, gradients, acts.entering_backward(s, j), held + present + sizes.buffer(s))
    copied = ahead * (1 + kind.is_cpu)
    yield Moment(name, gradients, acts.entering_backward(s, j), held + present + copied)
    yield Moment(name, gradients, acts.backward(s, j, "keeping"), held + present + ahead)


def _unit_reduction(
    kind: Kind, sizes: UnitBytes, place: tuple[int, Place, int], gradients: np.ndarray
) -> Iterator[Moment]:
    s, j, name = place
    after = kind.activations.leaving_backward(s, j)
    kept = sizes.kept_gathered(s, j) - sizes.gathered[s] * kind.plan.keeps_gathered
    held = sizes.root + kept + _fetched(kind, sizes, s, j)
    # FSDP1's gradients are views of a flat parameter: autograd joins them into one vector.
    joined = np.maximum(sizes.reduced[s], sizes.gathered[s] * _is_flat(kind))
    yield Moment(name, gradients + sizes.gradients[s] + joined, after, held)
    yield Moment(name, gradients + _reducing(kind, sizes, s), after, held)


def _reducing(kind: Kind, sizes: UnitBytes, s: int) -> np.ndarray:
    """[R] what is reduced, gloo's copy of it, and a rank's part of the result."""
    parts = sizes.reduced_part[s] + sizes.part[s] * sizes.casts_part
    return np.asarray(sizes.reduced[s] * (1 + kind.is_cpu) + parts)


def _end(kind: Kind, sizes: UnitBytes) -> Iterator[Moment]:
    """The root's reduction, and the optimizer's step."""
    zeros = np.zeros(len(kind.row))
    reduced = sizes.reduced_after(-1, 0)
    name = next(backward for _, _, _, backward in places(kind))
    every = range(len(kind.trace.segments))
    joined = [sizes.gradients[s] + sizes.reduced[s] for s in every]
    reducing = [_reducing(kind, sizes, s) for s in every]
    yield Moment(name, reduced + sizes.of_root(joined), zeros, zeros)
    yield Moment(name, reduced + sizes.of_root(reducing), zeros, zeros)
    gradients = kind.kept.gradients[kind.row] * (not kind.offloads)
    yield Moment(kind.last_moment(), gradients, zeros, kind.step_temporaries())


def _is_flat(kind: Kind) -> bool:
    return kind.plan.shard_layout == "flat"


def _last_reduced(kind: Kind, sizes: UnitBytes, s: int, j: Place) -> np.ndarray:
    """[R] the buffer of the unit that was reduced last."""
    if _is_flat(kind):
        return np.zeros(len(kind.row))
    return sizes.of_neighbour(sizes.reduced, s, j, 1)


def _fetched(kind: Kind, sizes: UnitBytes, s: int, j: Place) -> np.ndarray:
    """[R] the unit that the backward pass comes to next, on its way."""
    if kind.plan.keeps_gathered or kind.plan.prefetched_units == 0:
        return np.zeros(len(kind.row))
    return np.where(sizes.alone, 0.0, sizes.of_neighbour(sizes.gathered, s, j, -1))

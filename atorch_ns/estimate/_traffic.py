"""Seconds of gathering parameters and reducing gradients that computation does not hide."""

from __future__ import annotations

import numpy as np

from atorch_ns.estimate._buckets import gradient_buckets
from atorch_ns.estimate._passes import Passes
from atorch_ns.estimate._ring import collective_seconds
from atorch_ns.estimate._scene import Scene
from atorch_ns.estimate._units import Unit, gathered_bytes, reduced_bytes, units_of

__all__ = ["gather_and_reduce"]

_DATA = ("data", "zero")


def gather_and_reduce(scene: Scene, passes: Passes) -> tuple[np.ndarray, np.ndarray]:
    """[R] exposed seconds of a step for gathering parameters and for reducing gradients."""
    if scene.plan.gradient_sync == "reduce_scatter":
        return _by_units(scene, passes)
    nothing = np.zeros(len(scene.micro_batches))
    reduce = _by_buckets(scene, passes) if scene.plan.gradient_sync == "all_reduce" else nothing
    return _broadcast_of_updates(scene), reduce


def _by_buckets(scene: Scene, passes: Passes) -> np.ndarray:
    """Gradients all-reduced in buckets while the backward pass goes on."""
    device, num_bytes = scene.hardware.device, float(sum(gradient_buckets(scene.plan, scene.trace)))
    count = len(gradient_buckets(scene.plan, scene.trace))
    seconds = collective_seconds("all_reduce", num_bytes, scene.groups(_DATA), scene.hardware, count)
    last = seconds / max(1, count)
    backward = sum(
        segment.count * each.backward
        for segment, each in zip(scene.trace.segments, passes.segments, strict=True)
    )
    hidden = scene.hardware.within_node.overlap * np.asarray(backward)
    # Each gradient goes into its bucket, which reads one tensor and writes one; further passes add to it.
    moved = num_bytes * (2 + 3 * (scene.micro_batches - 1))
    return np.asarray(np.maximum(last, seconds - hidden) + moved / device.update_bytes_per_s)


def _by_units(scene: Scene, passes: Passes) -> tuple[np.ndarray, np.ndarray]:
    """Parameters gathered and gradients reduced unit by unit, each behind its neighbour's computation."""
    plan, micro_batches = scene.plan, scene.micro_batches
    gather, reduce = np.zeros(len(micro_batches)), np.zeros(len(micro_batches))
    # On a CPU, fully_shard waits for each collective where it starts it.
    overlap = 0.0 if scene.hardware.device.type == "cpu" else scene.hardware.within_node.overlap
    is_first = True
    for unit in units_of(plan, scene.trace):
        gathered, reduced, added = _unit_seconds(scene, unit)
        reduce = reduce + (micro_batches - 1) * unit.count * added
        if unit.is_root:
            gather, reduce = gather + gathered * micro_batches, reduce + reduced
            continue
        each = passes.segments[unit.segment]
        # Prefetched behind the neighbour's computation, which is taken to be as long as its own; the first
        # has none, and in the backward pass the last reduction has none.
        ahead = np.maximum(0.0, gathered - overlap * each.forward)
        gather = gather + micro_batches * (unit.count * ahead + is_first * (gathered - ahead))
        behind = overlap * (each.backward + each.recompute)
        if not plan.keeps_gathered:
            gather = gather + micro_batches * unit.count * np.maximum(0.0, gathered - behind)
            behind = np.maximum(0.0, behind - gathered)
        exposed = np.maximum(0.0, reduced - behind)
        reduce = reduce + unit.count * exposed + is_first * (reduced - exposed)
        is_first = False
    return gather, reduce


def _unit_seconds(scene: Scene, unit: Unit) -> tuple[np.ndarray, np.ndarray, float]:
    """Seconds of one gather and one reduction of a unit, with the copies to and from their buffers, and of
    adding the gradients of one more micro-batch."""
    plan, hardware = scene.plan, scene.hardware
    shard, device = scene.groups(plan.gradients_over), hardware.device
    gathered, reduced = gathered_bytes(plan, unit.parameters), reduced_bytes(plan, unit.parameters)
    # A gather writes a new buffer and copies it into new parameters; a reduction copies gradients into a new
    # buffer and makes new shards. Shards are cast before and after, where dtypes differ.
    copied = 3 * gathered + 2 * gathered / shard.size
    gather = (
        collective_seconds("all_gather", float(gathered), shard, hardware)
        + copied / device.memory_bytes_per_s
    )
    copied = 2 * reduced + 3 * reduced / shard.size
    reduce = collective_seconds("reduce_scatter", float(reduced), shard, hardware)
    reduce = reduce + copied / device.memory_bytes_per_s
    others = tuple(name for name in _DATA if name not in plan.gradients_over)
    if others:
        replicas = scene.groups(others)
        reduce = reduce + collective_seconds("all_reduce", reduced / shard.size, replicas, hardware)
    return gather, reduce, 3 * reduced / device.update_bytes_per_s


def _broadcast_of_updates(scene: Scene) -> np.ndarray:
    """Updated parameters sent from their owners to all, where only the optimizer is sharded."""
    plan = scene.plan
    if not plan.optimizer_over:
        return np.zeros(len(scene.micro_batches))
    parameters = [
        p for unit in units_of(plan, scene.trace) for p in unit.parameters * unit.count if p.trainable
    ]
    num_bytes = float(gathered_bytes(plan, parameters))
    return collective_seconds(
        "broadcast", num_bytes, scene.groups(plan.optimizer_over), scene.hardware, len(parameters)
    )

"""Seconds of gathering parameters and reducing gradients that computation does not hide."""

from __future__ import annotations

import numpy as np

from atorch_ns.estimate._buckets import gradient_buckets
from atorch_ns.estimate._passes import Passes
from atorch_ns.estimate._ring import collective_seconds
from atorch_ns.estimate._scene import Scene
from atorch_ns.estimate._units import Unit, gathered_bytes, reduced_bytes

__all__ = ["gather_and_reduce"]


def gather_and_reduce(scene: Scene, passes: Passes) -> tuple[np.ndarray, np.ndarray]:
    """[R] exposed seconds of a step for gathering parameters and for reducing gradients."""
    if scene.plan.gradient_sync == "reduce_scatter":
        return _by_units(scene, passes)
    nothing = np.zeros(len(scene.micro_batches))
    if scene.plan.gradient_sync == "all_reduce":
        return _broadcast_of_updates(scene), _of_replicas(scene, passes)
    return _broadcast_of_updates(scene), nothing


def _of_replicas(scene: Scene, passes: Passes) -> np.ndarray:
    """By DistributedDataParallel, or at the end of the backward pass where ranks hold parts of the model."""
    if not scene.parts.divides:
        return _by_buckets(scene, passes)
    num_bytes = sum(
        reduced_bytes(scene.plan, unit.parameters) * scene.share_of(unit) * scene.count(unit)
        for unit in scene.units
    )
    groups = scene.data_groups
    seconds = collective_seconds("all_reduce", num_bytes, groups, scene.hardware)
    moved = num_bytes * np.where(groups.size > 1, 4, 0) + 3 * num_bytes * (scene.micro_batches - 1)
    at_end = seconds + moved / scene.hardware.device.update_bytes_per_s
    return np.where(scene.sizes.divides_model, at_end, _by_buckets(scene, passes))


def _by_buckets(scene: Scene, passes: Passes) -> np.ndarray:
    """Gradients all-reduced in buckets while the backward pass goes on."""
    device, num_bytes = scene.hardware.device, float(sum(gradient_buckets(scene.plan, scene.trace)))
    count = len(gradient_buckets(scene.plan, scene.trace))
    seconds = collective_seconds("all_reduce", num_bytes, scene.data_groups, scene.hardware, count)
    last = seconds / max(1, count)
    backward = scene.parts.total([each.backward for each in passes.segments])
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
    # A pipeline keeps what a backward pass gathered for the pass that comes next, and its root for the step; or
    # all of it for the step.
    is_cut = scene.sizes.pipeline > 1
    in_pipeline = 1 if plan.keeps_gathered else (micro_batches + 1) / 2
    passes_gathered = np.where(is_cut, in_pipeline, micro_batches)
    is_first = True
    for unit in scene.units:
        gathered, reduced, added = _unit_seconds(scene, unit)
        count = scene.count(unit)
        reduce = reduce + (micro_batches - 1) * count * added
        if unit.is_root:
            gather = gather + gathered * np.where(is_cut, 1, micro_batches)
            reduce = reduce + reduced
            continue
        each = passes.segments[unit.segment]
        # Prefetched behind the neighbour's computation, which is taken to be as long as its own; the first
        # has none, and in the backward pass the last reduction has none.
        ahead = np.maximum(0.0, gathered - overlap * each.forward)
        gather = gather + passes_gathered * (count * ahead + is_first * (gathered - ahead))
        behind = overlap * (each.backward + each.recompute)
        if not plan.keeps_gathered:
            gather = gather + passes_gathered * count * np.maximum(0.0, gathered - behind)
            behind = np.maximum(0.0, behind - gathered)
        exposed = np.maximum(0.0, reduced - behind)
        reduce = reduce + count * exposed + is_first * (reduced - exposed)
        is_first = False
    return gather, reduce


def _unit_seconds(scene: Scene, unit: Unit) -> tuple[np.ndarray, np.ndarray, np.ndarray | float]:
    """Seconds of one gather and one reduction of a unit, with the copies to and from their buffers, and of
    adding the gradients of one more micro-batch."""
    plan, hardware = scene.plan, scene.hardware
    shard, device = scene.shard_groups, hardware.device
    share = scene.share_of(unit)
    gathered = gathered_bytes(plan, unit.parameters) * share
    reduced = reduced_bytes(plan, unit.parameters) * share
    # A gather writes a new buffer and copies it into new parameters; a reduction copies gradients into a new
    # buffer and makes new shards. Shards are cast before and after, where dtypes differ.
    copied = 3 * gathered + 2 * gathered / shard.size
    gather = collective_seconds("all_gather", gathered, shard, hardware) + copied / device.memory_bytes_per_s
    copied = 2 * reduced + 3 * reduced / shard.size
    reduce = collective_seconds("reduce_scatter", reduced, shard, hardware)
    reduce = reduce + copied / device.memory_bytes_per_s
    replicas = scene.replica_groups
    if (replicas.size > 1).any():
        reduce = reduce + collective_seconds("all_reduce", reduced / shard.size, replicas, hardware)
    return gather, reduce, 3 * reduced / device.update_bytes_per_s


def _broadcast_of_updates(scene: Scene) -> np.ndarray:
    """Updated parameters sent from their owners to all, where only the optimizer is sharded."""
    plan = scene.plan
    if not plan.optimizer_over:
        return np.zeros(len(scene.micro_batches))
    parameters = [p for unit in scene.units for p in unit.parameters * unit.count if p.trainable]
    num_bytes = float(gathered_bytes(plan, parameters))
    return collective_seconds("broadcast", num_bytes, scene.shard_groups, scene.hardware, len(parameters))

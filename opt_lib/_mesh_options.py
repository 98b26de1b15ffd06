"""Meshes that divide a model, as many as a search should look at.

What limits them, beside what divides what:

- sizes along ``tensor``, ``sequence`` and ``pipeline`` are powers of two;
- ``tensor`` and ``sequence`` together stay inside a node: they exchange activations in every layer;
- ``sequence`` is for samples of at least :data:`LONG_SAMPLE` tokens: a short sample's activations shrink as well
  with fewer samples in a micro-batch, which costs no exchange;
- ``expert`` stands alone or with ``pipeline``: experts are whole within ``tensor``;
- a pipeline has at most one rank for every two blocks, so that its stages can be even;
- shards of states lie on whole nodes: the data ranks of one, of 8, of 64, …, or all of them;
- at least a quarter of all ranks of a large cluster see different data: there a model that needs more ranks than that
  for one replica is divided by fsdp over them as well.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

from atorch_ns.cluster import Cluster
from atorch_ns.profile import Profile, Trace

__all__ = ["LONG_SAMPLE", "model_shapes"]

LONG_SAMPLE = 8192
"""Tokens of a sample from which on dividing it is tried."""

_SMALL_WORLD = 64
"""Ranks up to which all of them may divide one replica of the model."""


def model_shapes(profile: Profile, cluster: Cluster) -> Iterator[tuple[tuple[str, int], ...]]:
    """Axes, innermost first, of meshes that divide the model; the smallest divisions first.

    Args:
        profile: with a trace; without one nothing is known that could be divided.
        cluster: whose ranks they are for.
    """
    trace, world = profile.trace, cluster.world_size
    if trace is None:
        return
    tensors = [size for size in _powers(cluster.local_world_size) if _divides_tensor(trace, size)]
    sequences = [size for size in _powers(cluster.local_world_size) if _divides_sequence(trace, size)]
    pipelines = [size for size in _powers(world) if size == 1 or 2 * size <= len(profile.blocks)]
    experts = [size for size in range(1, world + 1) if size == 1 or _divides_experts(trace, size)]
    shapes = itertools.product(tensors, sequences, experts, pipelines)
    for tensor, sequence, expert, pipeline in sorted(shapes, key=lambda shape: (math.prod(shape), shape)):
        model = tensor * sequence * pipeline
        data, rest = divmod(world, model * expert)
        if rest or model * expert == 1 or cluster.local_world_size % (tensor * sequence):
            continue
        if expert > 1 and tensor * sequence > 1:
            continue
        if world > _SMALL_WORLD and 4 * model > world:
            continue
        inner = (("tensor", tensor), ("sequence", sequence), ("expert", expert))
        for zero in (1, *_within_data(data, cluster.local_world_size // (tensor * sequence), expert)):
            sizes = (*inner, ("zero", zero), ("data", data // zero), ("pipeline", pipeline))
            yield tuple((name, size) for name, size in sizes if size > 1)


def _within_data(data: int, in_node: int, expert: int) -> Iterator[int]:
    """Sizes of an axis ``zero`` inside ``data``: ranks of one node, of 8, of 64, …, fewer than all.

    Within a node sharding over some of the data ranks and over all of them costs the same.
    """
    zero = max(1, in_node)
    while expert == 1 and zero < data and data % zero == 0:
        if zero > 1:
            yield zero
        zero *= 8


def _powers(most: int) -> list[int]:
    """1, 2, 4, … that divide ``most``."""
    return [2**power for power in range(most.bit_length()) if most % 2**power == 0]


def _divides_tensor(trace: Trace, size: int) -> bool:
    """Whether there are layers to divide, and heads and features divide into so many parts."""
    if size == 1:
        return True
    dims = [
        spec.shape[spec.tensor_dim]
        for segment in trace.segments
        for spec in segment.parameters
        if segment.is_block and spec.tensor_dim is not None
    ]
    return bool(dims) and all(dim % size == 0 for dim in dims) and _divides_heads(trace, size)


def _divides_sequence(trace: Trace, size: int) -> bool:
    """Whether there is attention over samples that are long, and tokens divide: heads need not for a ring."""
    if size == 1:
        return True
    attends = any(segment.num_attentions for segment in trace.segments if segment.is_block)
    long = trace.num_tokens >= LONG_SAMPLE and trace.num_tokens % (2 * size) == 0
    return attends and long


def _divides_heads(trace: Trace, size: int) -> bool:
    """Whether the heads of all attentions divide, as far as they are known."""
    heads = [trace.num_heads, trace.num_key_value_heads]
    heads += [count for segment in trace.segments for count in segment.heads]
    return all(count % size == 0 for count in heads)


def _divides_experts(trace: Trace, size: int) -> bool:
    """Whether layers of experts divide into so many parts."""
    has = any(segment.num_routed for segment in trace.segments)
    return has and trace.num_experts % size == 0

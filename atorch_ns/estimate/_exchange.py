"""Seconds of exchanging activations between ranks that hold parts of the model or of a sample.

Legend: R plans of one kind, B samples in a micro-batch, T tokens, D model, V vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from atorch_ns.estimate._passes import recomputed_shares
from atorch_ns.estimate._ring import collective_seconds
from atorch_ns.estimate._scene import Scene
from atorch_ns.estimate._units import (
    DTYPE_BYTES,
    LOSS_CALLS,
    LOSS_NUMBERS,
    computed_in,
    cost_of,
    reduced_bytes,
)
from atorch_ns.profile import Segment

__all__ = ["Exchange", "exchanges_of", "partial_sums"]

_OPERATORS = 4.0
"""Operators that one exchange starts on the host: an autograd node, a buffer, the collective, its wait."""


class Exchange(NamedTuple):
    """Of one instance of a segment in one micro-batch, all passes together.

    Attributes:
        seconds: [R].
        operators: [R] started on the host.
    """

    seconds: np.ndarray | float
    operators: np.ndarray | float


def exchanges_of(scene: Scene) -> tuple[Exchange, ...]:
    """What every segment exchanges along the axes ``tensor``, ``sequence`` and ``expert``. Nothing hides it."""
    segments = scene.trace.segments
    if not scene.parts.divides:
        return (Exchange(0.0, 0.0),) * len(segments)
    again = recomputed_shares(scene.plan, segments)
    found = []
    for s, segment in enumerate(segments):
        seconds, calls = np.zeros(len(scene.sizes)), np.zeros(len(scene.sizes))
        for axis, of in (("tensor", _tensor), ("sequence", _sequence), ("expert", _expert)):
            size = getattr(scene.sizes, axis)
            if (size > 1).any():
                more, count = of(scene, s, segment, again[s])
                seconds = seconds + np.where(size > 1, more, 0.0)
                calls = calls + np.where(size > 1, count, 0.0)
        found.append(Exchange(seconds, _OPERATORS * calls))
    return tuple(found)


def partial_sums(scene: Scene) -> np.ndarray:
    """[R] seconds of summing, once a step, gradients that each rank along ``sequence`` has a part of."""
    size = scene.sizes.sequence
    if not (size > 1).any():
        return np.zeros(len(size))
    num_bytes = scene.parts.total(
        [float(reduced_bytes(scene.plan, one.parameters)) * one.is_block for one in scene.trace.segments]
    )
    return collective_seconds("all_reduce", num_bytes, scene.groups(("sequence",)), scene.hardware)


def _tensor(scene: Scene, s: int, segment: Segment, again: float) -> tuple[np.ndarray, np.ndarray | float]:
    """Megatron's exchanges: one sum for each row layer forward, one for each group of column layers backward.

    With the residual stream divided, a gather and a scattered sum take the place of each sum, which is as many
    bytes. Around the blocks the embedding's rows are summed, and the logits gathered; a loss on parts of the logits
    sums three numbers for each token instead.
    """
    groups = scene.groups(("tensor",))
    output = _output(scene, s) / scene.sizes.sequence
    if segment.is_block:
        # Recomputation stops before its last sum.
        count = 2 * segment.num_rows + again * max(0, segment.num_rows - 1)
        return collective_seconds("all_reduce", output * count, groups, scene.hardware, count), count
    words = [p for p in segment.parameters if p.tensor_dim == 0 and len(p.shape) == 2]
    if not words:
        return np.zeros(len(scene.sizes)), 0.0
    if s < len(scene.trace.segments) - 1:
        return collective_seconds("all_reduce", output, groups, scene.hardware), 1.0
    weights, autocast = computed_in(scene.plan)
    tokens = scene.num_samples * scene.num_tokens * DTYPE_BYTES.get(autocast or weights, 4)
    logits = collective_seconds("all_gather", tokens * words[0].shape[0], groups, scene.hardware)
    hidden = collective_seconds("all_reduce", tokens * words[0].shape[1], groups, scene.hardware)
    parts = scene.sizes.parallel_loss
    seen = scene.num_samples * scene.num_tokens * scene.trace.loss_share
    numbers = seen * LOSS_NUMBERS * DTYPE_BYTES["float32"]
    sums = collective_seconds("all_reduce", numbers, groups, scene.hardware, LOSS_CALLS)
    return np.where(parts, sums, logits) + hidden, np.where(parts, LOSS_CALLS, 1) + 1.0


def _sequence(scene: Scene, s: int, segment: Segment, again: float) -> tuple[np.ndarray, np.ndarray | float]:
    """Ulysses: queries, keys, values and results change between tokens and heads in each attention; a ring: keys
    and values pass every rank, forward, and with their gradients backward. Keys and values have fewer heads."""
    groups = scene.groups(("sequence",))
    if not segment.is_block:
        return np.zeros(len(scene.sizes)), 0.0
    trace = scene.trace
    heads = trace.num_key_value_heads / trace.num_heads if trace.num_heads else 1.0
    width = _output(scene, s) / scene.sizes.tensor
    passes = segment.num_attentions * (2 + again)
    is_ring = scene.sizes.is_ring
    count = 4 * passes
    num_bytes = width * (2 + 2 * heads) * passes / scene.sizes.sequence
    seconds = collective_seconds("all_to_all", num_bytes, groups, scene.hardware, count)
    if not is_ring.any():
        return seconds, count
    turns = segment.num_attentions * (1 + again + 2)
    around = collective_seconds("all_gather", width * 2 * heads * turns, groups, scene.hardware, turns)
    return np.where(is_ring, around, seconds), np.where(is_ring, turns, count)


def _expert(scene: Scene, s: int, segment: Segment, again: float) -> tuple[np.ndarray, float]:
    """Tokens go to the ranks that hold their experts, and results come back, in both passes."""
    count = 2 * segment.num_routed * (2 + again)
    routed = _output(scene, s) * max(1, scene.trace.experts_per_token)
    groups = scene.groups(("expert",))
    return collective_seconds("all_to_all", routed * count, groups, scene.hardware, count), count


def _output(scene: Scene, s: int) -> np.ndarray:
    """[R] bytes of what a segment hands on: [B, T, D]."""
    cost = cost_of(scene.plan, scene.trace.segments[s])
    return np.asarray(cost.output.at(scene.num_samples, scene.num_tokens), dtype=float)

"""Pipelines: the slowest rank, and how long it waits for the others.

Legend: R plans of one kind, p ranks of a pipeline, v stages on each, m micro-batches, S segments.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from atorch_ns.estimate._exchange import Exchange
from atorch_ns.estimate._memo import Memo
from atorch_ns.estimate._passes import SegmentSeconds
from atorch_ns.estimate._scene import Scene
from atorch_ns.estimate._stages import Stages, known_stages
from atorch_ns.estimate._units import cost_of
from atorch_ns.pipeline import StageCosts, actions, simulate

__all__ = ["Waiting", "as_pipeline"]


class Waiting(NamedTuple):
    """What a pipeline adds to a step on its slowest rank.

    Attributes:
        bubble: [R] seconds of waiting for other ranks to compute.
        sends: [R] seconds of waiting for what they send.
    """

    bubble: np.ndarray
    sends: np.ndarray


def as_pipeline(
    scene: Scene, segments: Sequence[SegmentSeconds], exchanges: Sequence[Exchange]
) -> tuple[Scene, Waiting]:
    """The scene of each pipeline's slowest rank, and what it waits for.

    While the slowest rank works without a pause, all others are hidden behind it. Before and after, each of the
    others takes one micro-batch once, forward and backward: the bubble. With v stages on a rank it is one v-th.
    """
    none = np.zeros(len(scene.sizes))
    if not (scene.sizes.pipeline > 1).any():
        return scene, Waiting(none, none)
    launch = scene.hardware.device.launch_s if scene.hardware.device.type == "cpu" else 0.0
    seconds = np.stack(
        [
            np.broadcast_to(
                one.forward
                + one.backward
                + one.recompute
                + other.seconds
                + launch * (one.operators + other.operators),
                none.shape,
            )
            for one, other in zip(segments, exchanges, strict=True)
        ]
    )  # [S, R]
    counts = np.tile([segment.count for segment in scene.trace.segments], (len(none), 1))
    bubble, sends = none.copy(), none.copy()
    for num_ranks in np.unique(scene.sizes.pipeline):
        rows = np.flatnonzero(scene.sizes.pipeline == num_ranks)
        if num_ranks == 1:
            continue
        stages = known_stages(scene.plan, scene.trace, int(num_ranks), scene.memo)
        of_rank = stages.on_rank @ seconds[:, rows]  # [p, R']
        slowest = of_rank.argmax(axis=0)
        counts[rows] = stages.on_rank[slowest]
        others = of_rank.sum(axis=0) - of_rank[slowest, np.arange(len(rows))]
        bubble[rows] = others * _shares(stages, scene.micro_batches[rows], scene.memo)
        sends[rows] = _sends(scene, rows, stages)
    ones = np.ones(len(none), dtype=bool)
    staged = scene.parts.staged(counts, scene.parts.live, scene.parts.accumulates, ones, ones)
    return replace(scene, parts=staged), Waiting(bubble, sends)


def _shares(stages: Stages, micro_batches: np.ndarray, memo: Memo) -> np.ndarray:
    """[R] what is left of the bubble: 1 with one stage on each rank; simulated for all other schedules."""
    if stages.info.is_single:
        return np.ones(len(micro_batches))
    p, v = stages.numbers.shape
    found = {}
    for count in np.unique(micro_batches).tolist():
        key = ("bubble", stages.info.name, p, v, count)
        found[count] = memo.get(key, functools.partial(_share, stages, count))
    return np.asarray([found[count] for count in micro_batches.tolist()])


def _share(stages: Stages, micro_batches: int) -> float:
    p, v = stages.numbers.shape
    if stages.info.problem(p, micro_batches, v):
        return 1.0
    timeline = simulate(actions(stages.info, p, micro_batches, v), StageCosts.equal(p * v))
    return float((timeline.step_seconds - 3.0 * v * micro_batches) / (3.0 * v * (p - 1)))


def _sends(scene: Scene, rows: np.ndarray, stages: Stages) -> np.ndarray:
    """[R] seconds of sends that nothing hides: all of a rank's where it posts its receives late, else those of
    the first and the last micro-batch."""
    p = len(stages.numbers)
    inner = max(range(len(scene.trace.segments)), key=lambda s: scene.trace.segments[s].count)
    output = cost_of(scene.plan, scene.trace.segments[inner]).output
    num_bytes = np.asarray(output.at(scene.num_samples[rows], scene.num_tokens), dtype=float)
    groups = scene.groups(("pipeline",))
    inside = groups.within[rows] > 1
    near = scene.hardware.within_node.rate_of("send")
    far = scene.hardware.between_nodes.rate_of("send")
    each = np.where(
        inside, near.latency_s + num_bytes / near.bytes_per_s, far.latency_s + num_bytes / far.bytes_per_s
    )
    exposed = 2.0 * (p - 1) * each
    if not stages.info.hides_sends:
        exposed = exposed + 2.0 * scene.micro_batches[rows] * each
    return np.asarray(exposed)

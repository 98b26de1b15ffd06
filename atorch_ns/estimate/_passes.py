"""Seconds of the passes over a model's segments: forward, backward, recomputation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from atorch_ns.estimate._host_work import recompute_operators
from atorch_ns.estimate._narrow import NarrowShare, narrow_share
from atorch_ns.estimate._scene import Scene
from atorch_ns.estimate._units import computed_in, cost_of, matches
from atorch_ns.profile import PhaseCost, Segment, SegmentCost, precision_key
from atorch_ns.strategy import Plan

__all__ = [
    "Passes",
    "SegmentSeconds",
    "offloaded_activations",
    "passes_of",
    "phase_seconds",
    "recomputed_shares",
    "segments_of",
]

COMPILED_LAUNCHES = 0.25
"""Share of operators that a compiled block still starts: TorchInductor fuses chains of element-wise operators
and reductions, three to six into one (its own fusion logs on transformer blocks)."""

COMPILED_MOVED = 0.5
"""Share of bytes that a compiled block still moves: what lies between fused operators stays in registers."""


@dataclass(frozen=True)
class SegmentSeconds:
    """One instance of a segment, in one micro-batch.

    Attributes:
        forward, backward, recompute: [R] seconds of computation.
        operators: started on the host, all passes together.
    """

    forward: np.ndarray
    backward: np.ndarray
    recompute: np.ndarray
    operators: float


@dataclass(frozen=True)
class Passes:
    """All passes of a step.

    Attributes:
        segments: for each segment its seconds in one micro-batch.
        compute, recompute: [R] seconds of the whole step.
        operators: [R] started on the host in the whole step.
    """

    segments: tuple[SegmentSeconds, ...]
    compute: np.ndarray
    recompute: np.ndarray
    operators: np.ndarray


def segments_of(scene: Scene) -> tuple[SegmentSeconds, ...]:
    """The seconds of one instance of every segment."""
    shares = recomputed_shares(scene.plan, scene.trace.segments)
    return tuple(
        _segment_seconds(scene, segment, again)
        for segment, again in zip(scene.trace.segments, shares, strict=True)
    )


def passes_of(scene: Scene, segments: tuple[SegmentSeconds, ...]) -> Passes:
    """The seconds of a step, from those of the segments."""

    def total(values: Sequence[np.ndarray | float]) -> np.ndarray:
        return np.asarray(scene.micro_batches * scene.parts.total(values))

    return Passes(
        segments,
        compute=total([each.forward + each.backward for each in segments]),
        recompute=total([each.recompute for each in segments]),
        operators=total([each.operators for each in segments]),
    )


def _segment_seconds(scene: Scene, segment: Segment, again: float) -> SegmentSeconds:
    plan, cost = scene.plan, cost_of(scene.plan, segment)
    forward = phase_seconds(scene, segment, cost.forward, "forward")
    backward = phase_seconds(scene, segment, cost.backward, "backward")
    kept = _kept_share(plan, cost) if again else 0.0
    started = cost.forward.num_operators * (1 + again) + cost.backward.num_operators
    return SegmentSeconds(
        forward=forward,
        backward=backward,
        recompute=forward * again * (1 - kept),
        operators=started * (COMPILED_LAUNCHES if _is_fused(scene, segment) else 1.0)
        + recompute_operators(plan, segment, again),
    )


def _is_fused(scene: Scene, segment: Segment) -> bool:
    """Whether a compiler makes few kernels of the segment: only blocks are compiled, where there are any."""
    if scene.plan.compiler != "inductor":
        return False
    return segment.is_block or not any(each.is_block for each in scene.trace.segments)


def phase_seconds(scene: Scene, segment: Segment, phase: PhaseCost, which: str) -> np.ndarray:
    """[R] seconds of computation of one pass of one instance, without starting its operators."""
    device, plan = scene.hardware.device, scene.plan
    fused = _is_fused(scene, segment)
    factor = float(np.prod([extra.compute_factor for extra in plan.extras]))
    moved = COMPILED_MOVED if fused else 1.0
    place = scene.trace.segments.index(segment) if scene.parts.divides else None
    narrow = narrow_share(plan, segment, scene.trace.num_samples, scene.trace.num_tokens)
    seconds = factor * _roofline(scene, phase, moved, scene.num_samples, scene.num_tokens, place, narrow)
    measured = scene.trace.seconds.get(f"{segment.fingerprint}:{_key(plan)}:{which}")
    if measured is None or fused or not segment.fingerprint:
        return seconds
    # On a CPU the time of a block holds that of starting its operators, which is counted apart.
    started = phase.num_operators * device.launch_s if device.type == "cpu" else 0.0
    traced = _roofline(scene, phase, moved, scene.trace.num_samples, scene.trace.num_tokens)
    return np.asarray(seconds * np.maximum(0.1 * measured, measured - started) / traced)


def _roofline(
    scene: Scene,
    phase: PhaseCost,
    moved: float,
    num_samples: np.ndarray | float,
    num_tokens: int,
    place: int | None = None,
    narrow: NarrowShare | None = None,
) -> np.ndarray:
    """[R] seconds of a pass; of a rank's part of it where the segment's ``place`` is given.

    Measured times are in the precision of the weights or of autocast, so they are held against a pass without
    ``narrow`` products.
    """
    device = scene.hardware.device
    weights, autocast = computed_in(scene.plan)
    peak = device.flops_of(autocast or weights) * device.efficiency
    flops = np.asarray(phase.flops.at(num_samples, num_tokens), dtype=float)
    num_bytes = np.asarray(phase.moved.at(num_samples, num_tokens), dtype=float)
    if place is not None:
        flops = flops * scene.parts.share(place, phase.flops.divided)
        num_bytes = num_bytes * scene.parts.share(place, phase.moved.divided, phase.moved.words)
    flops, num_bytes = np.maximum(flops, 0), np.maximum(num_bytes, 0)
    products = flops / peak
    if narrow is not None and scene.plan.narrow is not None and narrow.flops:
        rate = device.flops_per_s.get(scene.plan.narrow.dtype)
        faster = peak if rate is None else rate * device.efficiency
        products = flops * ((1 - narrow.flops) / peak + narrow.flops / faster)
        num_bytes = num_bytes + flops * narrow.bytes_per_flop
    return np.asarray(products + num_bytes * moved / device.memory_bytes_per_s)


def _key(plan: Plan) -> str:
    return precision_key(*computed_in(plan))


def recomputed_shares(plan: Plan, segments: Sequence[Segment]) -> list[float]:
    """Share of each segment's instances that are recomputed: every n-th of all modules that are selected."""
    shares, position = [], 0
    for segment in segments:
        if not _may_recompute(plan, segment):
            shares.append(0.0)
            continue
        last, every = position + segment.count, plan.recompute_every
        shares.append((-(-last // every) - -(-position // every)) / segment.count)
        position = last
    return shares


def offloaded_activations(scene: Scene) -> np.ndarray:
    """[R] seconds of moving inputs of recomputed blocks to the host and back, in a step; none of it is hidden."""
    plan, hardware = scene.plan, scene.hardware
    if not plan.offload_activations or hardware.device.type == "cpu":
        return np.zeros(len(scene.micro_batches))
    rate = hardware.to_host.rate
    each = []
    for segment, share in zip(
        scene.trace.segments, recomputed_shares(plan, scene.trace.segments), strict=True
    ):
        num_bytes = cost_of(plan, segment).output.at(scene.num_samples, scene.num_tokens)
        each.append(share * 2 * (rate.latency_s + num_bytes / rate.bytes_per_s))
    return np.asarray(scene.micro_batches * scene.parts.total(each))


def _may_recompute(plan: Plan, segment: Segment) -> bool:
    if plan.recompute == "none" or not segment.is_block:
        return False
    return plan.recomputed is None or any(matches(selector, segment) for selector in plan.recomputed)


def _kept_share(plan: Plan, cost: SegmentCost) -> float:
    """Share of the forward pass's operations whose results recomputation keeps."""
    if plan.recompute != "selective":
        return 0.0
    saved = {name.removesuffix(".default") for name in plan.saved_operators}
    total = sum(each.flops.per_sample + each.flops.per_token + each.flops.constant for each in cost.operators)
    kept = sum(
        each.flops.per_sample + each.flops.per_token + each.flops.constant
        for each in cost.operators
        if each.name in saved
    )
    return kept / total if total else 0.0

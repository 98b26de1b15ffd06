"""Seconds of the passes over a model's segments (forward, backward, recomputation), and the host's overhead.

Overheads are in units of starting one operator. They were measured in one process on a CPU, as the growth of
a step's time with the number of tiny blocks over the time of one operator in a small model (with module,
autograd node and views, as in :attr:`~atorch_ns.cluster.Device.launch_s`). In these units they differ little
between machines, since all are Python.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

import numpy as np

from atorch_ns.cluster import AttentionKind, Device
from atorch_ns.costs.count import is_attention
from atorch_ns.costs.price import kernel_seconds
from atorch_ns.estimate.model_shard import ShardUnit, computed_in, cost_of, is_recomputed, saved_results
from atorch_ns.estimate.time.context import PricingContext
from atorch_ns.profile import Growth, ParameterSpec, PhaseCost, Segment, precision_key
from atorch_ns.strategy import NarrowProducts, Plan

_PRODUCTS = ("aten.mm", "aten.addmm")  # of linear layers; products of activations are batched ones


class LowBitShare(NamedTuple):
    """The part of a segment that is computed in fewer bits, both passes together.

    Attributes:
        flops: share of its floating point operations.
        bytes_per_flop: bytes that finding scales and rounding move, for each operation of the segment.
    """

    flops: float = 0.0
    bytes_per_flop: float = 0.0


def low_bit_share(plan: Plan, segment: Segment, num_samples: float, num_tokens: float) -> LowBitShare:
    """The share of a segment under a plan, at the micro-batch that was traced.

    The layer of a product is not traced, so products are assigned by the sizes of weights: operations of
    linear layers are proportional to them.
    """
    if plan.precision.narrow is None:
        return LowBitShare()
    operators = cost_of(plan, segment).operators
    products = [each for each in operators if each.name.removesuffix(".default") in _PRODUCTS]
    total = _sum_growths((each.flops for each in operators), num_samples, num_tokens)
    share = plan.precision.narrow.share * _eligible_share(plan.precision.narrow, segment)
    if not total or not share:
        return LowBitShare()
    flops = share * _sum_growths((each.flops for each in products), num_samples, num_tokens) / total
    num_bytes = share * _sum_growths((each.moved for each in products), num_samples, num_tokens) / total
    casts = plan.precision.narrow.casts_per_operand
    if plan.compiler == "inductor":
        casts *= _FUSED_CASTS
    return LowBitShare(flops, num_bytes * max(0.0, casts - _SMALLER_OPERANDS))


# Share of the casts' bytes that is left under a compiler. A cast reads two bytes twice and writes one; the
# kernel that makes the tensor finds its largest value, which saves the first read.
_FUSED_CASTS: Final = 3 / 5
# Share of its bytes that a product saves: of three tensors it reads two in half the bytes.
_SMALLER_OPERANDS: Final = 1 / 3


def low_bit_rate(plan: Plan, device: Device) -> float:
    """FLOP/s of products in fewer bits; in the dtype of all else where the device has no rate for them."""
    low_bit = plan.precision.narrow
    if low_bit is not None and low_bit.dtype in device.flops_per_s:
        return low_bit.rate * device.products_of(low_bit.dtype)
    weights, autocast = computed_in(plan)
    return device.products_of(autocast or weights)


def _sum_growths(values: Iterable[Growth], num_samples: float, num_tokens: float) -> float:
    return float(sum(max(0.0, value.at(num_samples, num_tokens)) for value in values))


def _eligible_share(narrow: NarrowProducts, segment: Segment) -> float:
    matrices = [each for each in segment.parameters if len(each.shape) == 2]
    total = sum(each.num_elements for each in matrices)
    eligible = sum(each.num_elements for each in matrices if is_chosen(narrow, segment, each))
    return eligible / total if total else 0.0


def is_chosen(narrow: NarrowProducts, segment: Segment, matrix: ParameterSpec) -> bool:
    """Returns whether a matrix of a segment belongs to a layer that computes in fewer bits."""
    path = f"{segment.paths[0]}.{matrix.name}" if segment.paths else matrix.name
    name = path.rpartition(".")[0]
    if any(size % narrow.multiple for size in matrix.shape) or any(part in name for part in narrow.exclude):
        return False
    if narrow.include is not None:
        return any(part in name for part in narrow.include)
    return matrix.tied_to is None


_GATHER: Final = (24.0, 1.0)  # operators per unit, and per parameter, at every gather: hooks, buffers, views
_REDUCE: Final = (32.0, 3.0)  # the same at every reduction, with the sharded gradients made
_PASS: Final = (8.0, 1.0)  # the same at every backward pass that only accumulates
_BUCKETED: Final = 1.0  # operators per parameter whose gradient is copied to a bucket
_BROADCAST: Final = 2.0  # operators per updated parameter that is broadcast
_RECOMPUTED: Final = 40.0  # operators per recomputed block: saved-tensor hooks, random states, error checks
# Operators per operator of a selectively recomputed block: both of its forward passes ask a policy in Python.
_DISPATCHED: Final = 2.0
_GUARDED: Final = 16.0  # operators per compiled block, both passes: guards and the calls around the graph
# Operators per parameter of an optimizer with 0, 1, 2 states, one by one, with Adam's step counter.
_UPDATE: Final = (0.5, 1.2, 4.0)
_UPDATE_FUSED: Final = 0.65  # the same where one call updates all: lists are unpacked, step counters added to
_DTENSOR: Final = 5.0  # host time of an operator on a DTensor (layout ``rows``), over one on a plain tensor
# The same of a parameter in a fused call, which unpacks it: 1.4 and 0.44 operators (200 parameters, a CPU).
_DTENSOR_FUSED: Final = 3.0
_FOREACH_GPU: Final = 0.1  # share of these operators that is left where foreach kernels update all (GPUs)


def communication_operators(context: PricingContext) -> np.ndarray:
    """Operators launched per step to gather, reduce and send parameters and gradients, [R]."""
    plan, passes = context.plan, context.micro_batches
    none = np.zeros(len(passes))
    if plan.gradient_sync == "none":
        return none
    units = context.units
    trainable = sum(context.count(unit) * len(unit.parameters) for unit in units)
    total = none
    if plan.gradient_sync == "all_reduce" or plan.sharding.layout == "parameters":
        total = total + _BUCKETED * trainable
        return total + (_BROADCAST * trainable if plan.sharding.optimizer_over else 0.0)
    for unit in units:
        gathers = 1 if unit.is_root or plan.sharding.keeps_gathered else 2  # again for the backward pass
        each = (
            gathers * passes * _unit_cost(_GATHER, unit)
            + _unit_cost(_REDUCE, unit)
            + (passes - 1) * _unit_cost(_PASS, unit)
        )
        total = total + context.count(unit) * each
    return np.asarray(total)


def _unit_cost(figures: tuple[float, float], unit: ShardUnit) -> float:
    constant, per_parameter = figures
    return constant + per_parameter * len(unit.parameters)


def update_operators(
    plan: Plan, num_parameters: np.ndarray, num_states: int, device: str, *, fused: bool = False
) -> np.ndarray:
    """Operators launched by the update on the busiest rank, [R]."""
    each = _UPDATE_FUSED if fused else _UPDATE[num_states]
    if plan.sharding.layout == "rows" and plan.sharding.optimizer_over:
        each *= _DTENSOR_FUSED if fused else _DTENSOR
    if plan.precision.master_dtype is not None:
        each += 2.0  # the gradient's cast to fp32, and the copy of the master into the weight
    if device != "cpu" and not fused:
        each *= _FOREACH_GPU
    return num_parameters * each


COMPILED_LAUNCHES = 0.25
"""Share of operators that a compiled block still launches: TorchInductor fuses three to six element-wise
operators and reductions into one (its fusion logs on transformer blocks)."""


@dataclass(frozen=True)
class SegmentSeconds:
    """One instance of a segment, in one micro-batch.

    Attributes:
        forward, backward: [R] seconds of computation.
        recompute: [R] the same; of one recomputed block, where a plan recomputes a share of the blocks.
        operators: number of operators launched by the host, all passes but recomputation together.
        more_operators: number of those that recomputation launches.
    """

    forward: np.ndarray
    backward: np.ndarray
    recompute: np.ndarray
    operators: float
    more_operators: float


@dataclass(frozen=True)
class Passes:
    """All passes of a step.

    Attributes:
        segments: seconds of each segment in one micro-batch.
        compute, recompute: [R] seconds of the whole step.
        operators: [R] number of operators launched by the host in the whole step.
    """

    segments: tuple[SegmentSeconds, ...]
    compute: np.ndarray
    recompute: np.ndarray
    operators: np.ndarray


def segments_of(context: PricingContext) -> tuple[SegmentSeconds, ...]:
    """Seconds of one instance of every segment."""
    shares = recomputed_shares(context.plan, context.trace.segments)
    return tuple(
        _segment_seconds(context, segment, again)
        for segment, again in zip(context.trace.segments, shares, strict=True)
    )


def passes_of(context: PricingContext, segments: tuple[SegmentSeconds, ...]) -> Passes:
    """The seconds of a step, from those of the segments."""

    def total(values: Sequence[np.ndarray | float]) -> np.ndarray:
        return np.asarray(context.micro_batches * context.parts.total(values))

    ratio = context.parts.recomputed_share(context.plan)
    share = 1.0 if ratio is None else ratio
    return Passes(
        segments,
        compute=total([each.forward + each.backward for each in segments]),
        recompute=share * total([each.recompute for each in segments]),
        operators=total([each.operators + share * each.more_operators for each in segments]),
    )


def _segment_seconds(context: PricingContext, segment: Segment, again: float) -> SegmentSeconds:
    plan, cost = context.plan, cost_of(context.plan, segment)
    forward = phase_seconds(context, segment, cost.forward, "forward")
    backward = phase_seconds(context, segment, cost.backward, "backward")
    share = _kept_share(context, segment) if again else 0.0
    launches = COMPILED_LAUNCHES if _is_fused(context, segment) else 1.0
    dispatch = _DISPATCHED if plan.recomputation.kind == "selective" and not plan.compiled else 0.0
    guards = _GUARDED if plan.compiled and segment.is_block else 0.0
    return SegmentSeconds(
        forward=forward,
        backward=backward,
        recompute=forward * again * (1 - share),
        operators=(cost.forward.num_operators + cost.backward.num_operators) * launches + guards,
        more_operators=again * (cost.forward.num_operators * (launches + dispatch) + _RECOMPUTED),
    )


def _kept_share(context: PricingContext, segment: Segment) -> np.ndarray | float:
    """[R] share of a forward pass's seconds that selective recomputation does not spend again."""
    forward = cost_of(context.plan, segment).forward
    results = saved_results(context.plan, cost_of(context.plan, segment))
    if not results:
        return 0.0
    flops, traffic = (sum((getattr(each, name) for each in results), Growth()) for name in ("flops", "moved"))
    attention = sum((each.flops for each in results if is_attention(each.name)), Growth())
    at = context.trace.num_samples, context.trace.num_tokens
    products = forward.flops.at(*at) - forward.attention.at(*at)
    # A pass of the kept operators alone; operands and fused bytes are taken in proportion.
    part = replace(
        forward,
        flops=flops,
        attention=attention,
        operands=forward.operands * ((flops.at(*at) - attention.at(*at)) / (products or 1.0)),
        moved=traffic,
        fused=forward.fused * (traffic.at(*at) / (forward.moved.at(*at) or 1.0)),
    )
    all_seconds, saved_seconds = (
        _Running(context, segment, phase, "forward").seconds(context.num_samples, context.num_tokens)
        for phase in (forward, part)
    )
    return np.asarray(np.minimum(1.0, saved_seconds / all_seconds))


def _is_fused(context: PricingContext, segment: Segment) -> bool:
    # Only blocks are compiled, where there are any.
    if context.plan.compiler != "inductor":
        return False
    return segment.is_block or not any(each.is_block for each in context.trace.segments)


def phase_seconds(context: PricingContext, segment: Segment, phase: PhaseCost, which: str) -> np.ndarray:
    """[R] seconds of computation of one pass of one instance, without starting its operators."""
    device, plan = context.hardware.device, context.plan
    factor = float(np.prod([extra.compute_factor for extra in plan.extras]))
    index = context.trace.segments.index(segment) if context.parts.divides else None
    narrow = low_bit_share(plan, segment, context.trace.num_samples, context.trace.num_tokens)
    running = _Running(context, segment, phase, which)
    seconds = factor * running.seconds(context.num_samples, context.num_tokens, index, narrow)
    block_s = context.trace.seconds.get(f"{segment.fingerprint}:{precision_key(*computed_in(plan))}:{which}")
    if block_s is None or _is_fused(context, segment) or not segment.fingerprint:
        return seconds
    # On a CPU the time of a block holds that of starting its operators, which is counted by itself.
    start_s = phase.num_operators * device.launch_s if device.type == "cpu" else 0.0
    # The measured time replaces the priced one at the traced size; the price gives its growth with the batch.
    price_s = running.seconds(context.trace.num_samples, context.trace.num_tokens)
    return np.asarray(seconds * np.maximum(0.1 * block_s, block_s - start_s) / price_s)


@dataclass(frozen=True)
class _Running:
    """One pass of one segment on the cluster's device."""

    context: PricingContext
    segment: Segment
    phase: PhaseCost
    passes: str

    def seconds(
        self,
        num_samples: np.ndarray | float,
        num_tokens: int,
        index: int | None = None,
        narrow: LowBitShare | None = None,
    ) -> np.ndarray:
        """[R] seconds: operations at the rates of their kernels, and bytes at that of memory.

        They are of a rank's part where the segment's ``index`` is given.
        """

        def on_rank(growth: Growth) -> np.ndarray:
            value = np.asarray(growth.at(num_samples, num_tokens), dtype=float)
            if index is not None:
                value = value * self.context.parts.share(index, growth.divided, growth.words)
            return np.asarray(np.maximum(value, 0.0))

        device, segment = self.context.hardware.device, self.segment
        low_bit = self.context.plan.precision.narrow
        weights, autocast = computed_in(self.context.plan)
        dtype = autocast or weights
        # A batch without words counts one token, windows fewer than all, and patches more.
        queries = segment.num_queries * num_tokens // self.context.trace.num_tokens or num_tokens
        kind = AttentionKind(self.passes, segment.head_width, segment.is_causal, queries)
        attention, flops = on_rank(self.phase.attention), on_rank(self.phase.flops)
        is_fused = _is_fused(self.context, segment)
        narrow_flops = rounding_bytes = np.zeros_like(flops)
        if narrow is not None and low_bit is not None:
            narrow_flops = np.minimum(narrow.flops * flops, flops - attention)  # attention is never narrow
            rounding_bytes = flops * narrow.bytes_per_flop
        seconds = kernel_seconds(
            device,
            dtype,
            products=flops - attention - narrow_flops,
            operands=on_rank(self.phase.operands),
            moved=on_rank(self.phase.fused if is_fused else self.phase.moved),
            attention=attention,
            kind=kind,
            is_compiled=is_fused,
        )
        seconds = seconds + narrow_flops / low_bit_rate(self.context.plan, device)
        return np.asarray(seconds + rounding_bytes / device.memory_bytes_per_s)


def recomputed_shares(plan: Plan, segments: Sequence[Segment]) -> list[float]:
    """Share of each segment's instances that are recomputed: every n-th of the selected modules; all of them
    where ranks have shares (:meth:`~atorch_ns.estimate.model_shard.ModelShard.recomputed_share`)."""
    if plan.recomputation.share is not None:
        return [float(is_recomputed(plan, segment)) for segment in segments]
    shares, position = [], 0
    for segment in segments:
        if not is_recomputed(plan, segment):
            shares.append(0.0)
            continue
        last, every = position + segment.count, plan.recomputation.every
        # Multiples of n among the segment's positions, counted over all modules that are selected.
        shares.append((-(-last // every) - -(-position // every)) / segment.count)
        position = last
    return shares


def offloaded_activations(context: PricingContext) -> np.ndarray:
    """[R] exposed seconds of moving inputs of recomputed blocks to the host and back, in a step."""
    plan, hardware = context.plan, context.hardware
    if not plan.recomputation.offload_activations or hardware.device.type == "cpu":
        return np.zeros(len(context.micro_batches))
    rate = hardware.to_host.rate
    each = []
    ratio = context.parts.recomputed_share(plan)
    for s, share in enumerate(recomputed_shares(plan, context.trace.segments)):
        seconds = rate.latency_s + context.output_bytes(s) / rate.bytes_per_s
        count = context.trace.segments[s].count
        chunks = np.ceil(share * count / plan.recomputation.chunk)
        each.append(chunks / count * 2 * seconds)  # there and back
    return np.asarray((1.0 if ratio is None else ratio) * context.micro_batches * context.parts.total(each))

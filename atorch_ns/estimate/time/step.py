"""Step time of plans of one kind, which differ in sizes only.

A step is priced as its passes over the model's segments (:mod:`.passes`), communication (:mod:`.traffic`),
waiting of a pipeline's ranks for each other (:mod:`.pipeline`), and the optimizer's update.
"""

from __future__ import annotations

from statistics import NormalDist

import numpy as np

from atorch_ns.cluster import Cluster
from atorch_ns.costs import collective_seconds, host_seconds
from atorch_ns.estimate.estimate import TimeParts, Workload
from atorch_ns.estimate.model_shard import DTYPE_BYTES, Memo, Sizes, computed_in, stored_dtype
from atorch_ns.estimate.table import PlanTable
from atorch_ns.estimate.time.context import PricingContext
from atorch_ns.estimate.time.passes import (
    communication_operators,
    offloaded_activations,
    passes_of,
    segments_of,
    update_operators,
)
from atorch_ns.estimate.time.pipeline import as_pipeline
from atorch_ns.estimate.time.traffic import exchanges_of, gather_and_reduce, partial_sums
from atorch_ns.profile import ParameterSpec, Trace
from atorch_ns.strategy import Plan

# Tensors that an optimizer with 0, 1, 2 states reads or writes in place for each parameter: SGD reads two and
# writes one; momentum adds ``mul_`` and ``add_``; Adam runs seven operators in place.
_IN_PLACE = (3, 8, 17)
_FRESH = (0, 0, 4)  # the same for operators that make new tensors: Adam's root and its quotient
# The same for one kernel: parameter, gradient and states are read once, all but the gradient are written.
_FUSED = (3, 5, 7)


def update_seconds(context: PricingContext) -> tuple[np.ndarray, np.ndarray]:
    """[R] seconds of moving states, and [R] operators started on the host."""
    trainable = _trainable_parameters(context)
    optimizer = context.trace.optimizer
    num_states = min(2, len(optimizer.state_dtypes)) if optimizer else 0
    fused = optimizer is not None and optimizer.fused
    plan, device = context.plan, context.hardware.device
    num_elements = context.elements(trainable=True)
    shards = context.shards(plan.sharding.optimizer_over)
    dtype = plan.precision.master_dtype or plan.precision.parameter_dtype
    share = num_elements / shards
    in_place = (_FUSED if fused else _IN_PLACE)[num_states] * share * DTYPE_BYTES.get(dtype, 4)
    fresh = (0 if fused else _FRESH[num_states]) * share * DTYPE_BYTES.get(dtype, 4)
    if plan.precision.master_dtype is not None:  # gradients to new fp32 ones, masters into weights
        in_place, fresh = in_place + share * (4 + 2), fresh + share * (2 + 4)
    if plan.precision.loss_scaling:  # gradients are read and written once to unscale them
        in_place = in_place + share * 8
    seconds = in_place / device.update_bytes_per_s + fresh / device.memory_bytes_per_s
    count = (
        len(trainable) / shards
        if plan.sharding.layout == "parameters"
        else np.broadcast_to(_num_trainable(context), shards.shape)
    )
    # The host updates, at about the speed of the link to it.
    if (plan.offload or plan.offload_optimizer) and device.type != "cpu":
        seconds = (in_place + fresh) / context.hardware.to_host.rate.bytes_per_s
    return seconds, update_operators(plan, count, num_states, device.type, fused=fused)


def offload_seconds(context: PricingContext) -> np.ndarray:
    """[R] seconds of moving shards of parameters to the device and gradients back, every micro-batch."""
    plan, device = context.plan, context.hardware.device
    if plan.offload_optimizer and device.type != "cpu":
        return _copied_weights(context)
    if not plan.offload or device.type == "cpu":
        return np.zeros(len(context.micro_batches))
    parameters = [p for unit in context.units for p in unit.parameters * unit.count]
    shards = context.shards(plan.sharding.parameters_over)
    whole = sum(p.num_elements * DTYPE_BYTES[stored_dtype(plan, p, None)] for p in parameters)
    num_bytes = whole * context.elements(trainable=False) / max(1, sum(p.num_elements for p in parameters))
    passes = 1 if plan.sharding.keeps_gathered else 2
    rate = context.hardware.to_host.rate
    per_pass = rate.latency_s * len(parameters) + num_bytes / shards / rate.bytes_per_s
    return np.asarray(context.micro_batches * per_pass * passes + per_pass)


def _copied_weights(context: PricingContext) -> np.ndarray:
    """[R] seconds of sending gradients to the host and updated weights back, once a step."""
    rate = context.hardware.to_host.rate
    # Gradients in their own dtype, weights in fp32.
    num_bytes = DTYPE_BYTES[context.plan.precision.parameter_dtype] + 4
    seconds = context.elements(trainable=True) * num_bytes / rate.bytes_per_s
    seconds = seconds + 2 * rate.latency_s * len(_trainable_parameters(context))
    return np.asarray(np.broadcast_to(seconds, len(context.micro_batches)))


def _num_trainable(context: PricingContext) -> np.ndarray | float:
    counts = [
        sum(p.trainable and p.tied_to is None for p in segment.parameters)
        for segment in context.trace.segments
    ]
    return context.parts.total([float(count) for count in counts])


def _trainable_parameters(context: PricingContext) -> list[ParameterSpec]:
    return [p for unit in context.units for p in unit.parameters * unit.count if p.trainable]


_STEP_OPERATORS = 30  # operators of no segment: preparing the batch, the loss's mean, bookkeeping


def _price_kind(
    plan: Plan, sizes: Sizes, trace: Trace, cluster: Cluster, *, workload: Workload, memo: Memo
) -> np.ndarray:
    context = PricingContext.of(plan, sizes, trace, cluster=cluster, workload=workload, memo=memo)
    computing = _compute_fields(plan)
    segments = memo.get(("seconds", computing, context.parts), lambda: segments_of(context))
    key = ("exchanges", computing, context.order, context.parts)
    exchanges = memo.get(key, lambda: exchanges_of(context))
    # From here on the context is that of each pipeline's slowest rank.
    context, waiting = as_pipeline(context, segments, exchanges)
    passes = passes_of(context, segments)
    slowest = _slowest_ratio(context)
    compute = passes.compute * slowest
    recompute = passes.recompute * slowest
    gather, reduce = gather_and_reduce(context, passes)
    update, update_operators = update_seconds(context)
    offload = offload_seconds(context) + offloaded_activations(context)
    exchange = context.micro_batches * context.parts.total([each.seconds for each in exchanges])
    device_seconds = compute + recompute + gather + reduce + update + offload + exchange
    operators = passes.operators + communication_operators(context) + update_operators + _STEP_OPERATORS
    of_exchanges = context.parts.total([each.operators for each in exchanges])
    operators = operators + context.micro_batches * of_exchanges + waiting.operators
    parts = {
        "compute": compute,
        "recompute": recompute,
        "gather": gather,
        "reduce": reduce + partial_sums(context),
        "optimizer": update,
        "offload": offload,
        "bubble": waiting.bubble,
        "overhead": _host_overhead(context, operators, device_seconds),
        "exchange": exchange + waiting.sends,
    }
    columns = np.empty((len(sizes), len(TimeParts._fields)))  # [R, 9] seconds
    for index, name in enumerate(TimeParts._fields):
        columns[:, index] = parts[name]
    return columns


# Standard deviation of the time that equal devices take, over its mean. Sinha et al. 2022 ("Not all GPUs are
# created equal") find 8 % between the whiskers of 18,800 hours on five clusters: 5.4 normal deviations.
_VARIATION = 0.08 / 5.4


def _slowest_ratio(context: PricingContext) -> np.ndarray:
    """[R] time of the slowest of a plan's devices over their mean."""
    sizes = context.sizes
    if context.hardware.measured or context.hardware.device.type == "cpu":  # measured on the slowest rank
        return np.ones(len(sizes))
    ranks = sizes.num_data_ranks * sizes.tensor * sizes.sequence * sizes.pipeline
    counts, inverse = np.unique(ranks, return_inverse=True)
    # Blom's approximation of the expected largest of n normal values.
    largest = [NormalDist().inv_cdf((count - 0.375) / (count + 0.25)) for count in counts.tolist()]
    return np.asarray(1 + _VARIATION * np.asarray(largest)[inverse])


def _compute_fields(plan: Plan) -> tuple[object, ...]:
    again = plan.recomputation
    kernels = (plan.precision.narrow, plan.replaced, plan.compiled, plan.compiler, plan.extras)
    recomputation = (again.kind, again.every, again.share, again.selectors, again.saved_operators)
    return (*computed_in(plan), *kernels, *recomputation)


def _host_overhead(context: PricingContext, operators: np.ndarray, device_seconds: np.ndarray) -> np.ndarray:
    """[R] exposed seconds of starting operators, and of the host's work in every step."""
    host = host_seconds(context.hardware.device, operators, device_seconds)
    extra_s = sum(extra.seconds_per_step for extra in context.plan.extras)
    # The loss's mean, and with loss scaling whether a gradient is infinite: an fp32 number each.
    loss = collective_seconds("all_reduce", 4.0, context.data_groups, context.hardware)
    flags = loss if context.plan.precision.loss_scaling else 0.0
    return np.asarray(host + extra_s + loss + flags)


def price_time(
    table: PlanTable, trace: Trace, cluster: Cluster, workload: Workload, *, memo: Memo | None = None
) -> np.ndarray:
    """Seconds of one step of every plan.

    Args:
        table: N plans.
        memo: results shared between calls with the same table, trace and workload.

    Returns:
        [N, 9] seconds, columns as :class:`TimeParts`.
    """
    times = np.zeros((len(table), len(TimeParts._fields)))
    memo = memo or Memo()
    for kind, plan in enumerate(table.templates):
        rows, sizes = table.sizes(kind, workload, memo)
        if rows.size:
            times[rows] = _price_kind(plan, sizes, trace, cluster, workload=workload, memo=memo)
    return times

"""Peak memory of plans: states + max over moments of (gradients + activations + temporaries) + GPU reserve.

States are parameters and optimizer states as kept between steps. Legend: N plans, R of them of one kind.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from atorch_ns.estimate.estimate import MemoryParts, Workload
from atorch_ns.estimate.memory.activations import Activations, SegmentBytes
from atorch_ns.estimate.memory.moments import (
    Moment,
    PlanGroup,
    flattened_moments,
    moment_names,
    owned_moments,
    replicated_moments,
)
from atorch_ns.estimate.memory.reserved import CACHED_SHARE, outside_bytes, workspace_bytes
from atorch_ns.estimate.memory.sharded import sharded_moments
from atorch_ns.estimate.memory.shards import Parameters
from atorch_ns.estimate.memory.states import kept_of, parameters_of, shares_of
from atorch_ns.estimate.model_shard import Memo, ModelShard, Sizes, computed_in, cost_of, distinct_rows
from atorch_ns.estimate.stages import shard_stages
from atorch_ns.estimate.table import PlanTable
from atorch_ns.profile import Trace
from atorch_ns.strategy import Plan


def price_memory(
    table: PlanTable,
    trace: Trace,
    workload: Workload,
    *,
    device_type: str = "cpu",
    capability: tuple[int, int] | None = None,
    memo: Memo | None = None,
) -> tuple[np.ndarray, np.ndarray, tuple[str, ...]]:
    """Returns the peak of every plan in parts, as bytes of tensors on the rank that holds most.

    Of workspaces inside kernels cuBLAS's are known; oneDNN's products in 16 bits take some 100 KiB on a CPU.

    Args:
        table: the plans.
        workload: the batch of a step.
        device_type: ``"cpu"``, where gloo's collectives work on copies and offloading frees nothing, or
            ``"cuda"``, where memory is reserved beyond the need of tensors.
        capability: of a CUDA device.
        memo: results shared between calls with the same table, trace and workload.

    Returns:
        [N, 7] columns as :class:`MemoryParts`; [N] at which moment; and the moments in words.
    """
    memory = np.zeros((len(table), len(MemoryParts._fields)))
    worst = np.zeros(len(table), dtype=np.int64)
    memo = memo or Memo()
    for index, plan in enumerate(table.templates):
        rows, sizes = table.sizes(index, workload, memo)
        if rows.size:
            parts, owners = shard_stages(trace, sizes, memo)
            kind = plan_group(plan, trace, workload, parts, device_type=device_type, memo=memo)
            peaks, moments = _price_peak(kind)
            if device_type == "cuda":
                _add_device_reserve(peaks, parts.sizes, capability)
            most = owners.largest(peaks.sum(axis=1))  # of the stages of each plan
            memory[rows], worst[rows] = peaks[most], moments[most]
    return memory, worst, moment_names(trace)


def _add_device_reserve(parts: np.ndarray, sizes: Sizes, capability: tuple[int, int] | None) -> None:
    # In this order: torch's allocator gives the workspaces too, so that its share is taken of them as well.
    temporaries, reserve, outside = map(MemoryParts._fields.index, ("temporaries", "reserve", "outside"))
    parts[:, temporaries] += workspace_bytes(capability)
    parts[:, reserve] += CACHED_SHARE * parts[:, :reserve].sum(axis=1)
    parts[:, outside] = outside_bytes(sizes)


def plan_group(
    plan: Plan, trace: Trace, workload: Workload, parts: ModelShard, *, device_type: str, memo: Memo
) -> PlanGroup:
    """The plans of one kind whose ranks hold ``parts``, with the inputs of their moments."""
    sizes = parts.sizes
    degree = sizes.shards(plan.sharding.layout)
    parameters = parameters_of(trace, plan, tied=parts.is_cut)
    num_blocks = _count_expanded(parameters, trace)
    if parts.divides:  # columns of keys: degree, degree of experts, tensor, expert, blocks of each segment
        keys, row = memo.get(("held", parts, plan.sharding.layout), lambda: _distinct_states(parts, degree))
        parameters = parameters.part(keys[:, 2], keys[:, 3], keys[:, 4:])
        degrees = keys[:, 0]
        if parameters.is_expert.any():
            degrees = np.where(parameters.is_expert, keys[:, 1:2], keys[:, :1])
    else:
        degrees, row = np.unique(degree, return_inverse=True)
        parameters = replace(parameters, is_expert=np.zeros_like(parameters.is_expert))
    shares = shares_of(plan, parameters, trace.optimizer, degrees, memo=memo)
    of_segments = memo.get(
        ("bytes", computed_in(plan), plan.replaced, parts),
        lambda: _segment_bytes(plan, trace, workload, parts),
    )
    return PlanGroup(
        plan=plan,
        trace=trace,
        activations=Activations(
            plan, trace, of_segments, offloads=plan.recomputation.offload_activations and device_type != "cpu"
        ),
        parameters=parameters,
        shares=shares,
        kept=kept_of(plan, parameters, shares, trace.optimizer),
        row=row.reshape(-1),
        degree=degree,
        num_ranks=sizes.num_data_ranks,
        micro_batches=sizes.micro_batches,
        parts=parts,
        expanded=num_blocks,
        is_cpu=device_type == "cpu",
    )


def _distinct_states(parts: ModelShard, degree: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    # [K, 4 + S] distinct combinations that determine a rank's states, and [R] the one of each row.
    sizes = parts.sizes
    counts = np.stack([np.broadcast_to(count, len(sizes)) for count in parts.counts], axis=1)
    # Experts are divided over the ranks that have the same ones.
    return distinct_rows(np.column_stack([degree, sizes.num_copies, sizes.tensor, sizes.expert, counts]))


def _segment_bytes(plan: Plan, trace: Trace, workload: Workload, parts: ModelShard) -> SegmentBytes:
    costs = tuple(cost_of(plan, segment) for segment in trace.segments)
    num_samples = np.ceil(parts.sizes.num_samples(workload.global_batch))  # those of the fullest rank
    return SegmentBytes(costs, parts, num_samples, workload.num_tokens)


def _count_expanded(parameters: Parameters, trace: Trace) -> tuple[int, ...]:
    counts = []  # blocks of each segment that stand in ``parameters`` one by one
    for s, segment in enumerate(trace.segments):
        copies = parameters.copies[(parameters.segment == s) & (parameters.owner < 0)]
        counts.append(segment.count // int(copies[0]) if len(copies) else 1)
    return tuple(counts)


def _price_peak(kind: PlanGroup) -> tuple[np.ndarray, np.ndarray]:
    moments = list(_iterate_moments(kind))
    names = np.asarray([moment.name for moment in moments])
    usage = np.empty((len(moments), 3, len(kind.row)))  # [M, gradients | activations | temporaries, R]
    for index, moment in enumerate(moments):
        usage[index, 0], usage[index, 1], usage[index, 2] = moment[1:]
    rows = np.arange(len(kind.row))
    worst = _mask_absent(kind, names, usage.sum(axis=1)).argmax(axis=0)
    gradients, activations, temporaries = usage[worst, :, rows].T  # [R] each, at the worst moment
    trace, plan, acts, parts = kind.trace, kind.plan, kind.activations, kind.parts
    # A rank's batch of the whole step is on the device throughout.
    batch = trace.batch_bytes.at(acts.bytes.num_samples * kind.micro_batches, acts.bytes.num_tokens)
    buffers = parts.total([float(segment.buffer_bytes) for segment in trace.segments])
    weights = (kind.parameters.elements * kind.parameters.itemsize * kind.parameters.copies).sum(axis=-1)
    weights = weights[kind.row] if np.ndim(weights) else float(weights)
    on_device = 0.0 if kind.offloads else 1.0
    columns = {
        "parameters": kind.kept.parameters[kind.row] * on_device + buffers,
        "gradients": gradients + weights * sum(extra.gradient_copies for extra in plan.extras),
        "optimizer": kind.kept.optimizer[kind.row] * (0.0 if kind.offloads_optimizer else 1.0),
        "activations": activations + batch,
        "temporaries": temporaries + weights * sum(extra.parameter_copies for extra in plan.extras),
        "reserve": float(sum(extra.fixed_bytes for extra in plan.extras)),
        "outside": 0.0,
    }
    table = np.empty((len(rows), len(MemoryParts._fields)))
    for index, name in enumerate(MemoryParts._fields):
        table[:, index] = columns[name]
    return table, names[worst]  # [R, 7] parts, [R] the moment


def _mask_absent(kind: PlanGroup, names: np.ndarray, totals: np.ndarray) -> np.ndarray:
    """[M, R] bytes of M moments, masked where the rank has no block of the moment."""
    if not kind.parts.is_cut:
        return totals
    has = np.stack(
        [np.asarray(count) > 0 for count in kind.parts.counts] + [np.ones(totals.shape[1], dtype=bool)]
    )
    return np.where(has[names // 4], totals, -1.0)  # four moments a segment; the optimizer's step is last


def _iterate_moments(kind: PlanGroup) -> Iterator[Moment]:
    """Moments of one micro-batch's passes, with memory that other micro-batches in a pipeline keep."""
    if not kind.parts.is_cut:
        yield from _of_passes(kind)
        return
    # A stage returns before another pass runs: local variables of the model's code are gone by then.
    transient = kind.activations.bytes.until_return
    others = (kind.parts.live - 1) * (kind.activations.everything() - transient) - transient
    buffers = kind.activations.received(kind.micro_batches)
    for moment in _of_passes(kind):
        if moment.name == kind.last_moment():  # all micro-batches have ended
            yield moment._replace(temporaries=moment.temporaries + buffers)
        else:
            yield moment._replace(
                activations=moment.activations + others, temporaries=moment.temporaries + buffers
            )


def _of_passes(kind: PlanGroup) -> Iterator[Moment]:
    plan = kind.plan
    if plan.sharding.updates_copy:
        return flattened_moments(kind)
    if plan.gradient_sync == "reduce_scatter":
        return sharded_moments(kind) if plan.sharding.parameters_over else owned_moments(kind)
    return replicated_moments(kind)

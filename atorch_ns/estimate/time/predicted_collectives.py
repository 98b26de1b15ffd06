"""Predicted collectives: calls and bytes of the first rank in a step, as torch's libraries make them.

Legend: B samples in a micro-batch, T tokens, D model, V vocabulary, t ranks along ``tensor``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

import numpy as np

from atorch_ns.estimate.estimate import Collective, Workload
from atorch_ns.estimate.model_shard import (
    DTYPE_BYTES,
    LOSS_CALLS,
    LOSS_NUMBERS,
    ShardUnit,
    bucket_sizes,
    computed_in,
    cost_of,
    reported_bytes,
    stored_dtype,
    units_of,
)
from atorch_ns.estimate.stages import schedule_of, stages_of, usual_micro_batches
from atorch_ns.estimate.time.passes import recomputed_shares
from atorch_ns.estimate.time.traffic import words_of
from atorch_ns.profile import ParameterSpec, Segment, Trace
from atorch_ns.strategy import MODEL_AXES, Plan

_SCALAR_BYTES = 4  # an fp32 number


def collectives(plan: Plan, trace: Trace, workload: Workload) -> tuple[Collective, ...]:
    """The first rank's collectives in a step after the second, those of one kind along one axis together.

    Clipping by the gradients' norm is left out, since no plan decides about it. Collectives that
    :func:`unpredicted` explains are left out. The workload decides exchanges between parts of a model.
    """
    divides = any(plan.size(name) > 1 for name in MODEL_AXES)
    if plan.size("pipeline") > 1 and plan.num_micro_batches == 1:
        num_samples = workload.global_batch // plan.num_data_ranks
        passes = usual_micro_batches(plan.pipeline, plan.size("pipeline"), num_samples)
        plan = replace(plan, num_micro_batches=passes)
    calls = list(model_axis_collectives(plan, trace, workload)) if divides else []
    part = first_part(plan, trace) if divides else trace
    if plan.num_data_ranks > 1:
        calls += _of_data(plan, part, divides)
    scalars = int(plan.num_data_ranks > 1)  # the loss's mean
    if plan.precision.loss_scaling and (divides or plan.num_data_ranks > 1):
        scalars += 1  # whether any gradient is infinite
    return _merge_collectives([*calls, Collective("all_reduce", "data", scalars, scalars * _SCALAR_BYTES)])


def _of_data(plan: Plan, trace: Trace, divides: bool) -> list[Collective]:
    if plan.gradient_sync == "reduce_scatter":
        return _of_owners(plan, trace) if plan.sharding.layout == "parameters" else _of_units(plan, trace)
    if plan.gradient_sync == "all_reduce":
        return _of_parts(plan, trace) if divides else _of_replicas(plan, trace)
    return []


def _of_parts(plan: Plan, trace: Trace) -> list[Collective]:
    # torch's ``replicate``: all gradients of a part of the model in one tensor.
    sizes = _trainable_bytes(plan, trace, plan.sharding.reduce_dtype)
    updates = _broadcast_updates(plan, trace) if plan.size(plan.sharding.optimizer_over) > 1 else []
    return [Collective("all_reduce", "data", 1, sum(sizes)), *updates]


def _of_replicas(plan: Plan, trace: Trace) -> list[Collective]:
    buckets = bucket_sizes(plan, trace)
    return [
        Collective("all_reduce", "data", len(buckets), sum(buckets) + reported_bytes(plan, trace)),
        *_broadcast_buffers(trace),
        *(_broadcast_updates(plan, trace) if plan.size(plan.sharding.optimizer_over) > 1 else ()),
    ]


def _of_owners(plan: Plan, trace: Trace) -> list[Collective]:
    # Gradients are reduced one by one to the rank that updates the parameter.
    sizes = _trainable_bytes(plan, trace, plan.sharding.reduce_dtype)
    return [
        Collective("reduce", "data", len(sizes), sum(sizes)),
        *_broadcast_buffers(trace),
        *_broadcast_updates(plan, trace),
    ]


def _of_units(plan: Plan, trace: Trace) -> list[Collective]:
    result = []
    axis = plan.sharding.gradients_over[0]
    shards = plan.size(plan.sharding.gradients_over)
    replicas = plan.num_data_ranks // shards
    each = bool(plan.sharding.reduces_each) and plan.size("pipeline") == 1
    for unit in units_of(plan, trace):
        gradients = _padded_bytes(
            plan, (p for p in unit.parameters if p.trainable), plan.sharding.reduce_dtype, shards
        )
        reductions = unit.count * (plan.num_micro_batches if each else 1)
        if shards > 1:
            weights = _padded_bytes(plan, unit.parameters, plan.sharding.gather_dtype, shards)
            calls = unit.count * _count_gathers(plan, unit)
            result.append(Collective("all_gather", axis, calls, calls * weights))
            if gradients:
                result.append(Collective("reduce_scatter", axis, reductions, reductions * gradients))
        if replicas > 1 and gradients:  # reduced shards are summed over the replicas
            result.append(Collective("all_reduce", "data", reductions, reductions * gradients // shards))
    return result


def _count_gathers(plan: Plan, unit: ShardUnit) -> int:
    # The root stays gathered until its backward pass; in a pipeline for the whole step.
    once = unit.is_root or plan.sharding.keeps_gathered or not plan.sharding.parameters_over
    if plan.size("pipeline") == 1:
        return plan.num_micro_batches * (1 if once else 2)
    return 1 if once else _gathers_of_stage(plan)


def _gathers_of_stage(plan: Plan) -> int:
    info = schedule_of(plan.pipeline)
    order = info.orders(plan.size("pipeline"), plan.num_micro_batches, plan.pipeline.stages_per_rank or None)[
        0
    ]
    is_gathered, calls = False, 0
    for kind, stage, _ in order:
        if stage == 0:
            # torch keeps parameters that a backward pass has gathered for the pass that comes next.
            calls += not is_gathered
            is_gathered = kind != "F"
    return calls


def _padded_bytes(plan: Plan, parameters: Iterable[ParameterSpec], dtype: str | None, shards: int) -> int:
    total = 0
    for parameter in parameters:
        rows = parameter.shape[0] if parameter.shape else 1
        num_rows = -(-rows // shards) * shards  # torch pads rows to a multiple of the shards
        total += parameter.num_elements // max(1, rows) * num_rows * _stored_itemsize(plan, parameter, dtype)
    return total


def _broadcast_buffers(trace: Trace) -> list[Collective]:
    # Buffers follow the first rank at the start of a step's first forward pass, as one flat tensor.
    num_bytes = sum(segment.buffer_bytes * segment.count for segment in trace.segments)
    return [Collective("broadcast", "data", 1, num_bytes)] if num_bytes else []


def _broadcast_updates(plan: Plan, trace: Trace) -> list[Collective]:
    # Updated parameters go from their owner to all: one by one, or (flat) those of each owner as one tensor.
    axis = "zero" if plan.sharding.optimizer_over == ("zero",) else "data"
    sizes = _trainable_bytes(plan, trace, plan.precision.master_dtype)
    count = plan.size(plan.sharding.optimizer_over) if plan.sharding.layout == "flat" else len(sizes)
    return [Collective("broadcast", axis, count, sum(sizes))]


def _trainable_bytes(plan: Plan, trace: Trace, dtype: str | None) -> list[int]:
    parameters = (p for unit in units_of(plan, trace) for p in unit.parameters * unit.count if p.trainable)
    return [p.num_elements * _stored_itemsize(plan, p, dtype) for p in parameters]


def _stored_itemsize(plan: Plan, parameter: ParameterSpec, dtype: str | None) -> int:
    return DTYPE_BYTES[stored_dtype(plan, parameter, dtype)]


def _merge_collectives(calls: Iterable[Collective]) -> tuple[Collective, ...]:
    sums: dict[tuple[str, str], tuple[int, int]] = {}
    for each in calls:
        count, num_bytes = sums.get((each.kind, each.axis), (0, 0))
        sums[each.kind, each.axis] = (count + each.count, num_bytes + each.num_bytes)
    return tuple(Collective(kind, axis, *both) for (kind, axis), both in sums.items() if both[0])


def unpredicted_reason(plan: Plan) -> str:
    """The reason why the collectives of a plan are not predicted, as a clause; empty if they are."""
    axes = [name for name in ("sequence", "expert") if plan.size(name) > 1]
    if axes:
        return (
            f"what is exchanged along {' and '.join(axes)} depends on attention and routing, which a trace does "
            "not tell"
        )
    if plan.size("tensor") > 1 and plan.tensor.sequence:
        return "what Megatron's sequence parallelism gathers depends on the found layout"
    if (
        plan.size("pipeline") > 1
        and plan.sharding.parameters_over
        and not schedule_of(plan.pipeline).is_single
    ):
        return "when each of several stages on a rank gathers its parameters depends on the schedule"
    return ""


def first_part(plan: Plan, trace: Trace) -> Trace:
    """The part of the model that the first rank has, with the sizes that its parameters have there."""
    counts = [segment.count for segment in trace.segments]
    if plan.size("pipeline") > 1:
        counts = stages_of(plan.pipeline, trace, plan.size("pipeline")).on_rank[0].tolist()
    segments = []
    names: set[str | None] = set()
    for segment, count in zip(trace.segments, counts, strict=True):
        if not count:  # on other stages
            continue
        paths = segment.paths[:count]
        specs = [_local_spec(spec, plan) for spec in segment.parameters]
        # A tied parameter is another one where the first use is on another rank.
        specs = [replace(spec, tied_to=spec.tied_to if spec.tied_to in names else None) for spec in specs]
        segments.append(replace(segment, paths=paths, parameters=tuple(specs)))
        names.update(segments[-1].parameter_names)
    return replace(trace, segments=tuple(segments))


def _local_spec(spec: ParameterSpec, plan: Plan) -> ParameterSpec:
    tensor, dim = plan.size("tensor"), spec.tensor_dim
    if dim is None or tensor == 1 or spec.shape[dim] % tensor:
        return spec
    return replace(
        spec, shape=tuple(size // tensor if index == dim else size for index, size in enumerate(spec.shape))
    )


def tied_bytes(plan: Plan, trace: Trace) -> int:
    """Bytes that tied stages sum: gradients of the first rank's shared parameters, and a number for each."""
    if plan.size("pipeline") == 1:
        return 0
    names = {name for segment in first_part(plan, trace).segments for name in segment.parameter_names}
    counts = stages_of(plan.pipeline, trace, plan.size("pipeline")).on_rank[0]
    away = [part for part, count in zip(trace.segments, counts, strict=True) if not count]
    shards = plan.size(plan.sharding.gradients_over)
    sizes = {
        spec.tied_to: (_local_spec(spec, plan).num_elements // shards + 1)
        * DTYPE_BYTES[stored_dtype(plan, spec, None)]
        for segment in away
        for spec in segment.parameters
        if spec.tied_to in names
    }
    return sum(sizes.values())


def model_axis_collectives(plan: Plan, trace: Trace, workload: Workload) -> Iterator[Collective]:
    """Collectives along ``tensor`` and ``pipeline`` in one step."""
    passes = plan.num_micro_batches
    samples = workload.global_batch / (plan.num_data_ranks * passes)
    if plan.size("tensor") > 1:
        part = first_part(plan, trace)
        again = recomputed_shares(plan, part.segments)
        for segment, share in zip(part.segments, again, strict=True):
            for kind, count, num_bytes in _of_segment(plan, trace, segment, share, samples=samples):
                yield Collective(kind, "tensor", passes * count, round(passes * num_bytes))
    if plan.size("pipeline") > 1:
        yield from _of_stages(plan, trace, samples)
        # Their losses.
        yield Collective("broadcast", "pipeline", 1, _SCALAR_BYTES * max(1, plan.num_micro_batches))
        if shared_bytes := tied_bytes(plan, trace):
            yield Collective("all_reduce", "pipeline", 1, shared_bytes)


def _of_segment(
    plan: Plan, trace: Trace, segment: Segment, again: float, *, samples: float
) -> Iterator[tuple[str, int, float]]:
    """Kind, calls and bytes of a segment in one micro-batch."""
    residual, compute = _computed_itemsizes(plan)
    width = _residual_bytes(plan, trace, samples) / residual  # B T D elements
    if segment.num_rows:
        # Results of row layers are summed in the compute dtype, gradients of inputs of column layers in that
        # of the residual stream. Recomputation stops before its last sum.
        forward = segment.count * (segment.num_rows + again * (segment.num_rows - 1))
        backward = segment.count * segment.num_rows
        yield "all_reduce", round(forward), forward * width * compute
        yield "all_reduce", backward, backward * width * residual
    if not words_of(segment):
        return
    if segment.name != trace.segments[-1].name:  # the embedding, divided along the vocabulary
        yield "all_reduce", 1, width * residual
        return
    tokens = samples * trace.num_tokens
    if plan.tensor.parallel_loss:
        yield "all_reduce", LOSS_CALLS, LOSS_NUMBERS * tokens * trace.loss_share * DTYPE_BYTES["float32"]
    else:
        whole, *_ = words_of(trace.segments[-1])  # of all ranks
        yield "all_gather", 1, tokens * whole.shape[0] * compute
    yield "all_reduce", 1, width * residual


def _computed_itemsizes(plan: Plan) -> tuple[int, int]:
    weights, autocast = computed_in(plan)
    return DTYPE_BYTES.get(weights, 4), DTYPE_BYTES.get(autocast or weights, 4)


def _residual_bytes(plan: Plan, trace: Trace, samples: float) -> float:
    blocks = [segment for segment in trace.segments if segment.is_block]
    cost = cost_of(plan, max(blocks or trace.segments, key=lambda block: block.count))
    return float(cost.output.at(samples, trace.num_tokens))  # of [B, T, D]


def _of_stages(plan: Plan, trace: Trace, samples: float) -> Iterator[Collective]:
    stages = stages_of(plan.pipeline, trace, plan.size("pipeline"))
    num_ranks, last = len(stages.numbers), int(stages.numbers.max())
    # The cuts on both sides of the first rank's stages. Neighbours on one rank, as in a V, send nothing.
    cuts = [stage for stage in stages.numbers[0].tolist() if stage < last]
    cuts += [stage - 1 for stage in stages.numbers[0].tolist() if stage > 0]
    crossing = [
        cut for cut in cuts if stages.info.rank_of(cut, num_ranks) != stages.info.rank_of(cut + 1, num_ranks)
    ]
    calls = plan.num_micro_batches * len(crossing)  # activations one way, gradients the other
    num_bytes = int(np.ceil(calls * _residual_bytes(plan, trace, samples)))
    for kind in ("send", "recv"):
        yield Collective(kind, "pipeline", calls, num_bytes)

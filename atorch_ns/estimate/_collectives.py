"""What a plan communicates in one step, as the libraries that execute it do."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from atorch_ns.estimate._buckets import gradient_buckets
from atorch_ns.estimate._estimate import Collective, Workload
from atorch_ns.estimate._exchanged import exchanged, first_part, unpredicted
from atorch_ns.estimate._stages import schedule_of, usual_micro_batches
from atorch_ns.estimate._units import DTYPE_BYTES, Unit, stored_dtype, units_of
from atorch_ns.pipeline import actions
from atorch_ns.profile import ParameterSpec, Trace
from atorch_ns.strategy import MODEL_AXES, Plan

__all__ = ["collectives", "unpredicted"]

_SCALAR_BYTES = 4


def collectives(plan: Plan, trace: Trace, workload: Workload) -> tuple[Collective, ...]:
    """Every collective that the first rank takes part in, in one step after the second, those of one kind along
    one axis together.

    Clipping by the gradients' norm is not in it: no plan decides about it. Of plans for which :func:`unpredicted`
    gives a reason, what it names is not in it either.

    Args:
        plan: with its axes and micro-batches.
        trace: of the model.
        workload: the batch, which decides about what is exchanged between parts of a model.
    """
    divides = any(plan.size(name) > 1 for name in MODEL_AXES)
    if plan.size("pipeline") > 1 and plan.num_micro_batches == 1:
        num_samples = workload.global_batch // plan.num_data_ranks
        passes = usual_micro_batches(plan, plan.size("pipeline"), num_samples)
        plan = replace(plan, num_micro_batches=passes)
    own = list(exchanged(plan, trace, workload)) if divides else []
    part = first_part(plan, trace) if divides else trace
    if plan.num_data_ranks > 1:
        own += _of_data(plan, part, divides)
    scalars = int(plan.num_data_ranks > 1)  # the loss's mean
    if plan.loss_scaling and (divides or plan.num_data_ranks > 1):
        scalars += 1  # whether any gradient is infinite
    return _together([*own, Collective("all_reduce", "data", scalars, scalars * _SCALAR_BYTES)])


def _of_data(plan: Plan, trace: Trace, divides: bool) -> list[Collective]:
    """What combines gradients of different data."""
    if plan.gradient_sync == "reduce_scatter":
        return _of_owners(plan, trace) if plan.shard_layout == "parameters" else _of_units(plan, trace)
    if plan.gradient_sync == "all_reduce":
        return _of_parts(plan, trace) if divides else _of_replicas(plan, trace)
    return []


def _of_parts(plan: Plan, trace: Trace) -> list[Collective]:
    """torch's ``replicate``: all gradients of a part of the model in one tensor."""
    sizes = [_bytes(plan, p, plan.reduce_dtype) for p in _parameters(plan, trace) if p.trainable]
    return [Collective("all_reduce", "data", 1, sum(sizes))]


def _of_replicas(plan: Plan, trace: Trace) -> list[Collective]:
    """DistributedDataParallel, with the optimizer sharded or not."""
    buckets = gradient_buckets(plan, trace)
    return [
        Collective("all_reduce", "data", len(buckets), sum(buckets)),
        *_broadcast_buffers(trace),
        *(_broadcast_updates(plan, trace) if plan.size(plan.optimizer_over) > 1 else ()),
    ]


def _of_owners(plan: Plan, trace: Trace) -> list[Collective]:
    """Gradients reduced one by one to the rank that updates the parameter."""
    sizes = [_bytes(plan, p, plan.reduce_dtype) for p in _parameters(plan, trace) if p.trainable]
    return [
        Collective("reduce", "data", len(sizes), sum(sizes)),
        *_broadcast_buffers(trace),
        *_broadcast_updates(plan, trace),
    ]


def _of_units(plan: Plan, trace: Trace) -> list[Collective]:
    """fully_shard and FullyShardedDataParallel, with parameters kept gathered or not."""
    found = []
    axis = "zero" if plan.gradients_over == ("zero",) else "data"
    shards = plan.size(plan.gradients_over)
    replicas = plan.num_data_ranks // shards
    for unit in units_of(plan, trace):
        reduced = _padded(plan, (p for p in unit.parameters if p.trainable), plan.reduce_dtype, shards)
        if shards > 1:
            gathered = _padded(plan, unit.parameters, plan.gather_dtype, shards)
            calls = unit.count * _gathers(plan, unit)
            found.append(Collective("all_gather", axis, calls, calls * gathered))
            if reduced:
                found.append(Collective("reduce_scatter", axis, unit.count, unit.count * reduced))
        if replicas > 1 and reduced:
            found.append(Collective("all_reduce", "data", unit.count, unit.count * reduced // shards))
    return found


def _gathers(plan: Plan, unit: Unit) -> int:
    """How often a unit is gathered in a step: the root stays gathered until its backward pass.

    In a pipeline, torch keeps what a backward pass gathered for the next pass, and the root for the whole step.
    """
    once = unit.is_root or plan.keeps_gathered or not plan.parameters_over
    if plan.size("pipeline") == 1:
        return plan.num_micro_batches * (1 if once else 2)
    return 1 if once else _gathers_of_stage(plan)


def _gathers_of_stage(plan: Plan) -> int:
    """Gathers of a block in the first stage, in the order of its passes."""
    info = schedule_of(plan)
    order = actions(info, plan.size("pipeline"), plan.num_micro_batches, plan.stages_per_rank or None)[0]
    gathered, calls = False, 0
    for kind, stage, _ in order:
        if stage == 0:
            calls += not gathered
            gathered = kind != "F"
    return calls


def _padded(plan: Plan, parameters: Iterable[ParameterSpec], wanted: str | None, shards: int) -> int:
    """Bytes of tensors as they are divided: by rows, each padded to a multiple of the shards; or flat."""
    if plan.shard_layout == "flat":
        sizes = [(p.num_elements, _itemsize(plan, p, wanted)) for p in parameters]
        elements = sum(size for size, _ in sizes)
        itemsize = max((size for _, size in sizes), default=1)
        return -(-elements // shards) * shards * itemsize
    total = 0
    for parameter in parameters:
        rows = parameter.shape[0] if parameter.shape else 1
        padded = -(-rows // shards) * shards
        total += parameter.num_elements // max(1, rows) * padded * _itemsize(plan, parameter, wanted)
    return total


def _broadcast_buffers(trace: Trace) -> list[Collective]:
    """Buffers follow the first rank at the start of a step's first forward pass, as one flat tensor."""
    num_bytes = sum(segment.buffer_bytes * segment.count for segment in trace.segments)
    return [Collective("broadcast", "data", 1, num_bytes)] if num_bytes else []


def _broadcast_updates(plan: Plan, trace: Trace) -> list[Collective]:
    """Updated parameters go from their owner to all: one by one, or those of each owner as one tensor."""
    axis = "zero" if plan.optimizer_over == ("zero",) else "data"
    sizes = [_bytes(plan, p, plan.master_dtype) for p in _parameters(plan, trace) if p.trainable]
    count = plan.size(plan.optimizer_over) if plan.shard_layout == "flat" else len(sizes)
    return [Collective("broadcast", axis, count, sum(sizes))]


def _parameters(plan: Plan, trace: Trace) -> list[ParameterSpec]:
    return [p for unit in units_of(plan, trace) for p in unit.parameters * unit.count]


def _bytes(plan: Plan, parameter: ParameterSpec, wanted: str | None) -> int:
    return parameter.num_elements * _itemsize(plan, parameter, wanted)


def _itemsize(plan: Plan, parameter: ParameterSpec, wanted: str | None) -> int:
    return DTYPE_BYTES[stored_dtype(plan, parameter, wanted)]


def _together(found: Iterable[Collective]) -> tuple[Collective, ...]:
    sums: dict[tuple[str, str], tuple[int, int]] = {}
    for each in found:
        count, num_bytes = sums.get((each.kind, each.axis), (0, 0))
        sums[each.kind, each.axis] = (count + each.count, num_bytes + each.num_bytes)
    return tuple(Collective(kind, axis, *both) for (kind, axis), both in sums.items() if both[0])

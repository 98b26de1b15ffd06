"""What the first rank exchanges with ranks that hold other parts of the model, as the libraries that do it.

Legend: B samples in a micro-batch, T tokens, D model, V vocabulary, t ranks along ``tensor``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from atorch_ns.estimate._estimate import Collective, Workload
from atorch_ns.estimate._passes import recomputed_shares
from atorch_ns.estimate._stages import schedule_of, stages_of
from atorch_ns.estimate._units import (
    DTYPE_BYTES,
    LOSS_CALLS,
    LOSS_NUMBERS,
    computed_in,
    cost_of,
    stored_dtype,
)
from atorch_ns.profile import ParameterSpec, Segment, Trace
from atorch_ns.strategy import Plan

__all__ = ["exchanged", "first_part", "tied_bytes", "unpredicted"]

_SCALAR_BYTES = 4


def unpredicted(plan: Plan) -> str:
    """Why the collectives of a plan are not predicted, as a clause; empty if they are."""
    axes = [name for name in ("sequence", "expert") if plan.size(name) > 1]
    if axes:
        return f"what is exchanged along {' and '.join(axes)} depends on attention and routing, which a trace does not tell"
    if plan.size("tensor") > 1 and plan.tensor_sequence:
        return "what Megatron's sequence parallelism gathers depends on the found layout"
    if plan.size("pipeline") > 1 and plan.parameters_over and not schedule_of(plan).is_single:
        return "when each of several stages on a rank gathers its parameters depends on the schedule"
    return ""


def first_part(plan: Plan, trace: Trace) -> Trace:
    """The part of the model that the first rank has, with the sizes that its parameters have there."""
    counts = [segment.count for segment in trace.segments]
    if plan.size("pipeline") > 1:
        counts = stages_of(plan, trace, plan.size("pipeline")).on_rank[0].tolist()
    segments = []
    names: set[str | None] = set()
    for segment, count in zip(trace.segments, counts, strict=True):
        if not count:
            continue
        paths = segment.paths[:count]
        own = [_local(spec, plan) for spec in segment.parameters]
        # A tied parameter is another one where the first use is on another rank.
        own = [replace(spec, tied_to=spec.tied_to if spec.tied_to in names else None) for spec in own]
        names |= {f"{path}.{spec.name}" if path else spec.name for path in paths or ("",) for spec in own}
        segments.append(replace(segment, paths=paths, parameters=tuple(own)))
    return replace(trace, segments=tuple(segments))


def _local(spec: ParameterSpec, plan: Plan) -> ParameterSpec:
    tensor, dim = plan.size("tensor"), spec.tensor_dim
    if dim is None or tensor == 1 or spec.shape[dim] % tensor:
        return spec
    return replace(
        spec, shape=tuple(size // tensor if place == dim else size for place, size in enumerate(spec.shape))
    )


def tied_bytes(plan: Plan, trace: Trace) -> int:
    """Bytes of the first rank's parameters that other stages have too: their gradients are summed."""
    if plan.size("pipeline") == 1:
        return 0
    held = {
        f"{path}.{spec.name}" if path else spec.name
        for segment in first_part(plan, trace).segments
        for path in segment.paths or ("",)
        for spec in segment.parameters
    }
    counts = stages_of(plan, trace, plan.size("pipeline")).on_rank[0]
    away = [one for one, count in zip(trace.segments, counts, strict=True) if not count]
    tied = {
        spec.tied_to: _local(spec, plan).num_elements * DTYPE_BYTES[stored_dtype(plan, spec, None)]
        for segment in away
        for spec in segment.parameters
        if spec.tied_to in held
    }
    return sum(tied.values())


def exchanged(plan: Plan, trace: Trace, workload: Workload) -> Iterator[Collective]:
    """Along ``tensor`` and ``pipeline``, in one step."""
    passes = plan.num_micro_batches
    samples = workload.global_batch / (plan.num_data_ranks * passes)
    if plan.size("tensor") > 1:
        part = first_part(plan, trace)
        again = recomputed_shares(plan, part.segments)
        for segment, share in zip(part.segments, again, strict=True):
            for kind, count, num_bytes in _of_segment(plan, trace, segment, share, samples):
                yield Collective(kind, "tensor", passes * count, round(passes * num_bytes))
    if plan.size("pipeline") > 1:
        yield from _of_stages(plan, trace, samples)
        yield Collective("broadcast", "pipeline", 1, _SCALAR_BYTES)  # the loss
        if tied := tied_bytes(plan, trace):
            # Sharded gradients are summed shard by shard.
            yield Collective("all_reduce", "pipeline", 1, tied // plan.size(plan.gradients_over))


def _of_segment(
    plan: Plan, trace: Trace, segment: Segment, again: float, samples: float
) -> Iterator[tuple[str, int, float]]:
    """Kind, calls and bytes of a segment in one micro-batch.

    Each row layer's results are summed in the compute dtype, the gradients of what column layers read in the
    dtype of the residual stream. Recomputation stops before its last sum.
    """
    residual, computed = _itemsizes(plan)
    width = _hidden(plan, trace, samples) / residual
    if segment.is_block:
        forward = segment.count * (segment.num_rows + again * (segment.num_rows - 1))
        backward = segment.count * segment.num_rows
        yield "all_reduce", round(forward), forward * width * computed
        yield "all_reduce", backward, backward * width * residual
        return
    words = [spec for spec in segment.parameters if spec.tensor_dim == 0 and len(spec.shape) == 2]
    if not words:
        return
    if segment.name != trace.segments[-1].name:
        yield "all_reduce", 1, width * residual
        return
    tokens = samples * trace.num_tokens
    if plan.parallel_loss:
        yield "all_reduce", LOSS_CALLS, LOSS_NUMBERS * tokens * trace.loss_share * DTYPE_BYTES["float32"]
    else:
        yield "all_gather", 1, tokens * trace.vocabulary_size * computed
    yield "all_reduce", 1, width * residual


def _itemsizes(plan: Plan) -> tuple[int, int]:
    weights, autocast = computed_in(plan)
    return DTYPE_BYTES.get(weights, 4), DTYPE_BYTES.get(autocast or weights, 4)


def _hidden(plan: Plan, trace: Trace, samples: float) -> float:
    """Bytes of the residual stream, [B, T, D]."""
    blocks = [segment for segment in trace.segments if segment.is_block]
    cost = cost_of(plan, max(blocks or trace.segments, key=lambda one: one.count))
    return float(cost.output.at(samples, trace.num_tokens))


def _of_stages(plan: Plan, trace: Trace, samples: float) -> Iterator[Collective]:
    """Activations to the next stage and gradients to the one before, unless that is on the same rank."""
    stages = stages_of(plan, trace, plan.size("pipeline"))
    num_ranks, last = len(stages.numbers), int(stages.numbers.max())
    cuts = [stage for stage in stages.numbers[0].tolist() if stage < last]
    cuts += [stage - 1 for stage in stages.numbers[0].tolist() if stage > 0]
    crossing = [
        cut for cut in cuts if stages.info.rank_of(cut, num_ranks) != stages.info.rank_of(cut + 1, num_ranks)
    ]
    calls = plan.num_micro_batches * len(crossing)
    num_bytes = int(np.ceil(calls * _hidden(plan, trace, samples)))
    for kind in ("send", "recv"):
        yield Collective(kind, "pipeline", calls, num_bytes)

"""Pipeline schedule ``auto``: the estimate chooses by the same function as the pipeline itself.

Legend: R plans of one kind, S segments.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from atorch_ns.cluster import Cluster
from atorch_ns.errors import InputError
from atorch_ns.estimate.estimate import Workload
from atorch_ns.estimate.memory.activations import Activations, SegmentBytes
from atorch_ns.estimate.model_shard import DTYPE_BYTES, Memo, cost_of
from atorch_ns.estimate.table import PlanTable
from atorch_ns.estimate.time.context import PricingContext
from atorch_ns.estimate.time.passes import segments_of
from atorch_ns.estimate.time.traffic import exchanges_of
from atorch_ns.pipeline import (
    BlockCosts,
    RecomputeShare,
    choose_for_device,
    get_schedule,
    split_backward,
)
from atorch_ns.profile import Trace
from atorch_ns.strategy import PipelineParallelism, Recomputation

_DIGITS = 2
"""Significant digits of blocks' costs: plans whose blocks cost the same to a percent get one choice."""


def with_chosen_schedules(
    table: PlanTable, trace: Trace, cluster: Cluster, workload: Workload, memo: Memo
) -> PlanTable:
    """The table with a schedule for every pipeline whose schedule is ``auto``, and with the share of its blocks that each
    stage recomputes, where recomputation is by shares.

    Where there is no schedule that can be run, 1F1B stands for it.
    """
    automatic = np.asarray([use.pipeline.schedule == "auto" for use in table.uses], dtype=bool)
    by_share = [plan.recomputation.share is not None for plan in table.templates]
    if not automatic.any() and not any(by_share):
        return table
    use, known = table.use.copy(), {one: place for place, one in enumerate(table.uses)}
    for index in range(len(table.templates)):
        rows, sizes = table.sizes(index, workload, memo)
        wanted = automatic[use[rows]] | (by_share[index] & (sizes.pipeline > 1))
        for place in np.flatnonzero(wanted).tolist():
            one = table.uses[use[rows[place]]]
            chosen = _Chosen("1F1B", 0, ())
            if sizes.pipeline[place] > 1:
                only = sizes.take(np.asarray([place]))
                context = PricingContext.of(table.templates[index], only, trace, cluster, workload, Memo())
                chosen = _chosen(context, one.pipeline, memo)
            if not by_share[index]:
                chosen = chosen._replace(recomputed=())
            new = one._replace(pipeline=replace(one.pipeline, **chosen._asdict()))
            use[rows[place]] = known.setdefault(new, len(known))
    return replace(table, use=use, uses=tuple(known))


class _Chosen(NamedTuple):
    """Fields of a pipeline that are chosen."""

    schedule: str
    stages_per_rank: int
    recomputed: tuple[float, ...]


def _chosen(context: PricingContext, pipeline: PipelineParallelism, memo: Memo) -> _Chosen:
    """What is chosen for the one row of a context."""
    numbers = (_costs(context), int(context.sizes.pipeline[0]), int(context.micro_batches[0]))
    options: dict[str, Any] = {
        "schedule": None if pipeline.schedule == "auto" else get_schedule(pipeline.schedule),
        "stages_per_rank": pipeline.stages_per_rank or None,
        "whole_backward": context.plan.whole_backward,
        "memory_bytes": context.hardware.device.memory_bytes,
        "recompute": RecomputeShare.of(context.plan.recomputation),
    }

    def choose() -> _Chosen:
        try:
            best = choose_for_device(*numbers, **options).best
        except InputError:
            if pipeline.schedule == "auto":
                return _Chosen("1F1B", 0, ())
            return _Chosen(pipeline.schedule, pipeline.stages_per_rank, ())
        return _Chosen(best.schedule.name, best.stages_per_rank, best.shares)

    key = ("auto", pipeline.schedule, *numbers, *(v for k, v in options.items() if k != "schedule"))
    return memo.get(key, choose)


def _costs(context: PricingContext) -> BlockCosts:
    """The costs of every piece of the model, for the one plan of a context."""
    segments, exchanges = segments_of(context), exchanges_of(context)
    samples = np.ceil(context.num_samples)
    costs = tuple(cost_of(context.plan, segment) for segment in context.trace.segments)
    of_segments = SegmentBytes(costs, context.parts, samples, context.num_tokens)
    whole = replace(context.plan, recomputation=Recomputation())
    every = Activations(whole, context.trace, of_segments)
    again = replace(whole, recomputation=replace(context.plan.recomputation, every=1, share=None))
    kept = Activations(again, context.trace, of_segments)
    send = context.hardware.within_node.rate_of("send")
    columns = []
    for s, (one, other, segment) in enumerate(zip(segments, exchanges, context.trace.segments, strict=True)):
        moved = _first(other.seconds) / 3.0
        output = _first(costs[s].output.at(context.num_samples, context.num_tokens))
        column = (
            _first(one.forward) + moved,
            _first(one.backward) + 2 * moved,
            _first(one.recompute) * context.plan.recomputation.every,
            _state_bytes(context, s),
            float((every.before(s, 1) - every.before(s, 0))[0]),
            float((kept.before(s, 1) - kept.before(s, 0))[0]),
            output,
            send.latency_s + output / send.bytes_per_s,
        )
        columns += [tuple(float(f"{value:.{_DIGITS - 1}e}") for value in column)] * segment.count
    forward, backward, recompute, states, saved, recomputed, outputs, sends = zip(*columns, strict=True)
    for_input, for_weight = split_backward(backward)
    return BlockCosts(
        forward=forward,
        backward_input=for_input,
        backward_weight=for_weight,
        backward=backward,
        recompute=recompute,
        send=sends[:-1],
        state_bytes=states,
        activation_bytes=saved,
        recomputed_bytes=recomputed,
        boundary_bytes=outputs[:-1],
    )


def _state_bytes(context: PricingContext, s: int) -> float:
    """A parameter, its gradient and two moments as of Adam, as they are divided."""
    plan, segment = context.plan, context.trace.segments[s]
    own = sum(p.num_elements * DTYPE_BYTES.get(p.dtype, 4) for p in segment.parameters if p.tied_to is None)
    over = (
        plan.sharding.parameters_over,
        plan.sharding.gradients_over,
        plan.sharding.optimizer_over,
        plan.sharding.optimizer_over,
    )
    copies = sum(1.0 / float(context.shards(axes)[0]) for axes in over)
    return own * copies * _first(context.parts.of_parameters(s))


def _first(value: np.ndarray | float) -> float:
    return float(np.asarray(value).reshape(-1)[0])

"""Pipeline schedule ``auto``: the estimate chooses by the same function as the pipeline itself.

Legend: R plans of one kind, S segments.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

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
from atorch_ns.pipeline import BlockCosts, choose_for_device, split_backward
from atorch_ns.profile import Trace

_DIGITS = 2
"""Significant digits of blocks' costs: plans whose blocks cost the same to a percent get one choice."""


def with_chosen_schedules(
    table: PlanTable, trace: Trace, cluster: Cluster, workload: Workload, memo: Memo
) -> PlanTable:
    """The table with a schedule for every pipeline whose schedule is ``auto``.

    Where there is none that can be run, 1F1B stands for it.
    """
    automatic = np.asarray([use.pipeline.schedule == "auto" for use in table.uses], dtype=bool)
    if not automatic.any():
        return table
    use, known = table.use.copy(), {one: place for place, one in enumerate(table.uses)}
    for index in range(len(table.templates)):
        rows, sizes = table.sizes(index, workload, memo)
        for place in np.flatnonzero(automatic[use[rows]]).tolist():
            one = table.uses[use[rows[place]]]
            name, on_rank = "1F1B", 0
            if sizes.pipeline[place] > 1:
                only = sizes.take(np.asarray([place]))
                context = PricingContext.of(table.templates[index], only, trace, cluster, workload, Memo())
                name, on_rank = _chosen(context, one.pipeline.stages_per_rank or None, memo)
            new = one._replace(pipeline=replace(one.pipeline, schedule=name, stages_per_rank=on_rank))
            use[rows[place]] = known.setdefault(new, len(known))
    return replace(table, use=use, uses=tuple(known))


def _chosen(context: PricingContext, stages_per_rank: int | None, memo: Memo) -> tuple[str, int]:
    """Name and stages on a rank, for the one row of a context."""
    numbers = (_costs(context), int(context.sizes.pipeline[0]), int(context.micro_batches[0]))
    options: dict[str, Any] = {
        "stages_per_rank": stages_per_rank,
        "whole_backward": context.plan.whole_backward,
        "memory_bytes": context.hardware.device.memory_bytes,
    }

    def choose() -> tuple[str, int]:
        try:
            best = choose_for_device(*numbers, **options).best
        except InputError:
            return "1F1B", 0
        return best.schedule.name, best.stages_per_rank

    return memo.get(("auto", *numbers, *options.values()), choose)


def _costs(context: PricingContext) -> BlockCosts:
    """The costs of every piece of the model, for the one plan of a context."""
    segments, exchanges = segments_of(context), exchanges_of(context)
    samples = np.ceil(context.num_samples)
    costs = tuple(cost_of(context.plan, segment) for segment in context.trace.segments)
    kept = Activations(
        context.plan, context.trace, SegmentBytes(costs, context.parts, samples, context.num_tokens)
    )
    send = context.hardware.within_node.rate_of("send")
    columns = []
    for s, (one, other, segment) in enumerate(zip(segments, exchanges, context.trace.segments, strict=True)):
        moved = _first(other.seconds) / 3.0
        output = _first(costs[s].output.at(context.num_samples, context.num_tokens))
        column = (
            _first(one.forward) + moved,
            _first(one.backward) + 2 * moved,
            _first(one.recompute),
            _state_bytes(context, s),
            float((kept.before(s, 1) - kept.before(s, 0))[0]),
            output,
            send.latency_s + output / send.bytes_per_s,
        )
        columns += [tuple(float(f"{value:.{_DIGITS - 1}e}") for value in column)] * segment.count
    forward, backward, again, states, saved, outputs, sends = zip(*columns, strict=True)
    for_input, for_weight = split_backward(backward, again)
    return BlockCosts(
        forward=forward,
        backward_input=for_input,
        backward_weight=for_weight,
        backward=tuple(first + second for first, second in zip(backward, again, strict=True)),
        send=sends[:-1],
        state_bytes=states,
        activation_bytes=saved,
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

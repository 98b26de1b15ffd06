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
from atorch_ns.estimate.model_shard import DTYPE_BYTES, Memo, cost_of, groups, is_recomputed
from atorch_ns.estimate.stages import known_stages
from atorch_ns.estimate.table import PlanTable
from atorch_ns.estimate.time.context import PricingContext
from atorch_ns.estimate.time.passes import segments_of
from atorch_ns.estimate.time.pipeline import send_seconds
from atorch_ns.estimate.time.traffic import exchanges_of
from atorch_ns.pipeline import BlockCosts, RecomputeShare, choose_for_device, split_backward
from atorch_ns.profile import Trace
from atorch_ns.strategy import PipelineParallelism, Recomputation

# Significant digits of blocks' costs: plans whose blocks cost the same to a percent share one choice.
_DIGITS = 2


def with_chosen_schedules(
    table: PlanTable, trace: Trace, cluster: Cluster, workload: Workload, *, memo: Memo
) -> PlanTable:
    """The table with a schedule for every pipeline with ``auto``, and with each stage's share of recomputed
    blocks, where recomputation is by shares. Where no schedule can be run, 1F1B stands for it."""
    automatic = np.asarray([use.pipeline.schedule == "auto" for use in table.uses], dtype=bool)
    by_share = [plan.recomputation.share is not None for plan in table.templates]
    if not automatic.any() and not any(by_share):
        return table
    # ``indices`` numbers the uses; chosen ones are appended, so that rows with the same choice share one.
    use, indices = table.use.copy(), {axis_use: position for position, axis_use in enumerate(table.uses)}
    with_shares: dict[tuple[int, tuple[float, ...]], int] = {}
    for index in range(len(table.templates)):
        rows, sizes = table.sizes(index, workload, memo)
        plan, is_auto = table.templates[index], automatic[use[rows]]
        for position in np.flatnonzero(is_auto).tolist():
            axis_use = table.uses[use[rows[position]]]
            choice = _Chosen("1F1B", 0, ())
            if sizes.pipeline[position] > 1:  # with one rank there is nothing to order
                # The context has its own memo: values of these one-row sizes are never asked for again.
                only = sizes.take(np.asarray([position]))
                context = PricingContext.of(
                    plan, only, trace, cluster=cluster, workload=workload, memo=Memo()
                )
                choice = _choose_schedule(context, axis_use.pipeline, memo)
            if not by_share[index]:
                choice = choice._replace(recomputed=())
            new = axis_use._replace(pipeline=replace(axis_use.pipeline, **choice._asdict()))
            use[rows[position]] = indices.setdefault(new, len(indices))
        # Pipelines whose schedule is named still need the shares of their stages.
        positions = np.flatnonzero(by_share[index] & (sizes.pipeline > 1) & ~is_auto)
        if len(positions):
            context = PricingContext.of(
                plan, sizes.take(positions), trace, cluster=cluster, workload=workload, memo=Memo()
            )
            for position, shares in zip(positions.tolist(), _recomputed_shares(context, memo), strict=True):
                number = int(use[rows[position]])
                if (number, shares) not in with_shares:
                    axis_use = table.uses[number]
                    new = axis_use._replace(pipeline=replace(axis_use.pipeline, recomputed=shares))
                    with_shares[number, shares] = indices.setdefault(new, len(indices))
                use[rows[position]] = with_shares[number, shares]
    return replace(table, use=use, uses=tuple(indices))


def _recomputed_shares(context: PricingContext, memo: Memo) -> list[tuple[float, ...]]:
    # Each stage's share of recomputed blocks, for every row, on the cuts that the row is priced with.
    recompute, sizes = RecomputeShare.of(context.plan.recomputation), context.sizes
    every, rest = _kept_bytes(context)
    states = np.stack([_state_bytes(context, s) for s in range(len(every))])  # [S, R]
    able = np.asarray([is_recomputed(context.plan, segment) for segment in context.trace.segments])
    shares: list[tuple[float, ...]] = [()] * len(sizes)
    for (num_ranks, passes, index), rows in groups(sizes.pipeline, sizes.micro_batches, sizes.pipelined):
        stages = known_stages(sizes.pipelines[index], context.trace, num_ranks, memo)
        live = stages.live(passes, memo)[:, None]
        whole, savings = stages.on_rank @ every[:, rows], stages.on_rank @ (every - rest)[:, rows]  # [p, R']
        if recompute.is_chosen:
            # Bytes over the device's memory, over the bytes that recomputing every block would free.
            over = stages.on_rank @ states[:, rows] + live * whole - context.hardware.device.memory_bytes
            share = over / np.maximum(1.0, live * savings)
            blocks = np.maximum(1, stages.on_rank @ able)[:, None]  # [p, 1] blocks that can be recomputed
            # Rounded up to whole blocks. The inner rounding keeps floating point noise from adding a block.
            of_rank = np.clip(np.ceil(np.round(share * blocks, 6)) / blocks, 0.0, 1.0)
        else:
            # Bytes that a recomputed block keeps, over those of a block that is not: one mean for all ranks.
            ratio = float((1.0 - savings / np.maximum(1.0, whole)).mean())
            ratios = recompute.of_stages(live[:, 0].tolist(), ratio, keeps_last=stages.info.keeps_last)
            of_rank = np.tile(np.asarray(ratios)[:, None], (1, len(rows)))
        if stages.info.keeps_last:
            of_rank[-1] = 0.0
        # The stages of a rank recompute alike: [p, R'] by rank becomes [p v, R'] by stage.
        of_stage = np.empty((stages.numbers.size, len(rows)))
        of_stage[stages.numbers.reshape(-1)] = np.repeat(of_rank, stages.numbers.shape[1], axis=0)
        for row, of_row in zip(rows.tolist(), np.round(of_stage, 3).T.tolist(), strict=True):
            shares[row] = tuple(of_row)
    return shares


def _kept_bytes(context: PricingContext) -> tuple[np.ndarray, np.ndarray]:
    """[S, R] bytes that a block of each segment keeps of a micro-batch, without and with recomputation."""
    costs = tuple(cost_of(context.plan, segment) for segment in context.trace.segments)
    of_segments = SegmentBytes(costs, context.parts, np.ceil(context.num_samples), context.num_tokens)
    again = replace(context.plan.recomputation, every=1, share=None)
    num_bytes = []
    for recomputation in (Recomputation(), again):
        plan = replace(context.plan, recomputation=recomputation)
        acts = Activations(plan, context.trace, of_segments)
        num_bytes.append(np.stack([acts.before(s, 1) - acts.before(s, 0) for s in range(len(costs))]))
    return num_bytes[0], num_bytes[1]


class _Chosen(NamedTuple):  # fields of a pipeline
    schedule: str
    stages_per_rank: int
    recomputed: tuple[float, ...]


def _choose_schedule(context: PricingContext, pipeline: PipelineParallelism, memo: Memo) -> _Chosen:
    numbers = (_block_costs(context), int(context.sizes.pipeline[0]), int(context.micro_batches[0]))
    options: dict[str, Any] = {
        "stages_per_rank": pipeline.stages_per_rank or None,
        "whole_backward": context.plan.whole_backward,
        "memory_bytes": context.hardware.device.memory_bytes,
        "recompute": RecomputeShare.of(context.plan.recomputation),
    }

    def choose() -> _Chosen:
        try:
            best = choose_for_device(*numbers, **options).best
        except InputError:  # no schedule runs this pipeline
            return _Chosen("1F1B", 0, ())
        return _Chosen(best.schedule.name, best.stages_per_rank, best.shares)

    # The choice depends on nothing else, so that rows of the same rounded costs are simulated once.
    return memo.get(("auto", *numbers, *options.values()), choose)


def _block_costs(context: PricingContext) -> BlockCosts:
    segments, exchanges = segments_of(context), exchanges_of(context)
    every, rest = _kept_bytes(context)
    columns = []
    for s, (time, other, segment) in enumerate(zip(segments, exchanges, context.trace.segments, strict=True)):
        # Seconds of exchanges are of all passes together: a third counts as forward, two thirds as backward.
        exchange = _first_value(other.seconds) / 3.0
        output = context.output_bytes(s)
        column = (
            _first_value(time.forward) + exchange,
            _first_value(time.backward) + 2 * exchange,
            # Of a block that is recomputed: ``time.recompute`` is the mean over blocks, of which one in n is.
            _first_value(time.recompute) * context.plan.recomputation.every,
            _first_value(_state_bytes(context, s)),
            float(every[s, 0]),
            float(rest[s, 0]),
            _first_value(output),
            _first_value(send_seconds(context, output)),
        )
        columns += [tuple(float(f"{value:.{_DIGITS - 1}e}") for value in column)] * segment.count
    forward, backward, recompute, states, acts, checkpoints, outputs, sends = zip(*columns, strict=True)
    for_input, for_weight = split_backward(backward)
    return BlockCosts(
        forward=forward,
        backward_input=for_input,
        backward_weight=for_weight,
        backward=backward,
        recompute=recompute,
        send=sends[:-1],  # by cut: nothing follows the last block
        state_bytes=states,
        activation_bytes=acts,
        recomputed_bytes=checkpoints,
        boundary_bytes=outputs[:-1],
    )


def _state_bytes(context: PricingContext, s: int) -> np.ndarray:
    """[R] a parameter, its gradient and two moments as of Adam, as they are divided."""
    plan, segment = context.plan, context.trace.segments[s]
    size = sum(p.num_elements * DTYPE_BYTES.get(p.dtype, 4) for p in segment.parameters if p.tied_to is None)
    over = (
        plan.sharding.parameters_over,
        plan.sharding.gradients_over,
        plan.sharding.optimizer_over,
        plan.sharding.optimizer_over,
    )
    copies = sum(1.0 / np.asarray(context.shards(axes), dtype=float) for axes in over)
    return np.broadcast_to(size * copies * context.parts.of_parameters(s), context.num_samples.shape)


def _first_value(value: np.ndarray | float) -> float:
    return float(np.asarray(value).reshape(-1)[0])

"""Pipeline stages: blocks of each segment on every rank, and micro-batches whose activations are alive there.

Legend: p ranks of a pipeline, v stages on each, S segments.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, partial
from typing import NamedTuple

import numpy as np

from atorch_ns.estimate.model_shard import Memo, ModelShard, Sizes, groups
from atorch_ns.pipeline import (
    ScheduleInfo,
    get_schedule,
    live_bytes,
    partition,
    stage_ranges,
    uniform_cuts,
    uniform_floor_cuts,
)
from atorch_ns.profile import Trace
from atorch_ns.strategy import PipelineParallelism


@dataclass(frozen=True)
class Stages:
    """A model cut into stages.

    Attributes:
        counts: [p, v, S] blocks of each segment in each stage, stages of a rank in the model's order.
        numbers: [p, v] the stages.
        recomputed: [p, v] share of blocks that each recomputes; NaN where recomputation is not by shares.
    """

    counts: np.ndarray
    numbers: np.ndarray
    info: ScheduleInfo
    recomputed: np.ndarray

    @cached_property
    def on_rank(self) -> np.ndarray:
        """[p, S] blocks of each segment on each rank."""
        return np.asarray(self.counts.sum(axis=1))

    @cached_property
    def recomputed_on_rank(self) -> np.ndarray:
        """[p] the share of its blocks that a rank recomputes."""
        blocks = self.counts.sum(axis=2)
        return np.asarray((blocks * self.recomputed).sum(axis=1) / np.maximum(1, blocks.sum(axis=1)))

    def live(self, num_micro_batches: int, memo: Memo) -> np.ndarray:
        """[p] micro-batches whose activations live on a rank at one time, in units of all its stages'."""
        p, v = self.numbers.shape
        key = ("live", self.info.name, p, v, num_micro_batches)
        return memo.get(key, lambda: self._live_micro_batches(p, v, num_micro_batches))

    def _live_micro_batches(self, p: int, v: int, num_micro_batches: int) -> np.ndarray:
        if self.info.name == "GPipe":  # all forward passes come first
            return np.full(p, float(num_micro_batches))
        if self.info.name == "1F1B":  # rank r runs p - r forward passes before its first backward pass
            return np.asarray(np.minimum(p - np.arange(p), num_micro_batches), dtype=float)
        # A short order stands for a long one: no more are alive later. LoopedBFS holds every micro-batch.
        if self.info.name != "LoopedBFS" and num_micro_batches % p == 0:
            num_micro_batches = min(num_micro_batches, 2 * v * p)
        orders = self.info.orders(p, num_micro_batches, v)
        return np.asarray(live_bytes(orders, [1.0 / v] * (p * v)))  # a stage is 1/v of its rank's blocks


class Owners(NamedTuple):
    """Rows that belong to plans, those of a plan one after the other.

    Attributes:
        plans: [R'] the plan that each belongs to, ascending.
        starts: [R] the first row of each plan.
    """

    plans: np.ndarray
    starts: np.ndarray

    def largest(self, values: np.ndarray) -> np.ndarray:
        """[R] row of each plan with the largest value."""
        most = np.maximum.reduceat(values, self.starts)[self.plans]  # [R'] the maximum of the row's plan
        rows = np.flatnonzero(values == most)
        _, first = np.unique(self.plans[rows], return_index=True)  # of equal rows the first
        return np.asarray(rows[first])


def shard_stages(trace: Trace, sizes: Sizes, memo: Memo) -> tuple[ModelShard, Owners]:
    """The parts of R' distinct ranks of pipelines, a row each, and the plans (R ``sizes``) of these rows."""
    return memo.get(("staged", sizes), lambda: _divide_into_stages(trace, sizes, memo))


def _divide_into_stages(trace: Trace, sizes: Sizes, memo: Memo) -> tuple[ModelShard, Owners]:
    if not (sizes.pipeline > 1).any():  # all ranks of a plan are alike
        every = np.arange(len(sizes))
        return ModelShard.whole(trace, sizes), Owners(every, every)
    owner, counts, live, flags = [], [], [], []
    for (num_ranks, passes, number), rows in groups(sizes.pipeline, sizes.micro_batches, sizes.pipelined):
        pipeline = sizes.pipelines[number]
        key = ("distinct ranks", pipeline, num_ranks, passes)
        # Rows are listed rank by rank: all plans with the first rank, all plans with the second, and so on.
        ranks = memo.get(key, partial(_distinct_ranks, trace, pipeline, num_ranks, passes, memo))
        owner.append(np.tile(rows, len(ranks)))
        counts.append(np.repeat([rank.counts for rank in ranks], len(rows), axis=0))
        live.append(np.repeat([rank.live for rank in ranks], len(rows)))
        flags.append(np.repeat(np.asarray([rank[2:] for rank in ranks], dtype=float), len(rows), axis=0))
    # Sorted by plan, so that the rows of one plan are neighbours.
    together = np.concatenate(owner)
    order = np.argsort(together, kind="stable")
    index = together[order]
    starts = np.searchsorted(index, np.arange(len(sizes)))
    parts = ModelShard.whole(trace, sizes.take(index))
    accumulates, first, last, shares = np.concatenate(flags)[order].T
    shard = parts.staged(
        np.concatenate(counts)[order],
        np.concatenate(live)[order],
        accumulates.astype(bool),
        first=first.astype(bool),
        last=last.astype(bool),
        recomputed=shares,
    )
    return shard, Owners(index, starts)


class _Rank(NamedTuple):
    counts: np.ndarray  # [S] blocks of each segment
    live: float  # micro-batches whose activations are alive
    accumulates: bool  # whether gradients of earlier micro-batches are there then
    is_first: bool  # whether it has the model's first stage
    is_last: bool
    recomputed: float  # the share of its blocks; NaN where recomputation is not by shares


def _distinct_ranks(
    trace: Trace, pipeline: PipelineParallelism, num_ranks: int, micro_batches: int, memo: Memo
) -> list[_Rank]:
    if num_ranks == 1:
        counts = np.asarray([segment.count for segment in trace.segments])
        return [_Rank(counts, 1.0, micro_batches > 1, True, True, np.nan)]
    stages = known_stages(pipeline, trace, num_ranks, memo)
    alive = stages.live(micro_batches, memo)
    ranks: dict[tuple[object, ...], _Rank] = {}
    last = stages.numbers.max()
    shares = stages.recomputed_on_rank
    for rank, (counts, live) in enumerate(zip(stages.on_rank, alive, strict=True)):
        numbers = stages.numbers[rank]
        ends = (bool((numbers == 0).any()), bool((numbers == last).any()))
        # Where all forward passes come first, there are no gradients yet when the first backward pass begins.
        moments = [(live, True)] if live < micro_batches else [(live, False), (live - 1, micro_batches > 1)]
        for count, accumulates in moments:
            candidate = _Rank(counts, float(count), accumulates, *ends, float(shares[rank]))
            key = (*counts.tolist(), accumulates, *ends, str(shares[rank]))  # no NaN equals another
            # Of ranks with equal blocks, the one with the most live micro-batches holds most.
            if count >= 1 and (key not in ranks or ranks[key].live < candidate.live):
                ranks[key] = candidate
    return list(ranks.values())


def known_stages(pipeline: PipelineParallelism, trace: Trace, num_ranks: int, memo: Memo) -> Stages:
    """Calls :func:`stages_of` once for each pipeline."""
    return memo.get(("stages", pipeline, num_ranks), lambda: stages_of(pipeline, trace, num_ranks, memo))


def schedule_of(pipeline: PipelineParallelism) -> ScheduleInfo:
    """The schedule that a pipeline is priced with; 1F1B for ``auto``, which can only be faster."""
    return get_schedule("1F1B" if pipeline.schedule == "auto" else pipeline.schedule)


def usual_micro_batches(pipeline: PipelineParallelism, num_ranks: int, num_samples: int) -> int:
    """The micro-batches of a pipeline where none are given; 1 if the schedule runs no number of them."""
    info, on_rank = schedule_of(pipeline), pipeline.stages_per_rank or None
    return info.usual_micro_batches(num_ranks, on_rank, num_samples) or 1


def stages_of(
    pipeline: PipelineParallelism, trace: Trace, num_ranks: int, memo: Memo | None = None
) -> Stages:
    """The stages that a pipeline makes of a model.

    The pieces are blocks and the segments between them; ``auto`` balances their floating point operations.

    Args:
        memo: knows the blocks of stages that other pipelines have too.

    Raises:
        InputError: if there are more stages than pieces, or no such schedule.
    """
    info = schedule_of(pipeline)
    v = pipeline.stages_per_rank or info.usual_stages
    how = (pipeline.split_method, tuple(pipeline.split_points), num_ranks * v)
    blocks = partial(_blocks_of_stages, pipeline, trace, num_ranks * v)
    per_stage = (memo or Memo()).get(("blocks of stages", *how), blocks)
    numbers = np.asarray([info.stages_of(rank, num_ranks, v) for rank in range(num_ranks)])
    shares = np.asarray(pipeline.recomputed or [np.nan] * (num_ranks * v))
    return Stages(per_stage[numbers], numbers, info, shares[numbers])  # by stage becomes by rank: [p, v, …]


def _blocks_of_stages(pipeline: PipelineParallelism, trace: Trace, num_stages: int) -> np.ndarray:
    # The segment of each block, block by block.
    owner = np.repeat(np.arange(len(trace.segments)), [segment.count for segment in trace.segments])
    cuts = _choose_cuts(pipeline, trace, owner, num_stages)
    in_stages = [owner[list(blocks)] for blocks in stage_ranges(cuts, len(owner))]
    # [stages, S] blocks of each segment in each stage.
    return np.stack([np.bincount(blocks, minlength=len(trace.segments)) for blocks in in_stages])


def _choose_cuts(
    pipeline: PipelineParallelism, trace: Trace, owner: np.ndarray, num_stages: int
) -> tuple[int, ...]:
    if pipeline.split_method == "custom" and pipeline.split_points:
        paths = [path for segment in trace.segments for path in (segment.paths or (segment.name,))]
        cuts = tuple(paths.index(point) for point in pipeline.split_points if point in paths)
        if len(cuts) == num_stages - 1:  # points that the trace does not have are ignored: cut as for "auto"
            return cuts
    if pipeline.split_method == "uniform":
        return uniform_cuts(len(owner), num_stages)
    if pipeline.split_method == "uniform_floor":
        return uniform_floor_cuts(len(owner), num_stages)
    if pipeline.split_method == "parameters":
        elements = [sum(p.num_elements for p in segment.parameters) for segment in trace.segments]
        return partition([elements[s] for s in owner], num_stages)
    costs = [next(iter(segment.costs.values())) for segment in trace.segments]  # of any precision: alike
    flops = [
        float((cost.forward.flops + cost.backward.flops).at(trace.num_samples, trace.num_tokens))
        for cost in costs
    ]
    return partition([max(0.0, flops[s]) for s in owner], num_stages)

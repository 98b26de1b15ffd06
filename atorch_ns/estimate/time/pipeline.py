"""Pipeline time: the slowest rank's passes, and its bubble.

Legend: R plans of one kind, p ranks of a pipeline, v stages on each, m micro-batches, S segments.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Final, NamedTuple

import numpy as np

from atorch_ns.estimate.model_shard import groups
from atorch_ns.estimate.stages import Stages, known_stages
from atorch_ns.estimate.time.context import PricingContext
from atorch_ns.estimate.time.passes import SegmentSeconds
from atorch_ns.estimate.time.traffic import Exchange
from atorch_ns.pipeline import ScheduleInfo, StageCosts, simulate, split_backward
from atorch_ns.profile import Segment, Trace


class Waiting(NamedTuple):
    """The time that a pipeline adds to a step on its slowest rank.

    Attributes:
        bubble: [R] seconds of waiting for other ranks to compute.
        sends: [R] seconds of waiting for their messages.
        operators: [R] more operators on the host, for each stage and for backward passes in two parts.
    """

    bubble: np.ndarray
    sends: np.ndarray
    operators: np.ndarray


class _BlockSeconds(NamedTuple):
    # [S, R] seconds of one block of each segment, forward and backward, for one micro-batch.
    device: np.ndarray
    device_again: np.ndarray  # of recomputation
    host: np.ndarray  # of starting operators
    host_again: np.ndarray


def as_pipeline(
    context: PricingContext, segments: Sequence[SegmentSeconds], exchanges: Sequence[Exchange]
) -> tuple[PricingContext, Waiting]:
    """Returns the context of each pipeline's slowest rank, and its waiting times.

    A rank takes the time of its device, or of its host, which starts the operators, where that is longer.
    While the slowest rank works without a pause, it hides all others. Before and after, each of the others
    runs one micro-batch forward and backward: the bubble. Schedules with several stages on a rank, or with
    the backward pass in two parts, leave a share of it.
    """
    sizes = context.sizes
    waiting = Waiting(*np.zeros((3, len(sizes))))
    if not (sizes.pipeline > 1).any():
        return context, waiting
    block_seconds = _block_seconds(context, segments, exchanges)
    recompute_ratio, send_s = _recompute_ratio(context.trace, segments), _seconds_of_a_send(context)
    # Of each slowest rank: [R, S] its blocks, and [R] the share of them that it recomputes.
    counts = np.tile([segment.count for segment in context.trace.segments], (len(sizes), 1))
    again_shares = np.full(len(sizes), np.nan)
    for (num_ranks, index), rows in groups(sizes.pipeline, sizes.pipelined):  # R' rows of equal pipelines
        if num_ranks == 1:
            continue
        stages = known_stages(sizes.pipelines[index], context.trace, num_ranks, context.memo)
        by_share = context.plan.recomputation.share is not None
        shares = stages.recomputed_on_rank if by_share else np.ones(num_ranks)
        seconds = _rank_seconds(context, block_seconds, rows, stages, shares=shares)  # [p, R']
        slowest = seconds.argmax(axis=0)
        counts[rows] = stages.on_rank[slowest]
        again_shares[rows] = shares[slowest]
        # Before and after its own work, a rank waits for one micro-batch on each of the others.
        others = seconds.sum(axis=0) - seconds.max(axis=0)
        # In halves, since each ratio takes a simulation of its own.
        again = recompute_ratio * round(2 * shares.mean()) / 2
        waiting.bubble[rows] = others * _bubble_shares(context, rows, stages, again)
        waiting.sends[rows] = 2.0 * send_s[rows] * _unhidden_sends(context, rows, stages)  # there and back
        waiting.operators[rows] = context.micro_batches[rows] * _more_operators(context, stages, counts[rows])
    ones = np.ones(len(sizes), dtype=bool)  # whether a rank is first or last matters to memory only
    parts = context.parts.staged(
        counts, context.parts.live, context.parts.accumulates, first=ones, last=ones, recomputed=again_shares
    )
    return replace(context, parts=parts), waiting


def _block_seconds(
    context: PricingContext, segments: Sequence[SegmentSeconds], exchanges: Sequence[Exchange]
) -> _BlockSeconds:
    def table(values: Iterable[np.ndarray | float]) -> np.ndarray:
        return np.stack([np.broadcast_to(value, len(context.sizes)) for value in values])

    launch_s, pairs = context.hardware.device.launch_s, list(zip(segments, exchanges, strict=True))
    return _BlockSeconds(
        device=table(part.forward + part.backward + exchange.seconds for part, exchange in pairs),
        device_again=table(part.recompute for part in segments),
        host=table(launch_s * (part.operators + exchange.operators) for part, exchange in pairs),
        host_again=table(launch_s * part.more_operators for part in segments),
    )


def _rank_seconds(
    context: PricingContext, of_block: _BlockSeconds, rows: np.ndarray, stages: Stages, *, shares: np.ndarray
) -> np.ndarray:
    # [p, R'] seconds of one micro-batch on each rank, which recomputes its share of its blocks.
    def sum_blocks(first: np.ndarray, again: np.ndarray) -> np.ndarray:
        blocks = stages.on_rank
        return np.asarray(blocks @ first[:, rows] + shares[:, None] * (blocks @ again[:, rows]))

    device = sum_blocks(of_block.device, of_block.device_again)
    host = sum_blocks(of_block.host, of_block.host_again)
    # A CPU is its own host; a GPU runs behind its host, so the longer of both counts.
    return device + host if context.hardware.device.type == "cpu" else np.asarray(np.maximum(device, host))


# Host time of passing a micro-batch through a stage and back, in operators: messages, the stage's call, the
# engine's. 34 to 59 of stages of four and two layers on a CPU (benchmark ``schedules``).
_STAGE_OPERATORS: Final = 45.0

# More operators for each matrix whose gradient is computed later, since its layer is Python in both passes:
# 4.4, 2.6 and 3.2 of tiny blocks of GPT-2, Llama and BERT on a CPU, by time (benchmark ``schedules``).
_DEFERRED_OPERATORS: Final = 3.4


def _more_operators(context: PricingContext, stages: Stages, counts: np.ndarray) -> np.ndarray | float:
    # [R'] of one micro-batch in the stages of ranks that have [R', S] ``counts`` blocks of each segment.
    passing: float = _STAGE_OPERATORS * stages.numbers.shape[1]
    if context.plan.whole_backward or not stages.info.splits_backward:
        return passing
    matrices = np.asarray([_num_matrices(part) for part in context.trace.segments])
    return np.asarray(passing + _DEFERRED_OPERATORS * (counts @ matrices))


def _num_matrices(segment: Segment) -> int:
    return sum(parameter.trainable and len(parameter.shape) == 2 for parameter in segment.parameters)


def _recompute_ratio(trace: Trace, segments: Sequence[SegmentSeconds]) -> float:
    means = [(float(np.mean(part.forward)), float(np.mean(part.recompute))) for part in segments]
    forward, again = np.asarray([segment.count for segment in trace.segments]) @ np.asarray(means)
    return float(round(2 * again / forward)) / 2 if forward else 0.0  # in halves: few pipelines are simulated


def _bubble_shares(context: PricingContext, rows: np.ndarray, stages: Stages, again: float) -> np.ndarray:
    """[R] the share of the bubble that is left: 1 with one stage on each rank, else as it is simulated."""
    micro_batches = context.micro_batches[rows]
    if stages.info.is_single:
        return np.ones(len(rows))
    p, v = stages.numbers.shape
    whole = context.plan.whole_backward
    shares = {}
    for count in np.unique(micro_batches).tolist():
        numbers = (*_as_small(p, count), v)
        make = functools.partial(_simulate_bubble, stages.info, numbers, again, whole)
        shares[count] = context.memo.get(("bubble", stages.info.name, numbers, again, whole), make)
    return np.asarray([shares[count] for count in micro_batches.tolist()])


def _as_small(num_ranks: int, micro_batches: int) -> tuple[int, int]:
    # A small pipeline stands for a large one. The share of idle time depends on the micro-batches for each
    # rank, where these are a whole number, and does not change from two on.
    each, rest = divmod(micro_batches, num_ranks)
    if rest or not each:
        return num_ranks, micro_batches
    few = min(num_ranks, 4)
    return few, few * min(each, 2)


def _simulate_bubble(info: ScheduleInfo, numbers: tuple[int, int, int], again: float, whole: bool) -> float:
    # Idle seconds of a rank for each second of the others' passes, where all stages are equal.
    p, micro_batches, v = numbers
    if info.problem(p, micro_batches, v):  # the schedule does not run it: as with one stage on a rank
        return 1.0
    # A forward pass takes 1 and a backward pass 2; a whole one (``whole``) is never split.
    (first,), (second,) = ((2.0,), (0.0,)) if whole else split_backward([2.0])
    costs = StageCosts.equal(
        p * v, backward_input=first + again, backward_weight=second, backward=2.0 + again, recompute=again
    )
    timeline = simulate(info.orders(p, micro_batches, v), costs)
    idle = timeline.step_seconds - max(timeline.busy_seconds)
    return float(idle / ((3.0 + again) * v * (p - 1)))


def _seconds_of_a_send(context: PricingContext) -> np.ndarray:
    # The segment with the most blocks: stages are mostly cut inside it.
    inner = max(range(len(context.trace.segments)), key=lambda s: context.trace.segments[s].count)
    return send_seconds(context, context.output_bytes(inner))


def send_seconds(context: PricingContext, num_bytes: np.ndarray) -> np.ndarray:
    """[R] seconds of a message between neighbours of a pipeline."""
    near, far = context.hardware.within_node, context.hardware.between_nodes
    inside = context.groups(("pipeline",)).within > 1  # whether neighbours share a node
    return np.where(inside, near.message_seconds("send", num_bytes), far.message_seconds("send", num_bytes))


def _unhidden_sends(context: PricingContext, rows: np.ndarray, stages: Stages) -> np.ndarray:
    p, v = stages.numbers.shape
    # On GPUs, messages of two ranks run in the order in which they are started, each once both are there.
    # As passes alternate, a rank receives the message that was sent last: nothing hides it.
    all_sent = context.hardware.device.type != "cpu"
    steady = context.micro_batches[rows] * v if all_sent else 0
    return np.asarray(steady + p - 1)  # the first micro-batch goes down all ranks, the last comes back

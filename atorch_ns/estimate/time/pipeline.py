"""Pipeline time: the slowest rank's passes, and its bubble.

Legend: R plans of one kind, p ranks of a pipeline, v stages on each, m micro-batches, S segments.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Final, NamedTuple

import numpy as np

from atorch_ns.estimate.model_shard import cost_of, groups
from atorch_ns.estimate.stages import Stages, known_stages
from atorch_ns.estimate.time.context import PricingContext
from atorch_ns.estimate.time.passes import SegmentSeconds
from atorch_ns.estimate.time.traffic import Exchange
from atorch_ns.pipeline import ScheduleInfo, StageCosts, simulate, split_backward
from atorch_ns.profile import Segment


class Waiting(NamedTuple):
    """The time that a pipeline adds to a step on its slowest rank.

    Attributes:
        bubble: [R] seconds of waiting for other ranks to compute.
        sends: [R] seconds of waiting for what they send.
        operators: [R] more operators on the host, for each stage and for backward passes in two parts.
    """

    bubble: np.ndarray
    sends: np.ndarray
    operators: np.ndarray


def as_pipeline(
    context: PricingContext, segments: Sequence[SegmentSeconds], exchanges: Sequence[Exchange]
) -> tuple[PricingContext, Waiting]:
    """The context of each pipeline's slowest rank, and what it waits for.

    A rank takes the time of its device, or of its host, which starts the operators, where that is longer.
    While the slowest rank works without a pause, it hides all others. Before and after, each of the others
    runs one micro-batch forward and backward: the bubble. Schedules with several stages on a rank, or with
    the backward pass in two parts, leave a share of it.
    """
    none = np.zeros(len(context.sizes))
    if not (context.sizes.pipeline > 1).any():
        return context, Waiting(none, none, none)
    launch = context.hardware.device.launch_s
    # Of one micro-batch, forward and backward: seconds on the device, then seconds of starting operators.
    of_pass = [
        part.forward + part.backward + other.seconds for part, other in zip(segments, exchanges, strict=True)
    ]
    in_pass = [
        launch * (part.operators + other.operators) for part, other in zip(segments, exchanges, strict=True)
    ]
    seconds, starts = _broadcast_rows(of_pass, none), _broadcast_rows(in_pass, none)  # [S, R]
    recompute = _broadcast_rows([part.recompute for part in segments], none)
    restarts = _broadcast_rows([launch * part.more_operators for part in segments], none)
    by_share = context.plan.recomputation.share is not None
    matrices = np.asarray([_num_matrices(part) for part in context.trace.segments])
    again = _recompute_ratio(segments)
    counts = np.tile([segment.count for segment in context.trace.segments], (len(none), 1))
    again_shares = np.full(len(none), np.nan)
    waiting = Waiting(none.copy(), none.copy(), none.copy())
    sizes, each = context.sizes, _seconds_of_a_send(context)
    for (num_ranks, index), rows in groups(sizes.pipeline, sizes.pipelined):
        if num_ranks == 1:
            continue
        stages = known_stages(sizes.pipelines[index], context.trace, num_ranks, context.memo)
        shares = stages.recomputed_on_rank if by_share else np.ones(num_ranks)
        of_rank, host = (  # [p, R']
            stages.on_rank @ first[:, rows] + shares[:, None] * (stages.on_rank @ more[:, rows])
            for first, more in ((seconds, recompute), (starts, restarts))
        )
        # A CPU is its own host; a GPU runs behind its host, so the longer of both counts.
        of_rank = of_rank + host if context.hardware.device.type == "cpu" else np.maximum(of_rank, host)
        slowest = of_rank.argmax(axis=0)
        counts[rows] = stages.on_rank[slowest]
        again_shares[rows] = shares[slowest]
        # Before and after its own work, a rank waits for one micro-batch on each of the others.
        others = of_rank.sum(axis=0) - of_rank[slowest, np.arange(len(rows))]
        waiting.bubble[rows] = others * _bubble_shares(
            context, rows, stages, again * round(2 * shares.mean()) / 2
        )
        waiting.sends[rows] = 2.0 * each[rows] * _unhidden_sends(context, rows, stages)
        splits = stages.info.splits_backward and not context.plan.whole_backward
        extra = _DEFERRED_OPERATORS * (counts[rows] @ matrices) if splits else 0.0
        num_stages = stages.numbers.shape[1]
        waiting.operators[rows] = context.micro_batches[rows] * (_STAGE_OPERATORS * num_stages + extra)
    ones = np.ones(len(none), dtype=bool)  # whether a rank is first or last matters to memory only
    parts = context.parts.staged(
        counts, context.parts.live, context.parts.accumulates, first=ones, last=ones, recomputed=again_shares
    )
    return replace(context, parts=parts), waiting


def _broadcast_rows(values: Sequence[np.ndarray | float], none: np.ndarray) -> np.ndarray:
    return np.stack([np.broadcast_to(value, none.shape) for value in values])


# Host time of passing a micro-batch through a stage and back, in operators: messages, the stage's call, the
# engine's. 34 to 59 of stages of four and two layers on a CPU (benchmark ``schedules``).
_STAGE_OPERATORS: Final = 45.0

# More operators for each matrix whose gradient is computed later, since its layer is Python in both passes:
# 4.4, 2.6 and 3.2 of tiny blocks of GPT-2, Llama and BERT on a CPU, by time (benchmark ``schedules``).
_DEFERRED_OPERATORS: Final = 3.4


def _num_matrices(segment: Segment) -> int:
    return sum(parameter.trainable and len(parameter.shape) == 2 for parameter in segment.parameters)


def _recompute_ratio(segments: Sequence[SegmentSeconds]) -> float:
    forward = sum(float(np.mean(segment.forward)) for segment in segments)
    again = sum(float(np.mean(segment.recompute)) for segment in segments)
    return round(2 * again / forward) / 2 if forward else 0.0  # in halves: few pipelines are simulated


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
    output = cost_of(context.plan, context.trace.segments[inner]).output
    num_bytes = np.asarray(output.at(context.num_samples, context.num_tokens), dtype=float)
    num_bytes = num_bytes * context.parts.share(inner, output.divided, output.words)
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

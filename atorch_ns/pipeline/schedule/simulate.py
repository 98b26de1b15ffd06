"""Simulation of one pipeline step: stage costs in, a timeline out."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from atorch_ns.errors import InputError
from atorch_ns.pipeline.schedule.actions import Action, Orders, live_micro_batches
from atorch_ns.pipeline.schedule.orders import PipelineSize
from atorch_ns.pipeline.schedule.schedules import ScheduleInfo, get_schedule


@dataclass(frozen=True, kw_only=True)
class StageCosts:
    """Seconds of one micro-batch, by stage.

    Attributes:
        forward: seconds of the forward pass.
        backward_input, backward_weight: backward pass for the input (with recomputation) and for weights.
        backward: the whole backward pass; empty if it is the sum of both parts.
        recompute: the recomputation, which may run earlier in a separate pass; empty for none.
        send: activations from stage ``s`` to ``s + 1``, or gradients back, by ``s``; empty for none.
            Stages on one rank send nothing.
    """

    forward: tuple[float, ...]
    backward_input: tuple[float, ...]
    backward_weight: tuple[float, ...]
    backward: tuple[float, ...] = ()
    recompute: tuple[float, ...] = ()
    send: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        num = len(self.forward)
        if not self.backward:
            whole = zip(self.backward_input, self.backward_weight, strict=False)
            object.__setattr__(self, "backward", tuple(first + second for first, second in whole))
        if not self.recompute:
            object.__setattr__(self, "recompute", (0.0,) * num)
        if not self.send:
            object.__setattr__(self, "send", (0.0,) * (num - 1))
        for name in ("forward", "backward_input", "backward_weight", "backward", "recompute", "send"):
            values, length = getattr(self, name), num - (name == "send")  # one send for each cut
            if num < 1 or len(values) != length:
                raise InputError(
                    f"the costs of {num} stages need {length} values in {name!r}, but there are {len(values)}."
                )
            bad = [value for value in values if not (math.isfinite(value) and value >= 0)]
            if bad:
                raise InputError(
                    f"{name!r} holds {bad[0]}, which is not a duration in seconds. Use 0 or more."
                )

    @classmethod
    def equal(
        cls,
        num_stages: int,
        *,
        forward: float = 1.0,
        backward_input: float = 1.0,
        backward_weight: float = 1.0,
        backward: float | None = None,
        recompute: float = 0.0,
        send: float = 0.0,
    ) -> StageCosts:
        """The same seconds for every stage."""
        return cls(
            forward=(forward,) * num_stages,
            backward_input=(backward_input,) * num_stages,
            backward_weight=(backward_weight,) * num_stages,
            backward=() if backward is None else (backward,) * num_stages,
            recompute=(recompute,) * num_stages,
            send=(send,) * (num_stages - 1),
        )

    @property
    def num_stages(self) -> int:
        """The number of stages."""
        return len(self.forward)


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """A simulated step.

    Attributes:
        starts, ends: seconds from the start of the step, one array per rank with an entry per action.
    """

    orders: Orders
    starts: tuple[NDArray[np.float64], ...] = field(repr=False)
    ends: tuple[NDArray[np.float64], ...] = field(repr=False)

    @property
    def step_seconds(self) -> float:
        """Seconds from the start of the first pass to the end of the last."""
        return max(float(ends[-1]) for ends in self.ends if len(ends))

    @property
    def busy_seconds(self) -> tuple[float, ...]:
        """Compute time of each rank, in seconds."""
        return tuple(
            float((ends - starts).sum()) for starts, ends in zip(self.starts, self.ends, strict=True)
        )

    @property
    def idle_shares(self) -> tuple[float, ...]:
        """The share of the step in which each rank waits for other ranks or sends."""
        step = self.step_seconds
        return tuple(1.0 - busy / step if step else 0.0 for busy in self.busy_seconds)

    @property
    def bubble_share(self) -> float:
        """The mean of the idle shares."""
        return sum(self.idle_shares) / len(self.orders)

    @property
    def live_micro_batches(self) -> tuple[int, ...]:
        """Peak number of micro-batches whose activations a stage holds, by stage."""
        return live_micro_batches(self.orders)


def simulate(orders: Sequence[Sequence[Action]], costs: StageCosts) -> Timeline:
    """Simulates a step in which every rank runs its actions in order, each as early as possible.

    A forward pass waits for the stage before, a backward pass for the stage after.

    Raises:
        InputError: if the costs have another number of stages, or the actions are deadlocked.
    """
    num_stages = 1 + max((action.stage for order in orders for action in order), default=-1)
    if not num_stages:
        raise InputError("a pipeline without actions has no timeline: give the actions of every rank.")
    if num_stages != costs.num_stages:
        raise InputError(f"the actions have {num_stages} stages, but the costs have {costs.num_stages}.")
    kinds = _build_passes(orders, costs)
    passes = [_of_rank(order, kinds) for order in orders]
    starts = _start_times(orders, passes)  # shorter than the order of a rank that is stuck
    stuck = [rank for rank, order in enumerate(orders) if len(starts[rank]) < len(order)]
    if stuck:
        waiting = ", ".join(
            f"rank {rank} with {_describe_action(orders[rank][len(starts[rank])])}" for rank in stuck[:4]
        )
        raise InputError(f"the actions wait for each other and never end: {waiting}.")
    begins = tuple(np.array(times, dtype=np.float64) for times in starts)
    ends = tuple(
        times + np.array([each.seconds for each in row]) for times, row in zip(begins, passes, strict=True)
    )
    return Timeline(orders=tuple(map(tuple, orders)), starts=begins, ends=ends)


class _Pass(NamedTuple):
    """The dependencies and duration of a kind of pass through one stage.

    It produces the stream ``chain`` of micro-batches, F or B. W and R produce none. It waits for the stage
    ``source`` in that stream; ``None`` for none.
    """

    chain: str
    source: int | None
    send: float
    seconds: float


_RECOMPUTED = "recomputed"
"""The kind of a whole backward pass after a separate recomputation pass."""


def _build_passes(orders: Sequence[Sequence[Action]], costs: StageCosts) -> dict[tuple[str, int], _Pass]:
    rank_of = {action.stage: rank for rank, order in enumerate(orders) for action in order}
    last = costs.num_stages - 1
    # Send time over each boundary. Stages on one rank send nothing.
    crossing = [
        costs.send[stage] if rank_of.get(stage) != rank_of.get(stage + 1) else 0.0 for stage in range(last)
    ]
    passes: dict[tuple[str, int], _Pass] = {}
    for stage in range(last + 1):
        before: tuple[int | None, float] = (stage - 1, crossing[stage - 1]) if stage else (None, 0.0)
        after: tuple[int | None, float] = (stage + 1, crossing[stage]) if stage < last else (None, 0.0)
        passes["F", stage] = _Pass("F", *before, costs.forward[stage])
        passes["B", stage] = _Pass("B", *after, costs.backward[stage])
        passes["R", stage] = _Pass("R", None, 0.0, costs.forward[stage])  # its input has arrived before
        passes[_RECOMPUTED, stage] = _Pass("B", *after, costs.backward[stage] - costs.recompute[stage])
        passes["I", stage] = _Pass("B", *after, costs.backward_input[stage])
        passes["W", stage] = _Pass("W", None, 0.0, costs.backward_weight[stage])  # no pass waits for it
    return passes


def _of_rank(order: Sequence[Action], kinds: Mapping[tuple[str, int], _Pass]) -> list[_Pass]:
    early = {action[1:] for action in order if action.kind == "R"}
    return [
        kinds[_RECOMPUTED if kind == "B" and (stage, index) in early else kind, stage]
        for kind, stage, index in order
    ]


def _start_times(orders: Sequence[Sequence[Action]], passes: Sequence[Sequence[_Pass]]) -> list[list[float]]:
    end_times: dict[tuple[str, int, int], float] = {}  # by (chain, stage, micro-batch)
    waiting: dict[tuple[str, int, int], int] = {}  # rank by the pass it waits for; a pass has one reader
    free = [0.0] * len(orders)  # when each rank has ended its last action
    starts: list[list[float]] = [[] for _ in orders]
    runnable = list(range(len(orders)))
    # A rank runs on until it needs a pass that has not ended. That pass wakes it: linear in the actions.
    while runnable:
        rank = runnable.pop()
        order, now, begins = orders[rank], free[rank], starts[rank]
        for position in range(len(begins), len(order)):
            _, stage, index = order[position]
            chain, source, send, seconds = passes[rank][position]
            start = now
            if source is not None:
                ready = end_times.get((chain, source, index))
                if ready is None:
                    waiting[chain, source, index] = rank
                    break
                start = max(now, ready + send)  # a send travels while both ranks compute
            begins.append(start)
            now = start + seconds
            if chain in "FB":
                end_times[chain, stage, index] = now
                woken = waiting.pop((chain, stage, index), None)
                if woken is not None:
                    runnable.append(woken)
        free[rank] = now
    return starts


def _describe_action(action: Action) -> str:
    kinds = {
        "F": "forward",
        "B": "backward",
        "I": "input backward",
        "W": "weight backward",
        "R": "recomputation",
    }
    return f"the {kinds[action.kind]} of micro-batch {action.micro_batch} in stage {action.stage}"


def checked_orders(
    info: ScheduleInfo, num_ranks: int, num_micro_batches: int, stages_per_rank: int | None = None
) -> Orders:
    """The orders of a schedule, checked for deadlocks.

    Raises:
        InputError: if they deadlock, or the schedule cannot run such a pipeline.
    """
    orders = info.orders(num_ranks, num_micro_batches, stages_per_rank)
    on_rank = stages_per_rank or info.usual_stages
    try:
        simulate(orders, StageCosts.equal(num_ranks * on_rank))  # a deadlock does not depend on costs
    except InputError as error:
        size = PipelineSize(num_ranks, on_rank, num_micro_batches)
        raise info.refusal(size, str(error).rstrip(".")) from error
    return orders


@dataclass(frozen=True, kw_only=True)
class PipelineStep:
    """A step of a named schedule on a pipeline with known costs."""

    schedule: str
    num_ranks: int
    num_micro_batches: int
    stages_per_rank: int
    costs: StageCosts

    def timeline(self) -> Timeline:
        """The simulated timeline of the step.

        Raises:
            InputError: if the schedule is unknown or cannot run this pipeline.
        """
        info = get_schedule(self.schedule)
        orders = info.orders(self.num_ranks, self.num_micro_batches, self.stages_per_rank)
        return simulate(orders, self.costs)

"""Actions of a pipeline schedule: the passes of each rank in order, and the activations that they hold."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

from atorch_ns.pipeline.schedule.schedules import ScheduleInfo

PassKind = Literal["F", "B", "I", "W"]
"""Forward, whole backward, backward for the input, backward for the weights."""


class Action(NamedTuple):
    """One pass of one micro-batch through one stage; stages are numbered in the order of the model."""

    kind: PassKind
    stage: int
    micro_batch: int


Orders = tuple[tuple[Action, ...], ...]
"""The actions of every rank."""


def actions(
    info: ScheduleInfo, num_ranks: int, num_micro_batches: int, stages_per_rank: int | None = None
) -> Orders:
    """The actions of every rank in the order of torch's runtime; passes that torch pairs follow one another.

    Args:
        stages_per_rank: the number of stages on a rank; ``None`` for the schedule's usual number.

    Returns:
        The actions of each rank. A stage's activations of a micro-batch live from ``F`` to ``B`` or ``W``.

    Raises:
        InputError: if the schedule cannot run so many micro-batches or stages.
    """
    on_rank = info.usual_stages if stages_per_rank is None else stages_per_rank
    info.check(num_ranks, num_micro_batches, on_rank)
    if info.name == "GPipe":
        return tuple(_gpipe(stage, num_micro_batches) for stage in range(num_ranks))
    if info.name == "1F1B":
        return tuple(
            _one_forward_one_backward(stage, num_ranks, num_micro_batches) for stage in range(num_ranks)
        )
    from atorch_ns.torch_compat import pipeline_orders

    orders = pipeline_orders(
        info.torch_name, num_ranks=num_ranks, num_micro_batches=num_micro_batches, stages_per_rank=on_rank
    )
    return tuple(tuple(map(Action._make, order)) for order in orders)


def _gpipe(stage: int, num: int) -> tuple[Action, ...]:
    forwards = tuple(Action("F", stage, index) for index in range(num))
    return (*forwards, *(Action("B", stage, index) for index in range(num)))


def _one_forward_one_backward(stage: int, num_stages: int, num: int) -> tuple[Action, ...]:
    """The order in which ``Schedule1F1B._step_microbatches`` runs.

    The order that the class itself reports numbers the last stage's forwards from 1.
    """
    ahead = min(num, num_stages - stage)
    order = [Action("F", stage, index) for index in range(ahead)]
    for index in range(num):
        order.append(Action("B", stage, index))
        if ahead + index < num:
            order.append(Action("F", stage, ahead + index))
    return tuple(order)


def live_micro_batches(orders: Sequence[Sequence[Action]]) -> tuple[int, ...]:
    """The most micro-batches whose activations each stage holds at one time, by stage."""
    held: dict[int, int] = {}
    most: dict[int, int] = {}
    for order in orders:
        for kind, stage, _ in order:
            if kind == "F":
                held[stage] = held.get(stage, 0) + 1
                most[stage] = max(most.get(stage, 0), held[stage])
            elif kind != "I":
                held[stage] -= 1
    return tuple(most[stage] for stage in range(len(most)))


def live_bytes(orders: Sequence[Sequence[Action]], activation_bytes: Sequence[float]) -> tuple[float, ...]:
    """The most bytes of activations that each rank holds at one time, by rank.

    Args:
        activation_bytes: bytes that a stage keeps of one micro-batch between forward and backward, by stage. Bytes
            that a split backward frees before the weights' part are counted until then.
    """
    peaks = []
    for order in orders:
        held = most = 0.0
        for kind, stage, _ in order:
            if kind == "F":
                held += activation_bytes[stage]
                most = max(most, held)
            elif kind != "I":
                held -= activation_bytes[stage]
        peaks.append(most)
    return tuple(peaks)

"""Schedules as users write them."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

from atorch_ns.pipeline import Action, PipelineSize, ScheduleInfo


def _pairs(rank: int, size: PipelineSize) -> Iterator[Action]:
    """Two forward passes, then their backward passes."""
    for begin in range(0, size.num_micro_batches, 2):
        both = range(begin, min(begin + 2, size.num_micro_batches))
        yield from (Action("F", rank, index) for index in both)
        yield from (Action("B", rank, index) for index in both)


def _crossed(rank: int, size: PipelineSize) -> Iterator[Action]:
    """The last rank begins with the micro-batch that comes last."""
    numbers = range(size.num_micro_batches)
    for index in reversed(numbers) if rank else numbers:
        yield Action("F", rank, index)
        yield Action("B", rank, index)


def _forgetful(rank: int, size: PipelineSize) -> Iterator[Action]:
    """Forward passes alone."""
    return (Action("F", rank, index) for index in range(size.num_micro_batches))


def _endless(rank: int, size: PipelineSize) -> Iterator[Action]:
    """Never ends."""
    return (Action("F", rank, index) for index in count())


def _raising(rank: int, size: PipelineSize) -> Iterator[Action]:
    """Fails after its first pass."""
    yield Action("F", rank, 0)
    raise KeyError("of the user")


def _backwards(rank: int, size: PipelineSize) -> Iterator[Action]:
    """Backward before forward passes."""
    for index in range(size.num_micro_batches):
        yield Action("B", rank, index)
        yield Action("F", rank, index)


def _schedule(order: object) -> ScheduleInfo:
    return ScheduleInfo(name="", order=order, most_stages=1, usual_stages=1, summary="")  # type: ignore[arg-type]


PAIRS, CROSSED, FORGETFUL = map(_schedule, (_pairs, _crossed, _forgetful))
ENDLESS, RAISING, BACKWARDS = map(_schedule, (_endless, _raising, _backwards))
NO_ORDER = _schedule(lambda rank, size: 3)
OTHER = "no schedule"

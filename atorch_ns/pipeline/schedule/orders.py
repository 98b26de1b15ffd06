"""Orders of pipeline schedules: the actions of a rank, generated from the sizes of a pipeline."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from functools import cache
from typing import NamedTuple

from atorch_ns.pipeline.schedule.actions import Action, Orders


class PipelineSize(NamedTuple):
    """Ranks (p), stages on each of them (v), and micro-batches (m)."""

    num_ranks: int
    stages_per_rank: int
    num_micro_batches: int

    @property
    def num_stages(self) -> int:
        """The number of stages."""
        return self.num_ranks * self.stages_per_rank


Order = Callable[[int, PipelineSize], Iterable[Action]]
"""``(rank, size) -> the rank's actions``; passes wait for others' results, and sends follow from them."""


def gpipe(rank: int, size: PipelineSize) -> Iterator[Action]:
    """All forward passes, then all backward passes; one stage on a rank."""
    for index in range(size.num_micro_batches):
        yield Action("F", rank, index)
    for index in range(size.num_micro_batches):
        yield Action("B", rank, index)


def one_forward_one_backward(rank: int, size: PipelineSize) -> Iterator[Action]:
    """One forward pass per stage from here on, then backward and forward passes in turn."""
    return _in_turn(rank, min(size.num_micro_batches, size.num_stages - rank), size.num_micro_batches)


def _in_turn(stage: int, ahead: int, num: int) -> Iterator[Action]:
    for index in range(ahead):  # warm-up
        yield Action("F", stage, index)
    for index in range(num):  # steady state, then the cool-down of backward passes alone
        yield Action("B", stage, index)
        if ahead + index < num:
            yield Action("F", stage, ahead + index)


# Merak's schedules (core/pipeline/schedules; IEEE TPDS 34(5), doi 10.1109/TPDS.2023.3247001): 1F1B in which
# some recomputations begin before their gradients have arrived.


def pre_recompute(rank: int, size: PipelineSize) -> Iterator[Action]:
    """1F1B that recomputes the last micro-batches while their backward passes wait for later stages."""
    return _recompute_early(one_forward_one_backward(rank, size), _waiting_micro_batches(rank, size))


def last_no_recompute(rank: int, size: PipelineSize) -> Iterator[Action]:
    """As :func:`pre_recompute` with a last stage that keeps its activations: the stage before it recomputes
    its first micro-batch while it waits, and no others."""
    early = {0} if rank == size.num_stages - 2 else _waiting_micro_batches(rank, size)
    return _recompute_early(one_forward_one_backward(rank, size), early)


def shifted_critical_path(rank: int, size: PipelineSize) -> Iterator[Action]:
    """As :func:`last_no_recompute`; the last stage but one runs one more forward pass ahead and two backward
    passes in a row, so that the longest chain of waiting passes goes through it."""
    from_end, num = size.num_stages - 1 - rank, size.num_micro_batches
    if from_end == 1:  # the last stage but one
        forwards = [Action("F", rank, index) for index in range(num)]
        backwards = [Action("B", rank, index) for index in range(num)]
        order = [*forwards[:3], *backwards[:2]]  # 1F1B begins with F0 F1 B0 F2 B1
        for index in range(2, num):
            order += [*forwards[index + 1 : index + 2], backwards[index]]
        return _recompute_early(order, {0, 1})
    early = _waiting_micro_batches(rank, size) | ({0} if from_end == 2 else set())
    return _recompute_early(one_forward_one_backward(rank, size), early)


def _waiting_micro_batches(stage: int, size: PipelineSize) -> set[int]:
    # In the cool-down of 1F1B a stage waits for as many gradients as there are stages after it.
    num = size.num_micro_batches
    return set(range(max(0, num - (size.num_stages - 1 - stage)), num))


def _recompute_early(order: Iterable[Action], micro_batches: Collection[int]) -> Iterator[Action]:
    for action in order:
        if action.kind == "B" and action.micro_batch in micro_batches:
            yield action._replace(kind="R")  # while the gradient is on its way
        yield action


def torchs(class_name: str) -> Order:
    """The order of a class of ``torch.distributed.pipelining``, with its paired passes one by one."""

    @cache  # one call for all ranks
    def of_all(size: PipelineSize) -> Orders:
        from atorch_ns.torch_compat import pipeline_orders  # late: it imports torch's pipelining

        ranks = pipeline_orders(
            class_name,
            num_ranks=size.num_ranks,
            num_micro_batches=size.num_micro_batches,
            stages_per_rank=size.stages_per_rank,
        )
        return tuple(tuple(map(Action._make, order)) for order in ranks)

    return lambda rank, size: of_all(size)[rank]

"""Simulated ranks communicate as processes do, and end together."""

from __future__ import annotations

import gc
import math
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from atorch_ns.sharding import collectives
from atorch_ns.sharding.collectives import Group, SimulatedGroup, simulate
from atorch_ns.testing.workers import run_ranks

CPU = torch.device("cpu")
CALLS: dict[str, Callable[[torch.Tensor, Group], torch.Tensor]] = {
    "copy_to": collectives.copy_to,
    "reduce_from": collectives.reduce_from,
    "gather_from": lambda x, group: collectives.gather_from(x, 0, group),
    "scatter_to": lambda x, group: collectives.scatter_to(x, 1, group),
    "all_gather": lambda x, group: collectives.all_gather(x, 1, group),
    "reduce_scatter": lambda x, group: collectives.reduce_scatter(x, 0, group),
    "all_to_all": lambda x, group: collectives.all_to_all(x, 0, 1, group),
    "exchange": lambda x, group: collectives.exchange(
        x, [1, 3] if group.rank() == 0 else [2, 2], [1, 2] if group.rank() == 0 else [3, 2], group
    ),
    "total": lambda x, group: x * collectives.total(x.detach(), group),
}


def _all(group: Group) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """The result and the gradient of every collective, and what a rank is sent by the one before it."""
    found = {}
    for name, call in CALLS.items():
        x = (torch.arange(16.0).view(4, 4) + 100 * group.rank()).requires_grad_()
        out = call(x, group)
        (out * (torch.arange(float(out.numel())).view(out.shape) + group.rank())).sum().backward()
        assert x.grad is not None
        found[name] = (out.detach(), x.grad)
    works, arriving = collectives.sent_on(torch.full((2,), float(group.rank())), group)
    for work in works:
        work.wait()
    return {**found, "sent_on": (arriving, arriving)}


def _weights(group: Group, shape: tuple[int, ...]) -> torch.Tensor:
    """What a rank multiplies its result by, so that it is the gradient of that result."""
    return torch.arange(float(math.prod(shape))).view(shape) + 100.0 * group.rank()


def _gradients(group: Group) -> dict[str, torch.Tensor]:
    found = {}
    for name, (call, shape) in PAIRED.items():
        x = torch.ones(2, 4).requires_grad_()
        (call(x, group) * _weights(group, shape)).sum().backward()
        assert x.grad is not None
        found[name] = x.grad
    return found


PAIRED: dict[str, tuple[Callable[[torch.Tensor, Group], torch.Tensor], tuple[int, ...]]] = {
    "copy_to": (collectives.copy_to, (2, 4)),
    "reduce_from": (collectives.reduce_from, (2, 4)),
    "gather_from": (lambda x, group: collectives.gather_from(x, 0, group), (4, 4)),
    "scatter_to": (lambda x, group: collectives.scatter_to(x, 1, group), (2, 2)),
    "summand_of": (collectives.summand_of, (2, 4)),
    "all_gather": (lambda x, group: collectives.all_gather(x, 0, group), (4, 4)),
    "reduce_scatter": (lambda x, group: collectives.reduce_scatter(x, 1, group), (2, 2)),
}
"""Collectives with the shapes of what they make of [2, 4] on two ranks."""


def test_each_collective_has_the_gradient_that_belongs_to_it() -> None:
    ranks = simulate(
        2, lambda group: (_gradients(group), {s: _weights(group, s) for _, s in PAIRED.values()}), CPU
    )
    weights = [each for _, each in ranks]
    of_wholes = [each[4, 4] for each in weights]
    of_pieces = torch.cat([each[2, 2] for each in weights], 1)
    for rank, (found, own) in enumerate(ranks):
        expected = {
            "copy_to": weights[0][2, 4] + weights[1][2, 4],
            "reduce_from": own[2, 4],
            "gather_from": own[4, 4].chunk(2)[rank],
            "scatter_to": of_pieces,
            "summand_of": own[2, 4],
            "all_gather": sum(of_wholes).chunk(2)[rank],
            "reduce_scatter": of_pieces,
        }
        for name, gradient in expected.items():
            torch.testing.assert_close(found[name], gradient, msg=name)


def _on_processes() -> Any:
    assert dist.group.WORLD is not None
    return _all(dist.group.WORLD)


def test_simulated_ranks_get_what_processes_get() -> None:
    for real, simulated in zip(run_ranks(_on_processes, 2), simulate(2, _all, CPU), strict=True):
        for name, pair in real.items():
            for one, other in zip(pair, simulated[name], strict=True):
                torch.testing.assert_close(one, other, msg=name)


def _fails_on_the_second(group: SimulatedGroup) -> None:
    group.swap(1)
    if group.rank() == 1:
        raise ZeroDivisionError("here")
    group.swap(2)


def _swaps_by_rank(group: SimulatedGroup) -> list[list[int]]:
    return [group.swap(group.rank()) for _ in range(1 + group.rank())]


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_a_rank_that_raises_or_stops_ends_all(num_ranks: int) -> None:
    with pytest.raises(ZeroDivisionError, match="here"):
        simulate(num_ranks, _fails_on_the_second, CPU)
    with pytest.raises(KeyError):
        simulate(num_ranks, _swaps_by_rank, CPU)


def test_ranks_take_turns_in_order() -> None:
    order: list[int] = []

    def work(group: SimulatedGroup) -> list[list[int]]:
        found = []
        for turn in range(3):
            order.append(group.rank())
            found.append(group.swap(10 * turn + group.rank()))
        return found

    assert simulate(3, work, CPU) == [[[0, 1, 2], [10, 11, 12], [20, 21, 22]]] * 3
    assert order == [0, 1, 2] * 3


def test_nothing_of_a_simulation_stays() -> None:
    kept: list[weakref.ref[torch.Tensor]] = []

    def work(group: SimulatedGroup) -> None:
        x = torch.ones(4, requires_grad=True)
        kept.append(weakref.ref(x))
        collectives.gather_from(collectives.copy_to(x, group) * 2, 0, group).tanh().sum().backward()

    simulate(2, work, CPU)
    gc.collect()
    assert [ref() for ref in kept] == [None, None]

"""Executor: what a rank holds of the tensors that cross cuts."""

from __future__ import annotations

import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from atorch_ns.pipeline.run import executor
from atorch_ns.pipeline.run.executor import Execution
from atorch_ns.pipeline.schedule.actions import forward_only


class _Stage(nn.Module):
    """Counts the tensors that it has received and that something still refers to."""

    def __init__(self) -> None:
        super().__init__()
        self.received: list[weakref.ref[torch.Tensor]] = []
        self.alive: list[int] = []

    def forward(self, *received: torch.Tensor, index: int) -> torch.Tensor:
        self.received += map(weakref.ref, received)
        self.alive.append(sum(tensor() is not None for tensor in self.received))
        return torch.full((1,), float(index))


class _Sends:
    """Counts the tensors that have been sent and that something still refers to, and which were waited for."""

    def __init__(self) -> None:
        self.sent: list[weakref.ref[torch.Tensor]] = []
        self.alive: list[int] = []
        self.waits: list[int] = []

    def send(self, tensor: torch.Tensor, group: Any, group_dst: int) -> Any:
        number = len(self.sent)
        self.sent.append(weakref.ref(tensor))
        self.alive.append(sum(tensor() is not None for tensor in self.sent))
        return SimpleNamespace(wait=lambda: self.waits.append(number))


def _run_order(monkeypatch: pytest.MonkeyPatch, rank_of: tuple[int, ...]) -> tuple[Execution, _Sends]:
    """Forward passes of eight micro-batches on the first rank, which receives nothing from others."""
    sends = _Sends()
    monkeypatch.setattr(dist, "isend", sends.send)
    monkeypatch.setattr(executor._Inbox, "_post_receive", lambda self: None)
    monkeypatch.setattr(executor._Inbox, "take", lambda self, message: (torch.ones(1),))
    crossing = SimpleNamespace(carried=[SimpleNamespace(spec=SimpleNamespace(requires_grad=False))])
    stages = [SimpleNamespace(received=crossing if stage else None) for stage in range(len(rank_of))]
    execution = Execution(
        links=SimpleNamespace(rank=0, between=lambda source, target: None),  # type: ignore[arg-type]
        device=torch.device("cpu"),
        orders=forward_only(rank_of, 8),
        rank_of=rank_of,
        stages={stage: _Stage() for stage, rank in enumerate(rank_of) if rank == 0},  # type: ignore[misc]
        ranges=[stages] * 8,  # type: ignore[list-item]
    )
    with torch.no_grad():
        execution.run()
    return execution, sends


def test_forward_passes_alone_keep_nothing_that_they_have_received(monkeypatch: pytest.MonkeyPatch) -> None:
    execution, _ = _run_order(monkeypatch, (0, 0))
    assert execution.stages[1].alive == [1] * 8


def test_forward_passes_alone_keep_two_messages_that_are_on_their_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _, sends = _run_order(monkeypatch, (0, 1))
    assert max(sends.alive) == executor.BUFFERS + 1  # and the one that is being handed on
    assert sends.waits == list(range(8))


def test_ranks_that_send_in_a_circle_wait_at_the_end_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each could wait for the other to receive."""
    _, sends = _run_order(monkeypatch, (0, 1, 0))
    assert sends.alive == list(range(1, 9))
    assert sends.waits == list(range(8))

"""Following what tensors take in memory."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn

from atorch_ns.cluster.process_memory import MemoryTracker
from atorch_ns.job import state_bytes, track_memory
from atorch_ns.testing.models import get_case
from atorch_ns.testing.parity import accelerate_case
from atorch_ns.testing.workers import run_ranks

CPU = torch.device("cpu")


def test_the_peak_is_of_what_was_alive_at_once() -> None:
    with track_memory(CPU) as memory:
        kept = torch.empty(1000)
        passing = torch.empty(500)
        del passing
        other = torch.empty(100)
        assert memory.alive_bytes == 4400
        assert memory.peak_bytes == 6000
        memory.reset_peak()
        assert memory.peak_bytes == 4400
        del kept, other
        assert memory.alive_bytes == 0


def test_gradients_and_temporaries_of_the_backward_pass_count() -> None:
    with track_memory(CPU) as memory:
        model = nn.Linear(100, 50, bias=False)
        memory.reset_peak()
        model(torch.ones(10, 100)).sum().backward()
        assert memory.alive_bytes == 2 * 100 * 50 * 4
        assert memory.peak_bytes > memory.alive_bytes


def test_releases_by_other_threads_count() -> None:
    with track_memory(CPU) as memory:
        held = [torch.empty(1000)]
        thread = threading.Thread(target=held.clear)
        thread.start()
        thread.join()
        assert memory.alive_bytes == 0


def test_nothing_is_followed_afterwards(capfd: pytest.CaptureFixture[str]) -> None:
    memory = MemoryTracker(CPU)
    memory.start()
    kept = torch.empty(10)
    memory.stop()
    passing = torch.empty(100)
    assert memory.peak_bytes == memory.alive_bytes == kept.nbytes < passing.nbytes
    with track_memory(CPU) as again:
        assert again.alive_bytes == 0
    assert capfd.readouterr() == ("", "")


def _kept(strategy: list[object]) -> tuple[int, int, int]:
    result = accelerate_case(get_case("mlp"), strategy)
    assert result.dataloader is not None
    result.train_step(next(iter(result.dataloader)))
    states = state_bytes(result)
    return states.parameters, states.gradients, states.optimizer


def test_masters_belong_to_the_optimizer() -> None:
    whole = 4 * sum(parameter.numel() for parameter in get_case("mlp").build().parameters())
    counters = 4 * len(list(get_case("mlp").build().parameters()))
    plain = run_ranks(_kept, 2, args=([("ddp", {"reducer": "torch"})],))
    assert plain == [(whole, whole, 2 * whole + counters)] * 2
    half = run_ranks(_kept, 2, args=(["ddp", ("half", "fp16")],))
    assert half == [(whole // 2, whole // 2, 3 * whole + counters)] * 2, (
        "gradients are fp32 in the update alone"
    )

"""The instruments that memory is measured with."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from benchmarks._bytes import Allocated, StateBytes, allocated, resident, state_bytes, storage_bytes

MIB = 2**20


def _mib(number: float) -> torch.Tensor:
    return torch.ones(int(number * MIB / 4))


def test_a_storage_counts_once_and_whole() -> None:
    tensor = _mib(1)
    assert storage_bytes([tensor, tensor[:10], tensor.view(2, -1), torch.ones(3)]) == MIB + 12


def test_state_of_adamw() -> None:
    model = nn.Linear(100, 10, bias=False)
    optimizer = torch.optim.AdamW(model.parameters())
    assert state_bytes(model, optimizer) == StateBytes(parameters=4000, gradients=0, optimizer=0)
    model(torch.ones(1, 100)).sum().backward()
    optimizer.step()
    kept = state_bytes(model, optimizer)
    assert kept == StateBytes(parameters=4000, gradients=4000, optimizer=8004)
    assert kept.total == 16004


def test_temporaries_count_at_the_peak_and_not_at_the_end() -> None:
    def work() -> torch.Tensor:
        kept = _mib(2)
        torch.outer(torch.ones(1024), torch.ones(1024)).mul_(2)  # 4 MiB that nobody keeps
        return kept

    value, seen = allocated(work)
    assert seen.kept == pytest.approx(value.nbytes, abs=1000)
    assert 6 * MIB <= seen.peak <= 6.1 * MIB
    _, again = allocated(lambda: None)
    assert again == Allocated(peak=0, kept=0)


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="Linux tells the peak, others do not")
def test_resident_memory_rises_by_what_is_touched() -> None:
    value, rise = resident(lambda: [_mib(40) for _ in range(2)] and _mib(1))
    assert 79 * MIB <= rise <= 100 * MIB  # the system counts pages in batches
    assert sys.getrefcount(value)
    assert resident(lambda: None)[1] < 5 * MIB

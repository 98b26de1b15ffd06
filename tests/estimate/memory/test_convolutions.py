"""Predicted memory of convolutions, with what oneDNN takes while it computes them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from atorch_ns.job import PeakMemory
from atorch_ns.testing.models import Case
from atorch_ns.testing.workers import run_ranks
from benchmarks._memory_cases import SizedCase, seeded
from benchmarks.estimate_memory import compare, held, profile_of

STRATEGIES: list[Any] = [["ddp"], ["fsdp"], ["fsdp", "checkpoint"]]
TOLERANCE = 0.03
"""Without oneDNN's workspaces predictions are 5 to 8 % short."""


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Sequential(nn.Conv2d(32, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU())
        self.last = nn.Sequential(nn.Conv2d(32, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32))

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.last(self.conv(x)))


class _Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 32, 3, padding=1)
        self.blocks = nn.Sequential(*(_Block() for _ in range(4)))
        self.head = nn.Linear(32, 10)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        out: Tensor = self.head(self.blocks(self.stem(x)).mean((2, 3)))
        return out


def _batch(size: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(size, 3, 16, 16, generator=generator), torch.arange(size) % 10


def _sized() -> SizedCase:
    case = Case(
        name="convolutions",
        build=lambda: seeded(_Network),
        make_batch=_batch,
        loss_func=lambda batch, output: F.cross_entropy(output.float(), batch[1]),
        model_input_format="unpack_sequence",
        block="_Block",
    )
    return SizedCase(name="convolutions", case=case, global_batch=16)


def _measured() -> list[PeakMemory]:
    return held(_sized(), STRATEGIES)


@pytest.mark.timeout(120)
def test_two_ranks_hold_what_was_predicted() -> None:
    ranks = run_ranks(_measured, 2, timeout_s=100)
    rows = compare(_sized(), STRATEGIES, ranks, profile_of(_sized()))
    for strategy, row in zip(STRATEGIES, rows, strict=True):
        assert abs(row["error"]) <= TOLERANCE, (strategy, row)

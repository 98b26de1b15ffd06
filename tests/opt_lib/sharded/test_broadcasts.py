"""Values of the first rank for all, whatever tensors look like."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from atorch_ns.testing.workers import run_ranks
from opt_lib._sharded.units import broadcast_from_first

pytestmark = pytest.mark.processes


def _sent() -> list[torch.Tensor]:
    """On one rank: tensors that ranks have other values of before."""
    rank = dist.get_rank()
    tensors = [
        torch.full((300_000,), float(rank)),
        torch.full((3, 5), float(rank)).t(),  # not contiguous
        torch.full((4,), rank, dtype=torch.int64),
        torch.tensor(rank == 0),
        torch.zeros(0),
        torch.full((2, 2), float(rank), dtype=torch.bfloat16),
        torch.full((7,), rank + 0.5),
        torch.zeros(1).expand(3),  # its elements share memory: alike everywhere
        torch.empty(3, device="meta"),
    ]
    mesh = SimpleNamespace(data_group=dist.group.WORLD)
    job: Any = SimpleNamespace(mesh=mesh, device=torch.device("cpu"))
    broadcast_from_first(job, tensors)
    return [tensor for tensor in tensors if not tensor.is_meta]


def test_all_ranks_have_the_values_of_the_first() -> None:
    first, second = run_ranks(_sent, 2, timeout_s=60.0)
    for one, other in zip(first, second, strict=True):
        assert torch.equal(one, other)
    assert second[0][0] == 0.0
    assert second[1].shape == (5, 3)
    assert second[3].item() is True
    assert second[6][0] == 0.5

"""Batch norms under sharding in reduced precision: their statistics stay in fp32, and so do their weights."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from atorch_ns import auto_accelerate
from atorch_ns.testing import run_ranks


class ConvNet(nn.Module):
    """[B, 3, 8, 8] to [B, 4]."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1))
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return self.head(self.body(x).flatten(1))


def _loss(batch: tuple[Tensor, Tensor], output: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output.float(), batch[1])


def _losses(methods: tuple[str, ...]) -> list[list[float]]:
    found = []
    for method in methods:
        torch.manual_seed(0)
        status, result, _ = auto_accelerate(
            ConvNet(),
            torch.optim.AdamW,
            TensorDataset(torch.randn(64, 3, 8, 8), torch.arange(64) % 4),
            _loss,
            model_input_format="unpack_sequence",
            optim_args={"lr": 1e-2},
            dataloader_args={"batch_size": 16},
            load_strategy=[method, ("amp_native", "bf16")],
        )
        assert status
        assert result is not None
        found.append([float(result.train_step(batch)) for batch in result.dataloader or ()])
        assert (method == "ddp") != ("but for 1 batch norm(s)" in str(result.applied))
        kept = [module for module in result.model.modules() if isinstance(module, nn.BatchNorm2d)]
        assert all(module.running_mean.dtype == torch.float32 for module in kept)
    return found


def test_they_train_as_they_do_when_replicated() -> None:
    replicated, *sharded = run_ranks(_losses, 2, args=(("ddp", "fsdp", "zero2"),), timeout_s=90)[0]
    for losses in sharded:
        assert losses == pytest.approx(replicated, rel=1e-2)

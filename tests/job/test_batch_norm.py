"""Batch norms that share their statistics train on two ranks as in one process; those that do not, say so."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from atorch_ns import auto_accelerate
from atorch_ns.checkpoint.export import whole_tensors
from atorch_ns.testing import run_ranks

SYNC = {"sync_batchnorm": True}
TRAINED: tuple[list[Any], ...] = (
    [("ddp", SYNC)],
    ["ddp", ("zero1", SYNC)],
    [("zero2", SYNC)],
    [("fsdp", SYNC)],
    [("fsdp", SYNC), "checkpoint"],
)


class NormAct(nn.BatchNorm2d):
    """As timm's: what it computes is more than its base does."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(
            nn.functional.batch_norm(
                x, self.running_mean, self.running_var, self.weight, self.bias, self.training, 0.1, self.eps
            )
        )


class Block(nn.Module):
    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(4, 4, 3, padding=1), norm

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + torch.relu(self.norm(self.conv(x)))
        return out


class ConvNet(nn.Module):
    """[B, 4, 6, 6] to [B, 3], with every kind of setting."""

    def __init__(self) -> None:
        super().__init__()
        kinds = ({}, {"momentum": None}, {"affine": False}, {"track_running_stats": False})
        self.blocks = nn.ModuleList(Block(nn.BatchNorm2d(4, **kind)) for kind in kinds)  # type: ignore[arg-type]
        self.blocks.append(Block(NormAct(4)))
        self.flat = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(self.flat(x.mean((2, 3))))
        return out


def _loss(batch: Any, output: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output, batch[1])


def _trained(strategy: list[Any]) -> tuple[list[float], dict[str, Tensor], str]:
    torch.manual_seed(0)
    model = ConvNet()
    data = TensorDataset(3 * torch.randn(24, 4, 6, 6) + 1, torch.arange(24) % 3)
    _, result, _ = auto_accelerate(
        model,
        torch.optim.SGD,
        data,
        _loss,
        model_input_format="first",
        optim_args={"lr": 0.1, "momentum": 0.9},
        dataloader_args={"batch_size": 8, "shuffle": False},
        load_strategy=strategy,
    )
    assert result is not None
    losses = [float(result.train_step(batch)) for batch in result.dataloader or ()]
    return losses, whole_tensors(result, everywhere=True), str(result.applied)


def _all_trained(strategies: tuple[list[Any], ...]) -> list[tuple[list[float], dict[str, Tensor], str]]:
    return [_trained(strategy) for strategy in strategies]


@pytest.mark.timeout(150)
def test_shared_statistics_are_those_of_the_whole_batch() -> None:
    ((losses, tensors, text),) = run_ranks(_trained, 1, args=([],))
    assert "batch norm" not in text
    for rank in run_ranks(_all_trained, 2, args=(TRAINED,), timeout_s=120):
        for strategy, (own, found, told) in zip(TRAINED, rank, strict=True):
            assert own == pytest.approx(losses, rel=2e-6), strategy
            assert found.keys() == tensors.keys()
            for name, value in tensors.items():
                torch.testing.assert_close(
                    found[name], value, rtol=1e-5, atol=2e-6, msg=f"{strategy}: {name}"
                )
            assert "batch norm" not in told


def test_what_differs_by_default_is_said() -> None:
    ((losses, _, _),) = run_ranks(_trained, 1, args=([],))
    strategies = (["ddp"], [("ddp", SYNC), ("gradient_accumulation", 2)])
    for rank in run_ranks(_all_trained, 2, args=(strategies,)):
        (own, _, told), (_, _, accumulated) = rank
        assert own != pytest.approx(losses, rel=1e-4)
        assert "statistics are not shared over the 2 data ranks (sync_batchnorm=True" in told
        assert "not shared over the 2 micro-batches" in accumulated

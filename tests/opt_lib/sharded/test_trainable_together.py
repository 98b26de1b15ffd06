"""wrap_trainable_outmost: trainable parameters in one unit, with any units beside it, trains as one process."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from atorch_ns import auto_accelerate, checkpoint
from atorch_ns.testing.workers import run_ranks

X = torch.randn(16, 8, generator=torch.Generator().manual_seed(1))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.ones(8))
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.gate * x + self.second(torch.tanh(self.first(x)))
        return out


def frozen_biases(name: str) -> bool:
    return name.endswith("bias")


def all_but_gates(name: str) -> bool:
    """Trainable parameters of modules with units inside, of which all is frozen."""
    return not name.endswith("gate")


def nothing(name: str) -> bool:
    return False


def _loss(batch: Tensor, output: Tensor) -> Tensor:
    return (output - batch).square().mean()


def _trained(config: dict[str, Any], is_frozen: Callable[[str], bool]) -> tuple[float | None, str]:
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(3)))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not is_frozen(name))
    reference = copy.deepcopy(model)
    optimizer = torch.optim.AdamW([p for p in reference.parameters() if p.requires_grad], lr=1e-2)
    for batch in X.split(8):
        optimizer.zero_grad()
        _loss(batch, reference(batch)).backward()
        optimizer.step()
    _, result, _ = auto_accelerate(
        model,
        torch.optim.AdamW,
        X,
        _loss,
        optim_args={"lr": 1e-2},
        dataloader_args={"batch_size": 8, "shuffle": False},
        load_strategy=[("fsdp", {"wrap_trainable_outmost": True, **config})],
    )
    assert result is not None
    for batch in result.dataloader or ():
        result.train_step(batch)
    found = checkpoint.export_state_dict(result)
    expected = reference.state_dict()
    off = max(float((found[name] - value).abs().max()) for name, value in expected.items()) if found else None
    return off, str(result.report)


@pytest.mark.processes
@pytest.mark.parametrize("wrapped", [{"atorch_wrap_cls": ("Linear",)}, {}])
@pytest.mark.parametrize("is_frozen", [frozen_biases, all_but_gates, nothing])
def test_any_units_beside_it(wrapped: dict[str, Any], is_frozen: Callable[[str], bool]) -> None:
    (off, text), _ = run_ranks(_trained, 2, args=(wrapped, is_frozen), timeout_s=60)
    assert off is not None
    assert off < 1e-6
    assert ("nothing is frozen" in " ".join(text.split())) == (is_frozen is nothing)

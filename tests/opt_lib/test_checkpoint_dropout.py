"""Recomputation without the random state, which dropout needs."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from atorch_ns import auto_accelerate


class Block(nn.Module):
    def __init__(self, p: float, *, attends: bool = False) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.drop = nn.Dropout(0.0 if attends else p)
        self.attention = nn.MultiheadAttention(8, 2, dropout=p, batch_first=True) if attends else None

    def forward(self, x: Tensor) -> Tensor:
        """x [B, T, 8]."""
        if self.attention is not None:
            x = self.attention(x, x, x, need_weights=False)[0]
        out: Tensor = x + self.drop(self.layer(x))
        return out


def _said(model: nn.Module, **config: Any) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        auto_accelerate(
            model, torch.optim.SGD, optim_args={"lr": 0.1}, load_strategy=[("checkpoint", config)]
        )
    return [str(each.message) for each in caught if "preserve_rng_state" in str(each.message)]


@pytest.mark.parametrize("attends", [False, True])
def test_it_is_a_warning_where_something_drops(attends: bool) -> None:
    model = nn.Sequential(*(Block(0.5, attends=attends) for _ in range(2)))
    (said,) = _said(model, preserve_rng_state=False)
    assert "gradients are wrong" in said
    assert ("MultiheadAttention" in said) == attends
    assert not _said(nn.Sequential(*(Block(0.5) for _ in range(2))))


def test_nothing_is_said_where_nothing_drops() -> None:
    assert not _said(nn.Sequential(*(Block(0.0) for _ in range(2))), preserve_rng_state=False)
    frozen = nn.Sequential(*(Block(0.5) for _ in range(2)))
    for block in frozen:
        block.eval()
    assert not _said(frozen, preserve_rng_state=False)

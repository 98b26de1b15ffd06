"""Which modules of a model are its repeated blocks."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from atorch_ns.profile import repeated_blocks


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        """x [B, 8]."""
        out: Tensor = x + self.layer(x)
        return out


class Bare(nn.Module):
    """A block with parameters of its own, and no modules."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8, 8))


def _linears(count: int) -> list[nn.Module]:
    return [nn.Linear(8, 8) for _ in range(count)]


def _normed() -> nn.Module:
    layer = nn.Linear(8, 8)
    nn.utils.parametrizations.weight_norm(layer)
    return layer


@pytest.mark.parametrize(
    ("children", "wanted"),
    [
        ([*_linears(1), Block(), Block(), *_linears(1)], ["1", "2"]),
        ([*_linears(3), Block(), Block(), *_linears(3)], ["3", "4"]),
        ([*_linears(3), Bare(), Bare()], ["3", "4"]),
        ([Bare(), Bare(), Bare(), Block(), Block()], ["3", "4"]),
        ([_normed(), _normed(), _normed(), Block(), Block()], ["3", "4"]),
        ([*_linears(2), Block()], ["0", "1"]),
        (_linears(3), ["0", "1", "2"]),
        ([*_linears(1), Block()], []),
    ],
)
def test_what_holds_modules_goes_before_layers(children: list[nn.Module], wanted: list[str]) -> None:
    assert [block.name for block in repeated_blocks(nn.Sequential(*children))] == wanted

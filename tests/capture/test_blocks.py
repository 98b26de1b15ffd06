"""Repeated blocks of a model, and fingerprints that tell structures apart."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from atorch_ns.capture.blocks import counters, fingerprint, fingerprints, repeated_blocks
from atorch_ns.profile import Profile
from tests.profile.subjects import Stack


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        """x [B, 8]."""
        out: Tensor = x + self.layer(x)
        return out


class Attending(Block):
    pass


class Recurring(Block):
    pass


class Model(nn.Module):
    """Holds blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])

    def forward(self, x: Tensor) -> Tensor:
        """x [B, 8]."""
        return x


class OtherModel(Model):
    pass


class Bare(nn.Module):
    """A block with parameters of its own, and no modules."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        """x [B, 8]."""
        return x @ self.weight


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
        ([*_linears(1), Attending(), Recurring()], ["1", "2"]),
        ([Recurring(), Recurring(), Recurring(), Attending(), Recurring()], ["0", "1", "2", "3", "4"]),
        ([Block(), Block(), Model(), Model()], ["0", "1", "2", "3"]),
        ([OtherModel(), Model()], ["0.blocks.0", "0.blocks.1", "1.blocks.0", "1.blocks.1"]),
    ],
)
def test_what_holds_modules_goes_before_layers(children: list[nn.Module], wanted: list[str]) -> None:
    assert [block.name for block in repeated_blocks(nn.Sequential(*children))] == wanted


class Numbered(nn.Module):
    def __init__(self, layer_idx: int, heads: int = 4, rate: float = 0.1) -> None:
        super().__init__()
        self.layer_idx = layer_idx
        self.heads = heads
        self.rate = rate
        self.linear = nn.Linear(4, 4)


def _prints(*modules: nn.Module) -> list[str]:
    return list(fingerprints({f"layers.{index}": module for index, module in enumerate(modules)}).values())


def test_weights_do_not_matter() -> None:
    first, second = Stack(), Stack()
    assert not torch.equal(first.layers[0].weight, second.layers[0].weight)
    assert fingerprint(first) == fingerprint(second) == Profile.of(first).fingerprint
    with torch.device("meta"):
        assert fingerprint(Stack()) == fingerprint(first)


def test_structure_shapes_and_settings_matter() -> None:
    base = fingerprint(Stack())
    frozen = Stack().requires_grad_(False)
    others = [Stack(depth=5), Stack(width=16), Stack().to(torch.bfloat16), Stack().eval(), frozen]
    tied = Stack()
    tied.layers[1].weight = tied.layers[0].weight
    prints = [base, *map(fingerprint, [*others, tied])]
    assert len(set(prints)) == len(prints)


def test_places_do_not_matter_but_counts_do() -> None:
    blocks = [Numbered(index) for index in range(3)]
    assert len(set(_prints(*blocks))) == 1
    assert counters(blocks) == ("layer_idx",)
    assert len(set(_prints(Numbered(0, heads=4), Numbered(1, heads=8)))) == 2


def test_a_rate_matters_only_in_being_zero() -> None:
    prints = _prints(Numbered(0, rate=0.0), Numbered(1, rate=0.1), Numbered(2, rate=0.2))
    assert prints[0] != prints[1] == prints[2]

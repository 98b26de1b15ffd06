"""Fingerprints tell structures apart, and nothing else."""

from __future__ import annotations

import torch
from torch import nn

from atorch_ns.capture.blocks import counters, fingerprint, fingerprints
from atorch_ns.profile import Profile
from tests.profile.subjects import Stack


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

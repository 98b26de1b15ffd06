"""Blocks on parts of the sequence compute what they compute on the whole, or are refused before they train."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from atorch_ns.capture.blocks import NamedModule
from atorch_ns.errors import InputError
from atorch_ns.sharding import BlockChain, SequenceSettings
from atorch_ns.testing.workers import run_ranks
from tests.sharding.sequence.blocks import (
    CHAINS,
    HEADS,
    REFUSED,
    TRAINED_BIAS,
    WIDTH,
    WRITTEN_OUT,
    Chain,
    FlagBlock,
)

Kind = Literal["auto", "ulysses", "ring"]


def attach(model: Chain, kind: Kind = "auto", **settings: Any) -> BlockChain:
    group = dist.group.WORLD
    assert group is not None
    blocks = [NamedModule(f"blocks.{place}", block) for place, block in enumerate(model.blocks)]
    settings = {"group": group, "device": torch.device("cpu"), "kind": kind, **settings}
    run = BlockChain(blocks, ["same"] * len(blocks), SequenceSettings(**settings))
    run.attach()
    run.join(dict.fromkeys(range(len(blocks) - 1), ()))
    return run


def gradients(model: Chain, x: torch.Tensor) -> dict[str, torch.Tensor]:
    """The result, and gradients of a weighted sum of it."""
    x = x.clone().requires_grad_()
    out = model(x)
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(3))
    named = {"input": x, **dict(model.named_parameters())}
    found = torch.autograd.grad((out * weights).sum(), list(named.values()))
    return {"result": out.detach(), **dict(zip(named, found, strict=True))}


def deviation(make: Callable[[], Chain], kind: Kind, length: int) -> float:
    torch.manual_seed(0)
    model = make()
    x = torch.randn(3, length, WIDTH)
    whole = gradients(model, x)
    attach(model, kind)
    worst = 0.0
    for _ in range(2):  # the first time it is tested, the second time it is not
        parts = gradients(model, x)
        for name, expected in whole.items():
            found = parts[name]
            if name.startswith("blocks."):
                dist.all_reduce(found)
                found /= dist.get_world_size()
            worst = max(worst, float((found - expected).abs().max() / expected.abs().max().clamp(min=1e-3)))
    return worst


def _deviations(names: list[str], kind: Kind, length: int) -> dict[str, float]:
    makers = {**CHAINS, **TRAINED_BIAS, **WRITTEN_OUT}
    return {name: deviation(makers[name], kind, length) for name in names}


@pytest.mark.parametrize(
    ("kind", "num_ranks", "length"),
    [("ulysses", 2, 12), ("ulysses", 4, 13), ("ring", 2, 13), ("ring", 3, 12)],
)
def test_blocks_of_many_kinds(kind: Kind, num_ranks: int, length: int) -> None:
    names = [*CHAINS, *TRAINED_BIAS]
    for found in run_ranks(_deviations, num_ranks, args=(names, kind, length)):
        assert max(found.values()) < 1e-4, found


@pytest.mark.parametrize(("num_ranks", "length"), [(2, 12), (2, 5), (3, 13)])
def test_attention_that_is_written_out(num_ranks: int, length: int) -> None:
    for found in run_ranks(_deviations, num_ranks, args=([*WRITTEN_OUT], "auto", length)):
        assert max(found.values()) < 1e-4, found


def test_a_table_as_wide_as_the_sequence_is_long() -> None:
    length = WIDTH // HEADS // 2
    for found in run_ranks(_deviations, 2, args=(["rotary"], "auto", length)):
        assert found["rotary"] < 1e-4


@dataclasses.dataclass
class _Box:
    """Not registered with torch."""

    hidden: torch.Tensor
    name: str = "box"


class _BoxedBlock(FlagBlock):
    def forward(self, box: _Box) -> _Box:  # type: ignore[override]
        return _Box(super().forward(box.hidden))


class _BoxedChain(Chain):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        box = _Box(x * self.scale)
        for block in self.blocks:
            box = block(box)
        return box.hidden


def test_blocks_that_take_and_give_dataclasses() -> None:
    def deviations() -> float:
        return deviation(lambda: _BoxedChain(_BoxedBlock), "auto", 12)

    assert max(run_ranks(deviations, 2)) < 1e-4


def _refusals() -> dict[str, str]:
    messages = {}
    for name, make in REFUSED.items():
        torch.manual_seed(0)
        model = make()
        attach(model)
        with pytest.raises(InputError) as caught:
            model(torch.randn(2, 16, WIDTH))
        messages[name] = str(caught.value)
    model = WRITTEN_OUT["written out"]()
    attach(model, "ring")
    with pytest.raises(InputError) as caught:
        model(torch.randn(2, 16, WIDTH))
    return {**messages, "ring": str(caught.value)}


def test_blocks_that_cannot_be_divided_are_named_before_use() -> None:
    for messages in run_ranks(_refusals, 2):
        assert "cannot divide blocks.0 (MeanBlock) over 2 ranks" in messages["mean"]
        assert "No attention that can be divided was seen" in messages["mean"]
        assert "writes its attention out" in messages["shifted"]
        assert "attn_implementation='sdpa'" in messages["shifted"]
        assert "kind='ring' cannot divide. Use kind='auto'" in messages["ring"]
        assert "cannot divide blocks.0 (NeighbourBlock)" in messages["neighbour"]
        assert "off by" in messages["neighbour"]


class Skipping(Chain):
    """Leaves its first block out."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks[1](x)


def _order() -> str:
    model = Skipping(FlagBlock)
    attach(model)
    with pytest.raises(InputError) as caught:
        model(torch.randn(2, 16, WIDTH))
    return str(caught.value)


def test_a_block_left_out_is_noticed() -> None:
    (message, _) = run_ranks(_order, 2)
    assert "blocks.1 is called where blocks.0 should be" in message


class Dropping(nn.Module):
    """Remembers what its dropout kept."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.kept = torch.empty(0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        dropped = nn.functional.dropout(self.inner(x), 0.5, self.training)
        self.kept = dropped.detach() != 0
        return x + dropped


def _masks() -> dict[str, Any]:
    torch.manual_seed(0)
    model = Chain(Dropping).train()
    attach(model)
    x = torch.randn(1, 32, WIDTH)
    outs = []
    for _ in range(2):
        torch.manual_seed(5)
        outs.append(model(x).detach())
    return {"outs": outs, "after": torch.rand(4), "kept": [block.kept for block in model.blocks]}


def test_masks_differ_between_ranks_and_come_again() -> None:
    first, second = run_ranks(_masks, 2)
    assert torch.equal(*first["outs"])
    assert torch.equal(first["outs"][0], second["outs"][0])
    assert torch.equal(first["after"], second["after"])  # outside of the blocks all draw the same again
    masks = [*first["kept"], *second["kept"]]
    assert all(mask.shape == (1, 16, WIDTH) for mask in masks)
    for place, mask in enumerate(masks):
        assert abs(float(mask.float().mean()) - 0.5) < 0.1
        for other in masks[place + 1 :]:
            assert 0.35 < float((mask == other).float().mean()) < 0.65


class Recomputed(Chain):
    """Recomputes its blocks."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * self.scale
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x


class DroppingFlagBlock(FlagBlock):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(super().forward(x), 0.3, self.training)


def _recomputed(kind: Kind) -> float:
    """Two forward passes of other lengths before their backward passes, with dropout."""
    results = []
    for cls in (Chain, Recomputed):
        torch.manual_seed(0)
        model = cls(DroppingFlagBlock).train()
        attach(model, kind)
        xs = [torch.randn(2, length, WIDTH, requires_grad=True) for length in (15, 16, 13)]
        torch.manual_seed(6)
        outs = [model(x) for x in xs]
        total = sum((out * torch.linspace(0, 1, out.numel()).view_as(out)).sum() for out in outs)
        results.append(torch.autograd.grad(total, [*xs, *model.parameters()]))
    return max(float((one - other).abs().max()) for one, other in zip(*results, strict=True))


@pytest.mark.parametrize("kind", ["ulysses", "ring"])
def test_recomputation_gives_the_same(kind: Kind) -> None:
    assert max(run_ranks(_recomputed, 2, args=(kind,))) < 1e-5


def _kept_plan() -> dict[str, Any]:
    found = {}
    for name in ("flag", "rotary", "counted mask"):
        torch.manual_seed(0)
        model = CHAINS[name]()
        run = attach(model, "auto")
        model(torch.randn(2, 16, WIDTH))
        (plan,) = run.plans().values()
        found[name] = plan
    return found


def test_the_plan_says_what_was_found() -> None:
    found, _ = run_ranks(_kept_plan, 2)
    assert found["flag"].kind == "ulysses"
    assert found["flag"].divided == {(0, 0): 1}
    assert found["rotary"].divided[(1, "angles")] == 0
    assert dict(found["counted mask"].sites) == {0: "own", 1: "whole"}


def _too_flat() -> str:
    model = CHAINS["flag"]()
    attach(model, dim=3)
    with pytest.raises(InputError) as caught:
        model(torch.randn(2, 16, WIDTH))
    return str(caught.value)


def test_no_hidden_states_of_that_dimension() -> None:
    (message, _) = run_ranks(_too_flat, 2)
    assert "Set sequence_dim" in message

"""The self-test tells right layouts from wrong ones by far."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from atorch_ns.sharding import LayerGraph, TensorPlan, trace_layers
from atorch_ns.sharding.tensor.regions import regions_in
from atorch_ns.sharding.tensor.selftest import SelfTest
from tests.sharding.tensor_models import (
    TOKENS,
    WIDTH,
    ByCount,
    BySettings,
    FusedByHead,
    FusedGrouped,
    FusedParts,
    Hiding,
    WithNorms,
    make,
    tokens,
)


def graph_of(model: nn.Module, batch: Any) -> LayerGraph:
    return trace_layers(model, batch, lambda module, data: module(data))


def _errors() -> dict[str, float]:
    """How wrong some layouts are; each runs without an error."""
    wrong = {
        "heads not divided": (ByCount, {}, ()),
        "parts not given": (FusedParts, {}, ()),
        "parts where there are none": (FusedByHead, {"qkv": (WIDTH,) * 3}, ("heads",)),
        "parts of other sizes": (FusedGrouped, {"qkv": (WIDTH, WIDTH)}, ("q_size", "kv_size")),
        "right": (BySettings, {"qkv": (WIDTH,) * 3}, ("cfg.n_head",)),
        "right with norms": (WithNorms, {}, ()),
    }
    errors = {}
    for what, (attention, parts, attributes) in wrong.items():
        model = make(attention)
        graph = graph_of(model, tokens())
        styles = {**dict.fromkeys(("q", "k", "v", "qkv"), "colwise"), "o": "rowwise"}
        layout = TensorPlan(styles=styles, parts=parts, attributes=attributes).resolve(model)
        verdict = SelfTest(model, graph, 2).unit("blocks.0.attention", layout, regions_in(graph, layout))
        assert verdict.passed == what.startswith("right")
        errors[what] = verdict.error
    return errors


def test_the_self_test_tells_right_from_wrong_by_far() -> None:
    for what, error in _errors().items():
        assert (error < 1e-5) if what.startswith("right") else (error > 0.1), f"{what}: {error}"


class Outer(nn.Module):
    """Hands its attention the mask that it has worked out."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = Hiding()

    def forward(self, x: Tensor) -> Tensor:
        hidden = (x.mean(-1) > 0)[:, None].expand(-1, x.size(1), -1)
        out: Tensor = self.attention(x, hidden)
        return out


def test_masks_hide_a_part_whatever_their_values_mean() -> None:
    model = Outer()
    graph = graph_of(model, torch.randn(2, TOKENS, WIDTH))
    styles = {**dict.fromkeys("qkv", "colwise"), "o": "rowwise"}
    layout = TensorPlan(styles=styles, attributes=("head_dim",)).resolve(model)
    verdict = SelfTest(model, graph, 2).unit("attention", layout, regions_in(graph, layout))
    assert (
        verdict.error > 0.1
    )  # a softmax of half a head's products is another one, but not where all is hidden


class Casting(BySettings):
    """Computes in bf16 by casts of its own, and gives what it was given."""

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = super().forward(x.float().bfloat16()).to(torch.bfloat16)
        return out


def test_casts_of_its_own_are_left_out_of_the_comparison() -> None:
    model = make(Casting).bfloat16()
    graph = graph_of(model, tokens())
    styles = {"qkv": "colwise", "o": "rowwise"}
    for attributes in (("cfg.n_head",), ()):
        layout = TensorPlan(styles=styles, parts={"qkv": (WIDTH,) * 3}, attributes=attributes).resolve(model)
        verdict = SelfTest(model, graph, 2).unit("blocks.0.attention", layout, regions_in(graph, layout))
        assert verdict.passed == bool(attributes), verdict.reason
        assert not attributes or verdict.error < 1e-5, "compared in fp32"

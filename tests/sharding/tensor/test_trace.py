"""A trace shows how layers are connected, and leaves the model and random states as they are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from atorch_ns.profile.record.steps import TracedModel
from atorch_ns.sharding import LayerGraph, trace_layers
from atorch_ns.sharding.tensor.trace import ways_to_run
from atorch_ns.torch_compat import fake_tensor_mode
from tests.sharding.tensor_models import WIDTH, make, tokens


def graph_of(model: nn.Module, batch: Any) -> LayerGraph:
    return trace_layers(model, batch, lambda module, data: module(data))


def test_layers_and_where_their_inputs_come_from() -> None:
    graph = graph_of(make(), tokens())
    first = "blocks.0.attention"
    assert graph.nodes[f"{first}.o"].sources == {f"{first}.q", f"{first}.k", f"{first}.v"}
    assert graph.nodes["blocks.0.gate_up"].sources == {f"{first}.o"}
    assert graph.outputs == {"head"}


def test_the_model_and_random_states_stay_as_they_are() -> None:
    model = make(dropout=0.5).eval()
    before, state = {n: p.clone() for n, p in model.named_parameters()}, torch.get_rng_state()
    graph_of(model, tokens())
    assert not model.training
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(before[name], p) for name, p in model.named_parameters())
    assert not any(module._forward_hooks for module in model.modules())


def test_a_weight_used_outside_its_layer_is_seen() -> None:
    class Glued(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(32, WIDTH)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.embed(ids) @ self.embed.weight.T

    assert graph_of(Glued(), tokens()).nodes["embed"].used_elsewhere


def test_dropout_between_columns_and_rows_is_seen() -> None:
    assert not graph_of(make(), tokens()).random
    assert "blocks.0.gate_up" in graph_of(make(dropout=0.1), tokens()).random


def test_a_model_on_meta() -> None:
    with torch.device("meta"):
        model = make()
    assert graph_of(model, tokens()).nodes.keys() == graph_of(make(), tokens()).nodes.keys()


def test_a_batch_of_another_device_follows_the_copy() -> None:
    run_with_memory, sizes = ways_to_run((4, 8))[-1]
    with fake_tensor_mode():
        batch = torch.zeros(4, 8, dtype=torch.int64, device="cuda")
        subject = TracedModel(make(), batch, lambda module, data: module(data), sizes, sizes)
        with run_with_memory(subject, sizes) as (copy, small):
            assert small.device == copy.embed.weight.device == torch.device("cpu")


@pytest.mark.parametrize("is_read", [False, True])
def test_what_code_reads_beside_layers_is_seen(is_read: bool) -> None:
    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.down(self.up(x).view(*x.shape[:2], -1))
            return out * x.sigmoid() if is_read else out

    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.norm, self.inner = nn.Embedding(32, WIDTH), nn.LayerNorm(WIDTH), Inner()

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            stream = self.embed(ids)
            out: torch.Tensor = stream + self.inner(self.norm(stream))
            return out

    graph = graph_of(Normed(), tokens())
    assert graph.reads_in_code(graph.calls["inner.up"].args[0]) is is_read
    assert graph.reads_in_code(graph.calls["norm"].args[0])

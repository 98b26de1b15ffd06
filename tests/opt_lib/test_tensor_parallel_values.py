"""tensor_parallel on code that looks at values, as a list of experts does, which shapes alone tell nothing of."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from atorch_ns.sharding import LayerGraph, Layout, choose_plan, trace_layers
from atorch_ns.sharding.tensor.selftest import SelfTest, UnitFailure
from tests.opt_lib.tensor_cases import TENSOR, check, of_model
from tests.sharding.tensor_models import VOCAB, WIDTH, make, tokens

NUM_EXPERTS, NUM_CHOICES = 4, 2


class Experts(nn.Module):
    """Gives each expert the rows that chose it."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, NUM_EXPERTS, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))
            for _ in range(NUM_EXPERTS)
        )

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.size(-1))
        weights, chosen = self.gate(rows).softmax(-1).topk(NUM_CHOICES, -1)
        out = torch.zeros_like(rows)
        for number, expert in enumerate(self.experts):
            row, choice = torch.where(chosen == number)
            if row.numel():
                out = out.index_add(0, row, expert(rows[row]) * weights[row, choice, None])
        return out.view_as(x)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(Experts() for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        h = self.embed(ids)
        for layer in self.layers:
            h = h + layer(h)
        out: Tensor = self.head(h)
        return out


def _graph(model: nn.Module) -> LayerGraph:
    return trace_layers(model, tokens(), lambda module, data: module(data))


def test_a_list_of_experts_trains_as_in_one_process() -> None:
    model = Model()
    layers = choose_plan(model, 2, _graph(model), run_numerics=False).layout.layers
    assert {layers[f"layers.0.experts.{number}.0"].style for number in range(NUM_EXPERTS)} == {"colwise"}
    check(of_model(Model, "experts"), 2, {"tensor": [TENSOR]})


def test_a_unit_whose_layers_fail_together_stays_whole_and_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails_together(self: SelfTest, layout: Layout, *_: object) -> tuple[UnitFailure | None, set[str]]:
        found = [path for path in layout.layers if path.startswith("blocks.0.")]
        failed = UnitFailure("blocks.0", "output 0 is off by 1 of its size", ("blocks.0", "blocks.1"))
        return (failed if found else None), set()

    monkeypatch.setattr(SelfTest, "plan", fails_together)
    model = make()
    chosen = choose_plan(model, 2, _graph(model), run_numerics=False)
    assert set(chosen.layout.layers) == {"embed", "head"}
    assert not chosen.layout.attributes
    (why,) = {text for path, text in chosen.plan.left.items() if path.startswith("blocks.*.attention")}
    assert "together output 0 is off by 1" in why

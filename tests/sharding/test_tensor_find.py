"""Plans are found for models that nobody prepared, and only those that compute the same are used."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from atorch_ns.errors import InputError
from atorch_ns.sharding import (
    Division,
    LayerGraph,
    Layout,
    TensorPlan,
    check_degree,
    choose_plan,
    find_tensor_plan,
    regions_in,
    self_test,
    trace_layers,
    unit_for,
)
from atorch_ns.testing.workers import run_ranks
from tests.sharding.tensor_models import (
    ATTENTIONS,
    WIDTH,
    ByCount,
    BySettings,
    FusedByHead,
    FusedGrouped,
    FusedParts,
    NormOverHeads,
    WithNorms,
    make,
    tokens,
)


class FusedKeyValue(nn.Module):
    """Two heads of keys and values in one layer."""

    def __init__(self) -> None:
        super().__init__()
        self.heads, self.kv_heads = 4, 2
        self.q, self.o = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.kv = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q = self.q(x).unflatten(-1, (self.heads, -1))
        k, v = self.kv(x).split(WIDTH // 2, -1)
        k, v = (t.unflatten(-1, (self.kv_heads, -1)).repeat_interleave(2, -2) for t in (k, v))
        mixed = F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v)))
        out: torch.Tensor = self.o(mixed.transpose(1, 2).flatten(2))
        return out


def graph_of(model: nn.Module, batch: Any) -> LayerGraph:
    return trace_layers(model, batch, lambda module, data: module(data))


class TestTrace:
    def test_layers_and_where_their_inputs_come_from(self) -> None:
        graph = graph_of(make(), tokens())
        first = "blocks.0.attention"
        assert graph.nodes[f"{first}.o"].sources == {f"{first}.q", f"{first}.k", f"{first}.v"}
        assert graph.nodes["blocks.0.gate_up"].sources == {f"{first}.o"}
        assert graph.outputs == {"head"}

    def test_the_model_and_random_states_stay_as_they_are(self) -> None:
        model = make(dropout=0.5).eval()
        before, state = {n: p.clone() for n, p in model.named_parameters()}, torch.get_rng_state()
        graph_of(model, tokens())
        assert not model.training
        assert torch.equal(torch.get_rng_state(), state)
        assert all(torch.equal(before[name], p) for name, p in model.named_parameters())
        assert not any(module._forward_hooks for module in model.modules())

    def test_a_weight_used_outside_its_layer_is_seen(self) -> None:
        class Glued(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.embed = nn.Embedding(32, WIDTH)

            def forward(self, ids: torch.Tensor) -> torch.Tensor:
                return self.embed(ids) @ self.embed.weight.T

        assert graph_of(Glued(), tokens()).nodes["embed"].used_elsewhere

    def test_dropout_between_columns_and_rows_is_seen(self) -> None:
        assert not graph_of(make(), tokens()).random
        assert "blocks.0.gate_up" in graph_of(make(dropout=0.1), tokens()).random

    def test_a_model_on_meta(self) -> None:
        with torch.device("meta"):
            model = make()
        assert graph_of(model, tokens()).nodes.keys() == graph_of(make(), tokens()).nodes.keys()


class TestDegrees:
    def test_heads_that_do_not_divide(self) -> None:
        with pytest.raises(InputError, match=r"tensor=3 does not divide the 4 attention heads.*\{1, 2, 4\}"):
            check_degree(make(), 3)

    def test_a_vocabulary_that_does_not_divide_stays_whole(self) -> None:
        model = make(vocab=31)
        plan = find_tensor_plan(model, 2, graph_of(model, tokens(31)))
        assert plan.left["embed"] == plan.left["head"] == "its size 31 is not divisible by 2"
        assert "blocks.*.down" in plan.styles

    def test_heads_of_keys_that_do_not_divide_are_told(self) -> None:
        model = make(FusedKeyValue)
        plan = find_tensor_plan(model, 4, graph_of(model, tokens()))
        told = {why for path, why in plan.left.items() if path.startswith("blocks.0.attention")}
        assert told == {"kv_heads=2 is not divisible by 4; tensor in {1, 2} would divide the heads"}

    def test_nothing_to_divide(self) -> None:
        model = nn.Sequential(nn.Linear(15, 25), nn.ReLU(), nn.Linear(25, 5))
        division = Division(None, degree=2)
        graph = graph_of(model, torch.randn(4, 15))
        with pytest.raises(
            InputError, match=r"Sequential \(\{0,2\}: 25 outputs do not divide by 2.*\{5, 25\}"
        ):
            choose_plan(model, division, graph, really=False)


def _found(names: list[str]) -> dict[str, Any]:
    """For each attention the plan found, and how the chosen plan tests."""
    division = Division(init_device_mesh("cpu", (2,), mesh_dim_names=("tensor",)))
    found: dict[str, Any] = {}
    for attention in (*ATTENTIONS, NormOverHeads):
        if attention.__name__ in names:
            model = make(attention)
            chosen = choose_plan(model, division, graph_of(model, tokens()))
            found[attention.__name__] = (chosen.plan, chosen.partial)
    return found


class TestFound:
    @pytest.fixture(scope="class")
    def found(self) -> dict[str, Any]:
        names = [attention.__name__ for attention in (*ATTENTIONS, NormOverHeads)]
        return run_ranks(_found, 2, args=(names,), timeout_s=100)[0]

    @pytest.mark.parametrize("attention", ATTENTIONS, ids=lambda kind: kind.__name__)
    def test_every_layer_is_divided(self, found: dict[str, Any], attention: type[nn.Module]) -> None:
        plan, _ = found[attention.__name__]
        assert not plan.left
        assert plan.resolve(make(attention)).layers["blocks.1.attention.o"].style == "rowwise"

    def test_the_number_of_heads_is_divided_where_code_reshapes_by_it(self, found: dict[str, Any]) -> None:
        assert found["ByCount"][0].attributes == ("blocks.*.attention.num_heads",)
        assert found["FusedByHead"][0].attributes == ("blocks.*.attention.heads",)
        assert found["BySettings"][0].attributes == ("blocks.*.attention.cfg.n_head",)
        assert found["FusedParts"][0].attributes == ()

    def test_fused_layers_are_cut_as_their_code_cuts_them(self, found: dict[str, Any]) -> None:
        name = "blocks.*.attention.qkv"
        assert found["FusedParts"][0].parts[name] == (WIDTH, WIDTH, WIDTH)
        assert found["FusedGrouped"][0].parts[name] == (WIDTH, WIDTH // 2, WIDTH // 2)
        assert name not in found["FusedByHead"][0].parts
        assert found["FusedParts"][0].parts["blocks.*.gate_up"] == (2 * WIDTH, 2 * WIDTH)

    def test_norms_inside_a_region_have_partial_gradients(self, found: dict[str, Any]) -> None:
        inside = {"q_norm.weight", "k_norm.weight", "gate"}
        expected = {f"blocks.{block}.attention.{name}" for block in range(2) for name in inside}
        assert found["WithNorms"][1] == expected
        assert found["ByCount"][1] == set()

    def test_what_no_rank_can_compute_alone_stays_whole(self, found: dict[str, Any]) -> None:
        plan, _ = found["NormOverHeads"]
        assert "gives the results of the whole" in plan.left["blocks.*.attention.{q,k,v,o}"]


def _errors() -> dict[str, float]:
    """How wrong some layouts are; each runs without an error."""
    division = Division(init_device_mesh("cpu", (2,), mesh_dim_names=("tensor",)))
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
        unit = unit_for(model, graph, "blocks.0.attention")
        errors[what] = _tested(unit, layout, graph, division)
    return errors


def _tested(unit: Any, layout: Layout, graph: LayerGraph, division: Division) -> float:
    regions = [spec for spec in regions_in(graph, layout) if spec.rows[0].startswith(unit.path)]
    local = [
        type(spec)(
            *(tuple(p.removeprefix(f"{unit.path}.") for p in paths) for paths in (spec.columns, spec.rows))
        )
        for spec in regions
    ]
    return self_test(unit, layout.within(unit.path), local, division).error


def test_the_self_test_tells_right_from_wrong_by_far() -> None:
    errors = run_ranks(_errors, 2, timeout_s=60)[0]
    for what, error in errors.items():
        assert (error < 1e-5) if what.startswith("right") else (error > 0.1), f"{what}: {error}"

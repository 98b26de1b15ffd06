"""Plans are found for models that nobody prepared, and only those that compute the same are used."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from atorch_ns.errors import InputError
from atorch_ns.sharding import LayerGraph, TensorPlan, choose_plan, trace_layers
from atorch_ns.sharding.tensor.divisibility import check_degree
from atorch_ns.sharding.tensor.find import find_tensor_plan, plan_from
from atorch_ns.sharding.tensor.plan import Layout
from atorch_ns.sharding.tensor.selftest import SelfTest, Verdict
from tests.sharding.tensor_models import ATTENTIONS, WIDTH, ByCount, NormOverHeads, make, tokens


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


class Decoys(nn.Module):
    """Reads one number by a name of its settings' class, beside numbers of the same kind that it never reads."""

    class Config:
        """Keeps its sizes under other names than the code uses."""

        def __init__(self) -> None:
            self.buckets = self.window = self.topk = self.bits = self.groups = self.branches = 2
            self.count = 4

        @property
        def heads(self) -> int:
            """As transformers' ``attribute_map`` gives it."""
            return self.count

    class Slotted:
        """Cannot change its class."""

        __slots__ = ("experts",)

        def __init__(self) -> None:
            self.experts = 4

    def __init__(self) -> None:
        super().__init__()
        self.config, self.others = self.Config(), self.Slotted()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (layer(x).unflatten(-1, (self.config.heads, -1)) for layer in (self.q, self.k, self.v))
        mixed = F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v)))
        out: torch.Tensor = self.o(mixed.transpose(1, 2).flatten(2))
        return out


def graph_of(model: nn.Module, batch: Any) -> LayerGraph:
    return trace_layers(model, batch, lambda module, data: module(data))


def found_by_shapes(model: nn.Module, degree: int, batch: Any) -> TensorPlan:
    """The plan found without comparing numbers."""
    graph = graph_of(model, batch)
    test = SelfTest(model, graph, degree, run_numerics=False)
    return find_tensor_plan(model, degree, graph, test)


class TestDegrees:
    def test_heads_that_do_not_divide(self) -> None:
        with pytest.raises(InputError, match=r"tensor=3 does not divide the 4 attention heads.*\{1, 2, 4\}"):
            check_degree(make(), 3)

    def test_a_vocabulary_that_does_not_divide_stays_whole(self) -> None:
        model = make(vocab=31)
        plan = found_by_shapes(model, 2, tokens(31))
        assert plan.left["embed"] == plan.left["head"] == "its size 31 is not divisible by 2"
        assert "blocks.*.down" in plan.styles

    def test_heads_of_keys_that_do_not_divide_are_told(self) -> None:
        model = make(FusedKeyValue)
        plan = found_by_shapes(model, 4, tokens())
        told = {why for path, why in plan.left.items() if path.startswith("blocks.0.attention")}
        assert told == {"kv_heads=2 is not divisible by 4; tensor in {1, 2} would divide the heads"}

    def test_nothing_to_divide(self) -> None:
        model = nn.Sequential(nn.Linear(15, 25), nn.ReLU(), nn.Linear(25, 5))
        graph = graph_of(model, torch.randn(4, 15))
        with pytest.raises(
            InputError, match=r"Sequential \(\{0,2\}: 25 outputs do not divide by 2.*\{5, 25\}"
        ):
            choose_plan(model, 2, graph, run_numerics=False)


def test_pairs_over_two_blocks_are_tested_together() -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(4)))
    graph = graph_of(model, torch.randn(4, WIDTH))
    chosen = choose_plan(model, 2, graph)
    assert [spec.layers for spec in chosen.regions] == [("0.0", "1.0"), ("2.0", "3.0")]
    with pytest.raises(InputError, match="repeats no block whose layers are all divided"):
        choose_plan(model, 2, graph, sequence_dim=0)
    cut = replace(graph, stages={"0": 0, "1": 1, "2": 1, "3": 1})
    assert [spec.layers for spec in choose_plan(model, 2, cut).regions] == [("1.0", "2.0")]


def test_no_region_of_units_that_are_layers_crosses_a_cut() -> None:
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))
    graph = graph_of(model, torch.randn(4, WIDTH))
    cut = replace(graph, stages={"0": 0, "1": 1, "2": 1, "3": 1})
    assert [spec.layers for spec in choose_plan(model, 2, cut).regions] == [("1", "2")]


class Rows(nn.Module):
    """Knows the width of its input by heart."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.reshape(-1, WIDTH)


def test_degrees_that_would_fail_as_well_are_not_advised() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Rows(), nn.Linear(WIDTH, 8))
    with pytest.raises(InputError) as caught:
        choose_plan(model, 2, graph_of(model, torch.randn(4, WIDTH)))
    assert "Use another axis than tensor" in str(caught.value)


def test_a_plan_divides_the_numbers_of_no_other_block() -> None:
    model = nn.Sequential(*(ByCount() for _ in range(3)))
    layout = Layout({}, ("1.num_heads", "2.num_heads"), ("1.x", "2.x"))
    found = plan_from(model, layout).resolve(model)
    assert (found.attributes, found.narrow_inputs) == (layout.attributes, layout.narrow_inputs)


def _found() -> dict[str, Any]:
    """For each attention the plan found, and how the chosen plan tests."""
    found: dict[str, Any] = {}
    for attention in (*ATTENTIONS, NormOverHeads):
        model = make(attention)
        chosen = choose_plan(model, 2, graph_of(model, tokens()))
        found[attention.__name__] = (chosen.plan, chosen.partial)
    return found


class TestFound:
    @pytest.fixture(scope="class")
    def found(self) -> dict[str, Any]:
        return _found()

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

    def test_numbers_that_the_code_never_reads_are_not_tried(self, monkeypatch: pytest.MonkeyPatch) -> None:
        tried = []
        unit = SelfTest.unit

        def counted(test: SelfTest, path: str, *args: Any, **kwargs: Any) -> Verdict:
            tried.append(path)
            return unit(test, path, *args, **kwargs)

        monkeypatch.setattr(SelfTest, "unit", counted)
        model = make(Decoys)
        plan = choose_plan(model, 2, graph_of(model, tokens())).plan
        assert plan.attributes == ("blocks.*.attention.config.count",)
        # Of 7 numbers that a rank may have half of: none of them, the one that was read, and the finished plan.
        assert len([path for path in tried if path.startswith("blocks.0.attention")]) == 3

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


class Adapted(nn.Module):
    """A block of which each layer has two low-rank factors beside it; that of the first is fused."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = 4
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.narrow, self.wide = (nn.ModuleList(nn.Linear(*sizes) for sizes in pairs) for pairs in _FACTORS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        fused = self.qkv(x) + self.wide[0](self.narrow[0](x))
        q, k, v = (
            part.unflatten(-1, (-1, WIDTH // self.heads)).transpose(1, 2) for part in fused.chunk(3, -1)
        )
        mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        out: torch.Tensor = self.out(mixed) + self.wide[1](self.narrow[1](mixed))
        return out


_FACTORS = (((WIDTH, 2), (WIDTH, 2)), ((2, 3 * WIDTH), (2, WIDTH)))


class Vocabulary(nn.Module):
    """An embedding, a block, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(32, WIDTH), nn.Linear(WIDTH, 32)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.head(self.down(torch.relu(self.up(self.words(ids)))))
        return found


def test_a_layer_and_its_low_rank_factors_are_divided_together() -> None:
    torch.manual_seed(0)
    model, x = Adapted(), torch.randn(2, 6, WIDTH)
    layout = choose_plan(model, 2, graph_of(model, x), vocabulary=False).layout
    styles = {path: layer.style for path, layer in layout.layers.items()}
    assert styles == {"qkv": "colwise", "wide.0": "colwise", "out": "rowwise", "narrow.1": "rowwise"}
    assert layout.layers["wide.0"].parts == (WIDTH, WIDTH, WIDTH)


def test_the_vocabulary_stays_whole_where_it_is_not_wanted() -> None:
    torch.manual_seed(0)
    model, ids = Vocabulary(), torch.randint(0, 32, (2, 6))
    graph = graph_of(model, ids)
    assert {"words", "head"} < set(choose_plan(model, 2, graph).layout.layers)
    chosen = choose_plan(model, 2, graph, vocabulary=False)
    assert set(chosen.layout.layers) == {"up", "down"}
    assert "vocabulary=False" in chosen.plan.left.values()

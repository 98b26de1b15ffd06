"""Numbers that code reshapes by are found whatever they are called; what cannot be divided is told in plain words."""

from __future__ import annotations

import pytest
import torch.nn.functional as F
from torch import Tensor, nn

from atorch_ns.errors import InputError
from atorch_ns.sharding import LayerGraph, TensorPlan, choose_plan, trace_layers
from atorch_ns.sharding.tensor.find import group_reasons
from opt_lib._model_axes.tensor import TensorParallelConfig, users_plan
from tests.sharding.tensor_models import HEADS, WIDTH, attend, make, tokens


class OddNames(nn.Module):
    """Numbers of heads whose names do not say so."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads, self.pairs, self.size = HEADS, 2, WIDTH // HEADS
        self.layer_index = 2
        self.q, self.o = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.k, self.v = (nn.Linear(WIDTH, WIDTH // 2) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        q = self.q(x).unflatten(-1, (self.num_heads, -1))
        k, v = (layer(x).unflatten(-1, (self.pairs, -1)) for layer in (self.k, self.v))
        k, v = (t.repeat_interleave(self.num_heads // self.pairs, 2) for t in (k, v))
        out: Tensor = self.o(attend(q, k, v))
        return out


class SizeByHeads(nn.Module):
    """The size of a head is worked out from the input's width, which is that of all ranks, and the input is used."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads = HEADS
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        x = F.silu(x)
        shape = (rows, length, self.num_heads, width // self.num_heads)
        q, k, v = (layer(x).view(shape) for layer in (self.q, self.k, self.v))
        out: Tensor = self.o(attend(q, k, v))
        return out


class BackToWidth(nn.Module):
    """Heads go back together by the input's width, and the input is used."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads = HEADS
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = F.silu(x)
        q, k, v = (
            layer(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for layer in (self.q, self.k, self.v)
        )
        mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).contiguous()
        out: Tensor = self.o(mixed.view(x.shape))
        return out


def graph_of(model: nn.Module) -> LayerGraph:
    return trace_layers(model, tokens(), lambda module, data: module(data))


def chosen(model: nn.Module, plan: TensorPlan | None = None) -> TensorPlan:
    """By shapes alone."""
    return choose_plan(model, 2, graph_of(model), plan=plan, run_numerics=False, undivided="keep").plan


def test_a_number_with_any_name_is_divided_where_code_reshapes_by_it() -> None:
    model = make(OddNames)
    plan = choose_plan(model, 2, graph_of(model)).plan
    assert set(plan.attributes) == {"blocks.*.attention.num_heads", "blocks.*.attention.pairs"}
    assert plan.styles["blocks.*.attention.o"] == "rowwise"
    assert not plan.left


def test_a_head_size_worked_out_from_the_heads_is_told() -> None:
    left = chosen(make(SizeByHeads)).left
    assert list(left) == ["blocks.*.attention.{q,k,v,o}"]
    assert "the head size is computed from the number of heads" in left["blocks.*.attention.{q,k,v,o}"]
    assert "16 // 2 = 8 where a head has 4" in left["blocks.*.attention.{q,k,v,o}"]


def test_heads_that_go_back_to_the_width_of_all_ranks_are_told() -> None:
    (why,) = chosen(make(BackToWidth)).left.values()
    assert "with the 16 features of all ranks: use -1 there" in why


def test_one_cause_is_told_once() -> None:
    left = {f"blocks.{block}.attn.{name}": "why" for block in range(3) for name in "qkvo"}
    assert group_reasons(left) == {"blocks.*.attn.{q,k,v,o}": "why"}
    assert group_reasons({"head": "other", "blocks.1.down": "why"}) == {
        "head": "other",
        "blocks.1.down": "why",
    }
    own = {f"blocks.{block}.q": f"blocks.{block}.o: no" for block in range(3)}
    assert group_reasons(own) == {"blocks.*.q": "blocks.*.o: no"}


@pytest.mark.parametrize(
    ("styles", "told"),
    [
        (
            {"blocks.*.down": "rowwise"},
            r"blocks.0.down is rowwise and nothing before it is colwise: make blocks.0.gate_up colwise",
        ),
        (
            {"blocks.*.gate_up": "colwise"},
            r"blocks.0.gate_up is colwise and nothing after it is rowwise: make blocks",
        ),
        (
            {"blocks.*.gate_up": "rowwise", "blocks.*.down": "colwise"},
            "blocks.0.gate_up is rowwise and blocks.0.down, which takes its results, colwise: exchange the two. This",
        ),
        (
            {"blocks.*.gate_up": "colwise", "blocks.*.down": "rowwise", "head": "colwise"},
            r"in place of [^.]*\.[^.]*\]\. head is colwise and its results leave the model",
        ),
        ({"head": "colwise"}, "head is colwise and its results leave the model: use colwise_gather_output"),
    ],
)
def test_layers_without_another_end_are_named(styles: dict[str, str], told: str) -> None:
    with pytest.raises(InputError, match=told) as caught:
        chosen(make(), TensorPlan(styles=styles))
    assert "lacks attributes" not in str(caught.value)


@pytest.mark.parametrize("style", ["sequence", "replicate"])
def test_a_plan_that_leaves_all_whole_offers_no_degree(style: str) -> None:
    with pytest.raises(InputError, match="the plan of tensor_parallel divides no layer of Decoder") as caught:
        chosen(make(), TensorPlan(styles={"blocks.*.gate_up": style}))
    assert "tensor in" not in str(caught.value)


def test_a_dimension_that_weights_do_not_have_is_refused() -> None:
    config = TensorParallelConfig(weight_change_list=(("gate_up", 5),))
    with pytest.raises(
        InputError, match="names dimension 5 of gate_up, but layer weights have only two: use 0 or 1"
    ):
        users_plan(config, make())

"""Plans: styles by pattern, what they mean for a model, and their way through a strategy."""

from __future__ import annotations

import json

import pytest
from torch import Tensor, nn

from atorch_ns.sharding import TensorPlan, style_named
from atorch_ns.sharding.tensor.plan import kind_of
from tests.sharding.tensor_models import make

STYLES = {
    "blocks.*.attention.[qkv]": "colwise",
    "attention.o": "rowwise",
    "blocks.1.attention.o": "replicate",
}


def test_patterns_mean_paths_or_their_ends_and_the_last_one_holds() -> None:
    layout = TensorPlan(styles=STYLES).resolve(make())
    assert list(layout.layers) == [
        *(f"blocks.0.attention.{name}" for name in "qkvo"),
        *(f"blocks.1.attention.{name}" for name in "qkv"),
    ]
    assert layout.layers["blocks.0.attention.o"].style == "rowwise"


def test_a_pattern_that_is_a_path_does_not_mean_longer_ones() -> None:
    assert set(TensorPlan(styles={"norm": "replicate", "head": "colwise"}).resolve(make()).layers) == {"head"}


def test_attributes_are_paths_of_numbers() -> None:
    plan = TensorPlan(styles=STYLES, attributes=("blocks.*.num_heads",))
    assert plan.resolve(make()).attributes == ("blocks.0.attention.num_heads", "blocks.1.attention.num_heads")


def test_what_matches_nothing_is_told() -> None:
    plan = TensorPlan(styles={"blocks.*.attn.q": "colwise", "head": "colwise"}, attributes=("n_heads",))
    assert plan.unmatched(make()) == ["blocks.*.attn.q", "n_heads"]


def test_a_layout_is_seen_from_inside_a_module() -> None:
    plan = TensorPlan(styles=STYLES, attributes=("num_heads",), parts={"gate_up": (32, 32)})
    inner = plan.resolve(make()).within("blocks.0")
    assert list(inner.layers) == ["attention.q", "attention.k", "attention.v", "attention.o"]
    assert inner.attributes == ("attention.num_heads",)


def test_a_plan_becomes_settings_and_comes_back() -> None:
    plan = TensorPlan(styles=STYLES, attributes=("num_heads",), parts={"gate_up": (32, 32)})
    config = json.loads(json.dumps(plan.as_config()))
    again = TensorPlan(styles=config["plan"], attributes=tuple(config["attributes"]), parts=config["parts"])
    assert again.resolve(make()) == plan.resolve(make())


@pytest.mark.parametrize(("name", "style"), [("col", "colwise"), ("vocab", "embedding_rowwise")])
def test_styles_have_other_names(name: str, style: str) -> None:
    assert style_named(name) == style


def test_an_unknown_style_is_refused_with_those_there_are() -> None:
    with pytest.raises(
        ValueError, match="'diagonal' is not a style of a layer; choose from colwise, rowwise"
    ):
        TensorPlan(styles={"head": "diagonal"})


class Normed(nn.Embedding):
    """An embedding with a norm inside."""

    def __init__(self) -> None:
        super().__init__(8, 4)
        self.norm = nn.LayerNorm(4)

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = self.norm(super().forward(ids))
        return out


def test_an_embedding_with_other_parameters_is_not_divided() -> None:
    assert kind_of(nn.Embedding(8, 4)) is not None
    assert kind_of(Normed()) is None

"""Which modules a model is cut at."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from atorch_ns.errors import InputError
from atorch_ns.pipeline import find_units
from atorch_ns.testing.models import get_case
from tests.pipeline.odd_models import Base, ParametersInParent


def _names(model: nn.Module, **options: object) -> list[str]:
    return [unit.name for unit in find_units(model, **options)]


def test_blocks_and_what_lies_beside_them() -> None:
    assert _names(Base()) == ["embed", "blocks.0", "blocks.1", "blocks.2", "blocks.3", "head"]


def test_parameters_of_a_parent_are_no_unit() -> None:
    assert _names(ParametersInParent()) == _names(Base())


def test_containers_of_blocks_are_gone_through() -> None:
    names = _names(get_case("encoder_decoder").build())
    assert {"embed", "encoder.0", "encoder_norm", "decoder.1", "lm_head"} <= set(names)


def test_a_model_without_blocks_is_taken_apart_as_far_as_needed() -> None:
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), nn.Bilinear(4, 4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.first(x)
            return self.second(x, x)

    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.pair, self.last = Pair(), nn.LayerNorm(4)

    assert _names(Odd()) == ["pair", "last"]
    assert _names(Odd(), at_least=3) == ["pair.first", "pair.second", "last"]
    assert _names(Odd(), at_least=9) == ["pair.first", "pair.second", "last"]


def test_a_stage_may_begin_inside_a_block() -> None:
    names = _names(Base(), starts=["blocks.1.linear"])
    assert names[:5] == ["embed", "blocks.0", "blocks.1.norm", "blocks.1.linear", "blocks.2"]


def test_unknown_and_empty_starts() -> None:
    with pytest.raises(InputError, match=r"no module 'blocks\.9'"):
        find_units(Base(), starts=["blocks.9"])
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))
    with pytest.raises(InputError, match="'1' has no parameters"):
        find_units(model, starts=["1"])


def test_meta_models() -> None:
    with torch.device("meta"):
        assert _names(Base()) == _names(Base())

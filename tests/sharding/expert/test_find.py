"""Modules that hold experts are recognised by their forward and parameters, and refused with the reason."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from atorch_ns.sharding.expert.find import FoundExperts, ListedExperts, find_experts


class Fused(nn.Module):
    """Four experts in one module, with a table that belongs to none of them."""

    def __init__(self, shape: tuple[int, ...] = (4, 3, 3)) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.ones(shape))
        self.bias = nn.Parameter(torch.zeros(4, 3))
        self.scale = nn.Parameter(torch.ones(3))
        self.num_experts = 4
        self.width = 4

    def forward(
        self, x: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        return x


class Layer(nn.Module):
    def __init__(self, experts: nn.Module) -> None:
        super().__init__()
        self.experts = experts

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


def test_a_fused_module_is_found_with_what_is_divided_of_it() -> None:
    (found,), unfit = find_experts(Layer(Fused()))
    assert isinstance(found, FoundExperts)
    assert not unfit
    assert (found.name, found.num_experts) == ("experts", 4)
    assert found.divided == ("up", "bias")
    assert found.whole == ("scale",)
    assert found.counts == ("num_experts",)  # not every attribute that is 4
    assert found.arguments == ("x", "top_k_index", "top_k_weights")


def test_a_fused_module_without_stacked_parameters_is_refused_with_their_shapes() -> None:
    found, (unfit,) = find_experts(Layer(Fused((12, 3))))
    assert not found
    assert "(12, 3)" in unfit.reason


def test_a_list_is_found_and_keeps_whole_what_no_dimension_divides() -> None:
    (found,), unfit = find_experts(Layer(nn.ModuleList(nn.Linear(4, 3) for _ in range(2))))
    assert isinstance(found, ListedExperts)
    assert not unfit
    assert [found.dim_of(name, 2) for name in ("weight", "bias")] == [1, None]
    assert found.whole(2) == ["experts.0.bias", "experts.1.bias"]


def _tied() -> nn.Module:
    experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
    experts[1].weight = experts[0].weight
    return experts


@pytest.mark.parametrize(
    ("experts", "reason"),
    [
        (nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 8)]), "not alike"),
        (_tied(), "share parameters"),
        (nn.ModuleList(nn.BatchNorm1d(4) for _ in range(2)), "buffers"),
        (nn.ModuleDict({name: nn.Linear(4, 4) for name in "ab"}), "not an nn.ModuleList"),
    ],
)
def test_a_list_that_cannot_be_divided_is_refused(experts: nn.Module, reason: str) -> None:
    found, (unfit,) = find_experts(Layer(experts))
    assert not found
    assert reason in unfit.reason


def test_named_modules_are_examined_whatever_they_look_like() -> None:
    assert find_experts(Layer(nn.Linear(4, 4))) == ([], [])
    found, (unfit,) = find_experts(Layer(nn.Linear(4, 4)), ["experts"])
    assert not found
    assert "top_k_index" in unfit.reason

"""Runs of blocks between which nothing sees the hidden states."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from atorch_ns.errors import InputError
from atorch_ns.sharding.sequence.find_chains import find_chains

Between = Callable[["_Model", Tensor, int], Tensor]


class _Model(nn.Module):
    def __init__(self, between: Between) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        self.scale = nn.Parameter(torch.ones(4))
        self.seen: list[float] = []
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        h = x + 1
        for index, block in enumerate(self.blocks):
            h = self.between(self, block(h), index)
        return h * self.scale


def _note(model: _Model, h: Tensor, index: int) -> Tensor:
    if index == 1:
        model.seen.append(h.sum().item())
    return h


def _mean(model: _Model, h: Tensor, index: int) -> Tensor:
    return h + h.mean(1, keepdim=True) if index == 2 else h


def _early(model: _Model, h: Tensor, index: int) -> Tensor:
    model.kept = h if index == 0 else model.kept
    return model.kept + h if index == 2 else h


@pytest.mark.parametrize(
    ("between", "runs"),
    [
        (lambda model, h, index: h, [[0, 1, 2, 3]]),
        (lambda model, h, index: h * model.scale, [[0], [1], [2], [3]]),
        (_note, [[0, 1], [2, 3]]),
        (_mean, [[0, 1, 2], [3]]),
        (_early, [[0], [1, 2], [3]]),
    ],
    ids=["nothing between", "a parameter", "a look", "a mean", "an earlier output"],
)
def test_a_run_ends_where_something_else_sees_the_hidden_states(
    between: Between, runs: list[list[int]]
) -> None:
    model = _Model(between)
    assert find_chains(list(model.blocks), lambda: model(torch.ones(2, 3, 4))) == runs


class _Keeps(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        self.kept = x.pow(2).mean()
        return super().forward(x)


def test_a_value_that_a_block_keeps_is_refused_where_the_model_uses_it() -> None:
    first, last = _Keeps(4, 4), _Keeps(4, 4)
    x = torch.ones(2, 4)
    assert find_chains([first, last], lambda: last(first(x))) == [[0, 1]]
    with pytest.raises(InputError, match=r"block 0 \(_Keeps\) computes and does not return"):
        find_chains([first, last], lambda: last(first(x)).sum() + first.kept)


def test_a_parameter_of_a_block_that_the_loss_uses_is_refused() -> None:
    first, last = nn.Linear(4, 4), nn.Linear(4, 4)
    x = torch.ones(2, 4)
    with pytest.raises(InputError, match=r"weight of block 1 \(Linear\) is used outside"):
        find_chains([first, last], lambda: last(first(x)).sum() + last.weight.square().sum())
    runs = find_chains([first, last], lambda: last(first(x)) @ last.weight, shared_parameters=True)
    assert runs == [[0, 1]]
    find_chains([first, last], lambda: last(first(x).to(first.weight.dtype)) + first.weight.shape[0])


def test_a_block_that_is_called_twice_is_alone() -> None:
    first, last = nn.Linear(4, 4), nn.Linear(4, 4)
    assert find_chains([first, last], lambda: last(first(first(torch.ones(2, 4))))) == [[0], [0], [1]]

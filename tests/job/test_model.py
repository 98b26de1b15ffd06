"""Parameter groups by the names of the user's model, and names of tied parameters."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from atorch_ns.errors import InputError
from atorch_ns.job import Inputs, parameter_names
from atorch_ns.job.model import OriginalModel, name_groups, parameter_groups


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(4, 2)
        self.middle = nn.Linear(2, 2, bias=False)
        self.head = nn.Linear(2, 4, bias=False)
        self.head.weight = self.table.weight


def _decayed(model: nn.Module) -> list[dict[str, Any]]:
    named = dict(model.named_parameters())
    return [{"params": named["middle.weight"], "lr": 0.1}, {"params": [("table", named["table.weight"])]}]


def test_tied_parameters_have_one_first_name() -> None:
    model = Tied()
    assert parameter_names(model)[model.head.weight] == ["table.weight", "head.weight"]
    original = OriginalModel.of(Inputs(model=model))
    assert original.num_parameters == 12
    assert original.tied == {"table.weight": ["head.weight"]}
    assert original.first_name(["head.weight"]) == "table.weight"
    assert original.first_name(["middle.weight"]) == "middle.weight"
    assert original.ordered(["new", "middle.weight", "table.weight", "new"]) == [
        "table.weight",
        "middle.weight",
        "new",
    ]


def test_groups_follow_their_names_onto_another_model() -> None:
    groups = name_groups(Inputs(model=Tied(), optim_param_func=_decayed))
    other = Tied()
    first, second = parameter_groups(other, groups)
    assert first["params"] == [other.middle.weight]
    assert first["lr"] == 0.1
    assert second["params"][0] is other.table.weight
    assert "lr" not in second


def test_a_part_keeps_what_it_has_by_any_of_its_names() -> None:
    inputs = Inputs(model=Tied(), optim_param_func=_decayed)
    original = OriginalModel.of(inputs)
    part = nn.Module()
    part.head = nn.Linear(2, 4, bias=False)
    first, second = parameter_groups(part, original.groups, whole=False, tied=original.tied)
    assert first["params"] == []
    assert second["params"] == [part.head.weight]
    with pytest.raises(InputError, match=r"chose middle\.weight.*module_replace"):
        parameter_groups(part, original.groups)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (lambda model: 3, "returned an int"),
        (lambda model: [{"lr": 0.1}], "without 'params'; it has \\['lr'\\]"),
        (lambda model: [nn.Parameter(torch.ones(2))], "not a parameter of the model"),
    ],
)
def test_what_is_no_group_is_refused(given: Any, words: str) -> None:
    with pytest.raises(InputError, match=words):
        name_groups(Inputs(model=Tied(), optim_param_func=given))


def test_what_is_frozen_is_the_optimizers_too_without_groups() -> None:
    model = Tied()
    model.middle.weight.requires_grad = False
    assert parameter_groups(model, None) == [{"params": list(model.parameters())}]
    model.register_parameter("codes", nn.Parameter(torch.ones(2, dtype=torch.uint8), requires_grad=False))
    assert all(p is not model.codes for p in parameter_groups(model, None)[0]["params"])  # never trained
    with pytest.raises(InputError, match="nothing to optimize"):
        parameter_groups(model.requires_grad_(False), None)
    assert parameter_groups(nn.Identity(), None, whole=False) == [{"params": []}]

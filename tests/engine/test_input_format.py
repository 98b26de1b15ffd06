"""Input formats: how a batch is passed to a model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from atorch_ns.data import call_model
from atorch_ns.engine.input_format import check_format, chosen_format
from atorch_ns.errors import InputError


class _Two(nn.Module):
    def forward(self, x: Any, y: Any) -> Any:
        return x, y


class _Batch(nn.Module):
    def forward(self, batch: Any) -> Any:
        return batch


X = torch.ones(2)


@pytest.mark.parametrize(
    ("model", "sample", "chosen", "said"),
    [
        (nn.Sequential(), (X, X), "first", True),
        (nn.Sequential(), [X], "unpack_sequence", False),
        (_Two(), (X, X), "unpack_sequence", False),
        (_Two(), {"x": X, "y": X}, "unpack_dict", False),
        (_Two(), {"x": X, "y": X, "label": X}, "unpack_dict", True),
        (_Batch(), {"batch": X, "label": X}, "unpack_dict", True),
        (_Batch(), {"x": X, "y": X}, "none", True),
        (_Batch(), X, "none", False),
    ],
)
def test_auto(model: nn.Module, sample: Any, chosen: str, said: bool) -> None:
    found, line = chosen_format("auto", model, sample)
    assert found == chosen
    assert bool(line) is said
    assert chosen_format("none", model, sample) == ("none", "")


@pytest.mark.parametrize(
    ("model", "sample"), [(_Two(), (X, X, X)), (_Two(), {"x": X}), (_Two(), {"x": X, "label": X})]
)
def test_what_forward_cannot_take_names_the_formats(model: nn.Module, sample: Any) -> None:
    with pytest.raises(InputError, match=r"forward of _\w+ takes .*Choose the input format"):
        chosen_format("auto", model, sample)


def test_a_batch_that_cannot_be_passed_as_asked_is_the_batch_s_fault() -> None:
    with pytest.raises(InputError, match="the sample does not fit the input format unpack_dict"):
        chosen_format("unpack_dict", _Two(), (X, X))


def test_words() -> None:
    assert check_format("first") == "first"
    with pytest.raises(InputError, match="unpack_dict, first"):
        check_format("dict")


def test_the_first_item() -> None:
    assert call_model(_Batch(), (1, 2), "first") == 1
    for wrong in ((), {"x": 1}, "text"):
        with pytest.raises(InputError, match=r"'first' needs each batch to be a .*list or tuple"):
            call_model(_Batch(), wrong, "first")

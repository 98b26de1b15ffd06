"""The one JSON form of values in a config."""

from __future__ import annotations

import enum
import functools
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from atorch_ns.strategy import canonical, canonical_text, qualified_name
from atorch_ns.strategy.values import UnwritableValueError


class Kind(enum.Enum):
    FULL = 1


@dataclass
class Settings:
    size: int
    more: str | None = None


def policy(module: Any, size: int) -> bool:
    return False


@pytest.mark.parametrize(
    ("value", "form"),
    [
        (Kind.FULL, "FULL"),
        (torch.bfloat16, "bfloat16"),
        (torch.device("cuda", 1), "cuda:1"),
        (np.float32(0.5), 0.5),
        ((1, (2, "x")), [1, [2, "x"]]),
        ({"b", "a"}, ["a", "b"]),
        ({"use_ds_zero", True}, {"use_ds_zero": True}),
        (nn.Linear, "torch.nn.modules.linear.Linear"),
        (Settings(3), {"size": 3}),
        (functools.partial(policy, size=3), {"function": f"{__name__}.policy", "arguments": {"size": 3}}),
    ],
    ids=["enum", "dtype", "device", "number", "nest", "set", "flags", "class", "dataclass", "partial"],
)
def test_forms(value: Any, form: Any) -> None:
    assert canonical(value) == form
    assert canonical(form) == form, "a form is its own form"


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (lambda module: True, "cannot be named"),
        (float("nan"), "not a finite number"),
        ({1: 2}, "keys must be strings"),
        (torch.ones(2), "torch.Tensor cannot be in"),
        (functools.partial(policy, 3), "positional arguments; name them"),
    ],
    ids=["lambda", "nan", "key", "tensor", "partial"],
)
def test_what_has_no_form_is_refused(value: Any, words: str) -> None:
    with pytest.raises(UnwritableValueError, match=words):
        canonical({"inside": [value]})


def test_equal_values_have_equal_texts() -> None:
    assert canonical_text(canonical({"b": 1, "a": {"y", "x"}})) == '{"a":["x","y"],"b":1}'


def test_a_local_class_has_a_name_and_a_local_function_has_none() -> None:
    class Local:
        def method(self) -> None: ...

    assert qualified_name(Local).endswith("<locals>.Local")
    with pytest.raises(UnwritableValueError, match="module level"):
        qualified_name(Local.method)

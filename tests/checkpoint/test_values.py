from __future__ import annotations

import json
import math
from collections import Counter, OrderedDict
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from atorch_ns.checkpoint.manifest import decode, encode, plain_json
from atorch_ns.errors import CheckpointError

LEAVES = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
KEYS = st.text() | st.integers() | st.just("$")
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(KEYS, inner),
    max_leaves=12,
)


@given(VALUES)
def test_what_is_encoded_comes_back(value: Any) -> None:
    text = json.dumps(encode(value, what="it"), allow_nan=False)
    assert decode(json.loads(text)) == value
    assert repr(decode(json.loads(text))) == repr(value)  # 1 is not True, (1,) is not [1]


def test_nan_and_counters() -> None:
    assert math.isnan(decode(encode(math.nan, what="it")))
    milestones = Counter({30: 1, 80: 2})
    back = decode(encode({"milestones": milestones}, what="it"))["milestones"]
    assert type(back) is Counter
    assert back == milestones


@pytest.mark.parametrize("number", [torch.tensor(0.5), torch.tensor([0.5]), np.float32(0.5), np.array([0.5])])
def test_one_number_is_a_number(number: Any) -> None:
    assert encode(number, what="it") == 0.5


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ({"a": [1, object()]}, r"it\['a'\]\[1\] is a builtins.object"),
        (OrderedDict(a=1), "it is a collections.OrderedDict"),
        ({"a": torch.zeros(2)}, r"it\['a'\] is a torch.Tensor"),
        (lambda: None, "it is a builtins.function"),
    ],
)
def test_what_has_no_form_is_named(value: Any, said: str) -> None:
    with pytest.raises(CheckpointError, match=said):
        encode(value, what="it")


def test_an_unknown_form_is_refused() -> None:
    with pytest.raises(CheckpointError, match="unknown form 'set'"):
        decode({"$": "set", "value": []})


def test_plain_json_copies() -> None:
    given = {"a": [1, (2, None)], "b": {"c": "d"}}
    copied = plain_json(given, what="extra")
    assert copied == {"a": [1, [2, None]], "b": {"c": "d"}}
    given["a"].append(3)  # type: ignore[attr-defined]
    assert copied == {"a": [1, [2, None]], "b": {"c": "d"}}


@pytest.mark.parametrize("value", [{1: 2}, {"a": {3}}, {"a": b"x"}, {"a": math.inf}, {"a": torch.ones(1)}])
def test_plain_json_is_strict(value: Any) -> None:
    with pytest.raises(CheckpointError, match=r"^extra.* JSON cannot hold it"):
        plain_json(value, what="extra")

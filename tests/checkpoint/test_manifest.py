"""Values and parameter groups in the manifest of a checkpoint."""

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

from atorch_ns.checkpoint.manifest import (
    check_groups,
    decode,
    encode,
    plain_json,
    record_groups,
    restore_groups,
)
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


NAMES = [["a", "b"], ["c"]]


def groups(*options: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"params": [], "lr": 0.1, "betas": (0.9, 0.99), "foreach": None, **own} for own in options]


def test_hyperparameters_follow_the_names() -> None:
    saved = record_groups(NAMES, groups({"lr": 0.5, "initial_lr": 1.0}, {"lr": 0.25, "foreach": True}))
    here = groups({}, {"foreach": False})
    swapped = [["c"], ["b", "a"]]
    check_groups(saved, swapped, here, ordered=False)
    restore_groups(saved, swapped, here)
    assert [group["lr"] for group in here] == [0.25, 0.5]
    assert here[1]["initial_lr"] == 1.0
    assert here[0]["betas"] == (0.9, 0.99)
    assert [group["foreach"] for group in here] == [None, False]  # how, not what: this run's affair


def test_a_tensor_keeps_its_identity() -> None:
    saved = record_groups([["a"]], groups({"lr": torch.tensor(0.5), "betas": (torch.tensor(0.8), 0.99)}))
    rate, beta = torch.tensor(0.1), torch.tensor(0.9)
    here = groups({"lr": rate, "betas": (beta, 0.9)})
    restore_groups(saved, [["a"]], here)
    assert here[0]["lr"] is rate
    assert float(rate) == 0.5
    assert here[0]["betas"][0] is beta
    assert float(beta) == pytest.approx(0.8)
    assert here[0]["betas"][1] == 0.99
    plain = groups({})
    restore_groups(saved, [["a"]], plain)
    assert plain[0]["lr"] == 0.5


def test_another_cut_is_fine_if_it_loses_nothing() -> None:
    saved = record_groups(NAMES, groups({"lr": 0.5}, {"lr": 0.5}))
    here = groups({})
    check_groups(saved, [["a", "b", "c"]], here, ordered=False)
    restore_groups(saved, [["a", "b", "c"]], here)
    assert here[0]["lr"] == 0.5


@pytest.mark.parametrize(
    ("saved", "names", "here", "ordered", "said"),
    [
        (
            groups({"lr": 0.5}, {"lr": 0.2}),
            [["a", "b", "c"]],
            groups({}),
            False,
            "has under different lr: a and c",
        ),
        (
            groups({}, {}),
            [["a"], ["b", "c"]],
            groups({}, {"lr": 3.0}),
            False,
            "has under different lr: a and b",
        ),
        (groups({}, {}), [["c"], ["a", "b"]], groups({}, {}), True, "scheduler counts them"),
        (groups({}, {}), [["a", "b", "c"]], groups({}), True, r"\(s\) and this optimizer has 1, split"),
        (
            groups({}, {}),
            [["a"], ["c", "d"]],
            groups({}, {}),
            False,
            r"did not train: d; without 1 that it did: b",
        ),
    ],
)
def test_a_cut_that_loses_something_is_refused(
    saved: Any, names: Any, here: Any, ordered: bool, said: str
) -> None:
    with pytest.raises(CheckpointError, match=said):
        check_groups(record_groups(NAMES, saved), names, here, ordered=ordered)


def test_a_hyperparameter_without_a_form_is_named() -> None:
    with pytest.raises(CheckpointError, match=r"param_groups\[1\]\['schedule'\] is a builtins.function"):
        record_groups(NAMES, groups({}, {"schedule": lambda: 1}))

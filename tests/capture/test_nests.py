"""One walker for nests: what it enters, what it gives back, what it leaves alone."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, UserDict, deque, namedtuple
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch import nn

from atorch_ns.capture.nests import (
    can_be_written,
    copied_state,
    floats_to,
    leaves,
    map_instances,
    map_leaves,
    map_tensors,
    num_rows,
    path_text,
    resized_shape,
    samples_and_tokens,
    tensors_of,
    unique_tensors_of,
)

Pair = namedtuple("Pair", "x y")


@dataclasses.dataclass(frozen=True)
class Batch:
    x: Any
    rest: Any = None

    def __post_init__(self) -> None:
        assert not isinstance(self.x, str)


X, Y = torch.ones(2), torch.arange(3)


@pytest.mark.parametrize(
    "nest",
    [
        (X, [Y]),
        [X, (Y, 1, None)],
        {"a": X, "b": {"c": Y}},
        OrderedDict(a=X, b=Y),
        UserDict({"a": X, "b": UserDict({"c": Y})}),
        MappingProxyType({"a": X, "b": Y}),
        Pair(X, Pair(Y, "text")),
        Batch(X, [Y, "name"]),
        deque([X, Y]),
    ],
    ids=lambda nest: type(nest).__name__,
)
def test_every_container_is_entered_and_kept(nest: Any) -> None:
    assert [id(tensor) for tensor in tensors_of(nest)] == [id(X), id(Y)]
    assert [id(leaf) for _, leaf in leaves(nest) if isinstance(leaf, torch.Tensor)] == [id(X), id(Y)]
    made = map_tensors(lambda tensor: tensor + 1, nest)
    assert type(made) is (dict if isinstance(nest, MappingProxyType) else type(nest))
    assert [tensor.tolist() for tensor in tensors_of(made)] == [[2, 2], [1, 2, 3]]
    assert [path for path, _ in leaves(made)] == [path for path, _ in leaves(nest)]
    assert X.tolist() == [1, 1]


def test_what_transformers_gives_is_cast() -> None:
    from transformers import BatchEncoding
    from transformers.modeling_outputs import BaseModelOutput

    batch = BatchEncoding({"input_ids": Y, "pixel_values": X})
    cast = floats_to(batch, torch.bfloat16)
    assert (type(cast), cast["pixel_values"].dtype, cast["input_ids"].dtype) == (
        BatchEncoding,
        torch.bfloat16,
        torch.int64,
    )
    output = floats_to(BaseModelOutput(last_hidden_state=X), torch.float16)
    assert output.last_hidden_state.dtype == output[0].dtype == torch.float16


def test_a_value_that_is_no_container_is_its_own_leaf() -> None:
    assert list(leaves(7)) == [((), 7)]
    assert map_leaves(lambda path, leaf: (path, leaf), 7) == ((), 7)


def test_leaves_may_be_containers_on_demand() -> None:
    nest = {"a": [1, 2], "b": (X,)}
    assert [leaf for _, leaf in leaves(nest, is_leaf=lambda value: isinstance(value, list))] == [[1, 2], X]
    assert map_instances(list, len, nest)["a"] == 2


def test_a_tensor_in_two_places_is_given_twice_or_once() -> None:
    assert len(tensors_of([X, {"a": X}])) == 2
    assert len(unique_tensors_of([X, {"a": X}])) == 1


def test_rows_are_those_that_all_tensors_share() -> None:
    assert num_rows({"a": torch.ones(4, 2), "b": torch.ones(4), "scale": torch.tensor(1.0)}) == 4
    assert num_rows([torch.ones(4), torch.ones(3)]) is None


def test_paths_read_as_arguments() -> None:
    paths = [path_text(path) for path, _ in leaves(((1, {"x": 2}), {"mask": 3}))]
    assert paths == ["argument 0", "argument 1['x']", "mask"]


def test_samples_and_tokens_of_a_batch() -> None:
    tokens, features = torch.ones(4, 7, dtype=torch.int64), torch.ones(4, 5)
    assert samples_and_tokens({"scale": torch.tensor(1.0), "features": features, "tokens": tokens}) == (4, 7)
    assert samples_and_tokens(features) == (4, 1), "floats of two dims are features, not tokens"
    assert samples_and_tokens((features, torch.ones(3, 7, dtype=torch.int64))) == (4, 1)
    assert samples_and_tokens({}) == (1, 1)


def test_shapes_of_another_batch() -> None:
    assert resized_shape((4, 7, 7, 5), (4, 7), (2, 3)) == (2, 3, 3, 5)
    assert resized_shape((7, 4), (4, 7), (2, 3)) == (7, 4), "dim 0 is not a batch"
    assert resized_shape((4, 1), (4, 1), (2, 3)) == (2, 1), "a batch without tokens"
    assert resized_shape((), (4, 7), (2, 3)) == ()


class Store:
    def __init__(self) -> None:
        self.layers: list[Any] = [{"keys": torch.ones(2)}]
        self.model = nn.Linear(2, 2)
        self.itself = self


def test_a_copy_shares_tensors_and_modules_alone() -> None:
    store, tensor = Store(), torch.ones(3)
    made = copied_state(Pair([tensor], {"store": store}))
    assert isinstance(made, Pair)
    assert made.x[0] is tensor
    other = made.y["store"]
    assert other is not store
    assert other.itself is other
    assert other.model is store.model
    other.layers[0]["keys"] = other.layers.append(None)
    assert len(store.layers) == 1
    assert torch.equal(store.layers[0]["keys"], torch.ones(2))


@pytest.mark.parametrize(
    ("value", "expected"),
    [(torch.ones(1), False), ((1, "a", None), False), (nn.Linear(1, 1), False), ([], True), ((1, {}), True)],
    ids=["tensor", "plain", "module", "list", "a dictionary in a tuple"],
)
def test_what_can_be_written(value: Any, expected: bool) -> None:
    assert can_be_written(value) is expected

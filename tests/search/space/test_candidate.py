"""Refusal keys: two strategies have the same one where a method would refuse both for the same reason."""

from __future__ import annotations

from typing import Any

import pytest

from atorch_ns.cluster import cluster_from_spec
from atorch_ns.method import load_registry, resolve
from atorch_ns.search.space.candidate import refusal_keys
from atorch_ns.strategy import Strategy

REGISTRY = load_registry()


def keys_of(*methods: Any, ranks: int = 8) -> dict[str, str]:
    """The refusal keys of a strategy."""
    return dict(refusal_keys(resolve(Strategy(list(methods)), cluster_from_spec(f"{ranks}xcpu"), REGISTRY)))


def mesh(**axes: int) -> tuple[str, Any]:
    return ("parallel_mode", {"axes": [list(axis) for axis in axes.items()]})


def test_what_comes_later_does_not_count() -> None:
    one = keys_of(mesh(tensor=2, data=4), "tensor_parallel")["tensor_parallel"]
    for later in ("half", "amp_native", "checkpoint", ("gradient_accumulation", {"num_micro_batches": 2})):
        assert keys_of(mesh(tensor=2, data=4), "tensor_parallel", later)["tensor_parallel"] == one
    assert keys_of(mesh(tensor=2, zero=4), "tensor_parallel", "fsdp")["tensor_parallel"] == one


@pytest.mark.parametrize(
    "other",
    [
        (mesh(tensor=4, data=2), "tensor_parallel"),
        (mesh(tensor=2, data=4), ("tensor_parallel", {"sequence": True})),
        (mesh(tensor=2, sequence=2, data=2), "tensor_parallel", "sequence_parallel"),
        (mesh(tensor=2, pipeline=2, data=2), "tensor_parallel", "pipeline_parallel"),
        (mesh(tensor=2, data=4), "tensor_parallel", "module_replace"),
        (mesh(tensor=2, data=4), "tensor_parallel", "compile"),
    ],
    ids=["size", "config", "another axis", "stages", "other modules", "a field that it names"],
)
def test_what_the_method_sees_counts(other: tuple[Any, ...]) -> None:
    one = keys_of(mesh(tensor=2, data=4), "tensor_parallel")["tensor_parallel"]
    assert keys_of(*other)["tensor_parallel"] != one


def test_methods_that_declare_nothing_have_no_refusal_key() -> None:
    found = keys_of(mesh(pipeline=2, data=4), "pipeline_parallel", "half", "checkpoint")
    assert found == {}

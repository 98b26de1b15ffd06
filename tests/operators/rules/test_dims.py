"""Rules follow from letters."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from atorch_ns.capture.graph.call import Call, TensorSpec
from atorch_ns.operators.rules.dims import Dims, broadcast, but, letters


def call(*shapes: tuple[int, ...], result: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Call:
    specs = [TensorSpec(shape, dtype) for shape in shapes]
    return Call(torch.ops.aten.add.Tensor, tuple(specs), {}, (TensorSpec(result, dtype),))


def found(dims: Dims, one: Call, degree: int = 2) -> list[str]:
    return [str(rule) for rule in dims.rules(one, degree)]


def test_a_letter_is_divided_wherever_it_stands_or_nowhere() -> None:
    product = Dims([("N", "I"), ("I", "O")], [("N", "O")], "I")
    assert found(product, call((4, 8), (8, 2), result=(4, 2))) == ["0 <- 0,R", "P <- 1,0", "1 <- R,1"]
    assert found(product, call((4, 8), (8, 2), result=(4, 2)), 4) == ["0 <- 0,R", "P <- 1,0"]
    assert found(product, call((4, 0), (0, 3), result=(4, 3))) == ["0 <- 0,R"]


def test_a_letter_that_a_tensor_has_twice_is_not_divided() -> None:
    assert found(Dims([("a", "a")], [("a",)]), call((4, 4), result=(4,))) == []


def test_pieces_must_fit() -> None:
    dims = Dims([("a", "b")], [("a", "b")], fits=lambda letter, size: letter == "b" or size > 2)
    assert found(dims, call((4, 4), result=(4, 4))) == ["1 <- 1"]
    assert found(dims, call((8, 4), result=(8, 4))) == ["0 <- 0", "1 <- 1"]


def test_there_are_no_summands_of_integers() -> None:
    dims = Dims([(None,), (None,)], [(None,)], linear=[[0, 1], [1]])
    assert found(dims, call((4,), (4,), result=(4,))) == ["P <- P,P", "P <- R,P"]
    assert found(dims, call((4,), (4,), result=(4,), dtype=torch.int64)) == []


@given(st.lists(st.integers(1, 3), max_size=4), st.data())
def test_repeated_dims_have_no_letter(shape: list[int], data: st.DataObject) -> None:
    own = [data.draw(st.sampled_from([size, 1])) for size in shape[data.draw(st.integers(0, len(shape))) :]]
    dims = broadcast(shape, letters(len(shape)), own)
    assert len(dims) == len(own)
    for letter, size, place in zip(dims, own, range(len(shape) - len(own), len(shape)), strict=True):
        assert letter == ("abcd"[place] if size == shape[place] else None)


def test_places_count_from_the_end_too() -> None:
    assert but(letters(3), -1, 0) == (None, "b", None)
    assert but((), 0) == ()

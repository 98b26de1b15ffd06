"""Annotations: what is read, the shapes that follow, and the rules."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atorch_ns.errors import InputError
from atorch_ns.operators.rules.annotation import Annotation


def rules(text: str, shapes: list[tuple[int, ...] | None], degree: int = 2, **sizes: int) -> list[str]:
    return [str(rule) for rule in Annotation.read(text).rules(shapes, degree, **sizes)]


def shapes(text: str, inputs: list[tuple[int, ...] | None], **sizes: int) -> tuple[object, ...]:
    return Annotation.read(text).shapes(inputs, **sizes)


def test_a_product_is_divided_by_rows_columns_and_summands() -> None:
    assert rules("m k+, n k+ -> m n", [(4, 6), (8, 6)]) == ["0 <- 0,R", "P <- 1,1", "1 <- R,0"]
    assert shapes("m k+, n k+ -> m n", [(4, 6), (8, 6)]) == ((4, 8),)


def test_only_what_the_degree_divides_is_divided() -> None:
    assert rules("m k+, n k+ -> m n", [(4, 6), (8, 6)], degree=4) == ["0 <- 0,R", "1 <- R,0"]
    assert rules("a b -> a b", [(0, 3)], degree=1) == []


@pytest.mark.parametrize(
    ("text", "inputs", "expected"),
    [
        ("a^ b -> a^ b", [(4, 4)], ["1 <- 1"]),
        ("a b -> a^ b", [(4, 4)], ["1 <- 1"]),
        ("4 b -> b", [(4, 4)], ["0 <- 1"]),
        ("a b -> a", [(4, 4)], ["0 <- 0"]),  # b is in no result: neither a piece nor a sum
        ("a a -> a", [(4, 4)], []),  # one name, two dimensions of a tensor
        ("a b, ? -> a b", [(4, 3), None], ["0 <- 0"]),
        ("a b, ? -> a b", [(4, 3), (2, 2)], ["0 <- 0,R"]),
        ("a b -> a b, ?", [(4, 3)], ["0,R <- 0"]),
        ("a b+ -> a, b", [(3, 4)], ["P,0 <- 1"]),
        ("m k+, k+ n, n -> m n", [(1, 4), (4, 3), (3,)], ["P <- 1,0,R"]),
        ("N+ C^, N+ -> 1", [(4, 3), (4,)], ["P <- 0,0"]),
    ],
)
def test_marks(text: str, inputs: list[tuple[int, ...] | None], expected: list[str]) -> None:
    assert rules(text, inputs) == expected


def test_the_first_name_of_a_bracket_whose_size_is_not_one_is_divided() -> None:
    text = "(h t) k -> h t k"
    assert rules("(h t) k, h^ -> h t k", [(8, 3), (4,)]) == []
    assert rules("(h t) k, h -> h t k", [(8, 3), (4,)]) == ["0 <- 0,0"]
    assert rules("(h t) k, h -> h t k", [(6, 3), (3,)]) == []  # the dimension is even, the first name is not
    assert rules("(h t) k, h -> h t k", [(8, 3), (1,)]) == ["1 <- 0,R"]
    assert shapes(text, [(8, 3)], h=4) == ((4, 2, 3),)


def test_a_name_that_is_an_argument_is_not_divided() -> None:
    assert rules("(h t) k -> h t k", [(8, 4)], h=4) == ["2 <- 1"]


def test_stars_broadcast_from_the_right() -> None:
    assert shapes("* k, * k -> *", [(2, 1, 5), (4, 5)]) == ((2, 4),)
    assert rules("* d^, * d^ -> * d^", [(2, 1, 6, 5), (4, 6, 5)]) == ["0 <- 0,R", "2 <- 2,1", "1 <- R,0"]
    assert rules("* -> *", [()]) == []
    assert rules("*^ k -> *^ k", [(2, 2)]) == ["1 <- 1"]


def test_a_scalar_is_one_with_or_without_dimension() -> None:
    assert shapes("a, 1 -> a, 1", [(3,), ()]) == ((3,), ())
    assert shapes("a, 1 -> a, ?", [(3,), (1,)]) == ((3,), None)


@pytest.mark.parametrize(
    ("text", "place", "problem"),
    [
        ("a b", 3, "'->' is missing"),
        ("a, -> a", 3, "a tensor's dimensions, or '?', are missing"),
        ("(a b -> a b", 5, "')' is missing"),
        ("() -> 1", 1, "names are missing in the brackets"),
        ("a ! -> a", 2, "'!' has no meaning here"),
        ("a -> b", 5, "no argument has 'b'"),
        ("a -> a -> a", 7, "'->' is not expected here"),
        ("* * -> *", 2, "'*' stands once"),
        ("(* a) -> a", 1, "'*' stands once"),
        ("a -> *", 5, "no argument has '*'"),
        ("4+ -> 4", 0, "cannot be summed over"),
        ("a ? -> a", 2, "'?' is not expected here"),
    ],
)
def test_what_cannot_be_read_is_pointed_at(text: str, place: int, problem: str) -> None:
    with pytest.raises(InputError) as raised:
        Annotation.read(text)
    first, shown, pointer = str(raised.value).split("\n")
    assert problem in first
    assert shown == f"  {text}"
    assert pointer.index("^") - 2 == place


@pytest.mark.parametrize(
    ("text", "inputs", "problem"),
    [
        ("a b -> a b", [(2, 3, 4)], "argument 0 has 3 dimensions instead of 2"),
        ("a, a -> a", [(2,), (3,)], "a is 3 in argument 1, and 2 elsewhere"),
        ("a -> a", [None], "argument 0 is not a tensor"),
        ("4 -> 4", [(3,)], "4 is 3 in argument 0, and 4 elsewhere"),
        ("(a b) -> a b", [(6,)], r"the sizes of \(a b\), together 6 in argument 0, are not known"),
        ("(a 4) -> a", [(6,)], "a multiple of 4"),
        ("*, * -> *", [(2,), (3,)], r"\*1 is 2 in argument 0|\*1 is 3 in argument 1"),
        ("* a b -> a b", [(2,)], "too few dimensions"),
        ("a, a -> a", [(2,)], "has 2 arguments, but 1 were given"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(
    text: str, inputs: list[tuple[int, ...] | None], problem: str
) -> None:
    with pytest.raises(InputError, match=problem):
        Annotation.read(text).shapes(inputs)


@given(st.dictionaries(st.sampled_from("abcd"), st.integers(1, 8), min_size=1), st.integers(2, 4), st.data())
def test_rules_divide_each_name_wherever_it_stands(
    sizes: dict[str, int], degree: int, data: st.DataObject
) -> None:
    names = list(sizes)
    orders = [data.draw(st.permutations(names)) for _ in range(3)]
    *arguments, result = (" ".join(order) for order in orders)
    given_shapes = [tuple(sizes[name] for name in order) for order in orders[:2]]
    annotation = Annotation.read(f"{', '.join(arguments)} -> {result}")
    assert annotation.shapes(given_shapes) == (tuple(sizes[name] for name in orders[2]),)
    expected = {
        f"{orders[2].index(name)} <- {orders[0].index(name)},{orders[1].index(name)}"
        for name in names
        if sizes[name] % degree == 0
    }
    assert {str(rule) for rule in annotation.rules(given_shapes, degree)} == expected

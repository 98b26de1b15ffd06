"""The measures by which self-tests compare what is computed divided with what is computed whole."""

from __future__ import annotations

import torch

from atorch_ns.sharding.compare import (
    gradient_floor,
    gradients_of,
    largest,
    relative_error,
    sum_of_bits,
    weighted_sum,
)


def test_equal_on_every_rank_and_sensitive_to_every_element() -> None:
    first, second = torch.ones(2, 3), torch.ones(4)
    total = weighted_sum([first, second], seed=1)
    assert total is not None
    assert total == weighted_sum([first.clone(), second.clone()], seed=1)
    swapped = first.clone()
    swapped[0, 1] += 1e-3
    assert total != weighted_sum([swapped, second], seed=1)
    assert weighted_sum([], seed=1) is None


def test_gradients_of_what_the_total_does_not_depend_on_are_zeros() -> None:
    used, unused = torch.ones(2, requires_grad=True), torch.ones(3, requires_grad=True)
    found = gradients_of((2 * used).sum(), [used, unused])
    assert [gradient.tolist() for gradient in found] == [[2, 2], [0, 0, 0]]
    (constant,) = gradients_of(torch.ones(()), [used])
    assert constant.tolist() == [0, 0]


def test_bits_of_complex_numbers_count_with_both_parts() -> None:
    for dtype in (torch.complex64, torch.complex128):
        values = torch.tensor([1 + 2j, 3j], dtype=dtype)
        assert sum_of_bits(values) == sum_of_bits(torch.view_as_real(values))
        assert sum_of_bits(values) != sum_of_bits(values + 1j)
        assert sum_of_bits(values.conj()) == sum_of_bits(values.conj().resolve_conj())


def test_errors_are_relative_to_the_largest_value_wanted() -> None:
    wanted = torch.tensor([100.0, 1.0])
    assert relative_error(wanted + torch.tensor([0.0, 1.0]), wanted) == 0.01
    assert relative_error(torch.tensor([1e-3]), torch.zeros(1), floor=1.0) == torch.tensor(1e-3)
    assert relative_error(torch.zeros(0), torch.zeros(0)) == 0


def test_what_cannot_be_compared_is_infinitely_wrong() -> None:
    wanted = torch.ones(2)
    assert relative_error(None, wanted) == float("inf")
    assert relative_error(torch.ones(3), wanted) == float("inf")
    assert relative_error(torch.tensor([1.0, float("nan")]), wanted) == float("inf")


def test_infinities_integers_and_complex_numbers() -> None:
    inf, nan = float("inf"), float("nan")
    masked = torch.tensor([-inf, 2.0, nan])
    assert relative_error(masked.clone(), masked) == 0
    assert relative_error(torch.tensor([-inf, 3.0, nan]), masked) == 0.5
    for other in ([inf, 2.0, nan], [0.0, 2.0, nan], [-inf, nan, nan], [-inf, 2.0, 0.0]):
        assert relative_error(torch.tensor(other), masked) == inf
    assert relative_error(torch.full((2,), nan), torch.full((2,), nan)) == inf, "nothing was compared"
    assert relative_error(torch.tensor([1, 2]), torch.tensor([1, 2])) == 0
    assert relative_error(torch.tensor([1, 3]), torch.tensor([1, 2])) == inf
    assert relative_error(torch.tensor([1 + 2j]), torch.tensor([1 + 4j])) == 0.5


def test_infinite_gradients_make_no_scale() -> None:
    assert gradient_floor([torch.tensor([float("inf")]), torch.tensor([float("nan")])]) == 0


def test_small_gradients_are_compared_on_the_scale_of_the_largest() -> None:
    gradients = [torch.full((2,), 1e-9), torch.tensor([-5.0])]
    floor = gradient_floor(gradients)
    assert relative_error(torch.full((2,), 3e-9), gradients[0]) > 1
    assert relative_error(torch.full((2,), 3e-9), gradients[0], floor=floor) < 1e-6
    assert floor < largest(gradients[1])
    assert gradient_floor([]) == 0

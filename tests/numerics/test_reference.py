"""The parity measure: errors in units of the reference's own updates."""

from __future__ import annotations

import math

import pytest
import torch

from atorch_ns.numerics.reference import UPDATE_FLOOR, clip, distance, update_errors, updates_of
from atorch_ns.sharding.compare import largest

BEFORE = {"w": torch.zeros(3), "b": torch.ones(2)}
AFTER = {"w": torch.tensor([0.0, 0.5, -1.0]), "b": torch.ones(2)}
UPDATES = updates_of(BEFORE, AFTER)


def test_a_lost_update_is_one_and_a_doubled_one_is_one() -> None:
    assert update_errors(UPDATES, AFTER, BEFORE)["w"] == 1.0
    assert update_errors(UPDATES, AFTER, {**AFTER, "w": 2 * AFTER["w"]})["w"] == 1.0
    assert update_errors(UPDATES, AFTER, AFTER) == {"w": 0.0, "b": 0.0}


def test_what_hardly_moves_is_held_to_a_share_of_the_largest_update() -> None:
    moved = {**AFTER, "b": AFTER["b"] + 0.5 * UPDATE_FLOOR}
    assert math.isclose(update_errors(UPDATES, AFTER, moved)["b"], 0.5, rel_tol=1e-3)


def test_rounding_of_the_weight_itself_is_taken_off() -> None:
    eps = torch.finfo(torch.float32).eps
    off = {**AFTER, "b": AFTER["b"] + eps}
    assert update_errors(UPDATES, AFTER, off)["b"] > 0
    assert update_errors(UPDATES, AFTER, off, roundings=2.0)["b"] == 0.0


def test_a_missing_parameter_has_no_error_and_another_shape_an_infinite_one() -> None:
    assert "w" not in update_errors(UPDATES, AFTER, {"b": AFTER["b"]})
    assert distance(torch.zeros(2), torch.zeros(3)) == math.inf
    assert distance(torch.zeros(2), torch.tensor([0.0, math.nan])) == math.inf
    assert distance(torch.zeros(0), torch.zeros(0)) == largest(torch.zeros(0)) == 0.0
    assert str(largest(torch.zeros(2))) == str(largest(-torch.zeros(2))) == "0.0"  # as messages print it


def test_gradients_of_millions_of_elements_are_clipped_to_the_norm_that_they_have() -> None:
    weight = torch.zeros(2**22, requires_grad=True)
    weight.grad = torch.randn(2**22)  # torch's own norm of it is 9e-5 off
    exact = float(weight.grad.double().norm())
    before = weight.grad.clone()
    clip([weight, torch.zeros(1)], 1.0)
    assert float((weight.grad / before).mean()) == pytest.approx(1 / exact, rel=1e-6)

"""Parity measure: how far a run's parameters are from a reference's, in units of the reference's updates."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from atorch_ns.sharding.compare import largest

UPDATE_FLOOR = 1e-3
"""Parameters that move less than this share of the largest update are held to that instead: their gradient
is zero but for rounding, and the quotient would measure noise."""


def largest_update(initial: Mapping[str, torch.Tensor], final: Mapping[str, torch.Tensor]) -> float:
    """The largest absolute change of any element of any parameter."""
    return max((distance(value, initial[name]) for name, value in final.items()), default=0.0)


def update_errors(
    initial: Mapping[str, torch.Tensor],
    expected: Mapping[str, torch.Tensor],
    found: Mapping[str, torch.Tensor],
    *,
    roundings: float = 0.0,
) -> dict[str, float]:
    """``max|found - expected| / max|expected - initial|`` of every parameter that both runs have.

    Args:
        initial, expected: the reference's parameters before and after training.
        found: the other run's after training.
        roundings: units in the last place of a weight that are taken off its error first.
    """
    floor = UPDATE_FLOOR * largest_update(initial, expected)
    errors = {}
    for name, value in expected.items():
        if name not in found:
            continue
        eps = torch.finfo(found[name].dtype).eps if found[name].is_floating_point() else 0.0
        beyond = max(0.0, distance(found[name], value) - roundings * eps * largest(value))
        errors[name] = beyond / max(distance(value, initial[name]), floor) if beyond else 0.0
    return errors


def distance(one: torch.Tensor, other: torch.Tensor) -> float:
    """The largest absolute difference; infinite when shapes differ or a number is not finite."""
    if one.shape != other.shape:
        return math.inf
    if one.numel() == 0:
        return 0.0
    return finite(float((one.double() - other.double()).abs().max()))


def finite(value: float) -> float:
    """The value, or infinity in the place of NaN."""
    return value if math.isfinite(value) else math.inf

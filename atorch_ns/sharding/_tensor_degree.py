"""Which degrees of tensor parallelism a model allows."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from torch import nn

from atorch_ns.errors import InputError
from atorch_ns.profile._counts import num_heads, num_key_value_heads

__all__ = ["check_degree", "degrees", "no_layer_divides"]


def check_degree(model: nn.Module, degree: int) -> None:
    """Checks that ``degree`` divides the model's attention heads, where the model says how many it has.

    Raises:
        InputError: naming the numbers and the degrees that would work.
    """
    heads = num_heads(model)
    if degree < 1 or (heads and heads % degree):
        raise InputError(
            f"tensor={degree} does not divide the {heads} attention heads of {type(model).__name__}, and a head "
            f"is computed by one rank. Use tensor in {_set(degrees(model))}, or set undivided='keep' in "
            "tensor_parallel to leave attention whole on every rank."
        )


def degrees(model: nn.Module) -> list[int]:
    """The degrees that divide the model's attention heads, those of keys and values too where any does; empty
    where the model tells of no heads.
    """
    heads = num_heads(model)
    groups = num_key_value_heads(model)
    both = _divisors(math.gcd(heads, groups)) if heads else []
    return both if len(both) > 1 else _divisors(heads)


def no_layer_divides(
    model: nn.Module, degree: int, left: Mapping[str, str], works: Sequence[int]
) -> InputError:
    """The error for a model in which nothing can be divided.

    Args:
        model: the model.
        degree: what was asked for.
        left: why layers stay whole, by path.
        works: degrees by which some of its layers could be divided.
    """
    reasons = "; ".join(f"{path}: {why}" for path, why in list(left.items())[:3])
    advice = f"Use tensor in {_set(works)}, " if works else ""
    return InputError(
        f"tensor={degree} divides no layer of {type(model).__name__}{f' ({reasons})' if reasons else ''}. "
        f"{advice or 'Use '}another axis than tensor, or name layers in the plan of tensor_parallel."
    )


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0] if number else []


def _set(numbers: Iterable[int]) -> str:
    return "{" + ", ".join(map(str, numbers)) + "}"

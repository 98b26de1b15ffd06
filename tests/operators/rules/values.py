"""Values for calls of operators, and the check of all their rules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from atorch_ns.operators.rules.rule import Rule
from atorch_ns.operators.rules.table import rules_of
from tests.operators.confirm import call_of, confirm


def x(*shape: int) -> torch.Tensor:
    """Floats of both signs that need a gradient."""
    return torch.randn(shape).requires_grad_()


def up(*shape: int) -> torch.Tensor:
    """Floats between 0.5 and 1.5 that need a gradient, as scales of norms."""
    return (torch.rand(shape) + 0.5).requires_grad_()


def const(*shape: int) -> torch.Tensor:
    """Floats between 0.1 and 0.9 without a gradient, as targets and weights of classes."""
    return torch.rand(shape) * 0.8 + 0.1


def ids(bound: int, *shape: int) -> torch.Tensor:
    """Indices from the whole of their range."""
    return torch.randint(0, bound, shape)


def mask(*shape: int) -> torch.Tensor:
    """Booleans."""
    return torch.rand(shape) > 0.5


def confirmed(operator: Callable[..., Any], *args: Any, **kwargs: Any) -> str:
    """The rules of a call over two ranks, in text; all that it has over two and four ranks are confirmed.

    Values are drawn again for each run of the tests, by the seed that pytest's fixture sets."""
    call = call_of(operator, *args, **kwargs)
    found: list[list[Rule]] = []
    for degree in (2, 4):
        whole, *rules = rules_of(call, degree)
        assert not whole.divides
        for rule in (whole, *rules):
            confirm(call, rule, args, kwargs, degree)
        found.append(rules)
    assert {str(rule) for rule in found[1]} <= {str(rule) for rule in found[0]}
    return "; ".join(map(str, found[0]))

"""Torch's strategies for DTensors: these tests say when torch moves them, and that those left in are right."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.distributed.tensor import DTensor

from atorch_ns.capture.graph.call import Call
from atorch_ns.operators.rules.rule import Rule, whole_rule
from atorch_ns.torch_compat import dtensor_rules
from tests.operators.confirm import call_of
from tests.operators.rules.values import confirmed, const, x

aten = torch.ops.aten


def definite(*shape: int) -> torch.Tensor:
    """Matrices that have an inverse, and a Cholesky factor."""
    root = torch.randn(shape)
    return root @ root.mT + 4 * torch.eye(shape[-1])


CASES = [
    (lambda: confirmed(aten.linalg_cross.default, x(3, 4), x(3, 4), dim=0), "1 <- 1,1"),
    (lambda: confirmed(aten.linalg_inv_ex.default, definite(4, 4, 4)), "0,0 <- 0"),
    (lambda: confirmed(aten._linalg_solve_ex.default, definite(4, 4, 4), x(4, 4, 8)), "0,0,0,0 <- 0,0"),
    (
        lambda: confirmed(aten.grid_sampler_2d.default, x(4, 8, 8, 8), const(4, 4, 4, 2), 0, 0, False),
        "0 <- 0,0",
    ),
    (lambda: confirmed(aten._adaptive_avg_pool2d.default, x(4, 8, 8, 8), [2, 2]), "0 <- 0; 1 <- 1"),
    (lambda: confirmed(aten.slice_scatter.default, x(4, 8), x(4, 4), 1, 0, 4), "0 <- 0,0"),
    (lambda: confirmed(aten.bucketize.Tensor, const(4, 8), const(8).sort().values), "0 <- 0,R; 1 <- 1,R"),
    (lambda: confirmed(aten.linalg__powsum.default, const(4, 8), 2.0, [1]), "0 <- 0; P <- 1"),
    (lambda: confirmed(aten.native_group_norm.default, x(4, 8, 6), const(8), const(8), 4, 8, 6, 4, 1e-5), ""),
    (
        lambda: confirmed(
            aten.linalg_solve_triangular.default, definite(4, 4, 4).tril(), x(4, 4, 8), upper=False
        ),
        "",
    ),
]


def rules_by_torch(call: Call, degree: int = 2) -> tuple[Rule, ...]:
    return dtensor_rules(call, whole_rule(call), degree)


@pytest.mark.parametrize(("rules", "expected"), CASES)
def test_rules_by_torch_are_right(rules: Callable[[], str], expected: str) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        assert rules() == expected


def test_both_kinds_of_strategies_are_read() -> None:
    by_dim = call_of(aten.linalg_inv_ex.default, definite(4, 4, 4))
    by_mesh = call_of(aten._adaptive_avg_pool2d.default, const(4, 8, 8, 8), [2, 2])
    for call in (by_dim, by_mesh):
        assert rules_by_torch(call, 2), "torch has moved its strategies"
        assert {rule.source for rule in rules_by_torch(call, 2)} == {"torch's DTensor"}
        assert rules_by_torch(call, 3) == ()


def test_dims_from_the_last_are_left_out_as_torch_gets_them_wrong() -> None:
    assert rules_by_torch(call_of(aten.cumsum.default, const(4, 8), 0))
    assert rules_by_torch(call_of(aten.cumsum.default, const(4, 8), -2)) == ()


def test_a_torch_without_these_strategies_has_no_rules(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DTensor, "_op_dispatcher", object())
    assert rules_by_torch(call_of(aten.linalg_inv_ex.default, definite(4, 4, 4))) == ()

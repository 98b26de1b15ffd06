"""Rules of operators that compute element by element: those that each call has, all confirmed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tests.operators.rules.values import confirmed, const, ids, mask, up, x

aten = torch.ops.aten

CASES = [
    (lambda: confirmed(aten.add.Tensor, x(4, 8), x(8), alpha=2), "0 <- 0,R; 1 <- 1,0; P <- P,P"),
    (lambda: confirmed(aten.add.Tensor, x(4, 1), x(1, 8)), "0 <- 0,R; 1 <- R,1; P <- P,P"),
    (lambda: confirmed(aten.add.Tensor, x(4, 8), ids(4, 8)), "0 <- 0,R; 1 <- 1,0"),
    (lambda: confirmed(aten.add.Tensor, ids(4, 4, 8), 1), "0 <- 0; 1 <- 1"),
    (lambda: confirmed(aten.sub.Tensor, x(4, 8), x(4, 8)), "0 <- 0,0; 1 <- 1,1; P <- P,P"),
    (lambda: confirmed(aten.mul.Tensor, x(4, 8), x()), "0 <- 0,R; 1 <- 1,R; P <- P,R; P <- R,P"),
    (lambda: confirmed(aten.mul.Tensor, x(4, 8), mask(4, 8)), "0 <- 0,0; 1 <- 1,1; P <- P,R"),
    (lambda: confirmed(aten.mul.Tensor, x(4, 8), 2.0), "0 <- 0; 1 <- 1; P <- P"),
    (lambda: confirmed(aten.div.Tensor, x(4, 8), up(8)), "0 <- 0,R; 1 <- 1,0; P <- P,R"),
    (lambda: confirmed(aten.div.Scalar, x(4, 8), 2.0), "0 <- 0; 1 <- 1; P <- P"),
    (lambda: confirmed(aten.div.Tensor_mode, x(4, 8), up(8), rounding_mode="floor"), "0 <- 0,R; 1 <- 1,0"),
    (lambda: confirmed(aten.reciprocal.default, up(4, 8)), "0 <- 0; 1 <- 1"),
    (lambda: confirmed(aten.rsub.Scalar, x(4, 8), 1.0), "0 <- 0; 1 <- 1"),
    (lambda: confirmed(aten.pow.Scalar, 2.0, x(4, 8)), "0 <- 0; 1 <- 1"),
    (lambda: confirmed(aten.maximum.default, x(4, 8), x(8)), "0 <- 0,R; 1 <- 1,0"),
    (lambda: confirmed(aten.max.other, x(4, 8), x(8)), "0 <- 0,R; 1 <- 1,0"),
    (lambda: confirmed(aten.gelu.default, x(4, 8)), "0 <- 0; 1 <- 1"),
    (lambda: confirmed(aten.hardswish.default, x(4, 8)), "0 <- 0; 1 <- 1"),
    (lambda: confirmed(aten.prelu.default, x(4, 8, 4), up(8)), "0 <- 0,R; 1 <- 1,0; 2 <- 2,R"),
    (lambda: confirmed(aten.prelu.default, x(8), up(1)), "0 <- 0,R"),
    (lambda: confirmed(aten.where.self, mask(8), x(4, 8), x(4, 1)), "1 <- 0,1,R; 0 <- R,0,0; P <- R,P,P"),
    (lambda: confirmed(aten.where.ScalarOther, mask(4, 8), x(4, 8), 0.0), "0 <- 0,0; 1 <- 1,1"),
    (lambda: confirmed(aten.where.default, mask(8)), ""),
    (lambda: confirmed(aten.masked_fill.Scalar, x(4, 8), mask(8), 0.0), "0 <- 0,R; 1 <- 1,0; P <- P,R"),
    (lambda: confirmed(aten.masked_fill.Scalar, x(4, 8), mask(4, 1), -1.0), "0 <- 0,0; 1 <- 1,R"),
    (lambda: confirmed(aten.eq.Tensor, ids(3, 4, 8), ids(3, 4, 1)), "0 <- 0,0; 1 <- 1,R"),
    (lambda: confirmed(aten.to.dtype, x(4, 8), torch.float64), "0 <- 0; 1 <- 1; P <- P"),
    (lambda: confirmed(aten.to.dtype, mask(4, 8), torch.float32), "0 <- 0; 1 <- 1"),
    (lambda: confirmed(aten.type_as.default, x(4, 8), const(3, 3, 3)), "0 <- 0,R; 1 <- 1,R; P <- P,R"),
    (lambda: confirmed(aten.clone.default, x(4, 8)), "0 <- 0; 1 <- 1; P <- P"),
    (lambda: confirmed(aten.detach.default, x(4, 8)), "0 <- 0; 1 <- 1"),
    (lambda: confirmed(aten.zeros_like.default, x(4, 8)), "0 <- 0; 1 <- 1"),
    (lambda: confirmed(aten.dropout.default, x(4, 8), 0.5, True), "0 <- 0; 1 <- 1"),
    (lambda: confirmed(aten.native_dropout.default, x(4, 8), 0.5, True), "0,0 <- 0; 1,1 <- 1"),
    (lambda: confirmed(aten.rand_like.default, const(4, 8)), "0 <- 0; 1 <- 1"),
    (lambda: confirmed(aten.relu_.default, const(4, 8)), ""),
    (
        lambda: confirmed(aten.grid_sampler_2d.default, x(4, 8, 8, 8), const(4, 4, 4, 2), 0, 0, False),
        "0 <- 0,0",
    ),
    (lambda: confirmed(aten.bincount.default, ids(8, 16)), ""),
]


@pytest.mark.parametrize(("rules", "expected"), CASES)
def test_a_call_has_all_its_rules_and_no_wrong_one(rules: Callable[[], str], expected: str) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        assert rules() == expected

"""Rules of operators that read or write at indices: those that each call has, all confirmed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tests.operators.rules.values import confirmed, const, ids, mask, x

aten = torch.ops.aten

CASES = [
    (lambda: confirmed(aten.index.Tensor, x(8, 4, 6), [ids(8, 4)]), "1 <- 1,R; 2 <- 2,R; 0 <- R,0; P <- P,R"),
    (
        lambda: confirmed(aten.index.Tensor, x(8, 4, 6), [None, ids(4, 8)]),
        "0 <- 0,R; 2 <- 2,R; 1 <- R,0; P <- P,R",
    ),
    (
        lambda: confirmed(aten.index.Tensor, x(8, 4, 8), [ids(8, 4), ids(4, 4)]),
        "1 <- 2,R,R; 0 <- R,0,0; P <- P,R,R",
    ),
    (
        lambda: confirmed(aten.index.Tensor, x(8, 4, 8), [ids(8, 4, 1), ids(4, 8)]),
        "2 <- 2,R,R; 0 <- R,0,R; 1 <- R,R,0; P <- P,R,R",
    ),
    (
        lambda: confirmed(aten.index.Tensor, x(8, 4, 8), [ids(8, 4), None, ids(8, 4)]),
        "1 <- 1,R,R; 0 <- R,0,0; P <- P,R,R",
    ),
    (lambda: confirmed(aten.index.Tensor, x(8, 4), [mask(8)]), ""),
    (lambda: confirmed(aten.index.Tensor, mask(8, 4), [ids(8, 4), torch.tensor(2)]), "0 <- R,0,R"),
    (
        lambda: confirmed(aten.index_put.default, x(8, 4, 8), [torch.randperm(8)[:4]], x(4, 4, 8)),
        "1 <- 1,R,1; 2 <- 2,R,2",
    ),
    (
        lambda: confirmed(aten.index_put.default, x(8, 4, 8), [ids(8, 4)], x(4, 4, 8), True),
        "1 <- 1,R,1; 2 <- 2,R,2; P <- P,0,0",
    ),
    (
        lambda: confirmed(aten.index_put.default, x(8, 4, 8), [None, ids(4, 4)], x(8), True),
        "0 <- 0,R,R; 2 <- 2,R,0; P <- P,0,R",
    ),
    (lambda: confirmed(aten.index_put.default, x(8, 4), [mask(8, 4)], const()), ""),
    (lambda: confirmed(aten.index_select.default, x(8, 4), 0, ids(8, 16)), "1 <- 1,R; 0 <- R,0; P <- P,R"),
    (lambda: confirmed(aten.index_select.default, x(8), 0, torch.tensor(3)), "P <- P,R"),
    (lambda: confirmed(aten.gather.default, x(4, 8), -1, ids(8, 4, 4)), "0 <- 0,0; 1 <- R,1; P <- P,R"),
    (lambda: confirmed(aten.gather.default, x(8, 8), 1, ids(8, 4, 4)), "1 <- R,1; P <- P,R"),
    (
        lambda: confirmed(aten.take_along_dim.default, x(4, 8), ids(8, 4, 4), 1),
        "0 <- 0,0; 1 <- R,1; P <- P,R",
    ),
    (lambda: confirmed(aten.take_along_dim.default, x(8), ids(8, 4)), ""),
    (
        lambda: confirmed(aten.scatter.src, x(4, 8), 1, torch.stack([torch.randperm(8)] * 4), x(4, 8)),
        "0 <- 0,0,0",
    ),
    (lambda: confirmed(aten.scatter.value, x(8, 8), 1, ids(8, 4, 4), 2.0), ""),
    (
        lambda: confirmed(aten.scatter_add.default, x(4, 8), 0, ids(4, 8, 8), x(8, 8)),
        "1 <- 1,1,1; P <- P,0,0",
    ),
    (lambda: confirmed(aten.scatter_reduce.two, x(4, 8), 1, ids(8, 4, 8), x(4, 8), "mean"), "0 <- 0,0,0"),
    (lambda: confirmed(aten.index_add.default, x(8, 4), 0, ids(8, 16), x(16, 4)), "1 <- 1,R,1; P <- P,0,0"),
    (lambda: confirmed(aten.index_copy.default, x(8, 4), 0, torch.randperm(8)[:4], x(4, 4)), "1 <- 1,R,1"),
    (lambda: confirmed(aten.index_fill.int_Scalar, x(8, 4), 0, torch.randperm(8)[:4], 1.0), "1 <- 1,R"),
    (lambda: confirmed(aten.one_hot.default, ids(8, 4, 8), 8), "0 <- 0; 1 <- 1"),
    (lambda: confirmed(aten.one_hot.default, torch.arange(8)), ""),
]


@pytest.mark.parametrize(("rules", "expected"), CASES)
def test_a_call_has_all_its_rules_and_no_wrong_one(rules: Callable[[], str], expected: str) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        assert rules() == expected

"""Rules of operators that reduce dims or look along one, and of losses: those that each call has, all confirmed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tests.operators.rules.values import confirmed, const, ids, mask, up, x

aten = torch.ops.aten


def some_ignored(bound: int, *shape: int) -> torch.Tensor:
    """Targets of which the first three are ignored, so that ranks count differently."""
    targets = ids(bound, *shape)
    targets[:3] = -100
    return targets


CASES = [
    (lambda: confirmed(aten.sum.default, x(4, 8)), "P <- 0; P <- 1; P <- P"),
    (lambda: confirmed(aten.sum.default, ids(5, 4, 8)), ""),
    (lambda: confirmed(aten.sum.dim_IntList, x(4, 8, 8), [0, -1]), "P <- 0; 0 <- 1; P <- 2; P <- P"),
    (lambda: confirmed(aten.sum.dim_IntList, mask(4, 8), [1], True, dtype=torch.float32), "0 <- 0; P <- 1"),
    (lambda: confirmed(aten.mean.dim, x(4, 8, 8), [-1], True), "0 <- 0; 1 <- 1; P <- 2; P <- P"),
    (lambda: confirmed(aten.mean.default, x(4, 8)), "P <- 0; P <- 1; P <- P"),
    (lambda: confirmed(aten.nansum.default, x(4, 8), [1]), "0 <- 0; P <- 1"),
    (lambda: confirmed(aten.amax.default, x(4, 8, 8), [1]), "0 <- 0; 1 <- 2"),
    (lambda: confirmed(aten.max.dim, x(4, 8), 1), "0,0 <- 0"),
    (lambda: confirmed(aten.min.dim, x(4, 8), 0, True), "1,1 <- 1"),
    (lambda: confirmed(aten.max.default, x(4, 8)), ""),
    (lambda: confirmed(aten.median.dim, x(4, 8), -1), "0,0 <- 0"),
    (lambda: confirmed(aten.kthvalue.default, x(4, 8), 2), "0,0 <- 0"),
    (lambda: confirmed(aten.prod.dim_int, x(4, 8), 1), "0 <- 0"),
    (lambda: confirmed(aten.var.correction, x(4, 8, 8), [2], keepdim=True), "0 <- 0; 1 <- 1"),
    (lambda: confirmed(aten.var_mean.correction, x(4, 8, 8), [1]), "0,0 <- 0; 1,1 <- 2"),
    (lambda: confirmed(aten.logsumexp.default, x(4, 8), [-1]), "0 <- 0"),
    (lambda: confirmed(aten.argmax.default, x(4, 8), 1), "0 <- 0"),
    (lambda: confirmed(aten.any.dim, mask(4, 8), 0), "0 <- 1"),
    (lambda: confirmed(aten.linalg_vector_norm.default, x(4, 8), 2, [1]), "0 <- 0"),
    (lambda: confirmed(aten.cumsum.default, x(4, 8), -2), "1 <- 1; P <- P"),
    (lambda: confirmed(aten.cumsum.default, ids(4, 4, 8), 0), "1 <- 1"),
    (lambda: confirmed(aten.cumprod.default, up(4, 8), 1), "0 <- 0"),
    (lambda: confirmed(aten.diff.default, x(4, 8), 1, -1, x(4, 1)), "0 <- 0,0; P <- P,P"),
    (lambda: confirmed(aten.sort.default, x(4, 8), 0), "1,1 <- 1"),
    (lambda: confirmed(aten.argsort.default, x(4, 8)), "0 <- 0"),
    (lambda: confirmed(aten.topk.default, x(4, 8), 2), "0,0 <- 0"),
    (lambda: confirmed(aten.glu.default, x(4, 8), 0), "1 <- 1"),
    (lambda: confirmed(aten.softmax.int, x(4, 8, 8), -1), "0 <- 0; 1 <- 1"),
    (lambda: confirmed(aten._log_softmax.default, x(4, 8, 8), 1, False), "0 <- 0; 2 <- 2"),
    (lambda: confirmed(aten.softmax.int, x(8), 0), ""),
    (lambda: confirmed(aten.cross_entropy_loss.default, x(8, 4), ids(4, 8)), "R <- 0,0; R <- 1,R"),
    (lambda: confirmed(aten.cross_entropy_loss.default, x(8, 4), some_ignored(4, 8)), "R <- 0,0; R <- 1,R"),
    (
        lambda: confirmed(
            aten.cross_entropy_loss.default, x(8, 4), some_ignored(4, 8), const(4), 1, -100, 0.1
        ),
        "R <- 0,0,R",
    ),
    (
        lambda: confirmed(aten.cross_entropy_loss.default, x(8, 4), some_ignored(4, 8), const(4)),
        "R <- 0,0,R; R <- 1,R,R",
    ),
    (
        lambda: confirmed(aten.cross_entropy_loss.default, x(8, 4), some_ignored(4, 8), None, 2, -100, 0.1),
        "P <- 0,0; R <- 1,R",
    ),
    (
        lambda: confirmed(aten.cross_entropy_loss.default, x(8, 4), some_ignored(4, 8), const(4), 0),
        "0 <- 0,0,R; R <- 1,R,R",
    ),
    (
        lambda: confirmed(aten.cross_entropy_loss.default, x(8, 4), torch.full((8,), -100)),
        "R <- 0,0; R <- 1,R",
    ),
    (
        lambda: confirmed(aten.cross_entropy_loss.default, x(8, 4), ids(4, 8), ignore_index=3),
        "R <- 0,0; R <- 1,R",
    ),
    (
        lambda: confirmed(aten.cross_entropy_loss.default, x(4, 8, 4), ids(8, 4, 4)),
        "R <- 0,0; R <- 1,R; R <- 2,1",
    ),
    (lambda: confirmed(aten.cross_entropy_loss.default, x(8), torch.tensor(3)), "R <- 0,R"),
    (
        lambda: confirmed(aten.cross_entropy_loss.default, x(8, 4), const(8, 4), const(4), 1, -100, 0.1),
        "P <- 0,0,R",
    ),
    (lambda: confirmed(aten.cross_entropy_loss.default, x(8, 4), const(8, 4), None, 2), "P <- 0,0"),
    (lambda: confirmed(aten.nll_loss_nd.default, x(8, 4), some_ignored(4, 8), const(4)), "R <- 0,0,R"),
    (lambda: confirmed(aten.nll_loss_nd.default, x(8, 4), ids(4, 8), None, 0), "0 <- 0,0"),
    (lambda: confirmed(aten.mse_loss.default, x(4, 8), x(4, 8)), "P <- 0,0; P <- 1,1"),
    (lambda: confirmed(aten.smooth_l1_loss.default, x(4, 8), x(4, 8), 2), "P <- 0,0; P <- 1,1"),
    (lambda: confirmed(aten.l1_loss.default, x(4, 8), x(4, 8), 0), "0 <- 0,0; 1 <- 1,1"),
    (lambda: confirmed(aten.kl_div.default, x(4, 8), const(4, 8)), "P <- 0,0; P <- 1,1"),
    (
        lambda: confirmed(
            aten.binary_cross_entropy_with_logits.default, x(4, 8), const(4, 8), None, const(8)
        ),
        "P <- 0,0,R; P <- 1,1,0",
    ),
]


@pytest.mark.parametrize(("rules", "expected"), CASES)
def test_a_call_has_all_its_rules_and_no_wrong_one(rules: Callable[[], str], expected: str) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        assert rules() == expected

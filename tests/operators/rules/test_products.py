"""Rules of layers: matrix products, convolutions, attention, norms, pooling and look-ups: those that each call has, all confirmed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import transformers.integrations.moe  # noqa: F401 - registers its operators

from tests.operators.rules.values import confirmed, const, ids, up, x

aten = torch.ops.aten
moe = torch.ops.transformers

CASES = [
    (
        lambda: confirmed(aten.linear.default, x(4, 8, 16), x(8, 16), x(8)),
        "0 <- 0,R,R; 1 <- 1,R,R; P <- 2,1,P; 2 <- R,0,0",
    ),
    (lambda: confirmed(aten.linear.default, x(4, 16), x(8, 16)), "0 <- 0,R; P <- 1,1; 1 <- R,0"),
    (lambda: confirmed(aten.linear.default, x(8, 16), x(16)), "0 <- 0,R; P <- 1,0"),
    (lambda: confirmed(aten.linear.default, x(4, 6), x(6, 6)), "0 <- 0,R; P <- 1,1; 1 <- R,0"),
    (
        lambda: confirmed(aten.addmm.default, x(8), x(4, 16), x(16, 8), beta=0.5, alpha=2),
        "1 <- 0,R,1; 0 <- R,0,R; P <- P,1,0",
    ),
    (
        lambda: confirmed(aten.addmm.default, x(4, 1), x(4, 16), x(16, 8)),
        "0 <- 0,0,R; P <- P,1,0; 1 <- R,R,1",
    ),
    (
        lambda: confirmed(aten.baddbmm.default, x(8, 8), x(4, 8, 4), x(4, 4, 8)),
        "1 <- 0,1,R; 2 <- 1,R,2; 0 <- R,0,0; P <- P,2,1",
    ),
    (lambda: confirmed(aten.mm.default, x(4, 8), x(8, 4)), "0 <- 0,R; P <- 1,0; 1 <- R,1"),
    (lambda: confirmed(aten.bmm.default, x(4, 8, 4), x(4, 4, 8)), "0 <- 0,0; 1 <- 1,R; P <- 2,1; 2 <- R,2"),
    (lambda: confirmed(aten.mv.default, x(4, 8), x(8)), "0 <- 0,R; P <- 1,0"),
    (lambda: confirmed(aten.dot.default, x(8), x(8)), "P <- 0,0"),
    (lambda: confirmed(aten.outer.default, x(8), x(4)), "0 <- 0,R; 1 <- R,0"),
    (
        lambda: confirmed(aten.matmul.default, x(1, 4, 4, 8), x(4, 1, 8, 4)),
        "1 <- 1,R; 2 <- 2,R; P <- 3,2; 0 <- R,0; 3 <- R,3",
    ),
    (lambda: confirmed(aten.matmul.default, x(8), x(4, 8, 4)), "P <- 0,1; 0 <- R,0; 1 <- R,2"),
    (lambda: confirmed(aten.matmul.default, x(4, 4, 8), x(8)), "0 <- 0,R; 1 <- 1,R; P <- 2,0"),
    (
        lambda: confirmed(aten.einsum.default, "bhid,bhjd->bhij", [x(4, 4, 8, 4), x(4, 4, 8, 4)]),
        "0 <- 0,0; 1 <- 1,1; 2 <- 2,R; P <- 3,3; 3 <- R,2",
    ),
    (
        lambda: confirmed(aten.einsum.default, "bi,i,bj->bj", [x(4, 8), x(8), x(4, 4)]),
        "0 <- 0,R,0; P <- 1,0,R; 1 <- R,R,1",
    ),
    (
        lambda: confirmed(aten.einsum.default, "b...i,ji->b...j", [x(4, 8, 4), x(8, 4)]),
        "0 <- 0,R; 1 <- 1,R; P <- 2,1; 2 <- R,0",
    ),
    (
        lambda: confirmed(aten.einsum.default, "...ij,...jk", [x(4, 8, 4), x(1, 4, 8)]),
        "0 <- 0,R; 1 <- 1,R; P <- 2,1; 2 <- R,2",
    ),
    (lambda: confirmed(aten.einsum.default, "ii->i", [x(4, 4)]), ""),
    (lambda: confirmed(aten.einsum.default, "ij->", [x(4, 8)]), "P <- 0; P <- 1"),
    (
        lambda: confirmed(aten.conv1d.default, x(4, 8, 12), x(4, 8, 3), x(4)),
        "0 <- 0,R,R; P <- 1,1,P; 1 <- R,0,0",
    ),
    (
        lambda: confirmed(aten.conv2d.padding, x(8, 8, 8), x(4, 8, 3, 3), x(4), [1, 1], "same"),
        "P <- 0,1,P; 0 <- R,0,0",
    ),
    (
        lambda: confirmed(aten.conv2d.default, x(4, 8, 8, 8), x(8, 1, 3, 3), x(8), [1, 1], [1, 1], [1, 1], 8),
        "0 <- 0,R,R",
    ),
    (
        lambda: confirmed(aten.conv3d.default, x(4, 4, 4, 4, 4), x(8, 4, 2, 2, 2)),
        "0 <- 0,R; P <- 1,1; 1 <- R,0",
    ),
    (
        lambda: confirmed(aten.conv_transpose2d.input, x(4, 8, 8, 8), x(8, 4, 3, 3), x(4)),
        "0 <- 0,R,R; P <- 1,0,P; 1 <- R,1,0",
    ),
    (
        lambda: confirmed(
            aten.convolution.default, x(4, 8, 8), x(8, 4, 3), x(4), [1], [0], [1], True, [0], 1
        ),
        "0 <- 0,R,R; P <- 1,0,P; 1 <- R,1,0",
    ),
    (
        lambda: confirmed(
            aten.scaled_dot_product_attention.default, x(4, 4, 8, 8), x(4, 4, 4, 8), x(4, 4, 4, 8)
        ),
        "0 <- 0,0,0; 1 <- 1,1,1; 2 <- 2,R,R",
    ),
    (
        lambda: confirmed(
            aten.scaled_dot_product_attention.default,
            x(4, 4, 8, 8),
            x(4, 4, 8, 8),
            x(4, 4, 8, 8),
            None,
            0.3,
            True,
        ),
        "0 <- 0,0,0; 1 <- 1,1,1",
    ),
    (
        lambda: confirmed(
            aten.scaled_dot_product_attention.default,
            x(4, 4, 8, 8),
            x(4, 4, 8, 8),
            x(4, 4, 8, 8),
            x(1, 4, 8, 8),
        ),
        "0 <- 0,0,0,R; 1 <- 1,1,1,1; 2 <- 2,R,R,2",
    ),
    (
        lambda: confirmed(
            aten.scaled_dot_product_attention.default,
            x(4, 4, 8, 8),
            x(4, 4, 8, 8),
            x(4, 4, 8, 8),
            const(4, 1, 1, 8) > 0.2,
        ),
        "0 <- 0,0,0,0; 1 <- 1,1,1,R; 2 <- 2,R,R,R",
    ),
    (
        lambda: confirmed(
            aten.scaled_dot_product_attention.default,
            x(2, 8, 8, 8),
            x(2, 4, 8, 8),
            x(2, 4, 8, 8),
            enable_gqa=True,
        ),
        "0 <- 0,0,0; 1 <- 1,1,1; 2 <- 2,R,R",
    ),
    (
        lambda: confirmed(
            aten.scaled_dot_product_attention.default,
            x(4, 4, 8, 8),
            x(4, 1, 8, 8),
            x(4, 1, 8, 8),
            enable_gqa=True,
        ),
        "0 <- 0,0,0; 1 <- 1,R,R; 2 <- 2,R,R",
    ),
    (
        lambda: confirmed(aten.scaled_dot_product_attention.default, x(4, 8, 8), x(4, 8, 8), x(4, 8, 8)),
        "0 <- 0,0,0; 1 <- 1,R,R",
    ),
    (lambda: confirmed(aten.layer_norm.default, x(4, 8, 16), [16], up(16), x(16)), "0 <- 0,R,R; 1 <- 1,R,R"),
    (lambda: confirmed(aten.layer_norm.default, x(4, 8, 16), [8, 16], up(8, 16)), "0 <- 0,R"),
    (
        lambda: confirmed(aten.native_layer_norm.default, x(4, 8, 16), [16], up(16), x(16), 1e-5),
        "0,0,0 <- 0,R,R; 1,1,1 <- 1,R,R",
    ),
    (lambda: confirmed(aten.rms_norm.default, x(4, 8, 16), [16], up(16), 1e-6), "0 <- 0,R; 1 <- 1,R"),
    (lambda: confirmed(aten.group_norm.default, x(4, 8, 6, 6), 4, up(8), x(8)), "0 <- 0,R,R"),
    (
        lambda: confirmed(
            aten.instance_norm.default, x(4, 8, 6), up(8), x(8), None, None, True, 0.1, 1e-5, False
        ),
        "0 <- 0,R,R",
    ),
    (
        lambda: confirmed(
            aten.batch_norm.default, x(8, 4, 6), up(4), x(4), const(4), const(4), True, 0.1, 1e-5, False
        ),
        "",
    ),
    (
        lambda: confirmed(aten.embedding.default, x(16, 8), ids(16, 4, 8), 5),
        "P <- 0,R; 2 <- 1,R; 0 <- R,0; 1 <- R,1",
    ),
    (lambda: confirmed(aten.embedding.default, x(16, 8), ids(16, 4), -1, True), ""),
    (lambda: confirmed(aten.max_pool2d.default, x(4, 8, 8, 8), [2, 2]), "0 <- 0; 1 <- 1"),
    (lambda: confirmed(aten.adaptive_avg_pool1d.default, x(4, 8, 8), [1]), "0 <- 0; 1 <- 1"),
    (lambda: confirmed(aten.upsample_bilinear2d.vec, x(4, 8, 4, 4), [8, 8], False, None), "0 <- 0; 1 <- 1"),
    (
        lambda: confirmed(
            moe.grouped_mm_fallback.default,
            x(16, 16),
            x(4, 16, 8),
            torch.tensor([4, 8, 10, 16], dtype=torch.int32),
        ),
        "P <- 1,1,R; 1 <- R,2,R",
    ),
    (
        lambda: confirmed(
            aten._grouped_mm.default, x(16, 32), x(4, 32, 8), torch.tensor([4, 8, 10, 16], dtype=torch.int32)
        ),
        "P <- 1,1,R; 1 <- R,2,R",
    ),
]


@pytest.mark.parametrize(("rules", "expected"), CASES)
def test_a_call_has_all_its_rules_and_no_wrong_one(rules: Callable[[], str], expected: str) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        assert rules() == expected

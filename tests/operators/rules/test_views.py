"""Rules of operators that move, join, cut or repeat elements, and of those that make tensors: those that each call has, all confirmed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from atorch_ns.capture.graph.call import UNKNOWN_SIZE
from atorch_ns.operators.rules.views import _equal_products
from tests.operators.rules.values import confirmed, const, ids, x

aten = torch.ops.aten
_split_at = aten.tensor_split.tensor_indices_or_sections

CASES = [
    (lambda: confirmed(aten.view.default, x(4, 8, 16), [4, 8, 4, 4]), "0 <- 0; 1 <- 1; 2 <- 2; P <- P"),
    (lambda: confirmed(aten.view.default, x(4, 8, 4, 4), [-1, 16]), "0 <- 0; 1 <- 2; P <- P"),
    (lambda: confirmed(aten.reshape.default, x(4, 8, 4), [4, 4, 8]), "0 <- 0; 1 <- 1; P <- P"),
    (lambda: confirmed(aten.view.default, x(4, 6), [2, 12]), "0 <- 0; P <- P"),
    (lambda: confirmed(aten.view.default, x(1, 8, 1, 4), [8, 4, 1]), "0 <- 1; 1 <- 3; P <- P"),
    (lambda: confirmed(aten.view.default, x(1), []), "P <- P"),
    (lambda: confirmed(aten.view.default, ids(4, 8, 4), [32]), "0 <- 0"),
    (lambda: confirmed(aten.view.dtype, const(4, 8), torch.int16), ""),
    (lambda: confirmed(aten.view_as.default, x(4, 8), x(4, 2, 4)), "0 <- 0,0; 1 <- 1,1; P <- P,R"),
    (lambda: confirmed(aten.flatten.using_ints, x(4, 8, 16), 1), "0 <- 0; 1 <- 1; P <- P"),
    (lambda: confirmed(aten.unflatten.int, x(4, 16), -1, [4, -1]), "1 <- 1; P <- P"),
    (lambda: confirmed(aten.permute.default, x(4, 8, 2), [-1, 0, 1]), "1 <- 0; 2 <- 1; 0 <- 2; P <- P"),
    (lambda: confirmed(aten.transpose.int, x(4, 8, 2), -1, 0), "2 <- 0; 1 <- 1; 0 <- 2; P <- P"),
    (lambda: confirmed(aten.t.default, x(4, 8)), "1 <- 0; 0 <- 1; P <- P"),
    (lambda: confirmed(aten.movedim.intlist, x(4, 8, 2), [0, 1], [1, 2]), "1 <- 0; 2 <- 1; 0 <- 2; P <- P"),
    (lambda: confirmed(aten.swapaxes.default, x(4, 8), 0, 1), "1 <- 0; 0 <- 1; P <- P"),
    (lambda: confirmed(aten.mT.default, x(2, 4, 8)), "0 <- 0; 2 <- 1; 1 <- 2; P <- P"),
    (lambda: confirmed(aten.numpy_T.default, x(4, 8)), "1 <- 0; 0 <- 1; P <- P"),
    (lambda: confirmed(aten.expand.default, x(4, 1, 8), [-1, 8, -1]), "0 <- 0; 2 <- 2; 1 <- R; P <- P"),
    (lambda: confirmed(aten.expand.default, x(8), [4, 8]), "1 <- 0; 0 <- R; P <- P"),
    (lambda: confirmed(aten.expand_as.default, x(4, 1), x(4, 8)), "0 <- 0,0; 1 <- R,1; P <- P,R"),
    (lambda: confirmed(aten.unsqueeze.default, x(4, 8), -1), "0 <- 0; 1 <- 1; P <- P"),
    (lambda: confirmed(aten.squeeze.default, x(4, 1, 2)), "0 <- 0; P <- P"),
    (lambda: confirmed(aten.squeeze.dim, x(4, 1, 2), 1), "0 <- 0; 1 <- 2; P <- P"),
    (lambda: confirmed(aten.squeeze.dims, x(4, 1, 2), [1, 2]), "0 <- 0; P <- P"),
    (lambda: confirmed(aten.cat.default, [x(4, 8), x(4, 4)], -1), "0 <- 0,0; P <- P,P"),
    (lambda: confirmed(aten.cat.default, [x(0), x(4, 8)]), ""),
    (lambda: confirmed(aten.stack.default, [x(4, 8), x(4, 8)], 1), "0 <- 0,0; 2 <- 1,1; P <- P,P"),
    (lambda: confirmed(aten.split.Tensor, x(4, 8), 4, 1), "0,0 <- 0; P,P <- P"),
    (lambda: confirmed(aten.chunk.default, x(4, 8), 2), "1,1 <- 1; P,P <- P"),
    (lambda: confirmed(aten.unbind.int, x(4, 2), 1), "0,0 <- 0; P,P <- P"),
    (lambda: confirmed(aten.select.int, x(4, 8), -1, -1), "0 <- 0; P <- P"),
    (lambda: confirmed(aten.slice.Tensor, x(4, 8), 1, 0, 4), "0 <- 0; P <- P"),
    (lambda: confirmed(aten.slice.Tensor, x(4, 8), 1, 0, 9223372036854775807), "0 <- 0; 1 <- 1; P <- P"),
    (lambda: confirmed(aten.slice.Tensor, x(4, 8), 1, -8), "0 <- 0; P <- P"),
    (lambda: confirmed(aten.narrow.default, x(4, 8), 1, 2, 4), "0 <- 0; P <- P"),
    (lambda: confirmed(aten.narrow.Tensor, x(4, 8), 1, torch.tensor(2), 4), "0 <- 0,R; P <- P,R"),
    (lambda: confirmed(_split_at, x(4, 8), torch.tensor([2]), 1), "0,0 <- 0,R; P,P <- P,R"),
    (lambda: confirmed(aten.unfold.default, x(4, 8), 1, 2, 2), "0 <- 0; P <- P"),
    (lambda: confirmed(aten.flip.default, x(4, 8), [1]), "0 <- 0; P <- P"),
    (lambda: confirmed(aten.roll.default, x(4, 8), [3]), "P <- P"),
    (lambda: confirmed(aten.tril.default, x(4, 8, 8)), "0 <- 0; P <- P"),
    (lambda: confirmed(aten.pad.default, x(4, 8, 8), [0, 0, 1, 0]), "0 <- 0; 2 <- 2; P <- P"),
    (lambda: confirmed(aten.pad.default, x(4, 8, 8), [1, 1], "reflect"), "0 <- 0; 1 <- 1"),
    (lambda: confirmed(aten.constant_pad_nd.default, x(4, 8), [0, 2], 1.0), "0 <- 0"),
    (lambda: confirmed(aten.repeat.default, x(4, 8), [2, 1, 2]), "1 <- 0; P <- P"),
    (lambda: confirmed(aten.tile.default, x(4, 8), [2]), "0 <- 0; P <- P"),
    (lambda: confirmed(aten.repeat_interleave.self_int, x(4, 8), 2, 1), "0 <- 0; 1 <- 1; P <- P"),
    (lambda: confirmed(aten.repeat_interleave.self_int, x(4, 8), 2), "0 <- 0; P <- P"),
    (lambda: confirmed(aten.repeat_interleave.self_Tensor, x(4, 8), ids(3, 4) + 1, 0), "1 <- 1,R; P <- P,R"),
    (lambda: confirmed(aten.repeat_interleave.self_int, x(4, 8), 2, 1, output_size=16), "0 <- 0; P <- P"),
    (lambda: confirmed(aten.repeat_interleave.self_int, x(4, 8), 2, output_size=64), "P <- P"),
    (lambda: confirmed(aten.repeat_interleave.Tensor, ids(3, 4)), ""),
    (lambda: confirmed(aten.zeros.default, [4, 8]), "0 <- ; 1 <- "),
    (lambda: confirmed(aten.new_full.default, const(3), [4, 8], 2.0), "0 <- R; 1 <- R"),
    (lambda: confirmed(aten.randint.low, 0, 5, [4, 8]), "0 <- ; 1 <- "),
    (lambda: confirmed(aten.arange.default, 8), ""),
]


_JOINED = ((UNKNOWN_SIZE, 4), (UNKNOWN_SIZE,))


@pytest.mark.parametrize(("before", "after"), [_JOINED, _JOINED[::-1]])
def test_sizes_that_depend_on_values_are_joined_and_cut(
    before: tuple[int, ...], after: tuple[int, ...]
) -> None:
    assert list(_equal_products(before, after)) == [([0], [0])]


@pytest.mark.parametrize(("rules", "expected"), CASES)
def test_a_call_has_all_its_rules_and_no_wrong_one(rules: Callable[[], str], expected: str) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        assert rules() == expected

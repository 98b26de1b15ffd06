"""Confirmation refuses wrong rules, and says which."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from atorch_ns.errors import InputError
from atorch_ns.operators.rules.rule import Rule
from tests.operators.confirm import call_of, confirm
from tests.operators.rules.values import const, ids, up, x

aten = torch.ops.aten
Made = Callable[[], tuple[Any, ...]]

WRONG: dict[str, tuple[Made, str, str, str]] = {
    "a bias added by every rank": (
        lambda: (aten.linear.default, x(4, 8), x(8, 8), x(8)),
        "P <- 1,1,R",
        "",
        "result 0",
    ),
    "columns of the weight": (
        lambda: (aten.linear.default, x(4, 8), x(8, 8)),
        "1 <- R,1",
        "",
        "fails on pieces",
    ),
    "a mean of parts as it is": (lambda: (aten.mean.default, x(4, 8)), "P <- 0", "", "result 0"),
    "softmax along its dim": (lambda: (aten.softmax.int, x(4, 8), 1), "1 <- 1", "", "result 0"),
    "another dim of a view": (
        lambda: (aten.view.default, x(4, 8, 4), [4, 8, 2, 2]),
        "3 <- 2",
        "",
        "result 0",
    ),
    "the dim that a norm looks at": (
        lambda: (aten.layer_norm.default, x(4, 8), [8], up(8), x(8)),
        "1 <- 1,0,0",
        "",
        "fails on pieces",
    ),
    "keys": (
        lambda: (aten.scaled_dot_product_attention.default, x(2, 2, 4, 4), x(2, 2, 4, 4), x(2, 2, 4, 4)),
        "P <- R,2,2",
        "",
        "result 0",
    ),
    "rows of causal attention": (
        lambda: (aten.scaled_dot_product_attention.default, *(x(2, 2, 4, 4) for _ in "qkv"), None, 0.5, True),
        "2 <- 2,R,R",
        "",
        "result 0",
    ),
    "summands of a function that is not linear": (
        lambda: (aten.relu.default, x(4, 8)),
        "P <- P",
        "",
        "result 0",
    ),
    "a summand and a whole": (lambda: (aten.add.Tensor, x(4, 8), x(4, 8)), "P <- P,R", "", "result 0"),
    "rows of a table without a kernel": (
        lambda: (aten.embedding.default, x(8, 4), ids(8, 16)),
        "P <- 0,R",
        "",
        "fails on pieces",
    ),
    "a mean of means": (
        lambda: (aten.cross_entropy_loss.default, x(8, 4), torch.tensor([-100, -100, -100, 1, 2, 3, 0, 1])),
        "P <- 0,0",
        "mean_of_parts",
        "result 0",
    ),
    "a result that is not whole": (lambda: (aten.sum.default, x(4, 8)), "R <- 0", "", "result 0"),
    "a scan of integers": (
        lambda: (aten.cumsum.default, ids(4, 4, 8) + 1, 0),
        "0 <- 0",
        "",
        "differs at 16 places",
    ),
    "pieces in place of a whole result": (
        lambda: (aten.relu.default, x(4, 8)),
        "0 <- R",
        "",
        "has shape [8, 8]",
    ),
}


@pytest.mark.parametrize("mistake", WRONG)
def test_a_wrong_rule_is_refused(mistake: str) -> None:
    make, text, kernel, expected = WRONG[mistake]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        operator, *arguments = make()
        call = call_of(operator, *arguments)
        rule = Rule.read(text)
        with pytest.raises(InputError) as caught:
            confirm(call, Rule(rule.outputs, rule.inputs, kernel=kernel), tuple(arguments), {}, 2)
    message = str(caught.value)
    assert expected in message
    assert f"'{text}' of {call.name} on {list(call.tensors[0].shape)}" in message


def test_a_gradient_that_ranks_do_not_share_is_refused() -> None:
    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
            return gradients[0] * gradients[0].shape[0]  # as if it depended on the number of rows

    def operator(x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = Doubled.apply(x)
        return result

    values = x(4, 8)
    call = call_of(operator, values)
    confirm(call, Rule.read("1 <- 1"), (values,), {}, 2)
    with pytest.raises(InputError, match="the gradient of tensor 0 differs"):
        confirm(call, Rule.read("0 <- 0"), (values,), {}, 2)


def test_the_random_state_is_left_alone() -> None:
    values = const(4, 8)
    call = call_of(aten.dropout.default, values, 0.5, True)
    before = torch.get_rng_state()
    confirm(call, Rule.read("0 <- 0"), (values, 0.5, True), {}, 2)
    assert torch.equal(torch.get_rng_state(), before)

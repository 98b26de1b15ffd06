"""Counts of operators: equal to the formulas on paper, for kernels of CPUs and GPUs alike."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional as F

from atorch_ns.costs import OperatorCounter, OperatorCounts
from atorch_ns.profile import fused
from atorch_ns.torch_compat import KernelsOfGpus, fake_tensor_mode

B, H, T, D = 2, 8, 64, 16
ALL_PAIRS, CAUSAL_PAIRS = T * T, T * (T + 1) // 2


def counted(
    *, key_heads: int = H, value_width: int = D, dropout: float = 0.0, **options: Any
) -> tuple[OperatorCounts, OperatorCounts]:
    """Of a forward and a backward pass of attention."""
    with fake_tensor_mode(), KernelsOfGpus(), OperatorCounter() as counter:
        query = torch.randn(B, H, T, D, requires_grad=True)
        key, value = (torch.randn(B, key_heads, T, width, requires_grad=True) for width in (D, value_width))
        if "attn_mask" in options:
            options["attn_mask"] = torch.ones(T, T, dtype=torch.bool).tril()
        counter.counts = forward = OperatorCounts()
        out = F.scaled_dot_product_attention(query, key, value, dropout_p=dropout, **options)
        counter.counts = backward = OperatorCounts()
        out.backward(torch.empty_like(out))
    assert [x.grad.shape for x in (query, key, value) if x.grad is not None] == [
        query.shape,
        key.shape,
        value.shape,
    ]
    return forward, backward


@pytest.mark.parametrize(
    ("options", "pairs"),
    [
        ({}, ALL_PAIRS),
        ({"attn_mask": True}, ALL_PAIRS),  # a kernel computes what a mask of the user's hides
        ({"is_causal": True}, CAUSAL_PAIRS),
        ({"is_causal": True, "dropout": 0.1}, CAUSAL_PAIRS),
        ({"is_causal": True, "key_heads": 2, "enable_gqa": True}, CAUSAL_PAIRS),
    ],
)
@pytest.mark.parametrize("value_width", [D, D // 2])
def test_attention_is_its_pairs(options: dict[str, Any], pairs: int, value_width: int) -> None:
    forward, backward = counted(value_width=value_width, **options)
    assert forward.attention == 2 * B * H * pairs * (D + value_width)  # Q·Kᵀ and P·V
    assert backward.attention == 2 * B * H * pairs * (
        3 * D + 2 * value_width
    )  # scores again, and four gradients
    assert forward.products == backward.products == 0
    kind = forward.attention_kind("forward")
    assert (kind.width, kind.is_causal, kind.num_tokens) == (D, pairs != ALL_PAIRS, T)


@pytest.mark.parametrize(
    ("options", "call", "pairs"),
    [
        ({}, {}, ALL_PAIRS),
        ({"is_causal": True}, {}, CAUSAL_PAIRS),
        ({"is_causal": True}, {"is_causal": False}, ALL_PAIRS),
        ({"is_causal": True, "window": 16}, {}, CAUSAL_PAIRS - (T - 16) * (T - 16 + 1) // 2),
    ],
)
def test_what_is_fused_is_attention_and_trains_its_other_tensors(
    options: dict[str, Any], call: dict[str, Any], pairs: int
) -> None:
    def attend(*_: Any, **__: Any) -> torch.Tensor:
        pytest.fail("the kernel itself was called")

    with fake_tensor_mode(), KernelsOfGpus(), OperatorCounter() as counter:
        query, key = torch.randn(B, H, T, D, requires_grad=True), torch.randn(B, 2, T, D, requires_grad=True)
        sinks = torch.randn(H, requires_grad=True)
        out = fused(attend, **options)(query, key, key, sinks, **call)
        out.sum().backward()
    assert out.shape == query.shape
    assert counter.counts.attention == 7 * 2 * B * H * pairs * D
    assert sinks.grad is not None
    assert sinks.grad.shape == sinks.shape


def test_a_product_moves_its_operands_and_an_activation_its_values() -> None:
    with fake_tensor_mode(), OperatorCounter() as counter:
        x, weight = torch.randn(32, 16), torch.randn(8, 16)
        counter.counts = OperatorCounts()
        F.linear(x, weight).relu()
    counts = counter.counts
    assert counts.products == 2 * 32 * 16 * 8
    assert counts.operands == 4 * (32 * 16 + 8 * 16 + 32 * 8)
    assert counts.moved == 4 * 2 * 32 * 8
    assert counts.num_operators == 2  # the transposed weight is a view


def test_counts_add_up() -> None:
    one = OperatorCounts(products=1, operands=2, moved=3, num_operators=1)
    other = OperatorCounts(attention=5, num_operators=2, head_width=64, num_queries=9, is_causal=True)
    both = one + other
    assert both == OperatorCounts(1, 5, 2, 3, 3, head_width=64, num_queries=9, is_causal=True)

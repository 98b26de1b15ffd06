"""Attention around a ring is the attention of one process."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from atorch_ns.errors import InputError
from atorch_ns.sharding.sequence import ring
from atorch_ns.sharding.sequence.attention import AttentionCall
from atorch_ns.sharding.sequence.plan import SequenceLayout
from atorch_ns.sharding.sequence.ring import RingPart, attend, attend_backward, merge, ring_attention
from atorch_ns.testing.workers import run_ranks
from tests.sharding.sequence.attention_cases import Form, errors, make

FORMS = [
    Form(),
    Form(causal=True, scale=0.3),
    Form(causal=True, zigzag=True),
    Form(causal=True, zigzag=True, length=17, heads=3, key_heads=3),
    Form(causal=True, length=17),
    Form(length=13, mask="padding"),
    Form(length=13, mask="causal", zigzag=True),
    Form(length=3, causal=True, zigzag=True),
    Form(mask="of heads", zigzag=True),
    Form(mask="shared", length=9),
    Form(heads=4, key_heads=2, causal=True, zigzag=True),
    Form(causal=True, zigzag=True, value_width=10),
    Form(length=13, value_width=10),
    Form(heads=3, key_heads=1, mask="padding"),
]


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_equals_one_process(num_ranks: int) -> None:
    for found in run_ranks(errors, num_ranks, args=(ring_attention, FORMS)):
        for form, error in zip(FORMS, found, strict=True):
            assert error < 2e-5, form


def _forms_alike() -> None:
    """A mask that hides nothing keeps the kernel away."""
    generator = torch.Generator().manual_seed(0)
    query, key, value, gradient = (torch.randn(2, 3, 6, 8, generator=generator) for _ in range(4))
    for causal in (False, True):
        fused = RingPart(0.3, causal)
        plain = RingPart(0.3, causal, torch.ones(1, 1, 6, 6, dtype=torch.bool))
        assert fused.kernel(query, key, value) is not None
        assert plain.kernel(query, key, value) is None
        results = [attend(query, key, value, part) for part in (fused, plain)]
        for one, other in zip(*results, strict=True):
            assert torch.allclose(one, other, atol=1e-5)
        gradients = [
            attend_backward(gradient, (query, key, value), results[1], part)[:3] for part in (fused, plain)
        ]
        for one, other in zip(*gradients, strict=True):
            assert torch.allclose(one, other, atol=1e-5)


def test_the_kernel_computes_the_formula() -> None:
    run_ranks(_forms_alike, 1)


def test_a_kernel_whose_gradients_are_not_numbers_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ring, "_kernel_error", lambda *_, **__: 0.0)
    of_kernel = (torch.device("cpu"), torch.float32, 24)
    assert ring._tested_kernel(*of_kernel) is not None
    monkeypatch.setattr(ring, "_kernel_error", lambda *_, causal: float("nan") if causal else 0.0)
    ring._tested_kernel.cache_clear()
    assert ring._tested_kernel(*of_kernel) is None
    ring._tested_kernel.cache_clear()


def test_few_scores_are_alive_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    query, key, value, gradient = (torch.randn(1, 2, 7, 5) for _ in range(4))
    part = RingPart(0.5, causal=True)
    whole = attend(query, key, value, part)
    gradients = attend_backward(gradient, (query, key, value), whole, part)[:3]
    monkeypatch.setattr("atorch_ns.sharding.sequence.ring._MOST_SCORES", 30)
    pieces = attend(query, key, value, part)
    for one, other in zip(whole, pieces, strict=True):
        assert torch.allclose(one, other, atol=1e-6)
    for one, other in zip(
        gradients, attend_backward(gradient, (query, key, value), pieces, part)[:3], strict=True
    ):
        assert torch.allclose(one, other, atol=1e-6)


def test_merging_parts_of_the_keys_is_attention_to_all() -> None:
    query, key, value = (torch.randn(2, 3, 5, 4) for _ in range(3))
    whole, whole_lse = attend(query, key, value, RingPart(0.5))
    first = attend(query, key[..., :2, :], value[..., :2, :], RingPart(0.5))
    second = attend(query, key[..., 2:, :], value[..., 2:, :], RingPart(0.5))
    out, lse = merge(*first, *second)
    assert torch.allclose(out, whole, atol=1e-6)
    assert torch.allclose(lse, whole_lse, atol=1e-6)


def test_queries_that_see_nothing_stay_finite() -> None:
    query, key, value = (torch.randn(1, 1, 3, 4) for _ in range(3))
    nothing = RingPart(1.0, mask=torch.zeros(3, 3, dtype=torch.bool))
    out, lse = attend(query, key, value, nothing)
    assert torch.equal(out, torch.zeros_like(out))
    merged, _ = merge(out, lse, *attend(query, key, value, nothing))
    assert torch.equal(merged, torch.zeros_like(out))


def _trained_masks() -> list[float]:
    """How far a mask's gradient, summed over ranks, is from that in one process, for masks of several shapes."""
    group = dist.group.WORLD
    assert group is not None
    generator = torch.Generator().manual_seed(0)
    query, key, value, weight = (torch.randn(2, 3, 13, 8, generator=generator) for _ in range(4))
    found = []
    for shape, zigzag in (
        ((1, 3, 13, 13), True),
        ((2, 1, 13, 13), False),
        ((3, 1, 13), True),
        ((13, 1), False),
    ):
        layout = SequenceLayout(13, group.size(), group.rank(), zigzag)
        mask = torch.randn(shape, generator=generator).requires_grad_()
        (AttentionCall(query, key, value, mask).run() * weight).sum().backward()
        expected, mask.grad = mask.grad, None
        mine = (layout.select(tensor, -2) for tensor in (query, key, value, weight))
        *own, own_weight = mine
        is_real = torch.arange(layout.local) < layout.num_real(group.rank())
        out = ring_attention(AttentionCall(*own, mask), layout, group)
        (out * own_weight * is_real[:, None]).sum().backward()
        assert mask.grad is not None
        assert expected is not None
        dist.all_reduce(mask.grad)
        found.append(float((mask.grad - expected).abs().max()))
    return found


def test_a_mask_that_is_trained_has_the_gradient_of_one_process() -> None:
    for found in run_ranks(_trained_masks, 3):
        assert max(found) < 2e-5


def _refusal() -> str:
    group = dist.group.WORLD
    assert group is not None
    call = make(Form(mask="shared"))
    with pytest.raises(InputError) as caught:
        ring_attention(
            AttentionCall(call.query, call.key, call.value, dropout=0.1),
            SequenceLayout(24, 2, group.rank()),
            group,
        )
    return str(caught.value)


def test_dropout_of_weights_is_refused_with_the_reason() -> None:
    message, _ = run_ranks(_refusal, 2)
    assert "dropout_p=0.1" in message
    assert "kind='ulysses'" in message

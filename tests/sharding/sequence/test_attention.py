"""Attention over all-to-alls is the attention of one process."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from atorch_ns.errors import InputError
from atorch_ns.sharding.sequence.attention import ulysses_attention
from atorch_ns.sharding.sequence.plan import SequenceLayout
from atorch_ns.testing.workers import run_ranks
from tests.sharding.sequence.attention_cases import Form, errors, make

FORMS = [
    Form(),
    Form(causal=True, scale=0.3),
    Form(causal=True, zigzag=True, length=16),
    Form(length=13, mask="padding"),
    Form(length=13, mask="causal", zigzag=True),
    Form(length=3, causal=True),
    Form(mask="of heads"),
    Form(mask="shared", length=9),
    Form(heads=4, key_heads=2, causal=True),
    Form(heads=4, key_heads=1, mask="padding"),
    Form(heads=8, key_heads=4, length=10),
    Form(heads=12, key_heads=6, length=10),
]


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_equals_one_process(num_ranks: int) -> None:
    for found in run_ranks(errors, num_ranks, args=(ulysses_attention, FORMS)):
        for form, error in zip(FORMS, found, strict=True):
            assert error < 2e-5, form


def _masks_of_parts() -> float:
    """A mask made for this rank's rows or columns is completed."""
    group = dist.group.WORLD
    assert group is not None
    layout = SequenceLayout(12, 2, group.rank())
    call = make(Form(mask="shared"))
    assert call.mask is not None
    expected = call.run()
    worst = 0.0
    for dims in ((-1,), (-2,)):
        mask = call.mask
        for dim in dims:
            mask = layout.select(mask, dim)
        part = replace(call, mask=mask)
        part = type(part)(*(layout.select(x, -2) for x in (call.query, call.key, call.value)), mask)
        found = layout.gather(ulysses_attention(part, layout, group), -2, group)
        worst = max(worst, float((found - expected).abs().max()))
    return worst


def test_masks_of_parts_are_completed() -> None:
    assert max(run_ranks(_masks_of_parts, 2)) < 1e-5


def _too_few_heads() -> str:
    group = dist.group.WORLD
    assert group is not None
    call = make(Form(heads=3, key_heads=3))
    with pytest.raises(InputError) as caught:
        ulysses_attention(call, SequenceLayout(24, 2, group.rank()), group)
    return str(caught.value)


def test_heads_that_do_not_divide_are_named() -> None:
    (message, _) = run_ranks(_too_few_heads, 2)
    assert "3 attention heads over sequence=2" in message
    assert "kind='ring'" in message


def _dropped() -> tuple[float, float]:
    """The share of zeros that each rank sees, with values of one and uniform weights."""
    group = dist.group.WORLD
    assert group is not None
    torch.manual_seed(group.rank())
    layout = SequenceLayout(64, 2, group.rank())
    zeros = torch.zeros(4, 2, 32, 8)
    call = make(Form())
    call = type(call)(zeros, zeros, torch.ones(4, 2, 32, 8), dropout=0.25)
    out = ulysses_attention(call, layout, group)
    return float(out.mean()), float(out[..., 0].std())


def test_attention_dropout_keeps_the_mean() -> None:
    for mean, deviation in run_ranks(_dropped, 2):
        assert abs(mean - 1) < 0.05
        assert 0.02 < deviation < 0.2  # sqrt(p / (1-p) / 64) = 0.07

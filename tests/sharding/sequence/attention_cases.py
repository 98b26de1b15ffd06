"""Attention calls of many forms, computed whole and divided."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from atorch_ns.sharding.sequence.attention import AttentionCall
from atorch_ns.sharding.sequence.plan import SequenceLayout

Divided = Callable[[AttentionCall, SequenceLayout, dist.ProcessGroup], torch.Tensor]

BATCH, WIDTH = 2, 8


class Form(NamedTuple):
    """One form of a call: heads, key heads, positions, what is hidden, and where positions lie."""

    heads: int = 4
    key_heads: int = 4
    length: int = 12
    mask: str = ""
    causal: bool = False
    zigzag: bool = False
    scale: float | None = None
    value_width: int = WIDTH


def make(form: Form) -> AttentionCall:
    """The call on the whole sequence."""
    generator = torch.Generator().manual_seed(form.length)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, requires_grad=True)

    length = form.length
    return AttentionCall(
        random(BATCH, form.heads, length, WIDTH),
        random(BATCH, form.key_heads, length, WIDTH),
        random(BATCH, form.key_heads, length, form.value_width),
        _mask(form, generator),
        causal=form.causal,
        scale=form.scale,
        grouped=form.heads != form.key_heads,
    )


def _mask(form: Form, generator: torch.Generator) -> torch.Tensor | None:
    length = form.length
    if form.mask == "padding":
        seen = torch.ones(BATCH, 1, 1, length, dtype=torch.bool)
        seen[0, ..., :3] = False
        return seen
    if form.mask == "causal":
        return torch.ones(length, length, dtype=torch.bool).tril()
    if form.mask == "of heads":
        return torch.randn(BATCH, form.heads, length, length, generator=generator)
    if form.mask == "shared":
        return torch.randn(1, 1, length, length, generator=generator)
    return None


def errors(divided: Divided, forms: list[Form], **changes: Any) -> list[float]:
    """For each form the largest deviation of results and gradients on this rank, collective."""
    return [_error(divided, replace(make(form), **changes), form) for form in forms]


def _error(divided: Divided, call: AttentionCall, form: Form) -> float:
    group = dist.group.WORLD
    assert group is not None
    layout = SequenceLayout(form.length, group.size(), group.rank(), form.zigzag)
    whole = call.run()
    weights = torch.randn(whole.shape, generator=torch.Generator().manual_seed(9))
    inputs = (call.query, call.key, call.value)
    expected = torch.autograd.grad((whole * weights).sum(), inputs)
    part = replace(
        call,
        query=layout.divide(call.query, -2, group),
        key=layout.divide(call.key, -2, group),
        value=layout.divide(call.value, -2, group),
    )
    found = layout.gather(divided(part, layout, group), -2, group)
    gradients = torch.autograd.grad((found * weights).sum(), inputs)
    pairs = [(found, whole), *zip(gradients, expected, strict=True)]
    return max(float((mine - theirs).abs().max()) for mine, theirs in pairs)

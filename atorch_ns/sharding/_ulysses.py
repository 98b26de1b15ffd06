"""Ulysses: for attention, the division by positions becomes one by heads and back again.

Each rank has all heads of its positions before, and all positions of its heads in between, where the ordinary
kernel runs. Four all-to-alls a call, each of 1/n of the bytes of a query. (Jacobs et al. 2023, DeepSpeed Ulysses.)

Legend: as in ``_attention_calls.py``; n ranks, L = T/n positions of one rank.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
import torch.distributed as dist

from atorch_ns.errors import InputError
from atorch_ns.sharding._attention_calls import AttentionCall
from atorch_ns.sharding._collectives import all_gather, all_to_all
from atorch_ns.sharding._sequence_layout import SequenceLayout

__all__ = ["heads_divide", "own_rows", "ulysses_attention", "whole_mask"]

_HEADS = -3
_POSITIONS = -2


def heads_divide(call: AttentionCall, ranks: int) -> bool:
    """Whether the heads of a call can be divided over ``ranks``."""
    return call.query.dim() > 2 and call.num_heads % ranks == 0


def ulysses_attention(call: AttentionCall, layout: SequenceLayout, group: dist.ProcessGroup) -> torch.Tensor:
    """Attention of this rank's queries [..., H, L, E] to the keys of all ranks; [..., H, L, E'].

    The mask is that of the whole sequence or of this rank's positions, in either dimension.

    Raises:
        InputError: if the heads do not divide.
    """
    ranks = group.size()
    if not heads_divide(call, ranks):
        raise InputError(
            f"Ulysses divides {call.num_heads} attention heads over sequence={ranks} ranks, which does not go. "
            f"Use a divisor of {call.num_heads} for sequence, or kind='ring'."
        )
    key, value, grouped = _enough_heads(call, ranks)
    whole = replace(
        call,
        query=_to_heads(call.query, layout, group),
        key=_to_heads(key, layout, group),
        value=_to_heads(value, layout, group),
        mask=None if call.mask is None else _mask_of_heads(call.mask, call.num_heads, layout, group),
        grouped=grouped,
    )
    return _to_positions(whole.run(), layout, group)


def _enough_heads(call: AttentionCall, ranks: int) -> tuple[torch.Tensor, torch.Tensor, bool]:
    """Keys and values with heads that divide: shared heads are repeated where there are too few."""
    heads, key_heads = call.num_heads, call.num_key_heads
    times = ranks // math.gcd(key_heads, ranks)
    if times == 1:
        return call.key, call.value, call.grouped
    if (heads // key_heads) % times:
        times = heads // key_heads
    key = call.key.repeat_interleave(times, _HEADS)
    value = call.value.repeat_interleave(times, _HEADS)
    return key, value, key_heads * times < heads


def _to_heads(x: torch.Tensor, layout: SequenceLayout, group: dist.ProcessGroup) -> torch.Tensor:
    """All positions, in order and without padding, of this rank's heads."""
    return layout.in_order(all_to_all(x, _HEADS, _POSITIONS, group), _POSITIONS)


def _to_positions(x: torch.Tensor, layout: SequenceLayout, group: dist.ProcessGroup) -> torch.Tensor:
    """All heads of this rank's positions."""
    return all_to_all(layout.by_rank(x, _POSITIONS), _POSITIONS, _HEADS, group)


def whole_mask(mask: torch.Tensor, layout: SequenceLayout, group: dist.ProcessGroup) -> torch.Tensor:
    """The mask for all queries and keys, of one that may have been made for this rank's positions."""
    for dim in (-1, -2):
        if mask.dim() >= -dim and mask.size(dim) == layout.local and layout.local != layout.length:
            mask = layout.in_order(all_gather(mask, dim, group), dim)
    return mask


def own_rows(mask: torch.Tensor, layout: SequenceLayout, group: dist.ProcessGroup) -> torch.Tensor:
    """The mask for this rank's queries and all keys; its gradient is that of these rows."""
    if mask.dim() > 1 and mask.size(_POSITIONS) == layout.local and mask.size(-1) == layout.length:
        return mask
    mask = whole_mask(mask, layout, group)
    return layout.select(mask, _POSITIONS) if mask.dim() > 1 and mask.size(_POSITIONS) > 1 else mask


def _mask_of_heads(
    mask: torch.Tensor, num_heads: int, layout: SequenceLayout, group: dist.ProcessGroup
) -> torch.Tensor:
    """The mask for all queries and keys of this rank's heads."""
    if mask.dim() < 3 or mask.size(_HEADS) == 1:
        return whole_mask(mask, layout, group)
    if mask.size(_HEADS) == num_heads and mask.shape[-2:] == (layout.local, layout.length):
        return _to_heads(mask, layout, group)
    return whole_mask(mask, layout, group).chunk(group.size(), _HEADS)[group.rank()]

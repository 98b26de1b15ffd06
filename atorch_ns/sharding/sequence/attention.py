"""Attention on a part of the sequence: a single call, ``nn.MultiheadAttention`` in its terms, and Ulysses.

Ulysses (Jacobs et al. 2023, DeepSpeed Ulysses) turns the division by positions into one by heads and back.
Each rank has all heads of its positions outside, and all positions of its heads inside, where the ordinary
kernel runs. That takes four all-to-alls a call, each of 1/n of the bytes of a query.

Legend: B batch, H query heads, K key/value heads, T queries, S keys, D width, E head width, n ranks, L = T/n
positions of one rank. Leading dimensions may be missing: tensors are [..., H, T, E] or [T, E].
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F

from atorch_ns.errors import InputError
from atorch_ns.sharding.collectives import Group, all_gather, all_to_all
from atorch_ns.sharding.sequence.plan import SequenceLayout


@dataclass(frozen=True)
class AttentionCall:
    """The arguments of ``F.scaled_dot_product_attention``.

    Attributes:
        query: [..., H, T, E].
        key: [..., K, S, E].
        value: [..., K, S, E'].
        mask: broadcast to [..., H, T, S]; bool (True where attended) or added to the scores.
        dropout: the share of weights dropped.
        causal: whether a query attends to keys up to its own place only.
        scale: factor of the scores; ``None`` for 1/sqrt(E).
        grouped: whether H / K query heads share a key head; else H = K.
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    mask: torch.Tensor | None = None
    dropout: float = 0.0
    causal: bool = False
    scale: float | None = None
    grouped: bool = False

    @classmethod
    def of(
        cls,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> AttentionCall:
        """The call with the arguments of ``F.scaled_dot_product_attention``."""
        return cls(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)

    @property
    def num_heads(self) -> int:
        """H; 1 where there is no such dimension."""
        return self.query.size(-3) if self.query.dim() > 2 else 1

    @property
    def num_key_heads(self) -> int:
        """K; 1 where there is no such dimension."""
        return self.key.size(-3) if self.key.dim() > 2 else 1

    def cast(self) -> AttentionCall:
        """The call in the dtypes that autocast would give it."""
        device = self.query.device.type
        if not torch.is_autocast_enabled(device):
            return self
        dtype = torch.get_autocast_dtype(device)
        mask = self.mask
        if mask is not None and mask.is_floating_point():
            mask = mask.to(dtype)
        return replace(
            self, query=self.query.to(dtype), key=self.key.to(dtype), value=self.value.to(dtype), mask=mask
        )

    def run(self) -> torch.Tensor:
        """The ordinary result, [..., H, T, E']."""
        # A keyword that is not needed is left out: kernels differ in what they accept.
        more: dict[str, Any] = {"enable_gqa": True} if self.grouped else {}
        return F.scaled_dot_product_attention(
            self.query,
            self.key,
            self.value,
            attn_mask=self.mask,
            dropout_p=self.dropout,
            is_causal=self.causal,
            scale=self.scale,
            **more,
        )


Attend = Callable[[AttentionCall], torch.Tensor]
Widen = Callable[[torch.Tensor, bool], torch.Tensor]


def multi_head_attention(
    attend: Attend, widen: Widen, *args: Any, **kwargs: Any
) -> tuple[torch.Tensor, None]:
    """Returns [T, B, D] (or [T, D]) with attention computed by ``attend``, without attention weights.

    Args:
        attend: computes an attention call.
        widen: ``(mask, whether the keys are another sequence's) -> mask of the whole sequence``.
        args, kwargs: the arguments of ``F.multi_head_attention_forward``.

    Raises:
        InputError: for key biases and static keys, which belong to no position.
    """
    binding = inspect.signature(F.multi_head_attention_forward).bind(*args, **kwargs)
    binding.apply_defaults()
    it = binding.arguments
    if it["bias_k"] is not None or it["add_zero_attn"] or it["static_k"] is not None:
        raise InputError(
            "attention with bias_k, add_zero_attn or static keys cannot be divided over positions."
        )
    is_batched = it["query"].dim() == 3  # [T, B, D], else [T, D]
    query, key, value = (
        it[name] if is_batched else it[name].unsqueeze(1) for name in ("query", "key", "value")
    )
    # Keys of another sequence are another tensor of another length.
    is_cross = it["key"] is not it["query"] and it["key"].size(0) != it["query"].size(0)
    heads = it["num_heads"]
    q, k, v = (_split_heads(x, heads) for x in _project_inputs(it, query, key, value))
    causal, mask = _combine_masks(it, heads, is_cross, widen)
    # [B, H, T, E].
    mixed = attend(AttentionCall(q, k, v, mask, it["dropout_p"] if it["training"] else 0.0, causal))
    features = mixed.permute(2, 0, 1, 3).flatten(2)  # [T, B, D]
    out = F.linear(features, it["out_proj_weight"], it["out_proj_bias"])
    return (out if is_batched else out.squeeze(1)), None


def _project_inputs(
    it: dict[str, Any], query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> list[torch.Tensor]:
    if it["use_separate_proj_weight"]:
        weights = [it[f"{name}_proj_weight"] for name in "qkv"]
    else:
        weights = list(it["in_proj_weight"].chunk(3))  # fused as [q | k | v]
    bias = it["in_proj_bias"]
    biases = [None] * 3 if bias is None else list(bias.chunk(3))
    return [F.linear(x, w, b) for x, w, b in zip((query, key, value), weights, biases, strict=True)]


def _split_heads(x: torch.Tensor, heads: int) -> torch.Tensor:
    per_head: torch.Tensor = x.unflatten(-1, (heads, -1))
    return per_head.permute(1, 2, 0, 3)  # [T, B, H, E] to [B, H, T, E]


def _combine_masks(
    it: dict[str, Any], heads: int, is_cross: bool, widen: Widen
) -> tuple[bool, torch.Tensor | None]:
    attention, padding = it["attn_mask"], it["key_padding_mask"]
    if it["is_causal"] and padding is None:  # as in torch, the flag stands for the mask then
        return True, None
    dtype = it["query"].dtype
    summands = []  # each broadcasts to [B, H, T, S]
    if attention is not None:
        summand = widen(additive_mask(attention, dtype), is_cross)
        # torch takes a mask of each head as [B H, T, S].
        summands.append(summand.unflatten(0, (-1, heads)) if summand.dim() == 3 else summand)
    if padding is not None:
        rows = padding if padding.dim() == 2 else padding.unsqueeze(0)
        summands.append(widen(additive_mask(rows, dtype)[:, None, None, :], is_cross))
    if not summands:
        return False, None
    return False, summands[0] if len(summands) == 1 else summands[0] + summands[1]


def additive_mask(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The mask to add to the scores. True in a Boolean mask hides, as in ``nn.MultiheadAttention``."""
    if mask.dtype != torch.bool:
        return mask.to(dtype)
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(mask, float("-inf"))


_HEADS = -3  # the dimension of heads in [..., H, T, E]
_POSITIONS = -2


def heads_divide(call: AttentionCall, ranks: int) -> bool:
    """Returns whether the heads of a call can be divided over ``ranks``."""
    return call.query.dim() > 2 and call.num_heads % ranks == 0


def ulysses_attention(call: AttentionCall, layout: SequenceLayout, group: Group) -> torch.Tensor:
    """Attention [..., H, L, E'] of this rank's queries [..., H, L, E] to the keys of all ranks.

    In each dimension the mask covers the whole sequence or this rank's positions.

    Raises:
        InputError: if the heads do not divide.
    """
    ranks = group.size()
    if not heads_divide(call, ranks):
        raise InputError(
            f"Ulysses divides {call.num_heads} attention heads over sequence={ranks} ranks, but they do not divide evenly. "
            f"Use a divisor of {call.num_heads} for sequence, or kind='ring'."
        )
    key, value, is_grouped = _enough_heads(call, ranks)
    # Divided by heads: [..., H / n, T, E], all positions in order.
    whole = replace(
        call,
        query=_to_heads(call.query, layout, group),
        key=_to_heads(key, layout, group),
        value=_to_heads(value, layout, group),
        mask=None if call.mask is None else _mask_of_heads(call.mask, call.num_heads, layout, group),
        grouped=is_grouped,
    )
    # Divided by positions again, with padding where the length does not divide.
    return all_to_all(layout.by_rank(whole.run(), _POSITIONS), _POSITIONS, _HEADS, group)


def _enough_heads(call: AttentionCall, ranks: int) -> tuple[torch.Tensor, torch.Tensor, bool]:
    # Shared heads are repeated as often as it takes for the ranks to divide them.
    heads, key_heads = call.num_heads, call.num_key_heads
    times = ranks // math.gcd(key_heads, ranks)
    if times == 1:
        return call.key, call.value, call.grouped
    if (heads // key_heads) % times:
        times = heads // key_heads  # a key head for each query head
    key = call.key.repeat_interleave(times, _HEADS)
    value = call.value.repeat_interleave(times, _HEADS)
    return key, value, key_heads * times < heads  # the last: whether heads are still shared


def _to_heads(x: torch.Tensor, layout: SequenceLayout, group: Group) -> torch.Tensor:
    return layout.in_order(all_to_all(x, _HEADS, _POSITIONS, group), _POSITIONS)  # [..., H / n, T, E]


def whole_mask(mask: torch.Tensor, layout: SequenceLayout, group: Group) -> torch.Tensor:
    """The mask for all queries and keys, from one that may cover this rank's positions only."""
    for dim in (-1, -2):
        if mask.dim() >= -dim and mask.size(dim) == layout.local and layout.local != layout.length:
            mask = layout.in_order(all_gather(mask, dim, group), dim)
    return mask


def own_rows(mask: torch.Tensor, layout: SequenceLayout, group: Group) -> torch.Tensor:
    """The mask for this rank's queries and all keys; its gradient is that of these rows."""
    if mask.dim() > 1 and mask.size(_POSITIONS) == layout.local and mask.size(-1) == layout.length:
        return mask
    mask = whole_mask(mask, layout, group)
    return layout.select(mask, _POSITIONS) if mask.dim() > 1 and mask.size(_POSITIONS) > 1 else mask


def _mask_of_heads(mask: torch.Tensor, num_heads: int, layout: SequenceLayout, group: Group) -> torch.Tensor:
    if mask.dim() < 3 or mask.size(_HEADS) == 1:  # one mask for all heads
        return whole_mask(mask, layout, group)
    if mask.size(_HEADS) == num_heads and mask.shape[-2:] == (layout.local, layout.length):
        return _to_heads(mask, layout, group)  # rows of L queries for each head travel as queries do
    return whole_mask(mask, layout, group).chunk(group.size(), _HEADS)[group.rank()]

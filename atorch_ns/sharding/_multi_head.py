"""``F.multi_head_attention_forward``, which ``nn.MultiheadAttention`` calls, in terms of an attention call.

Legend: B batch, H heads, T queries, S keys, D width, E = D/H.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from atorch_ns.errors import InputError
from atorch_ns.sharding._attention_calls import AttentionCall

__all__ = ["multi_head_attention"]

Attend = Callable[[AttentionCall], torch.Tensor]
Widen = Callable[[torch.Tensor, bool], torch.Tensor]


def multi_head_attention(
    attend: Attend, widen: Widen, *args: Any, **kwargs: Any
) -> tuple[torch.Tensor, None]:
    """The result [T, B, D] (or [T, D]) with attention as ``attend`` computes it, and no attention weights.

    Args:
        attend: computes a call.
        widen: makes a mask that may be of a part whole, given whether the keys are another sequence's.
        args: of ``F.multi_head_attention_forward``.
        kwargs: of ``F.multi_head_attention_forward``.

    Raises:
        InputError: for key biases and static keys, which are no part of a sequence.
    """
    given = inspect.signature(F.multi_head_attention_forward).bind(*args, **kwargs)
    given.apply_defaults()
    it = given.arguments
    if it["bias_k"] is not None or it["add_zero_attn"] or it["static_k"] is not None:
        raise InputError(
            "attention with bias_k, add_zero_attn or static keys cannot be divided over positions."
        )
    is_batched = it["query"].dim() == 3
    query, key, value = (
        it[name] if is_batched else it[name].unsqueeze(1) for name in ("query", "key", "value")
    )
    crossed = it["key"] is not it["query"] and it["key"].size(0) != it["query"].size(0)
    heads = it["num_heads"]
    q, k, v = (_split(x, heads) for x in _projected(it, query, key, value))
    causal, mask = _mask(it, heads, crossed, widen)
    mixed = attend(
        AttentionCall(q, k, v, mask, it["dropout_p"] if it["training"] else 0.0, causal)
    )  # [B, H, T, E]
    joined = mixed.permute(2, 0, 1, 3).flatten(2)
    out = F.linear(joined, it["out_proj_weight"], it["out_proj_bias"])
    return (out if is_batched else out.squeeze(1)), None


def _projected(
    it: dict[str, Any], query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> list[torch.Tensor]:
    if it["use_separate_proj_weight"]:
        weights = [it[f"{name}_proj_weight"] for name in "qkv"]
    else:
        weights = list(it["in_proj_weight"].chunk(3))
    bias = it["in_proj_bias"]
    biases = [None] * 3 if bias is None else list(bias.chunk(3))
    return [F.linear(x, w, b) for x, w, b in zip((query, key, value), weights, biases, strict=True)]


def _split(x: torch.Tensor, heads: int) -> torch.Tensor:
    """[T, B, D] to [B, H, T, E]."""
    divided: torch.Tensor = x.unflatten(-1, (heads, -1))
    return divided.permute(1, 2, 0, 3)


def _mask(it: dict[str, Any], heads: int, crossed: bool, widen: Widen) -> tuple[bool, torch.Tensor | None]:
    """Whether the call is causal, and the mask that is added to [B, H, T, S]."""
    attention, padding = it["attn_mask"], it["key_padding_mask"]
    if it["is_causal"] and padding is None:
        return True, None
    dtype = it["query"].dtype
    summands = []
    if attention is not None:
        added = widen(_added(attention, dtype), crossed)
        summands.append(added.unflatten(0, (-1, heads)) if added.dim() == 3 else added)
    if padding is not None:
        rows = padding if padding.dim() == 2 else padding.unsqueeze(0)
        summands.append(widen(_added(rows, dtype)[:, None, None, :], crossed))
    if not summands:
        return False, None
    return False, summands[0] if len(summands) == 1 else summands[0] + summands[1]


def _added(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Booleans here are True for what is hidden."""
    if mask.dtype != torch.bool:
        return mask.to(dtype)
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(mask, float("-inf"))

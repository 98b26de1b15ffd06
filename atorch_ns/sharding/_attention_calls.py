"""One call of ``scaled_dot_product_attention``, and what stands in for it where the sequence is divided.

Legend: B batch, H query heads, K key/value heads, T queries, S keys, E head width. Leading dimensions may be
missing: tensors are [..., H, T, E] or [T, E].
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F

__all__ = ["AttentionCall", "read_call"]


@dataclass(frozen=True)
class AttentionCall:
    """The arguments of ``F.scaled_dot_product_attention``.

    Attributes:
        query: [..., H, T, E].
        key: [..., K, S, E].
        value: [..., K, S, E'].
        mask: broadcast to [..., H, T, S]; bool (True for what is attended to) or added to the scores.
        dropout: the share of weights dropped.
        causal: whether a query attends to keys up to its own place only.
        scale: of the scores; ``None`` for 1/sqrt(E).
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

    @property
    def num_heads(self) -> int:
        """H; 1 where there is no such dimension."""
        return self.query.size(-3) if self.query.dim() > 2 else 1

    @property
    def num_key_heads(self) -> int:
        """K; 1 where there is no such dimension."""
        return self.key.size(-3) if self.key.dim() > 2 else 1

    def cast(self) -> AttentionCall:
        """With the dtypes that autocast would give the call."""
        device = self.query.device.type
        if not torch.is_autocast_enabled(device):
            return self
        dtype = torch.get_autocast_dtype(device)
        mask = self.mask
        if mask is not None and mask.is_floating_point():
            mask = mask.to(dtype)
        return replace(
            self,
            query=self.query.to(dtype),
            key=self.key.to(dtype),
            value=self.value.to(dtype),
            mask=mask,
        )

    def with_mask(self, mask: torch.Tensor | None) -> AttentionCall:
        """The same call with another mask."""
        return replace(self, mask=mask)

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


def read_call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> AttentionCall:
    """The call with these arguments."""
    return _bind(*args, **kwargs)


def _bind(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> AttentionCall:
    return AttentionCall(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)

"""Flash attention that also returns the logarithm of its sum of exponentials.

Tensors are [B, H, T, E] and [B, H, S, E]; the logarithm of the sum is float32 [B, H, T].
"""

from __future__ import annotations

import torch

QueryKeyValue = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class FlashAttention:
    """``aten._scaled_dot_product_flash_attention_for_cpu`` or, in fp16 and bf16, ``_scaled_dot_product_flash_attention``,
    and its backward: without dropout or mask.

    Args:
        device_type: the type of the tensors' device.
    """

    def __init__(self, device_type: str) -> None:
        self._is_cpu = device_type == "cpu"

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, causal: bool, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attention and the logarithm of its sum of exponentials."""
        if self._is_cpu:
            operator = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
            out, lse = operator(query, key, value, 0.0, causal, scale=scale)
        else:
            operator = torch.ops.aten._scaled_dot_product_flash_attention
            out, lse, *_ = operator(query, key, value, 0.0, causal, False, scale=scale)
        return out, lse

    def backward(
        self,
        gradient: torch.Tensor,
        tensors: QueryKeyValue,
        result: tuple[torch.Tensor, torch.Tensor],
        causal: bool,
        scale: float,
    ) -> QueryKeyValue:
        """Gradients of queries, keys and values, given those three, and result and logarithm."""
        query, key, _ = tensors
        out, lse = result
        if self._is_cpu:
            operator = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
            lse = (
                lse.transpose(1, 2).contiguous().transpose(1, 2)
            )  # the memory order in which forward returns it
            found = operator(gradient, *tensors, out, lse, 0.0, causal, scale=scale)
        else:
            operator = torch.ops.aten._scaled_dot_product_flash_attention_backward
            saved = (out.contiguous(), lse.contiguous(), None, None, query.size(-2), key.size(-2))
            unused = torch.zeros(2, dtype=torch.uint64, device=query.device)  # random state of a dropout
            found = operator(gradient, *tensors, *saved, 0.0, causal, unused, unused[:1], scale=scale)
        return found[0], found[1], found[2]

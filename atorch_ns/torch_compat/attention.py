"""Flash attention that tells the sum of its exponentials."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


class CpuFlashAttention:
    """``aten._scaled_dot_product_flash_attention_for_cpu``, which gives the sum of exponentials too.

    Tensors are [B, H, T, E] and [B, H, S, E]; the logarithm of the sum is float32 [B, H, T].
    """

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, causal: bool, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attention and the logarithm of its sum of exponentials."""
        import torch

        operator = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        out, lse = operator(query, key, value, 0.0, causal, scale=scale)
        return out, lse

    def backward(
        self,
        gradient: torch.Tensor,
        tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        result: tuple[torch.Tensor, torch.Tensor],
        causal: bool,
        scale: float,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Gradients of queries, keys and values."""
        import torch

        operator = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        out, lse = result
        in_memory = lse.transpose(1, 2).contiguous().transpose(1, 2)  # the order in which forward returns it
        found = operator(gradient, *tensors, out, in_memory, 0.0, causal, scale=scale)
        return found[0], found[1], found[2]


class CudaFlashAttention:
    """``aten._scaled_dot_product_flash_attention``: as :class:`CpuFlashAttention`, in fp16 and bf16."""

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, causal: bool, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attention and the logarithm of its sum of exponentials."""
        import torch

        operator = torch.ops.aten._scaled_dot_product_flash_attention
        out, lse, *_ = operator(query, key, value, 0.0, causal, False, scale=scale)
        return out, lse

    def backward(
        self,
        gradient: torch.Tensor,
        tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        result: tuple[torch.Tensor, torch.Tensor],
        causal: bool,
        scale: float,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Gradients of queries, keys and values."""
        import torch

        operator = torch.ops.aten._scaled_dot_product_flash_attention_backward
        query, key, _ = tensors
        unused = torch.zeros(
            2, dtype=torch.uint64, device=query.device
        )  # the state of a dropout there is not
        lengths = (None, None, query.size(-2), key.size(-2))
        out, lse = result
        found = operator(
            gradient,
            *tensors,
            out.contiguous(),
            lse.contiguous(),
            *lengths,
            0.0,
            causal,
            unused,
            unused[:1],
            scale=scale,
        )
        return found[0], found[1], found[2]

"""Kernels of torch: flash attention with the logarithm of its sum of exponentials, and those of oneDNN."""

from __future__ import annotations

import functools

import torch

QueryKeyValue = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class FlashAttention:
    """aten's flash attention and its backward, without dropout or mask. fp16 or bf16 only, except on CPUs.

    Tensors are [B, H, T, E] and [B, H, S, E]. The log-sum-exp is float32 [B, H, T].

    Args:
        device_type: the type of the tensors' device.
    """

    def __init__(self, device_type: str) -> None:
        self._is_cpu = device_type == "cpu"

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, causal: bool, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns attention and its log-sum-exp."""
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
        """Returns gradients of queries, keys and values from these three, the result and the log-sum-exp."""
        query, key, _ = tensors
        out, lse = result
        if self._is_cpu:
            operator = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
            # The memory order in which forward returns it.
            lse = lse.transpose(1, 2).contiguous().transpose(1, 2)
            gradients = operator(gradient, *tensors, out, lse, 0.0, causal, scale=scale)
        else:
            operator = torch.ops.aten._scaled_dot_product_flash_attention_backward
            context = (out.contiguous(), lse.contiguous(), None, None, query.size(-2), key.size(-2))
            rng = torch.zeros(2, dtype=torch.uint64, device=query.device)  # random state of a dropout
            gradients = operator(gradient, *tensors, *context, 0.0, causal, rng, rng[:1], scale=scale)
        return gradients[0], gradients[1], gradients[2]


@functools.cache
def onednn_computes_in(dtype: torch.dtype) -> bool:
    """Returns whether oneDNN has ``dtype`` kernels on this CPU. Otherwise operators use ATen's own."""
    if not torch.backends.mkldnn.is_available():
        return False
    if dtype is torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    if dtype is torch.float16:
        return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
    return dtype is torch.float32


def onednn_block() -> int:
    """Channels in a block of oneDNN's layouts nChw16c and nChw8c: floats in a vector register."""
    return 16 if torch.backends.cpu.get_cpu_capability() == "AVX512" else 8


def has_matrix_tiles() -> bool:
    """Returns whether the CPU has AMX, whose kernels oneDNN prefers in reduced precision.

    Every CPU with AMX computes in fp16: where oneDNN does not, both are disabled (``ONEDNN_MAX_CPU_ISA``).
    """
    return bool(torch.cpu._is_amx_tile_supported()) and onednn_computes_in(torch.float16)

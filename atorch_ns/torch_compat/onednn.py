"""oneDNN on this CPU: block sizes, dtypes and matrix tiles."""

from __future__ import annotations

import functools

import torch


@functools.cache
def onednn_computes_in(dtype: torch.dtype) -> bool:
    """Whether oneDNN has kernels for ``dtype`` on this CPU; operators use ATen's own where it has none."""
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
    """Whether the CPU has AMX, whose kernels oneDNN prefers in reduced precision.

    Every CPU with AMX computes in fp16: where oneDNN does not, both are disabled (``ONEDNN_MAX_CPU_ISA``).
    """
    return bool(torch.cpu._is_amx_tile_supported()) and onednn_computes_in(torch.float16)

"""Telling that memory ran out from what torch and the libraries below it raise."""

from __future__ import annotations

import re
from typing import Final

import torch

__all__ = ["is_out_of_memory"]

_TEXTS: Final = re.compile(
    r"""
    CUDA\ out\ of\ memory                          # torch's allocator
    | CUDA\ (driver\ )?error:\ out\ of\ memory     # the runtime's and the driver's own, as of a pinned allocation
    | CUDA_ERROR_OUT_OF_MEMORY | cudaErrorMemoryAllocation
    | CU(BLAS|SPARSE|SOLVER|FFT)_(STATUS_)?ALLOC_FAILED
    | CUDNN_STATUS_(ALLOC_FAILED | INTERNAL_ERROR_(HOST|DEVICE)_ALLOCATION_FAILED)
    | Failed\ to\ CUDA\ (calloc|malloc|host\ alloc)    # NCCL
    | Cuda\ failure\ (2\ )?'out\ of\ memory'       # NCCL
    | DefaultCPUAllocator:.*can't\ allocate\ memory
    | not\ enough\ memory:\ you\ tried\ to\ allocate   # torch's CPU allocator
    | Cannot\ allocate\ memory                     # the system, by errno
    | \bout\ of\ memory\b
    """,
    re.VERBOSE,
)
_NOT_MEMORY: Final = re.compile(r"out of resource: shared memory")
"""A Triton kernel that asks for more of a multiprocessor than there is: a smaller batch does not help."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception, or one that it was raised from, says that the device's or the host's memory is full.

    torch has a class for its own allocator's failures only; those of libraries are RuntimeErrors known by their text.
    What cuBLAS says of its handle (``CUBLAS_STATUS_NOT_INITIALIZED``) has other causes too and does not count.
    """
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        if isinstance(current, (torch.OutOfMemoryError, MemoryError)):
            return True
        if isinstance(current, (RuntimeError, OSError)):
            text = str(current)
            if _TEXTS.search(text) and not _NOT_MEMORY.search(text):
                return True
        current = current.__cause__
    return False

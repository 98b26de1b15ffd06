"""Memory of a CUDA device beyond tensors: cuBLAS's workspaces, the allocator's cache, the context, and NCCL.

Legend: R plans of one kind.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import numpy as np

from atorch_ns.estimate.model_shard import Sizes
from atorch_ns.system import table_rows

_MIB: Final = 2**20


# Runs of torch's allocator without options: ``max_memory_allocated`` (or active bytes) and
# ``max_memory_reserved``, both in GB or both in GiB. Runs that predictions are compared with are left out.
_PUBLISHED: Final = table_rows(Path(__file__).with_name("reserved.csv"))

CACHED_SHARE: Final = statistics.median(float(r["reserved"]) / float(r["allocated"]) for r in _PUBLISHED) - 1
"""Bytes that torch's allocator reserves beyond those allocated at the peak, as a share of these: free gaps
fit no request, and a stream's pool serves no other. Median of published runs, alike with and without gathered
parameters (0.11); GMLake (arXiv:2401.08156) has 0.15 on average, STAlloc (arXiv:2507.16274) up to 0.43."""

CONTEXT_BYTES: Final = 426 * _MIB
"""The context of CUDA with kernels loaded as they are used: unslothai/unsloth-zoo#1053 (torch 2.10, CUDA 13);
pytorch/pytorch#109888 says 400 MB."""

NCCL_BYTES: Final[Mapping[bool, int]] = {False: 544 * _MIB, True: 688 * _MIB}
"""A communicator's buffers, by whether it has more than two ranks: NVIDIA/nccl#964, A100 with NVLink. They
grow with the channels and connections of one rank, not with the number of ranks (NVIDIA/nccl#986)."""

# cuBLAS's workspace in torch, by whether the device is of capability 9 or more: ``:4096:2:16:8`` (KiB and
# numbers of buffers), or the size that cuBLAS recommends for Hopper.
_CUBLAS_BYTES: Final[Mapping[bool, int]] = {False: 8_519_680, True: 32 * _MIB}
# cuBLASLt's workspace: pytorch/pytorch#120925.
_CUBLASLT_BYTES: Final[Mapping[bool, int]] = {False: 4 * _MIB, True: 32 * _MIB}


def workspace_bytes(capability: tuple[int, int] | None) -> int:
    """Bytes of cuBLAS's workspaces in torch's allocator, on a device of this CUDA capability."""
    is_recent = capability is not None and capability >= (9, 0)
    # Each thread that computes has a workspace, and torch runs forward and backward passes in a thread each.
    return 2 * _CUBLAS_BYTES[is_recent] + _CUBLASLT_BYTES[is_recent]


def outside_bytes(sizes: Sizes) -> np.ndarray:
    """[R] bytes that torch's allocator does not see: the context, and a communicator for each axis."""
    axes = (sizes.data, sizes.zero, sizes.tensor, sizes.sequence, sizes.expert, sizes.pipeline)
    buffers = [np.where(axis > 2, NCCL_BYTES[True], NCCL_BYTES[False]) * (axis > 1) for axis in axes]
    return np.asarray(CONTEXT_BYTES + np.sum(buffers, axis=0), dtype=float)

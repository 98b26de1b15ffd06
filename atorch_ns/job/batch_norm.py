"""Batch norms of models whose batch is divided: over ranks, which can share statistics, and into micro-batches.

Legend: B batch, C channels.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn

from atorch_ns.sharding.collectives import copy_to, reduce_from
from atorch_ns.torch_compat import check_batch_norm_input

if TYPE_CHECKING:
    from atorch_ns.job.job import Job

BatchNorm = nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d | nn.SyncBatchNorm


def synchronise_batch_norms(job: Job) -> None:
    """Lets batch norms in training take mean and variance over the samples of all data ranks.

    On GPUs they become torch's ``SyncBatchNorm``. That refuses CPUs, where they stay what they are and compute with
    collectives of their own. Parameters and buffers keep their names.
    """
    assert job.mesh is not None
    group = job.mesh.data_group
    if job.device.type == "cuda":
        nn.SyncBatchNorm.convert_sync_batchnorm(job.module, group)
    else:
        for norm in _batch_norms(job):
            norm.forward = partial(_normalised, norm, group)  # type: ignore[method-assign]
    job.step.shares_batch_norms = True


def note_batch_norms(job: Job) -> str:
    """What batch norms compute otherwise than in one process, and what can be done; empty where nothing differs."""
    num = sum(1 for _ in _batch_norms(job))
    apart = []
    if job.num_data_ranks > 1 and not job.step.shares_batch_norms:
        apart.append(
            f"over the {job.num_data_ranks} data ranks (sync_batchnorm=True in ddp, zero1, zero2 or fsdp)"
        )
    if job.step.num_micro_batches > 1:
        apart.append(f"over the {job.step.num_micro_batches} micro-batches, which run one after another")
    if not (num and apart):
        return ""
    return (
        f"{num} batch norm(s) see the samples of one rank and micro-batch at a time in training, where one process sees "
        f"the whole batch: their statistics are not shared {' nor '.join(apart)}."
    )


def _batch_norms(job: Job) -> Iterator[BatchNorm]:
    return (module for root in job.roots for module in root.modules() if isinstance(module, BatchNorm))


def _normalised(norm: BatchNorm, group: dist.ProcessGroup, x: torch.Tensor) -> torch.Tensor:
    """``x`` [B, C, ...] by the mean and the variance of each channel over all ranks; their batches may differ in size."""
    if not norm.training:
        return type(norm).forward(norm, x)  # type: ignore[arg-type]
    check_batch_norm_input(norm, x)
    dims = [0, *range(2, x.dim())]
    shape = [1, -1, *[1] * (x.dim() - 2)]
    wide = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x

    def total(value: torch.Tensor) -> torch.Tensor:
        # Every rank's loss depends on it, so its gradient is a sum too.
        return reduce_from(copy_to(value, group), group)

    count = torch.full((1,), x.numel() / x.size(1), dtype=wide.dtype, device=x.device)
    sums = total(torch.cat([wide.sum(dims), count]))
    size = sums[-1].detach()
    mean = sums[:-1] / size
    centred = wide - mean.view(shape)
    variance = total(centred.square().sum(dims)) / size
    _update_statistics(norm, mean.detach(), variance.detach(), float(size))
    out = centred * (variance + norm.eps).rsqrt().view(shape)
    if norm.affine:
        out = out * norm.weight.view(shape) + norm.bias.view(shape)
    return out.to(x.dtype)


@torch.no_grad()
def _update_statistics(norm: BatchNorm, mean: torch.Tensor, variance: torch.Tensor, size: float) -> None:
    if not norm.track_running_stats or norm.running_mean is None or norm.running_var is None:
        return
    assert norm.num_batches_tracked is not None
    norm.num_batches_tracked.add_(1)
    share = 1 / float(norm.num_batches_tracked) if norm.momentum is None else norm.momentum
    norm.running_mean.lerp_(mean.to(norm.running_mean.dtype), share)
    norm.running_var.lerp_((variance * (size / max(size - 1, 1))).to(norm.running_var.dtype), share)

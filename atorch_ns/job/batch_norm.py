"""Batch norms whose batch is divided: over ranks, which can share statistics, or into micro-batches.

Legend: B batch, C channels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, get_args

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from atorch_ns.capture.random_states import BatchNorm
from atorch_ns.sharding.collectives import copy_to, reduce_from

if TYPE_CHECKING:
    from atorch_ns.job.job import Job


def synchronise_batch_norms(job: Job) -> None:
    """Makes batch norms in training compute mean and variance over the samples of all data ranks.

    On GPUs, torch's batch norms become ``SyncBatchNorm``. It does not support CPUs and drops additions of
    subclasses, such as an activation. Collectives then compute the called function instead. Names stay.
    """
    assert job.mesh is not None
    group = job.mesh.data_group
    for root in job.roots:
        for parent in list(root.modules()):
            for name, child in parent.named_children():
                if not isinstance(child, BatchNorm):
                    continue
                if job.device.type == "cuda" and type(child) in get_args(BatchNorm):
                    setattr(parent, name, nn.SyncBatchNorm.convert_sync_batchnorm(child, group))
                else:
                    child.forward = partial(_run_norm, child, _Shared(group))  # type: ignore[method-assign]
    job.step.shares_batch_norms = True


def note_batch_norms(job: Job) -> str:
    """A note on batch norms that differ from one process, with remedies. Empty if there are none."""
    num = sum(isinstance(module, BatchNorm) for root in job.roots for module in root.modules())
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


def _run_norm(norm: nn.Module, shared: _Shared, *args: Any, **kwargs: Any) -> Any:
    with shared if norm.training else nullcontext():
        return type(norm).forward(norm, *args, **kwargs)


class _Shared(TorchFunctionMode):
    """Computes ``torch.nn.functional.batch_norm`` over the batches of all ranks in a group."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__()
        self._group = group

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is F.batch_norm:
            return _batch_norm(self._group, *args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _batch_norm(
    group: dist.ProcessGroup,
    x: torch.Tensor,
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> torch.Tensor:
    """``x`` [B, C, ...] normalised per channel by mean and variance over all ranks, of any batch sizes."""
    if not training:
        return F.batch_norm(x, running_mean, running_var, weight, bias, training, momentum, eps)
    dims = [0, *range(2, x.dim())]  # all dims but C
    shape = [1, -1, *[1] * (x.dim() - 2)]
    wide = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x  # sums need fp32

    def total(value: torch.Tensor) -> torch.Tensor:
        # The loss of every rank depends on the sum, so its gradient is a sum too.
        return reduce_from(copy_to(value, group), group)

    count = torch.full((1,), x.numel() / x.size(1), dtype=wide.dtype, device=x.device)
    sums = total(torch.cat([wide.sum(dims), count]))  # [C + 1], over all ranks
    size = sums[-1].detach()  # ranks may have different batch sizes
    mean = sums[:-1] / size
    deviation = wide - mean.view(shape)  # E[x²] - E[x]² would cancel
    variance = total(deviation.square().sum(dims)) / size
    with torch.no_grad():
        if running_mean is not None:
            running_mean.lerp_(mean.to(running_mean.dtype), momentum)
        if running_var is not None:  # unbiased, as torch keeps it
            running_var.lerp_((variance * (size / (size - 1).clamp(min=1))).to(running_var.dtype), momentum)
    out = deviation * (variance + eps).rsqrt().view(shape)
    if weight is not None:
        out = out * weight.view(shape)
    if bias is not None:
        out = out + bias.view(shape)
    return out.to(x.dtype)

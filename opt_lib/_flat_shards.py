"""What backends that cut parameters into flat pieces ask of an optimizer."""

from __future__ import annotations

import warnings
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn

from atorch_ns.errors import BackendError
from atorch_ns.job import OPTIMIZER, Job, keeps_blocks, make_user_optimizer

__all__ = ["require_elementwise", "require_share"]

_ROWS, _COLUMNS, _STEPS = 4, 6, 2


def require_elementwise(job: Job, backend: str) -> None:
    """Tries the user's optimizer on a small matrix and on the same matrix cut into two flat pieces.

    A backend that shards flat pieces trains wrongly, without an error, with an optimizer that looks at a
    parameter as a whole, as Adafactor or Muon do.

    Args:
        job: gives ``optim_func``.
        backend: its name, for the message.

    Raises:
        BackendError: if the two differ.
    """
    if job.inputs.optim_func is None:
        return
    _tell_of_blocks(job, backend)
    generator = torch.Generator().manual_seed(0)
    start, *gradients = torch.randn(1 + _STEPS, _ROWS, _COLUMNS, generator=generator)
    cut = _ROWS * _COLUMNS // 3
    try:
        whole = _updated(job, [start], [[gradient] for gradient in gradients])
    except Exception:  # it does not work on such a parameter at all, so nothing can be learned from it
        return
    try:
        flat = [_cut(gradient, cut) for gradient in gradients]
        pieces = _updated(job, _cut(start, cut), flat)
    except Exception as error:
        raise _error(job, backend, f"it fails on flat pieces with {type(error).__name__}: {error}") from error
    if not torch.allclose(whole, pieces, rtol=1e-4, atol=1e-6, equal_nan=True):
        raise _error(job, backend, "its updates of a matrix and of the same matrix in pieces differ")


def _tell_of_blocks(job: Job, backend: str) -> None:
    try:
        optimizer = make_user_optimizer(job, [{"params": [nn.Parameter(torch.zeros(_ROWS, _COLUMNS))]}])
    except Exception:  # the user's error, which is told where the optimizer is made
        return
    if not keeps_blocks(optimizer):
        return
    text = (
        f"{type(optimizer).__name__}: its 8-bit states have scales of blocks of elements, which cannot be put together "
        f"from the flat pieces of {backend}, so checkpoint.save will refuse them. To save them use zero1 or "
        "('zero2', {'not_use_fsdp': True})"
    )
    job.explain(OPTIMIZER, text)
    if job.cluster.rank == 0:
        warnings.warn(text, stacklevel=2)


def _cut(matrix: torch.Tensor, position: int) -> list[torch.Tensor]:
    flat = matrix.flatten()
    return [flat[:position], flat[position:]]


def _updated(job: Job, start: list[torch.Tensor], gradients: list[list[torch.Tensor]]) -> torch.Tensor:
    parameters = [nn.Parameter(piece.clone()) for piece in start]
    optimizer = make_user_optimizer(job, [{"params": parameters}])
    for step in gradients:
        for parameter, gradient in zip(parameters, step, strict=True):
            parameter.grad = gradient.clone()
        optimizer.step()
    return torch.cat([parameter.detach().flatten() for parameter in parameters])


def _error(job: Job, backend: str, why: str) -> BackendError:
    name = getattr(job.inputs.optim_func, "__name__", "the optimizer")
    return BackendError(
        f"{backend} updates flat pieces of parameters, but {name} looks at each parameter as a whole: {why}. "
        "Use an optimizer that works element by element, or a backend that keeps parameters whole (zero1, ddp)."
    )


def require_share(job: Job, backend: str, parameters: Iterable[torch.Tensor]) -> None:
    """Checks that every rank holds a part of the trainable parameters; collective.

    Dynamic loss scaling decides by each rank's own gradients, so a rank without any cannot take part.

    Args:
        job: gives the ranks.
        backend: its name, for the message.
        parameters: this rank's.

    Raises:
        BackendError: on all ranks, naming those with nothing.
    """
    assert job.mesh is not None
    here = sum(parameter.numel() for parameter in parameters if parameter.requires_grad)
    counts: list[int] = [0] * job.num_data_ranks
    dist.all_gather_object(counts, here, group=job.mesh.data_group)
    empty = [rank for rank, count in enumerate(counts) if count == 0]
    if empty:
        raise BackendError(
            f"{backend} leaves data ranks {empty} of {len(counts)} without any trainable parameter, and fp16's "
            "loss scaling needs a gradient on every rank. Use fewer processes, bf16, or another backend."
        )

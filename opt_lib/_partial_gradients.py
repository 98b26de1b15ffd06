"""Clipping gradients of which every rank holds its own part, as plain tensors."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist

__all__ = ["clip_parts", "norm_of_parts"]


@torch.no_grad()
def norm_of_parts(
    parts: Iterable[torch.Tensor], norm_type: float, *, group: dist.ProcessGroup, device: torch.device
) -> torch.Tensor:
    """The norm of all parts on all ranks of ``group`` as if they were one vector; collective.

    Args:
        parts: this rank's; may be none.
        norm_type: the p of the p-norm, positive; ``float("inf")`` for the largest absolute value.
        group: the ranks that hold the others.
        device: where the result is.

    Returns:
        A 0-d float32 tensor, the same on every rank.
    """
    norms = [
        torch.linalg.vector_norm(part, norm_type, dtype=torch.float32).to(device)
        for part in parts
        if part.numel()
    ]
    here = (
        torch.linalg.vector_norm(torch.stack(norms), norm_type) if norms else torch.zeros((), device=device)
    )
    if norm_type == float("inf"):
        dist.all_reduce(here, op=dist.ReduceOp.MAX, group=group)
        return here
    total = here**norm_type
    dist.all_reduce(total, group=group)
    norm: torch.Tensor = total ** (1.0 / norm_type)
    return norm


@torch.no_grad()
def clip_parts(
    parts: Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float,
    *,
    group: dist.ProcessGroup,
    device: torch.device,
    uncounted: Iterable[torch.Tensor] = (),
) -> torch.Tensor:
    """Scales all parts so that their norm is at most ``max_norm``; collective.

    Args:
        parts, norm_type, group, device: as :func:`norm_of_parts` has them.
        max_norm: the largest norm to leave.
        uncounted: parts that another rank has too and counts; only scaled.

    Returns:
        The norm before, as :func:`norm_of_parts`.
    """
    here = list(parts)
    norm = norm_of_parts(here, norm_type, group=group, device=device)
    scale = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    for part in (*here, *uncounted):
        part.mul_(scale.to(part.device, part.dtype))
    return norm

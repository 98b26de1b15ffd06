"""The norm of gradients that may be replicated or sharded, and clipping by it."""

from __future__ import annotations

from collections.abc import Collection, Iterable

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

__all__ = ["clip_gradients", "gradient_norm"]


@torch.no_grad()
def gradient_norm(
    parameters: Iterable[torch.Tensor],
    norm_type: float = 2.0,
    *,
    stages: dist.ProcessGroup | None = None,
    elsewhere: Collection[torch.Tensor] = (),
) -> torch.Tensor:
    """The norm of all gradients as if they were one vector, the same on every rank.

    Replicated gradients count once; shards are summed over the ranks that hold them (collective).

    Args:
        parameters: tensors whose ``grad`` is read; those without one are skipped.
        norm_type: the p of the p-norm; ``float("inf")`` for the largest absolute value.
        stages: the ranks that hold other parameters of the same model; collective over them.
        elsewhere: parameters that another of these ranks counts.

    Returns:
        A 0-d float32 tensor.
    """
    everything = list(parameters)
    left_out = {id(parameter) for parameter in elsewhere}
    groups = _by_mesh(parameter for parameter in everything if id(parameter) not in left_out)
    norms = [_full(torch.nn.utils.get_total_norm(_grads(group), norm_type)) for group in groups]
    if norms:
        total = torch.linalg.vector_norm(torch.stack([norm.float() for norm in norms]), norm_type)
    else:
        total = torch.zeros((), device=everything[0].device if everything else None)
    return total if stages is None else _over_stages(total, norm_type, stages)


@torch.no_grad()
def clip_gradients(
    parameters: Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    *,
    stages: dist.ProcessGroup | None = None,
    elsewhere: Collection[torch.Tensor] = (),
) -> torch.Tensor:
    """Scales all gradients so that their norm is at most ``max_norm``; collective where they are divided.

    The arguments are those of :func:`gradient_norm`.

    Returns:
        The norm before clipping, 0-d float32, the same on every rank.
    """
    everything = list(parameters)
    total = gradient_norm(everything, norm_type, stages=stages, elsewhere=elsewhere)
    for group in _by_mesh(everything):
        torch.nn.utils.clip_grads_with_norm_(group, max_norm, total)
    return total


def _by_mesh(parameters: Iterable[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Gradients on different meshes cannot stand in one fused operation, so they are handled mesh by mesh."""
    groups: dict[object, list[torch.Tensor]] = {}
    for parameter in parameters:
        if parameter.grad is not None:
            grad = parameter.grad
            key = (grad.device_mesh, grad.placements) if isinstance(grad, DTensor) else grad.device
            groups.setdefault(key, []).append(parameter)
    return list(groups.values())


def _grads(parameters: list[torch.Tensor]) -> list[torch.Tensor]:
    return [parameter.grad for parameter in parameters if parameter.grad is not None]


def _full(norm: torch.Tensor) -> torch.Tensor:
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


def _over_stages(norm: torch.Tensor, norm_type: float, stages: dist.ProcessGroup) -> torch.Tensor:
    if norm_type == float("inf"):
        dist.all_reduce(norm, op=dist.ReduceOp.MAX, group=stages)
        return norm
    power = norm**norm_type
    dist.all_reduce(power, group=stages)
    return power ** (1.0 / norm_type)

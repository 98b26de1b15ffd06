"""The norm of gradients that may be replicated or sharded, and clipping by it."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.distributed.tensor import DTensor

__all__ = ["clip_gradients", "gradient_norm"]


@torch.no_grad()
def gradient_norm(parameters: Iterable[torch.Tensor], norm_type: float = 2.0) -> torch.Tensor:
    """The norm of all gradients as if they were one vector, the same on every rank.

    Replicated gradients count once; shards are summed over the ranks that hold them (collective).

    Args:
        parameters: tensors whose ``grad`` is read; those without one are skipped.
        norm_type: the p of the p-norm; ``float("inf")`` for the largest absolute value.

    Returns:
        A 0-d float32 tensor.
    """
    groups = _by_mesh(parameters)
    norms = [_full(torch.nn.utils.get_total_norm(_grads(group), norm_type)) for group in groups]
    if not norms:
        return torch.zeros(())
    total: torch.Tensor = torch.linalg.vector_norm(torch.stack([norm.float() for norm in norms]), norm_type)
    return total


@torch.no_grad()
def clip_gradients(
    parameters: Iterable[torch.Tensor], max_norm: float, norm_type: float = 2.0
) -> torch.Tensor:
    """Scales all gradients so that their norm is at most ``max_norm``; collective where they are sharded.

    Returns:
        The norm before clipping, 0-d float32, the same on every rank.
    """
    everything = list(parameters)
    total = gradient_norm(everything, norm_type)
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

"""Where a rank's part of a divided tensor lies in the whole."""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor

from atorch_ns.torch_compat import is_strided_shard

__all__ = ["divided_like", "local_part"]


def local_part(whole: torch.Tensor, like: DTensor) -> torch.Tensor:
    """This rank's part of ``whole`` in the layout of ``like``; a view, and nothing is communicated.

    A dimension that is divided twice (over tensor ranks, then over the ranks that share a tensor rank's part)
    is divided in that order, which placements tell by a strided shard.

    Args:
        whole: of the shape of ``like``, the same on all of its ranks.
        like: divided by shards and replicas only.
    """
    mesh, coordinate = like.device_mesh, like.device_mesh.get_coordinate()
    assert coordinate is not None
    assert whole.shape == like.shape
    numbered = list(enumerate(like.placements))
    plain = [entry for entry in numbered if not is_strided_shard(entry[1])]
    strided = [entry for entry in reversed(numbered) if is_strided_shard(entry[1])]
    part = whole
    for axis, placement in (*plain, *strided):
        dim = getattr(placement, "dim", None)
        if dim is not None:
            part = _chunk(part, mesh.size(axis), dim, coordinate[axis])
    return part


def divided_like(whole: torch.Tensor, like: DTensor) -> DTensor:
    """``whole`` as a DTensor in the layout of ``like``, each rank with a copy of its part."""
    return DTensor.from_local(
        local_part(whole, like).contiguous().clone(),
        like.device_mesh,
        like.placements,
        run_check=False,
        shape=like.shape,
        stride=like.stride(),
    )


def _chunk(tensor: torch.Tensor, count: int, dim: int, index: int) -> torch.Tensor:
    """Piece ``index`` of ``torch.chunk``, which may be empty."""
    pieces = tensor.chunk(count, dim)
    return pieces[index] if index < len(pieces) else tensor.narrow(dim, tensor.size(dim), 0)

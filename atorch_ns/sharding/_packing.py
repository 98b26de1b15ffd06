"""Parameters in which several matrices are fused, divided over ranks part by part."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

__all__ = ["Packing"]


@dataclass(frozen=True)
class Packing:
    """The order in which a fused parameter lies when each rank has a share of every part.

    A fused ``qkv`` of a user's model is ``[q | k | v]``. Divided over two ranks, the first must hold
    ``[q0 | k0 | v0]``: the parameter is put in the order ``[q0 k0 v0 | q1 k1 v1]`` and then divided evenly.

    Attributes:
        dim: the dimension along which the parts lie.
        sizes: of the parts, in the user's order.
        ranks: over how many ranks each part is divided.
    """

    dim: int
    sizes: tuple[int, ...]
    ranks: int

    @cached_property
    def order(self) -> torch.Tensor:
        """The user's index at each place, int64, as long as the dimension."""
        starts = [sum(self.sizes[:part]) for part in range(len(self.sizes))]
        pieces = [
            torch.arange(start + rank * size // self.ranks, start + (rank + 1) * size // self.ranks)
            for rank in range(self.ranks)
            for start, size in zip(starts, self.sizes, strict=True)
        ]
        return torch.cat(pieces)

    def pack(self, whole: torch.Tensor) -> torch.Tensor:
        """From the user's order."""
        return whole.index_select(self.dim, self.order.to(whole.device))

    def unpack(self, whole: torch.Tensor) -> torch.Tensor:
        """To the user's order."""
        return whole.index_select(self.dim, torch.argsort(self.order).to(whole.device))

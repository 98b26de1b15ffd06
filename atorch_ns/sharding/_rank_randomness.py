"""Dropout masks that differ between ranks which hold different positions or heads of the same samples."""

from __future__ import annotations

import torch

__all__ = ["RankRandomness"]

_SEEDS = 2**62


class RankRandomness:
    """Gives the default generators states of this rank's own, made from the state they share.

    Between :meth:`enter` and :meth:`leave` each rank draws other numbers. Afterwards all ranks go on from the
    state they shared, one draw later. Recomputation that begins with the state of :meth:`enter` draws the same.

    Args:
        rank: this rank's place in its group.
        device: where the model computes.
    """

    def __init__(self, rank: int, device: torch.device) -> None:
        self._rank = rank
        self._device = device
        self._saved: list[tuple[torch.Tensor, torch.Tensor | None]] = []

    def enter(self) -> None:
        """Different numbers from here."""
        seed = int(torch.randint(_SEEDS, ()))
        cuda = torch.cuda.get_rng_state(self._device) if self._device.type == "cuda" else None
        self._saved.append((torch.get_rng_state(), cuda))
        torch.manual_seed(seed + self._rank)

    def leave(self) -> None:
        """The same numbers again."""
        cpu, cuda = self._saved.pop()
        torch.set_rng_state(cpu)
        if cuda is not None:
            torch.cuda.set_rng_state(cuda, self._device)

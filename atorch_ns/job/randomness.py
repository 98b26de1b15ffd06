"""Shared randomness: dropout masks that agree on ranks which work on the same samples."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn


class SharedRandomness:
    """Gives every forward pass in training random states that depend on the job, the data and a count.

    Ranks that hold parts of one layer must draw the same masks for what they compute alike, however differently
    the user has seeded them. The caller's random states are as before afterwards. Recomputation in the backward
    pass restores the states it has seen, so it draws the same again.

    Args:
        seed: a number that is the same on every rank.
        data_rank: this rank's place among those that see different data.
        device: the device on which the model computes.
    """

    def __init__(self, *, seed: int, data_rank: int, device: torch.device) -> None:
        self._seed = seed
        self._data_rank = data_rank
        self._device = device
        self._count = 0
        self._depth = 0
        self._saved: tuple[torch.Tensor, torch.Tensor | None] | None = None

    def state(self) -> torch.Tensor:
        """What the next forward passes draw from, int64; the same on all ranks after the same steps."""
        return torch.tensor([self._seed, self._count], dtype=torch.int64)

    def restore(self, state: torch.Tensor) -> None:
        """Goes on where :meth:`state` was taken, on any number of ranks."""
        self._seed, self._count = state.tolist()

    def next_seed(self) -> int:
        """The seed of the next forward pass, or of the next batch of a pipeline."""
        self._count += 1
        text = repr((self._seed, self._data_rank, self._count)).encode()
        return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 1

    def attach(self, modules: Iterable[nn.Module]) -> None:
        """Surrounds the forward passes of ``modules``; of those that run inside each other, the outermost."""
        for module in dict.fromkeys(modules):
            module.register_forward_pre_hook(self._begin, prepend=True)
            module.register_forward_hook(self._end, always_call=True)

    def _begin(self, module: nn.Module, inputs: Any) -> None:
        self._depth += 1
        if self._depth > 1 or not (module.training and torch.is_grad_enabled()):
            return
        seed = self.next_seed()
        cuda = None
        if self._device.type == "cuda":
            cuda = torch.cuda.get_rng_state(self._device)
            with torch.cuda.device(self._device):
                torch.cuda.manual_seed(seed)
        self._saved = (torch.get_rng_state(), cuda)
        torch.default_generator.manual_seed(seed)

    def _end(self, module: nn.Module, inputs: Any, output: Any) -> None:
        self._depth -= 1
        if self._depth > 0 or self._saved is None:
            return
        (cpu, cuda), self._saved = self._saved, None
        torch.set_rng_state(cpu)
        if cuda is not None:
            torch.cuda.set_rng_state(cuda, self._device)

"""Shared randomness: dropout masks that agree on ranks which work on the same samples."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from atorch_ns.capture.random_states import save_generators, seed_generators


class SharedRandomness:
    """Gives each forward pass in training random states that depend on the job, the data and a counter.

    Ranks that hold parts of one layer must draw the same masks, however the user has seeded them. The
    caller's random states are restored. Recomputation in the backward pass restores those it has seen.

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
        self._restore: Callable[[], None] | None = None

    def state(self) -> torch.Tensor:
        """State from which the next forward passes draw, int64. Equal on all ranks after the same steps."""
        return torch.tensor([self._seed, self._count], dtype=torch.int64)

    def restore(self, state: torch.Tensor) -> None:
        """Continues from a :meth:`state`, on any number of ranks."""
        self._seed, self._count = state.tolist()

    def next_seed(self) -> int:
        """The seed of the next forward pass, or of the next batch of a pipeline."""
        self._count += 1
        text = repr((self._seed, self._data_rank, self._count)).encode()
        return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 1  # 63 bits

    def attach(self, modules: Iterable[nn.Module]) -> None:
        """Surrounds the forward passes of ``modules``, only the outermost if they are nested."""
        for module in dict.fromkeys(modules):
            module.register_forward_pre_hook(self._seed_forward, prepend=True)
            module.register_forward_hook(self._restore_generators, always_call=True)  # also after errors

    def give_way(self) -> None:
        """Disables seeding from now on, since another object surrounds the same modules."""
        self._depth += 1  # so none of them is the outermost

    def _seed_forward(self, module: nn.Module, inputs: Any) -> None:
        self._depth += 1
        if self._depth > 1 or not (module.training and torch.is_grad_enabled()):
            return  # nested, or not training
        self._restore = save_generators(self._device)
        seed_generators(self.next_seed(), self._device)

    def _restore_generators(self, module: nn.Module, inputs: Any, output: Any) -> None:
        self._depth -= 1
        if self._depth == 0 and self._restore is not None:
            self._restore()
            self._restore = None

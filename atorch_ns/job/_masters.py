"""fp32 copies of half-precision weights, which the optimizer updates in their place."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch

__all__ = ["MasterWeights"]


class MasterWeights:
    """Pairs of a model's half-precision parameter and its fp32 copy.

    Args:
        parameters: the model's parameters; those that are not floating or already fp32 are their own master.
    """

    def __init__(self, parameters: Iterable[torch.Tensor]) -> None:
        self._masters: dict[torch.Tensor, torch.Tensor] = {}
        for parameter in parameters:
            if parameter.requires_grad and parameter.dtype in (torch.float16, torch.bfloat16):
                master = parameter.detach().to(torch.float32)
                self._masters[parameter] = torch.nn.Parameter(master)

    def of(self, parameter: torch.Tensor) -> torch.Tensor:
        """The tensor that the optimizer updates for ``parameter``."""
        return self._masters.get(parameter, parameter)

    def pairs(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """``(parameter, master)`` of every parameter that has one."""
        yield from self._masters.items()

    def groups(self, groups: Iterable[Any]) -> list[dict[str, Any]]:
        """Parameter groups with every parameter replaced by its master."""
        return [
            {**group, "params": [self.of(parameter) for parameter in group["params"]]} for group in groups
        ]

    @torch.no_grad()
    def take_gradients(self) -> None:
        """Moves the parameters' gradients to the masters, in fp32; the half-precision ones are freed."""
        for parameter, master in self._masters.items():
            if parameter.grad is not None:
                master.grad = parameter.grad.to(torch.float32)
                parameter.grad = None

    @torch.no_grad()
    def give_weights(self) -> None:
        """Rounds the masters into the parameters."""
        for parameter, master in self._masters.items():
            parameter.copy_(master)

"""fp32 copies of weights, which the optimizer updates in their place: of half-precision ones, or in host memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch

__all__ = ["MasterWeights"]


class MasterWeights:
    """Pairs of a model's parameter and its fp32 copy.

    Args:
        parameters: the model's parameters; those that are not floating or already fp32 are their own master.
        on_host: all floating parameters have a master, in host memory; they are plain tensors then.
        pinned: whether that memory is pinned, so that the device moves it by itself.
    """

    def __init__(
        self, parameters: Iterable[torch.Tensor], *, on_host: bool = False, pinned: bool = False
    ) -> None:
        self._on_host = on_host
        self._pinned = pinned
        self._gradients: dict[torch.Tensor, torch.Tensor] = {}
        self._masters: dict[torch.Tensor, torch.Tensor] = {}
        for parameter in parameters:
            if not parameter.requires_grad:
                continue
            if on_host and parameter.is_floating_point():
                master = self._host_tensor(parameter).copy_(parameter.detach())
                self._masters[parameter] = torch.nn.Parameter(master)
            elif parameter.dtype in (torch.float16, torch.bfloat16):
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
        """Moves the parameters' gradients to the masters, in fp32; the parameters' own are freed."""
        for parameter, master in self._masters.items():
            if parameter.grad is None:
                continue
            if self._on_host:
                if parameter not in self._gradients:
                    self._gradients[parameter] = self._host_tensor(parameter)
                gradient = self._gradients[parameter]
                master.grad = gradient.copy_(parameter.grad, non_blocking=self._pinned)
            else:
                master.grad = parameter.grad.to(torch.float32)
            parameter.grad = None
        if self._pinned:
            torch.cuda.current_stream().synchronize()  # the host reads them next

    @torch.no_grad()
    def give_weights(self) -> None:
        """Rounds the masters into the parameters."""
        for parameter, master in self._masters.items():
            parameter.copy_(master, non_blocking=self._pinned)

    def _host_tensor(self, parameter: torch.Tensor) -> torch.Tensor:
        return torch.empty(parameter.shape, dtype=torch.float32, device="cpu", pin_memory=self._pinned)

"""Stages whose passes sleep for fixed times: what a pipeline's schedule is worth, whatever else the machine does."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["SLOW_WIDTH", "Slow", "SlowStage"]

SLOW_WIDTH = 8
"""Features that go through the stages."""


class Slow(torch.autograd.Function):
    """The identity, for which both passes take their time."""

    num_forwards = 0

    @staticmethod
    def forward(ctx: Any, given: Tensor, forward_s: float, backward_s: float) -> Tensor:
        """Keeps what it is given, so that no recomputation stops before it."""
        Slow.num_forwards += 1
        ctx.save_for_backward(given)
        ctx.backward_s = backward_s
        time.sleep(forward_s)
        return given.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        """Asks for what was kept, as a layer would."""
        (_,) = ctx.saved_tensors
        time.sleep(ctx.backward_s)
        return grads[0], None, None


class SlowStage(nn.Module):
    def __init__(self, forward_s: float, backward_s: float) -> None:
        super().__init__()
        self.linear = nn.Linear(SLOW_WIDTH, SLOW_WIDTH)
        self.seconds = forward_s, backward_s

    def forward(self, hidden: Tensor) -> Tensor:
        slowed: Tensor = Slow.apply(self.linear(hidden), *self.seconds)
        return slowed

"""Keeping what the backward pass needs in host memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import save_on_cpu

__all__ = ["offloaded"]


def offloaded(function: Callable[..., Any], device: torch.device) -> Callable[..., Any]:
    """``function(module, *args, **kwargs)``, with what it saves for the backward pass in pinned host memory.

    Of a recomputed module that is its positional inputs: what is saved inside is not kept. The copies are not hidden
    behind computation. On a CPU, whose memory is the host's, nothing is copied.
    """
    if device.type == "cpu":
        return function

    def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with save_on_cpu(pin_memory=True, device_type=device.type):
            return function(module, *args, **kwargs)

    return call

"""Computing something in the midst of a forward pass without a trace in it."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

__all__ = ["isolated"]

T = TypeVar("T")


def isolated(action: Callable[[], T], device: torch.device) -> T:
    """``action()`` in a thread of its own, which has no autocast, no modes and no hooks of a recomputation.

    Those count what a forward pass does and expect the same again. The default generator, which all threads
    share, is as before afterwards.
    """

    def run() -> T:
        if device.type == "cuda":
            torch.cuda.set_device(device)
        with torch.random.fork_rng(devices=[]):
            return action()

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(run).result()

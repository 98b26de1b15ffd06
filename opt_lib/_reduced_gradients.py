"""Accumulating gradients under a wrapper that reduces them to their owner and frees them elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from atorch_ns.errors import StepError

__all__ = ["ReducedGradients"]


class ReducedGradients:
    """Keeps accumulation right where the wrapper would divide earlier gradients again.

    A backward pass of fairscale's ShardedDataParallel divides what ``grad`` holds by the number of ranks and
    sums it over them. A gradient that is an average already, held by its owner alone, would come out divided
    once more. It is therefore multiplied by the number of ranks when more is added to it. A step on gradients
    that were never reduced is an error.

    Args:
        optimizer: holds the parameters; its step is watched.
        num_ranks: how many ranks gradients are averaged over.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, *, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._paused = False
        self._averaged: set[torch.Tensor] = set()
        self._local: set[torch.Tensor] = set()
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.requires_grad:
                    self._watch(parameter)
        optimizer.register_step_pre_hook(self._require_averages)

    def pausing(
        self, no_sync: Callable[[], AbstractContextManager[Any]]
    ) -> Callable[[], AbstractContextManager[None]]:
        """The wrapper's ``no_sync``, of which this object knows."""

        @contextmanager
        def skip() -> Iterator[None]:
            self._paused = True
            try:
                with no_sync():
                    yield
            finally:
                self._paused = False

        return skip

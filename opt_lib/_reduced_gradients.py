"""Accumulating gradients under a wrapper that reduces them to their owner and frees them elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import nn

from atorch_ns.errors import StepError

__all__ = ["ReducedGradients"]


class ReducedGradients:
    """Keeps accumulation right where the wrapper would divide earlier gradients again.

    fairscale's ShardedDataParallel divides what ``grad`` holds by the number of ranks and sums it over them,
    once for each forward pass in training mode. A gradient that is an average already, held by its owner
    alone, would come out divided once more; it is therefore multiplied by the number of ranks when more is
    added to it. A step with gradients that were never reduced is an error.

    Args:
        model: the wrapper.
        optimizer: holds the parameters; its step is watched.
        num_ranks: how many ranks gradients are averaged over.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, *, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._paused = False
        self._parameters = [
            parameter
            for group in optimizer.param_groups
            for parameter in group["params"]
            if parameter.requires_grad
        ]
        self._expected: set[torch.Tensor] = set()  # will be reduced by the next backward pass
        self._averaged: set[torch.Tensor] = set()
        self._local: set[torch.Tensor] = set()
        for parameter in self._parameters:
            self._watch(parameter)
        model.register_forward_pre_hook(self._before_forward)
        optimizer.register_step_pre_hook(self._before_step)

    def pausing(
        self, no_sync: Callable[[], AbstractContextManager[Any]]
    ) -> Callable[[], AbstractContextManager[None]]:
        """The wrapper's ``no_sync``, told to this object."""

        @contextmanager
        def skip() -> Iterator[None]:
            self._paused = True
            try:
                with no_sync():
                    yield
            finally:
                self._paused = False

        return skip

    def _watch(self, parameter: torch.Tensor) -> None:
        def before(_: torch.Tensor) -> None:
            if parameter in self._averaged and parameter.grad is not None:
                parameter.grad.mul_(self._num_ranks)
            self._averaged.discard(parameter)

        def after(_: torch.Tensor) -> None:
            if self._paused or parameter not in self._expected:
                self._local.add(parameter)
            else:
                self._expected.discard(parameter)
                self._local.discard(parameter)
                self._averaged.add(parameter)

        parameter.register_hook(before)
        parameter.register_post_accumulate_grad_hook(after)

    def _before_forward(self, model: nn.Module, _: Any) -> None:
        if model.training:
            self._expected.update(self._parameters)
        else:
            self._expected.clear()

    def _before_step(self, *_: Any) -> None:
        if any(parameter.grad is not None for parameter in self._local):
            raise StepError(
                "the last backward pass did not average its gradients over the ranks. ShardedDataParallel does "
                "that once for each forward pass, and in training mode only: call model.train(), add losses "
                "before one backward pass, and leave the context that skips synchronisation for the last "
                "micro-batch."
            )

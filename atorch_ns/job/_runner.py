"""Running a batch where calling the model is not enough: pipelines, and engines of other libraries."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch

from atorch_ns.job._loss import LossFunction

if TYPE_CHECKING:
    from atorch_ns.job._job import Job

__all__ = ["BatchRunner", "MakeRunner"]


class BatchRunner(Protocol):
    """Runs micro-batches through a model of which this rank holds a part.

    All ranks of the part's group call it together, with the same micro-batches.
    """

    def forward_backward(self, micro_batches: Sequence[Any]) -> torch.Tensor:
        """Adds the gradients of the mean loss over ``micro_batches``.

        Returns:
            That loss, 0-d float32 and detached, on every rank of the group.
        """
        ...

    def forward(self, micro_batches: Sequence[Any]) -> torch.Tensor:
        """The mean loss over ``micro_batches`` without gradients, as :meth:`forward_backward` returns it."""
        ...


MakeRunner = Callable[["Job", LossFunction], BatchRunner]
"""``(built job, the result's loss function) -> the runner``; called once the model is final."""

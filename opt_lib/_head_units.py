"""Last layers that are units of their own, so that their weight is not there for the loss."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from atorch_ns.job import Job

__all__ = ["tell_of_heads"]


def tell_of_heads(job: Job, method: str, units: Iterable[nn.Module]) -> None:
    """Says in the report where a loss in chunks, which reads the last layer's weight, is not used.

    Args:
        job: the job.
        method: the method's name, for the report.
        units: the modules whose parameters are gathered for their own passes alone.
    """
    if any(hasattr(unit, "_deferring") for unit in units):
        job.explain(
            method,
            "the last layer is a unit of its own, gathered for its own passes alone, so the model computes all its "
            "logits and its own loss in place of chunked_linear_cross_entropy",
        )

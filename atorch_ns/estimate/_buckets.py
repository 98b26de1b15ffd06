"""The buckets in which DistributedDataParallel reduces gradients."""

from __future__ import annotations

from collections.abc import Iterator

from atorch_ns.estimate._units import DTYPE_BYTES, stored_dtype
from atorch_ns.profile import ParameterSpec, Trace
from atorch_ns.strategy import Plan

__all__ = ["DEFAULT_BUCKET_BYTES", "FIRST_BUCKET_BYTES", "gradient_buckets"]

DEFAULT_BUCKET_BYTES = 25 * 2**20
"""``bucket_cap_mb`` of torch's DistributedDataParallel where none is given."""

FIRST_BUCKET_BYTES = 2**20
"""``torch.distributed._DEFAULT_FIRST_BUCKET_BYTES``: a small first bucket starts to communicate early. A size
that the user gives holds for the first bucket too."""


def gradient_buckets(plan: Plan, trace: Trace) -> list[int]:
    """Bytes of each bucket, in the order in which they are reduced.

    Buckets are made anew after the first step, in the order in which gradients arrived: that of the
    parameters backwards. A bucket is closed by the gradient that fills it. Each dtype has its own.
    """
    cap = plan.bucket_bytes or DEFAULT_BUCKET_BYTES
    first = FIRST_BUCKET_BYTES if cap == DEFAULT_BUCKET_BYTES else cap
    closed: list[int] = []
    filling: dict[str, int] = {}
    limits: dict[str, int] = {}
    for parameter in _arriving(trace):
        dtype = stored_dtype(plan, parameter, None)
        filling[dtype] = filling.get(dtype, 0) + parameter.num_elements * DTYPE_BYTES[dtype]
        if filling[dtype] >= limits.get(dtype, first):
            closed.append(filling.pop(dtype))
            limits[dtype] = cap
    return [*closed, *filling.values()]


def _arriving(trace: Trace) -> Iterator[ParameterSpec]:
    """Trainable parameters in the order in which their gradients are complete; a tied one at its first use."""
    for segment in reversed(trace.segments):
        own = [p for p in reversed(segment.parameters) if p.tied_to is None and p.trainable]
        for _ in range(segment.count):
            yield from own

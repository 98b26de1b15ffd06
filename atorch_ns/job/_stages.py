"""What the ranks of one pipeline, which hold different parameters, tell each other of them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, TypeVar

import torch.distributed as dist

if TYPE_CHECKING:
    from atorch_ns.job._job import Job

__all__ = ["in_user_order", "on_all_stages"]

T = TypeVar("T")


def on_all_stages(job: Job, value: T) -> list[T]:
    """``value`` of every rank of this rank's pipeline; collective over them, and of this rank alone without one."""
    group = job.stage_group
    if group is None:
        return [value]
    values: list[Any] = [None] * group.size()
    dist.all_gather_object(values, value, group=group)
    return values


def in_user_order(job: Job, names: Iterable[str]) -> list[str]:
    """``names`` without repetition: parameters in the order of the user's model, then the others as they come."""
    order = {name: place for place, name in enumerate(job.parameter_order)}
    return sorted(dict.fromkeys(names), key=lambda name: order.get(name, len(order)))

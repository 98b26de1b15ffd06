"""fairscale as a backend of zero1 and zero2."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from atorch_ns.cluster import Cluster
from atorch_ns.errors import Problem
from atorch_ns.job import Job
from atorch_ns.method import Conflict


def conflicts(used: Callable[[Any], bool]) -> tuple[Conflict, ...]:
    """Methods that cannot stand with it."""
    return ()


def check(method: str, cluster: Cluster) -> list[Problem]:
    """The package must be there."""
    raise NotImplementedError


def shard_optimizer(job: Job, method: str) -> None:
    """OSS under DDP."""
    raise NotImplementedError


def shard_gradients(job: Job, method: str) -> None:
    """OSS with ShardedDataParallel."""
    raise NotImplementedError

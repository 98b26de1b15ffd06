"""Applying a resolved strategy: every method does its part to a job, and the job is built."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from atorch_ns.cluster import Cluster, agree
from atorch_ns.errors import AtorchError
from atorch_ns.job._build import build
from atorch_ns.job._inputs import Inputs
from atorch_ns.job._job import Job
from atorch_ns.job._result import Result
from atorch_ns.method import Phase, Resolved

__all__ = ["apply_strategy"]


def apply_strategy(inputs: Inputs, cluster: Cluster, resolved: Resolved) -> Result:
    """Does what the strategy says to the user's objects; collective where there is a process group.

    The caller's random states are as before. The model is changed in place where methods do so.

    Raises:
        AtorchError: what a method or a user's function found wrong; on all ranks, where the failure of one
            can be seen before ranks communicate.
    """
    with _caller_rng(cluster):
        return _apply(inputs, cluster, resolved)


def _apply(inputs: Inputs, cluster: Cluster, resolved: Resolved) -> Result:
    seed = _common_seed(cluster)
    job = agree(
        lambda: Job.start(inputs, cluster, resolved.plan, seed=seed),
        what="grouping the parameters",
        distributed=cluster.distributed,
    )
    for chosen in resolved.chosen:
        if chosen.method.phase is Phase.CUT:
            job.keep_structure()
        try:
            chosen.method.apply(job, chosen.config)
        except AtorchError as error:  # a search asks who would refuse again
            error.refused_by = chosen.method.name
            raise
    if job.take_over is not None:  # such a backend communicates while it builds
        return build(job, resolved)
    return agree(
        lambda: build(job, resolved), what="building optimizer and data", distributed=cluster.distributed
    )


def _common_seed(cluster: Cluster) -> int:
    """Rank 0's seed, for values that all ranks must draw alike."""
    seeds = [torch.initial_seed()]
    if cluster.distributed:
        dist.broadcast_object_list(seeds, src=0)
    return seeds[0]


def _caller_rng(cluster: Cluster) -> Any:
    devices = [cluster.local_rank] if cluster.device_type == "cuda" else []
    return torch.random.fork_rng(devices=devices)

"""Experts that are divided over the expert axis, in what shards or replicates the rest of the model.

The ranks along ``data`` and ``zero`` hold copies of a rank's experts; those along ``expert`` hold others. So experts
are sharded and averaged over the former, while everything else is over all ranks that see different data.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard

from atorch_ns.errors import InputError
from atorch_ns.job import Job
from atorch_ns.torch_compat import replicate
from opt_lib._shard_parts import broadcast_from_first

__all__ = ["apart", "replicate_experts", "shard_experts"]


def apart(job: Job) -> set[nn.Module]:
    """The modules that hold experts and those inside them."""
    return {inside for module in (*job.experts, *job.listed_experts) for inside in module.modules()}


def replicate_experts(job: Job) -> set[nn.Parameter]:
    """Averages gradients of experts over the ranks that hold the same ones; collective.

    Returns:
        All parameters that are treated so, for others to leave alone.
    """
    assert job.mesh is not None
    copies = job.mesh.copies
    for module in job.experts if copies.size() > 1 else ():
        broadcast_from_first(job, module.parameters(), mesh=copies)
        replicate(module, mesh=copies, ignored=set())
    return _parameters(job)


def shard_experts(job: Job, options: dict[str, Any], *, sync: bool) -> set[nn.Parameter]:
    """Shards experts over the ranks that hold the same ones; collective.

    Args:
        job: the job.
        options: of ``fully_shard`` for the rest of the model.
        sync: whether the first of these ranks gives the values.

    Returns:
        All parameters that are treated so, for others to leave alone.

    Raises:
        InputError: if a parameter cannot be divided evenly, the user wants experts left alone, or they are modules
            of their own.
    """
    assert job.mesh is not None
    if job.listed_experts:
        raise InputError(
            f"{type(job.listed_experts[0]).__name__} is one of a list of experts, which are divided over the expert axis "
            "and cannot be sharded further. Use ddp, or stack the experts' parameters in one module with "
            "forward(hidden_states, top_k_index, top_k_weights)."
        )
    if options["ignored_params"] & _parameters(job):
        raise InputError(
            f"{', '.join(sorted({type(module).__name__ for module in job.experts}))} cannot be left out of sharding: "
            "its experts are divided over the expert axis. Take it out of atorch_ignored_cls."
        )
    copies = job.mesh.copies
    # On one rank there is nothing to shard, but the dtype and the place of computation are a unit's, too.
    as_units = copies.size() > 1 or "mp_policy" in options or "offload_policy" in options
    for module in job.experts if as_units else ():
        placements = {parameter: _placement(job, parameter) for parameter in module.parameters()}
        if sync:
            broadcast_from_first(job, module.parameters(), mesh=copies)
        fully_shard(module, **{**options, "mesh": copies, "shard_placement_fn": placements.get})
    return _parameters(job)


def _parameters(job: Job) -> set[nn.Parameter]:
    modules = (*job.experts, *job.listed_experts)
    return {parameter for module in modules for parameter in module.parameters()}


def _placement(job: Job, parameter: nn.Parameter) -> Shard:
    """Which dimension is sharded: the first lies divided over the expert axis already, so another if that is even."""
    assert job.mesh is not None
    ranks = job.mesh.copies.size()
    for dim in range(1, parameter.dim()):
        if parameter.size(dim) % ranks == 0:
            return Shard(dim)
    if parameter.size(0) % (ranks * job.mesh.size("expert")) == 0 or parameter.dim() == 1:
        return Shard(0)
    raise InputError(
        f"experts of shape {tuple(parameter.shape)} are divided over {job.mesh.size('expert')} ranks, and none of "
        f"their dimensions divides into {ranks} further shards, over data and zero. Use fewer of these, or ddp."
    )

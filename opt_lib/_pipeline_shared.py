"""Parameters that several stages hold: equal at the start, their gradients summed."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn

from atorch_ns.job import Job
from atorch_ns.pipeline import Division
from atorch_ns.torch_compat import group_timeout

__all__ = ["all_names", "pipeline_groups", "share_parameters"]


def all_names(model: nn.Module) -> dict[str, tuple[str, ...]]:
    """All names of every parameter by the first of them."""
    found: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        found.setdefault(id(parameter), []).append(name)
    return {names[0]: tuple(names) for names in found.values()}


@torch.no_grad()
def share_parameters(job: Job, division: Division) -> None:
    """Gives what several ranks of a pipeline hold the values it has on the first of them; collective over all ranks.

    Their gradients are summed once a step, and only the first of them counts them in norms. To be called while the
    model is whole.
    """
    assert job.mesh is not None
    rank = job.mesh.axis("pipeline").get_local_rank()
    names = all_names(job.module)
    parameters = dict(job.module.named_parameters())
    groups = pipeline_groups(job, sorted({division.ranks_holding(name) for name in division.shared}))
    materialiser = job.materialiser()
    for name in division.shared:
        holders = division.ranks_holding(name)
        if rank not in holders:
            continue
        group = groups[holders]
        parameter = parameters[name]
        if parameter.is_meta:  # drawn by its path, so the same everywhere
            owners = [job.module.get_submodule(one.rpartition(".")[0]) for one in names[name]]
            materialiser.materialise(owners, recurse=False)
        else:
            _broadcast(parameter, group, job.device)
        job.sums.add(names[name], group)
        if rank != holders[0]:
            job.elsewhere.update(names[name])
    for name in division.shared_on_rank:
        if rank in division.ranks_holding(name):
            job.kept_whole.add(name)
            job.sums.add(names[name], job.mesh.data_group, mean=True)


def _broadcast(parameter: torch.Tensor, group: dist.ProcessGroup, device: torch.device) -> None:
    value = parameter.data.to(device)
    dist.broadcast(value, group=group, group_src=0)
    if value is not parameter.data:
        parameter.data.copy_(value)


def pipeline_groups(job: Job, wanted: Sequence[tuple[int, ...]]) -> dict[tuple[int, ...], dist.ProcessGroup]:
    """This rank's group for each set of places along the pipeline. Every rank makes the groups of all pipelines."""
    assert job.mesh is not None
    mesh = job.mesh.device_mesh
    names = mesh.mesh_dim_names or ()
    dim = names.index("pipeline")
    lines = mesh.mesh.movedim(dim, -1).reshape(-1, mesh.mesh.shape[dim]).tolist()
    found: dict[tuple[int, ...], dist.ProcessGroup] = {}
    timeout = group_timeout(job.device)
    for places in wanted:
        for line in lines:
            ranks = [line[place] for place in places]
            group = dist.new_group(ranks, timeout=timeout)
            if dist.get_rank() in ranks:
                assert isinstance(group, dist.ProcessGroup)
                found[places] = group
    return found

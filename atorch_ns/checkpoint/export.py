"""A job's weights as a plain ``state_dict``, and back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from atorch_ns.checkpoint.contents import held_by_stages, states_of, tensor_records
from atorch_ns.checkpoint.manifest import TensorRecord
from atorch_ns.errors import CheckpointError
from atorch_ns.job import Job, Result, local_part, on_all_stages
from atorch_ns.text import first_few
from atorch_ns.torch_compat import persistent_buffers, plain_name

_SHOWN = 5


class Unmatched(NamedTuple):
    """Names that only one side has, as torch's ``load_state_dict`` returns them."""

    missing_keys: list[str]
    unexpected_keys: list[str]


def export_state_dict(result: Result) -> dict[str, torch.Tensor]:
    """All parameters and persistent buffers, whole, as the plain model's ``state_dict()``. Collective.

    Weights are fp32 where the job has fp32 masters. Tied parameters stand under each name and share memory.

    Returns:
        Copies on the CPU on rank 0; an empty dict on the other ranks, which need no memory for it.
    """
    tensors = whole_tensors(result)
    for name, others in _other_names(result.job).items():
        if name in tensors:
            tensors |= dict.fromkeys(others, tensors[name])
    return tensors


def _other_names(job: Job) -> dict[str, list[str]]:
    # Of tied parameters, and of buffers in modules that stand in the model twice; by the first name.
    names: dict[int, list[str]] = {}
    for name, buffer in job.module.named_buffers(remove_duplicate=False):
        names.setdefault(id(buffer), []).append(plain_name(name))
    return {first: others for first, *others in names.values() if others} | job.original.tied


def whole_tensors(
    result: Result, *, everywhere: bool = False, buffers: bool = True
) -> dict[str, torch.Tensor]:
    """Like :func:`export_state_dict`, with tied parameters under their first name only. Collective.

    Args:
        result: result of ``auto_accelerate``.
        everywhere: whether every rank gets them, or rank 0 alone.
        buffers: whether persistent buffers are included.
    """
    job = result.job
    local = states_of(result).weights()
    dtensor = next((weight for weight in local.values() if isinstance(weight, DTensor)), None)
    if dtensor is not None and job.step.same_place is not None:
        job.step.same_place.meet("X", dtensor.device_mesh.mesh.flatten().tolist())  # all are at this call
    if buffers:
        local |= persistent_buffers(job.module)
    group = job.stage_group
    keeps = everywhere or job.cluster.rank == 0
    tensors = {}
    for stage, names in enumerate(_by_stage(job, local)):
        for name, record in names.items():
            # full_tensor is collective over a stage's ranks; then the stage sends to its whole pipeline.
            whole = _full_tensor(local[name]) if group is None or group.rank() == stage else None
            if group is not None and (everywhere or 0 in dist.get_process_group_ranks(group)):
                whole = _from_stage(whole, record, stage, group, device=job.device)
            if keeps and whole is not None:
                tensors[name] = whole.detach().to("cpu", copy=True)
    return {name: tensors[name] for name in job.original.ordered(tensors)}


def _by_stage(job: Job, tensors: Mapping[str, torch.Tensor]) -> list[dict[str, TensorRecord]]:
    # The first of several stages that hold a tensor sends it. Collective over the stages.
    earlier: set[str] = set()
    stages = []
    for stage in on_all_stages(job, tensor_records(tensors)):
        stages.append({name: record for name, record in stage.items() if name not in earlier})
        earlier |= stage.keys()
    return stages


def _full_tensor(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _from_stage(
    whole: torch.Tensor | None,
    record: TensorRecord,
    group_rank: int,
    group: dist.ProcessGroup,
    *,
    device: torch.device,
) -> torch.Tensor:
    if whole is None:
        buffer = torch.empty(record.shape, dtype=getattr(torch, record.dtype), device=device)
    else:
        buffer = whole.detach().to(device).contiguous()  # a broadcast needs contiguous memory
    dist.broadcast(buffer, src=dist.get_process_group_ranks(group)[group_rank], group=group)
    return buffer


def import_state_dict(
    result: Result, state_dict: Mapping[str, torch.Tensor], strict: bool = True
) -> Unmatched:
    """Loads the weights and buffers of ``state_dict`` into the model. Collective.

    The optimizer's states, if it has any, are not changed. A tied parameter needs one of its names.

    Args:
        result: result of ``auto_accelerate``.
        state_dict: whole tensors by the plain model's names, on rank 0; those of other ranks are not read.
        strict: whether every name must be in both.

    Returns:
        The names that were left out; empty with ``strict``.

    Raises:
        CheckpointError: on every rank, naming the first few names that do not match or shapes that differ.
    """
    job = result.job
    states = states_of(result)
    weights = states.weights()
    targets = {**weights, **persistent_buffers(job.module)}
    records = held_by_stages(job, targets)
    others = _other_names(job)
    aliases = {name: (name, *others.get(name, ())) for name in records}
    keys, leftovers = job.cluster.on_first(
        lambda: _match_keys(state_dict, records, aliases, strict=strict), what="comparing the names"
    )
    # All ranks go through the names in the same order; rank 0 broadcasts each tensor.
    for name, key in keys.items():
        source = state_dict[key] if job.cluster.rank == 0 else None
        _fill_target(
            targets.get(name), records[name], source, job.device, distributed=job.cluster.distributed
        )
    states.set_weights(weights)
    if job.step.same_weights is not None:
        job.step.same_weights.begin_anew()
    return leftovers


def _match_keys(
    weights: Mapping[str, torch.Tensor],
    targets: Mapping[str, TensorRecord],
    aliases: Mapping[str, Sequence[str]],
    *,
    strict: bool,
) -> tuple[dict[str, str], Unmatched]:
    keys: dict[str, str] = {}
    problems = []
    for name, names in aliases.items():
        present = [key for key in names if key in weights]
        if not present:
            continue
        keys[name] = present[0]  # by any of its names
        shape, target_shape = tuple(weights[present[0]].shape), targets[name].shape
        if shape != target_shape:
            problems.append(f"{name} is {target_shape} here and {shape} there")
        if any(not torch.equal(weights[present[0]], weights[key]) for key in present[1:]):
            problems.append(f"{' and '.join(present)} are tied here and differ there")
    all_names = {key for names in aliases.values() for key in names}
    leftovers = Unmatched(
        [name for name in targets if name not in keys], [key for key in weights if key not in all_names]
    )
    if strict and leftovers.missing_keys:
        problems.append(f"{len(leftovers.missing_keys)} missing: {first_few(leftovers.missing_keys)}")
    if strict and leftovers.unexpected_keys:
        problems.append(
            f"{len(leftovers.unexpected_keys)} unexpected: {first_few(leftovers.unexpected_keys)}"
        )
    if problems:
        raise CheckpointError("the weights are of another model: " + first_few(problems, _SHOWN, "; "))
    return keys, leftovers


@torch.no_grad()
def _fill_target(
    target: torch.Tensor | None,
    record: TensorRecord,
    source: torch.Tensor | None,
    device: torch.device,
    *,
    distributed: bool,
) -> None:
    # One tensor at a time is whole on every rank, which keeps its part.
    dtype: torch.dtype = getattr(torch, record.dtype)
    if source is None:
        whole = torch.empty(record.shape, dtype=dtype, device=device)
    else:
        whole = source.to(device=device, dtype=dtype).contiguous()
    if distributed:
        dist.broadcast(whole, src=0)
    if isinstance(target, DTensor):
        target.to_local().copy_(local_part(whole, target))
    elif target is not None:
        target.copy_(whole)

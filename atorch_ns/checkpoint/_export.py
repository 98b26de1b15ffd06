"""A job's weights as a plain ``state_dict``, and back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, distribute_tensor

from atorch_ns.checkpoint._contents import states_of
from atorch_ns.cluster import agree
from atorch_ns.errors import CheckpointError
from atorch_ns.job import Result
from atorch_ns.torch_compat import persistent_buffers

__all__ = ["Unmatched", "export_state_dict", "import_state_dict", "whole_tensors"]

_SHOWN = 5


class Unmatched(NamedTuple):
    """Names that only one side has, as torch's ``load_state_dict`` returns them."""

    missing_keys: list[str]
    unexpected_keys: list[str]


def export_state_dict(result: Result) -> dict[str, torch.Tensor]:
    """All parameters and persistent buffers, whole, as ``state_dict()`` of the plain model names them; collective.

    Weights are fp32 where the job keeps fp32 masters of them. Tied parameters stand under each of their names
    and share memory.

    Returns:
        Copies on the CPU on rank 0; an empty dict on the other ranks, which need no memory for it.
    """
    exported = whole_tensors(result)
    for name, others in result.job.tied.items():
        if name in exported:
            exported |= dict.fromkeys(others, exported[name])
    return exported


def whole_tensors(result: Result) -> dict[str, torch.Tensor]:
    """As :func:`export_state_dict`, with tied parameters under their first name only; collective."""
    first = result.job.cluster.rank == 0
    found = {}
    for name, weight in states_of(result).weights().items():
        whole = weight.full_tensor() if isinstance(weight, DTensor) else weight
        if first:
            found[name] = whole.detach().to("cpu", copy=True)
    if first:
        found |= {
            name: buffer.detach().to("cpu", copy=True)
            for name, buffer in persistent_buffers(result.job.module).items()
        }
    return found


def import_state_dict(
    result: Result, state_dict: Mapping[str, torch.Tensor], strict: bool = True
) -> Unmatched:
    """Gives the model the weights and buffers of ``state_dict``; collective.

    The optimizer's states, if it has any, stay as they are. A tied parameter needs one of its names.

    Args:
        result: of ``auto_accelerate``.
        state_dict: whole tensors by the plain model's names; rank 0's counts, what the others give is not read.
        strict: every name must be in both.

    Returns:
        The names that were left out; empty with ``strict``.

    Raises:
        CheckpointError: on every rank, naming the first few names that do not match or tensors whose shapes differ.
    """
    job = result.job
    states = states_of(result)
    targets = {**states.weights(), **persistent_buffers(job.module)}
    aliases = {name: (name, *job.tied.get(name, ())) for name in targets}
    first, distributed = job.cluster.rank == 0, job.cluster.distributed

    def match() -> tuple[dict[str, str], Unmatched]:
        return _match(state_dict, targets, aliases, strict=strict) if first else ({}, Unmatched([], []))

    matched = [agree(match, what="comparing the names", distributed=distributed)]
    if distributed:
        dist.broadcast_object_list(matched, src=0)
    keys, unmatched = matched[0]
    for name, key in keys.items():
        _fill(targets[name], state_dict[key] if first else None, job.device, distributed=distributed)
    states.set_weights({name: targets[name] for name in states.weights()})
    return unmatched


def _match(
    given: Mapping[str, torch.Tensor],
    targets: Mapping[str, torch.Tensor],
    aliases: Mapping[str, Sequence[str]],
    *,
    strict: bool,
) -> tuple[dict[str, str], Unmatched]:
    """For each target the key to take, and what is left over."""
    keys: dict[str, str] = {}
    problems = []
    for name, names in aliases.items():
        present = [key for key in names if key in given]
        if not present:
            continue
        keys[name] = present[0]
        shape, wanted = tuple(given[present[0]].shape), tuple(targets[name].shape)
        if shape != wanted:
            problems.append(f"{name} is {wanted} here and {shape} there")
        if any(not torch.equal(given[present[0]], given[key]) for key in present[1:]):
            problems.append(f"{' and '.join(present)} are tied here and differ there")
    known = {key for names in aliases.values() for key in names}
    unmatched = Unmatched(
        [name for name in targets if name not in keys], [key for key in given if key not in known]
    )
    if strict and unmatched.missing_keys:
        problems.append(f"{len(unmatched.missing_keys)} missing: {_few(unmatched.missing_keys)}")
    if strict and unmatched.unexpected_keys:
        problems.append(f"{len(unmatched.unexpected_keys)} unexpected: {_few(unmatched.unexpected_keys)}")
    if problems:
        raise CheckpointError("the weights are of another model: " + "; ".join(problems[:_SHOWN]))
    return keys, unmatched


@torch.no_grad()
def _fill(
    target: torch.Tensor, source: torch.Tensor | None, device: torch.device, *, distributed: bool
) -> None:
    """Copies rank 0's ``source`` into every rank's ``target``, or the rank's shard of it."""
    if source is None:
        whole = torch.empty(target.shape, dtype=target.dtype, device=device)
    else:
        whole = source.to(device=device, dtype=target.dtype).contiguous()
    if distributed:
        dist.broadcast(whole, src=0)
    if isinstance(target, DTensor):
        target.copy_(distribute_tensor(whole, target.device_mesh, target.placements, src_data_rank=None))
    else:
        target.copy_(whole)


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (", …" if len(names) > _SHOWN else "")

"""Units that fully sharded training gathers, parameters that it leaves alone, and divided experts."""

from __future__ import annotations

import importlib
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard

from atorch_ns.capture.blocks import repeated_blocks, select_modules
from atorch_ns.errors import InputError
from atorch_ns.job import Job, Materialiser
from atorch_ns.sharding import unit_dim
from atorch_ns.torch_compat import plain_name, replicate
from opt_lib._sharded.config import ShardConfig


def wrap_units(model: nn.Module, config: ShardConfig) -> list[nn.Module]:
    """The modules that are gathered as one unit each, the root excluded, parents before children.

    A module that shares a parameter with another outside it stays with the root: a shared parameter can
    belong to one unit only.
    """
    if config.atorch_wrap_cls is not None:
        units = [match.module for match in select_modules(model, config.atorch_wrap_cls)]
    elif config.atorch_size_based_min_num_params is not None:
        units = _large_modules(model, config.atorch_size_based_min_num_params)
    else:
        units = [block.module for block in repeated_blocks(model)]
    uses = _count_parameter_uses(model)
    places = Counter(id(child) for _, child in model.named_modules(remove_duplicate=False))
    # A unit stays if it holds all places of its parameters; a unit in several places counts each.
    return [
        unit
        for unit in units
        if all(uses[key] == count * places[id(unit)] for key, count in _count_parameter_uses(unit).items())
    ]


def units_of_other_dtypes(
    units: Collection[nn.Module], left_alone: Collection[nn.Parameter]
) -> list[nn.Module]:
    """Modules that become units of their own, since torch shards trainable parameters of one dtype together.

    A unit has the dtype of its own parameters, else that of most elements inside.

    Args:
        units: the roots and the units inside that are known.
        left_alone: parameters that are not sharded, or elsewhere.

    Raises:
        InputError: as :func:`own_dtype`, and if such a module shares a parameter with another.
    """
    new_units: list[nn.Module] = []
    waiting, edges = list(units), set(units)
    while waiting:
        unit = waiting.pop()
        dtypes = {
            module: dtype
            for module in _unit_modules(unit, edges)
            if (dtype := own_dtype(module, left_alone)) is not None
        }
        sizes: Counter[torch.dtype] = Counter()
        holders: Counter[nn.Parameter] = Counter()  # modules that own it: several, if tied
        for module, dtype in dtypes.items():
            sizes[dtype] += sum(parameter.numel() for parameter in _own_parameters(module))
            holders.update(_own_parameters(module))
        usual = dtypes.get(unit) or next((dtype for dtype, _ in sizes.most_common(1)), None)
        for module, dtype in dtypes.items():
            if dtype != usual:
                if any(holders[parameter] > 1 for parameter in _own_parameters(module)):
                    raise InputError(
                        f"{type(module).__name__} shares a parameter in {dtype} with another module, so it cannot be a "
                        f"separate unit, but the rest of {type(unit).__name__} is in {usual}. torch shards only "
                        "parameters of one dtype together: give them one dtype, or replicate the modules: atorch_ignored_cls."
                    )
                new_units.append(module)
                waiting.append(module)
                edges.add(module)
    return new_units


def _unit_modules(unit: nn.Module, edges: Collection[nn.Module]) -> Iterable[nn.Module]:
    """The unit and the modules inside it that belong to no unit inside it."""
    yield unit
    for child in unit.children():
        if child not in edges:
            yield from _unit_modules(child, edges)


def own_dtype(module: nn.Module, left_alone: Collection[nn.Parameter]) -> torch.dtype | None:
    """The dtype of a module's own trainable parameters, if it has any.

    Raises:
        InputError: if there are several.
    """
    dtypes = {
        name: parameter.dtype
        for name, parameter in module.named_parameters(recurse=False)
        if parameter.requires_grad and parameter not in left_alone
    }
    if len(set(dtypes.values())) > 1:
        text = ", ".join(f"{name} {dtype}" for name, dtype in dtypes.items())
        raise InputError(
            f"{type(module).__name__} has trainable parameters of several dtypes ({text}), but torch shards those of one dtype "
            "together. Give them one dtype, move some into a separate module, or replicate the module: "
            "atorch_ignored_cls."
        )
    return next(iter(dtypes.values()), None)


def _count_parameter_uses(module: nn.Module) -> Counter[int]:
    return Counter(
        id(parameter)  # a module may stand in several places
        for _, child in module.named_modules(remove_duplicate=False)
        for parameter in child.parameters(recurse=False)
    )


def _large_modules(model: nn.Module, min_num_params: int) -> list[nn.Module]:
    units: list[nn.Module] = []

    def remaining(module: nn.Module) -> int:
        size = sum(parameter.numel() for parameter in module.parameters(recurse=False))
        total = size + sum(remaining(child) for child in module.children())
        # A ModuleList is never called, so nothing would gather it.
        if module is not model and total >= min_num_params and not isinstance(module, nn.ModuleList):
            units.append(module)
            return 0  # taken out: parents do not count it again
        return total

    remaining(model)
    return list(reversed(units))  # parents first


def ignored_parameters(
    model: nn.Module, config: ShardConfig, materialiser: Materialiser
) -> set[nn.Parameter]:
    """The parameters that are replicated instead of sharded, with memory if the model is on meta.

    They belong to ignored modules or cannot be divided: scalars, as a learned temperature, and empty ones.
    """
    modules = [match.module for match in select_modules(model, config.ignored)]
    materialiser.materialise(modules)
    owners = [module for module in model.modules() if any(map(_is_indivisible, _own_parameters(module)))]
    materialiser.materialise(owners, recurse=False)
    parameters = {parameter for module in modules for parameter in module.parameters()}
    return parameters | {p for module in owners for p in _own_parameters(module) if _is_indivisible(p)}


def _is_indivisible(parameter: nn.Parameter) -> bool:
    return parameter.ndim == 0 or parameter.numel() == 0


def _own_parameters(module: nn.Module) -> Iterable[nn.Parameter]:
    return module.parameters(recurse=False)


def parameters_kept_whole(job: Job) -> set[nn.Parameter]:
    """Parameters that several stages of this rank use: neither sharded nor averaged; moved to its device."""
    pairs = job.module.named_parameters() if job.gradients.kept_whole else ()
    parameters = {parameter for name, parameter in pairs if plain_name(name) in job.gradients.kept_whole}
    move_to_device(job, parameters)
    return parameters


def move_to_device(job: Job, parameters: Iterable[nn.Parameter]) -> None:
    """Moves replicated parameters to this rank's device."""
    for parameter in parameters:
        parameter.data = parameter.data.to(job.device)  # the object stays, as groups and hooks know it


def average_ignored(job: Job, whole: Collection[nn.Parameter]) -> None:
    """Averages the gradients of ignored parameters over the data once a step, whichever ranks have any."""
    assert job.mesh is not None
    names = [plain_name(name) for name, parameter in job.module.named_parameters() if parameter in whole]
    job.gradients.sums.add(names, job.mesh.data_group, mean=True)


def leave_sequence_sums(job: Job, ignored_params: Collection[nn.Parameter]) -> None:
    """Leaves means of gradients over ``sequence`` to units, but for ``ignored_params``."""
    assert job.mesh is not None
    if job.mesh.size("sequence") > 1:
        pairs = job.module.named_parameters(remove_duplicate=False)
        names = [plain_name(name) for name, parameter in pairs if parameter not in ignored_params]
        job.gradients.sums.leave(names, job.mesh.axis("sequence").get_group())


def init_function(name: str | None) -> Callable[[nn.Module], object] | None:
    """The function of that qualified name.

    Raises:
        InputError: if there is none.
    """
    if name is None:
        return None
    module, _, function = name.rpartition(".")
    try:
        init_fn: Callable[[nn.Module], object] = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, ValueError) as error:
        raise InputError(f"param_init_fn={name!r} cannot be imported: {error}") from error
    return init_fn


@torch.no_grad()
def broadcast_from_first(
    job: Job, tensors: Iterable[torch.Tensor], *, group: dist.ProcessGroup | None = None
) -> None:
    """Gives ``tensors``, or this rank's shards of them, the values of a group's first rank. Collective.

    Args:
        job: the job, for its device and mesh.
        tensors: the same ones on all ranks; those on meta are left alone.
        group: the ranks; ``None`` for those that see different data.
    """
    assert job.mesh is not None
    under_way = []
    for tensor in tensors:
        data = tensor.to_local() if isinstance(tensor, DTensor) else tensor.data
        if data.is_meta:
            continue
        buffer = data.to(job.device).contiguous()
        work = dist.broadcast(buffer, group=group or job.mesh.data_group, group_src=0, async_op=True)
        if buffer is data:  # nothing was copied, so sends may wait together
            under_way.append(work)
        else:  # one copy at a time
            work.wait()
            _copy_values(data, buffer)
    for work in under_way:
        work.wait()


@torch.no_grad()
def broadcast_together(tensors: Iterable[torch.Tensor], group: dist.ProcessGroup) -> None:
    """Gives small tensors the values of a group's first rank, by one collective for each dtype."""
    of_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
    for tensor in tensors:
        of_dtype.setdefault(tensor.dtype, []).append(tensor)
    for alike in of_dtype.values():
        buffer = torch.cat([tensor.reshape(-1) for tensor in alike])
        dist.broadcast(buffer, group=group, group_src=0)
        for tensor, part in zip(alike, buffer.split([tensor.numel() for tensor in alike]), strict=True):
            _copy_values(tensor.data, part.view_as(tensor))


def _copy_values(tensor: torch.Tensor, values: torch.Tensor) -> None:
    # Elements of an expanded tensor share memory: it cannot be filled, and is alike on all ranks.
    if not any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True)):
        tensor.copy_(values)


# Ranks along ``data`` and ``zero`` hold copies of a rank's experts, ranks along ``expert`` hold others. So
# experts are sharded and averaged over the former, everything else over all ranks that see different data.


def expert_modules(job: Job) -> set[nn.Module]:
    """The modules that hold experts and those inside them."""
    return {
        inside for module in (*job.parts.experts, *job.parts.listed_experts) for inside in module.modules()
    }


def expert_parameters(job: Job) -> set[nn.Parameter]:
    """The parameters of all experts, which other sharding and averaging leaves alone."""
    modules = (*job.parts.experts, *job.parts.listed_experts)
    return {parameter for module in modules for parameter in module.parameters()}


def replicate_experts(job: Job) -> None:
    """Averages gradients of experts over the ranks that hold the same ones. Collective."""
    assert job.mesh is not None
    copies = job.mesh.copies
    for module in job.parts.experts if copies.size() > 1 else ():
        broadcast_from_first(job, module.parameters(), group=copies.get_group())
        replicate(module, mesh=copies, ignored=set())


def shard_experts(job: Job, options: dict[str, Any], *, sync: bool) -> None:
    """Shards experts over the ranks that hold the same ones. Collective.

    Args:
        job: the job.
        options: ``fully_shard``'s options for the rest of the model.
        sync: whether the first of these ranks gives the values.

    Raises:
        InputError: if a parameter does not divide evenly, or experts are ignored or separate modules.
    """
    assert job.mesh is not None
    if job.parts.listed_experts:
        raise InputError(
            f"{type(job.parts.listed_experts[0]).__name__} is one of a list of experts, which are divided over the expert axis "
            "and cannot be sharded further. Use ddp, or stack the experts' parameters in one module with "
            "forward(hidden_states, top_k_index, top_k_weights)."
        )
    if options["ignored_params"] & expert_parameters(job):
        raise InputError(
            f"{', '.join(sorted({type(module).__name__ for module in job.parts.experts}))} cannot be left out of sharding: "
            "its experts are divided over the expert axis. Take it out of atorch_ignored_cls."
        )
    copies = job.mesh.copies
    # On one rank there is nothing to shard, but the dtype and the place of computation are a unit's, too.
    as_units = copies.size() > 1 or "mp_policy" in options or "offload_policy" in options
    for module in job.parts.experts if as_units else ():
        placements = {parameter: _expert_placement(job, parameter) for parameter in module.parameters()}
        if sync:
            broadcast_from_first(job, module.parameters(), group=copies.get_group())
        fully_shard(module, **{**options, "mesh": copies, "shard_placement_fn": placements.get})


def _expert_placement(job: Job, parameter: nn.Parameter) -> Shard:
    assert job.mesh is not None
    ranks = job.mesh.copies.size()
    dim = int(unit_dim(parameter.shape, ranks, is_divided=True))
    if dim or parameter.size(0) % (ranks * job.mesh.size("expert")) == 0 or parameter.dim() == 1:
        return Shard(dim)
    raise InputError(
        f"experts of shape {tuple(parameter.shape)} are divided over {job.mesh.size('expert')} ranks, but none of "
        f"their dimensions divides into {ranks} further shards, over data and zero. Make these axes smaller, or use ddp."
    )

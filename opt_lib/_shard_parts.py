"""What both versions of fully sharded training need: units, replicated parameters, equal beginnings."""

from __future__ import annotations

import importlib
from collections import Counter
from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from atorch_ns.errors import InputError
from atorch_ns.job import Job, Materialiser
from atorch_ns.profile import repeated_blocks, select_modules
from atorch_ns.torch_compat import plain_name
from opt_lib._shard_config import MixedPrecisionConfig, ShardConfig

__all__ = [
    "Switch",
    "average_ignored",
    "broadcast_from_first",
    "dtype_of",
    "ignored_parameters",
    "init_function",
    "kept_whole",
    "place_ignored",
    "untied",
    "wanted_precision",
    "wrap_units",
]


def wrap_units(model: nn.Module, config: ShardConfig) -> list[nn.Module]:
    """The modules that are gathered as one unit each, the root excluded, parents before children.

    A module that shares a parameter with another outside it stays with the root: a shared parameter can
    belong to one unit only.
    """
    if config.atorch_wrap_cls is not None:
        units = [found.module for found in select_modules(model, config.atorch_wrap_cls)]
    elif config.atorch_size_based_min_num_params is not None:
        units = _large_modules(model, config.atorch_size_based_min_num_params)
    else:
        units = [block.module for block in repeated_blocks(model)]
    return untied(model, units)


def untied(model: nn.Module, modules: Iterable[nn.Module]) -> list[nn.Module]:
    """Those of ``modules`` that share no parameter with a module of ``model`` outside them."""
    uses = _uses(model)
    return [module for module in modules if all(uses[key] == count for key, count in _uses(module).items())]


def _uses(module: nn.Module) -> Counter[int]:
    """How many modules inside ``module`` hold each parameter, by identity."""
    return Counter(id(p) for child in module.modules() for p in child.parameters(recurse=False))


def _large_modules(model: nn.Module, min_num_params: int) -> list[nn.Module]:
    """Modules that have enough parameters left when the large ones inside them are taken out."""
    units: list[nn.Module] = []

    def remaining(module: nn.Module) -> int:
        own = sum(parameter.numel() for parameter in module.parameters(recurse=False))
        total = own + sum(remaining(child) for child in module.children())
        if module is not model and total >= min_num_params and not isinstance(module, nn.ModuleList):
            units.append(module)
            return 0
        return total

    remaining(model)
    return list(reversed(units))


def ignored_parameters(
    model: nn.Module, config: ShardConfig, materialiser: Materialiser
) -> set[nn.Parameter]:
    """The parameters that are replicated instead of sharded, with memory if the model is on meta.

    Those of ignored modules, and single numbers (a learned temperature, say), which cannot be divided.
    """
    modules = [found.module for found in select_modules(model, config.ignored)]
    materialiser.materialise(modules)
    scalars = [module for module in model.modules() if any(p.ndim == 0 for p in _own(module))]
    materialiser.materialise(scalars, recurse=False)
    ignored = {parameter for module in modules for parameter in module.parameters()}
    return ignored | {parameter for module in scalars for parameter in _own(module) if parameter.ndim == 0}


def kept_whole(job: Job) -> set[nn.Parameter]:
    """The parameters that are neither sharded nor averaged with the others, since several stages of this rank use
    them; moved to this rank's device."""
    named = job.module.named_parameters() if job.kept_whole else ()
    found = {parameter for name, parameter in named if plain_name(name) in job.kept_whole}
    place_ignored(job, found)
    return found


def _own(module: nn.Module) -> Iterable[nn.Parameter]:
    return module.parameters(recurse=False)


def place_ignored(job: Job, ignored: set[nn.Parameter]) -> None:
    """Moves replicated parameters to this rank's device."""
    for parameter in ignored:
        parameter.data = parameter.data.to(job.device)


class Switch:
    """Whether gradients of replicated parameters are averaged in the present backward pass."""

    def __init__(self) -> None:
        self.on = True


def average_ignored(job: Job, ignored: set[nn.Parameter]) -> Switch:
    """Averages gradients that nothing else does, or the ranks would diverge; the switch pauses it."""
    assert job.mesh is not None
    group, size, switch = job.mesh.data_group, job.mesh.data.size(), Switch()

    def average(parameter: torch.Tensor) -> None:
        if switch.on and parameter.grad is not None:
            dist.all_reduce(parameter.grad, group=group)
            parameter.grad /= size

    for parameter in ignored:
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(average)
    return switch


def init_function(name: str | None) -> Callable[[nn.Module], object] | None:
    """The function of that qualified name.

    Raises:
        InputError: if there is none.
    """
    if name is None:
        return None
    module, _, function = name.rpartition(".")
    try:
        found: Callable[[nn.Module], object] = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, ValueError) as error:
        raise InputError(f"param_init_fn={name!r} cannot be imported: {error}") from error
    return found


@torch.no_grad()
def broadcast_from_first(
    job: Job, tensors: Iterable[torch.Tensor], *, mesh: DeviceMesh | None = None
) -> None:
    """Gives ``tensors``, or this rank's shards of them, the values they have on the first data rank; collective.

    Args:
        job: the job.
        tensors: on all ranks the same ones.
        mesh: a one-dimensional one, in place of that of the data.
    """
    assert job.mesh is not None
    group = (mesh or job.mesh.data).get_group()
    source = dist.get_process_group_ranks(group)[0]
    for tensor in tensors:
        data = tensor.to_local() if isinstance(tensor, DTensor) else tensor.data
        local = data.to(job.device)
        dist.broadcast(local, src=source, group=group)
        if local is not data:
            data.copy_(local)


def wanted_precision(job: Job, config: ShardConfig) -> MixedPrecisionConfig | None:
    """The dtypes of communication and compute; ``None`` for those of the weights."""
    if config.mixed_precision != "auto":
        return config.mixed_precision
    if job.plan.compute_dtype is None:
        return None
    # Autocast would cast each gathered fp32 weight to this dtype anyway; casting before the all-gather
    # halves what is sent and held. Gradients are reduced in fp32. The inputs of a unit are cast too: on
    # CPU, autocast leaves normalisation alone, which refuses fp32 inputs with reduced weights. Those of the
    # root are the user's, and stay: see opt_lib._root_inputs.
    return MixedPrecisionConfig(param_dtype=job.plan.compute_dtype, reduce_dtype="float32")


def dtype_of(name: str | None) -> torch.dtype | None:
    """The dtype of that torch name."""
    return None if name is None else getattr(torch, name)

"""FullyShardedDataParallel (FSDP1), for those whose setup needs it; shared by fsdp and zero2."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import (
    BackwardPrefetch,
    CPUOffload,
    FullyShardedDataParallel,
    MixedPrecision,
    ShardingStrategy,
)
from torch.distributed.fsdp.wrap import CustomPolicy

from atorch_ns.errors import InputError
from atorch_ns.job import Job, Materialiser, StateSpec, inner_optimizer, parameter_names
from atorch_ns.torch_compat import fsdp1_parts, hybrid_shard_zero2, plain_name
from opt_lib._flat_shards import require_elementwise, require_share
from opt_lib._flat_states import FlatStates, Piece
from opt_lib._head_units import tell_of_heads
from opt_lib._root_inputs import cast_where_refused, leaves_inputs
from opt_lib._shard_config import ShardConfig
from opt_lib._shard_parts import (
    Switch,
    average_ignored,
    broadcast_from_first,
    dtype_of,
    ignored_parameters,
    init_function,
    place_ignored,
    untied,
    wanted_precision,
    wrap_units,
)

__all__ = ["WHY_NOT_COMPILE", "WHY_NOT_HALF", "WHY_WHOLE", "shard"]

WHY_NOT_HALF = "version 1 keeps flat fp32 parameters; use mixed_precision in its config, or version 2."
WHY_NOT_COMPILE = "version 1 flattens parameters, which the compiler cannot follow; use version 2."
WHY_WHOLE = "it flattens plain parameters of one model that is called as a whole"


def shard(job: Job, method: str, config: ShardConfig, *, keep_gathered: bool) -> None:
    """Shards the model; collective.

    A parameter that takes no part in the loss gets a gradient of zero, not none, so weight decay changes it.

    Args:
        job: the job; its model's modules are wrapped in place.
        method: the method's name, for the report.
        config: the settings.
        keep_gathered: whether parameters stay gathered from forward to backward.

    Raises:
        InputError: for settings that cannot be used with this model.
    """
    assert job.mesh is not None
    _check(job, config)
    require_elementwise(job, "FullyShardedDataParallel")
    materialiser = job.materialiser(init_function(config.param_init_fn))
    ignored = ignored_parameters(job.module, config, materialiser)
    if config.sync_module_states:
        tensors = [*job.module.parameters(), *job.module.buffers()]
        broadcast_from_first(job, (tensor for tensor in tensors if not tensor.is_meta))
    place_ignored(job, ignored)
    units = wrap_units(job.module, config)
    if config.wrap_trainable_outmost:
        units = _frozen_parts(job.module, units)
    options = _options(job, config, materialiser, keep_gathered)
    policy = _policy(units, options["mixed_precision"])
    if leaves_inputs(job, config):
        cast_where_refused(job, units)
        options["mixed_precision"] = _without_casts(options["mixed_precision"])
    root = _wrapped(job.module, auto_wrap_policy=policy, ignored_states=list(ignored), **options)
    job.wrap(root)
    job.placed = True
    job.clip = _clip(root)
    job.make_states = partial(_states, root)
    job.skip_sync = _skip_sync(root, average_ignored(job, ignored))
    if job.plan.loss_scaling:
        require_share(job, "FullyShardedDataParallel", root.parameters())
    _explain(job, method, options, len(units), len(ignored))
    tell_of_heads(job, method, units)


def _wrapped(model: nn.Module, **options: Any) -> FullyShardedDataParallel:
    try:
        return FullyShardedDataParallel(model, **options)
    except ValueError as error:  # a unit mixes dtypes, or trainable and frozen without use_orig_params
        raise InputError(f"version 1 of fsdp cannot shard this model: {error}. Use version 2.") from error


def _check(job: Job, config: ShardConfig) -> None:
    if job.inputs.find_unused_parameters:
        raise InputError(
            "find_unused_parameters=True announces parameters without a gradient, which version 1 of fsdp steps "
            "with a gradient of zero, so that weight decay changes them. Freeze them (requires_grad=False) or use "
            "version 2."
        )
    if not config.use_orig_params and job.inputs.optim_param_func is not None:
        raise InputError(
            "use_orig_params=False leaves one flat parameter per unit, of which optim_param_func cannot make "
            "groups. Use use_orig_params=True."
        )


def _options(
    job: Job, config: ShardConfig, materialiser: Materialiser, keep_gathered: bool
) -> dict[str, Any]:
    assert job.mesh is not None
    keep = keep_gathered or config.keeps_gathered
    hybrid = job.mesh.size("data") > 1 and job.mesh.size("zero") > 1
    if hybrid:
        strategy = hybrid_shard_zero2() if keep else ShardingStrategy.HYBRID_SHARD
        group: Any = (job.mesh.axis("zero").get_group(), job.mesh.axis("data").get_group())
    else:
        strategy = ShardingStrategy.SHARD_GRAD_OP if keep else ShardingStrategy.FULL_SHARD
        group = job.mesh.shard.get_group()
    prefetch = config.backward_prefetch
    return {
        "process_group": group,
        "sharding_strategy": strategy,
        "cpu_offload": CPUOffload(offload_params=config.cpu_offload and job.device.type != "cpu"),
        "backward_prefetch": None if prefetch is None else BackwardPrefetch[prefetch],
        "mixed_precision": _mixed_precision(job, config),
        "param_init_fn": lambda module: materialiser.materialise([module]),
        "device_id": job.device,
        "forward_prefetch": config.forward_prefetch,
        "limit_all_gathers": config.limit_all_gathers,
        "use_orig_params": config.use_orig_params,
    }


def _mixed_precision(job: Job, config: ShardConfig) -> MixedPrecision | None:
    wanted = wanted_precision(job, config)
    if wanted is None:
        return None
    return MixedPrecision(
        param_dtype=dtype_of(wanted.param_dtype),
        reduce_dtype=dtype_of(wanted.reduce_dtype),
        buffer_dtype=dtype_of(wanted.buffer_dtype),
        cast_forward_inputs=wanted.cast_forward_inputs,
        cast_root_forward_inputs=wanted.cast_forward_inputs,
    )


def _without_casts(precision: MixedPrecision) -> MixedPrecision:
    return replace(precision, cast_forward_inputs=False, cast_root_forward_inputs=False)


def _policy(units: list[nn.Module], precision: MixedPrecision | None) -> CustomPolicy:
    """Wraps ``units``, each with the dtypes ``precision``, whatever the root's."""
    options: dict[str, Any] = {"mixed_precision": precision}
    chosen = {id(unit) for unit in units}
    return CustomPolicy(lambda module: options if id(module) in chosen else False)


def _frozen_parts(model: nn.Module, units: list[nn.Module]) -> list[nn.Module]:
    """The largest frozen modules inside ``units``: with these as units, one wrapper around the model is left
    with the trainable parameters, and gathers them together."""
    trainable = any(parameter.requires_grad for parameter in model.parameters())
    if not trainable or all(parameter.requires_grad for parameter in model.parameters()):
        raise InputError(
            "wrap_trainable_outmost gathers the trainable parameters of a model that is mostly frozen (LoRA); "
            "here " + ("nothing is frozen." if trainable else "nothing is trainable.")
        )
    return untied(model, (part for unit in units for part in _frozen(unit)))


def _frozen(module: nn.Module) -> Iterator[nn.Module]:
    parameters = list(module.parameters())
    container = isinstance(module, (nn.ModuleList, nn.ModuleDict))
    if parameters and not container and not any(parameter.requires_grad for parameter in parameters):
        yield module
    else:
        for child in module.children():
            yield from _frozen(child)


def _clip(root: FullyShardedDataParallel) -> Any:
    def clip(_: Iterable[torch.Tensor], max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        return root.clip_grad_norm_(max_norm, norm_type).float()

    return clip


def _skip_sync(root: FullyShardedDataParallel, switch: Switch) -> Any:
    @contextmanager
    def skip() -> Iterator[None]:
        switch.on = False
        try:
            with root.no_sync():
                yield
        finally:
            switch.on = True

    return skip


def _states(root: FullyShardedDataParallel, job: Job, optimizer: torch.optim.Optimizer | None) -> FlatStates:
    assert job.mesh is not None
    paths: dict[nn.Module, str] = {}
    for path, module in job.module.named_modules():
        paths.setdefault(module, plain_name(path))
    specs: dict[str, StateSpec] = {}
    pieces: dict[str, Piece] = {}
    names: dict[torch.Tensor, list[str]] = {}
    for part in fsdp1_parts(root):
        name = ".".join(filter(None, (paths[part.module], part.name)))
        specs[name] = StateSpec(tuple(part.shape), part.shard.dtype)
        names.setdefault(part.parameter, []).append(name)
        if part.offset is not None:
            weight = part.shard[part.offset : part.offset + part.length]
            offset, size = (part.offset, part.shard.numel()) if part.is_flat else (0, part.length)
            pieces[name] = Piece(weight, part.start, part.parameter, offset, size)
    whole = {own[0]: p for p, own in parameter_names(job.module).items() if p not in names}
    names.update({parameter: [name] for name, parameter in whole.items()})
    inner = None if optimizer is None else inner_optimizer(optimizer)
    groups = [] if inner is None else inner.param_groups
    return FlatStates(
        specs=specs,
        pieces=pieces,
        whole=whole,
        optimizer=inner,
        groups=[[name for p in group["params"] for name in names[p]] for group in groups],
        mesh=job.mesh.data,
        shards=job.mesh.shard.get_group(),
        device=job.device,
    )


def _explain(job: Job, method: str, options: dict[str, Any], num_units: int, num_ignored: int) -> None:
    assert job.mesh is not None
    ranks = job.mesh.shard.size()
    text = (
        f"FSDP1 {options['sharding_strategy'].name}: {num_units} unit(s) and the rest, each sharded over "
        f"{ranks} rank(s)"
    )
    if job.num_data_ranks > ranks:
        text += f", {job.num_data_ranks // ranks} replicas"
    precision = options["mixed_precision"]
    if precision is not None and precision.param_dtype is not None:
        text += f", gathered in {str(precision.param_dtype).removeprefix('torch.')}"
    if num_ignored:
        text += f"; {num_ignored} parameter(s) replicated"
    job.explain(method, text)

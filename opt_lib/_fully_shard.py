"""Sharding a model with torch's ``fully_shard`` (FSDP2), shared by fsdp and zero2."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from atorch_ns.errors import InputError
from atorch_ns.job import Job, Materialiser, SkipSync
from atorch_ns.pipeline import get_schedule
from atorch_ns.strategy import MODEL_AXES
from opt_lib._expert_shards import apart, shard_experts
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
    kept_whole,
    place_ignored,
    wanted_precision,
    wrap_units,
)

__all__ = ["shard", "skip_sync"]

BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


def shard(job: Job, method: str, config: ShardConfig, *, keep_gathered: bool) -> None:
    """Shards parameters, gradients and optimizer states over the mesh; collective.

    A model on the meta device is materialised unit by unit, so that a rank never holds more than its shard
    and one unit.

    Args:
        job: the job; its model is sharded in place.
        method: the method's name, for the report.
        config: the settings.
        keep_gathered: whether parameters stay gathered from forward to backward.
    """
    assert job.mesh is not None
    materialiser = job.materialiser(init_function(config.param_init_fn))
    ignored = ignored_parameters(job.module, config, materialiser)
    options = _options(job, config, ignored, keep_gathered)
    units = [unit for unit in wrap_units(job.module, config) if unit not in apart(job)]
    experts = shard_experts(job, options, sync=config.sync_module_states)
    options["ignored_params"] = ignored | experts | kept_whole(job)
    if config.wrap_trainable_outmost:
        _shard_trainable(job, config, options, materialiser)
    norms = _keeping_statistics(job.module, units, options)
    for norm in norms:
        _prepare(job, config, materialiser, norm)
        fully_shard(norm, **{**options, "mp_policy": MixedPrecisionPolicy(cast_forward_inputs=False)})
    # Children before parents: a unit manages what no unit inside it manages.
    for module in reversed(units):
        _prepare(job, config, materialiser, module)
        fully_shard(module, **options)
    for root in job.roots:
        _prepare(job, config, materialiser, root)
        fully_shard(root, **_of_root(job, config, options))
    if leaves_inputs(job, config):
        cast_where_refused(job, units)
    place_ignored(job, ignored)
    if config.forward_prefetch:
        _prefetch_forward(units)
    job.skip_sync = skip_sync(job.roots, average_ignored(job, ignored))
    job.placed = True
    _explain(job, method, config, (len(units), len(norms), len(ignored)), options)
    tell_of_heads(job, method, units)


def _options(
    job: Job, config: ShardConfig, ignored: set[nn.Parameter], keep_gathered: bool
) -> dict[str, Any]:
    assert job.mesh is not None
    options: dict[str, Any] = {"mesh": job.mesh.replicate_and_shard, "ignored_params": ignored}
    if config.reshard_after_forward is not None:
        options["reshard_after_forward"] = config.reshard_after_forward
    elif keep_gathered or config.keeps_gathered or job.plan.keeps_gathered:
        options["reshard_after_forward"] = False
    if job.stages and get_schedule(job.plan.schedule).splits_backward:
        options["reshard_after_forward"] = _must_not_reshard(job, config)
    policy = _mixed_precision(job, config)
    if policy is not None:
        options["mp_policy"] = policy
    if config.cpu_offload:
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=job.device.type == "cuda")
    return options


def _keeping_statistics(
    model: nn.Module, units: Iterable[nn.Module], options: dict[str, Any]
) -> list[nn.Module]:
    """Batch norms that stay in full precision as units of their own: their statistics do, and torch wants weights of
    the same dtype. Inputs may be reduced."""
    policy = options.get("mp_policy")
    if policy is None or policy.param_dtype in (None, torch.float32):
        return []
    apart = {id(unit) for unit in units}
    return [
        module
        for module in model.modules()
        if isinstance(module, BATCH_NORMS)
        and module.track_running_stats
        and module.affine
        and id(module) not in apart
        and not any(parameter in options["ignored_params"] for parameter in module.parameters())
    ]


def _must_not_reshard(job: Job, config: ShardConfig) -> bool:
    """torch looks for the weights' part of a split backward pass among gathered parameters; where these have been
    let go after the forward pass, it finds none and computes no gradient."""
    if config.reshard_after_forward not in (None, False):
        raise InputError(
            f"reshard_after_forward={config.reshard_after_forward} cannot stand with the pipeline schedule "
            f"{job.plan.schedule}, which computes gradients of weights apart from those of inputs. Use "
            "reshard_after_forward=False, or the schedule 1F1B, GPipe, Interleaved1F1B or LoopedBFS."
        )
    return False


def _mixed_precision(job: Job, config: ShardConfig) -> MixedPrecisionPolicy | None:
    wanted = wanted_precision(job, config)
    if wanted is None:
        return None
    return MixedPrecisionPolicy(
        param_dtype=dtype_of(wanted.param_dtype),
        reduce_dtype=dtype_of(wanted.reduce_dtype),
        output_dtype=dtype_of(wanted.output_dtype),
        cast_forward_inputs=wanted.cast_forward_inputs,
    )


def _of_root(job: Job, config: ShardConfig, options: dict[str, Any]) -> dict[str, Any]:
    if not leaves_inputs(job, config):
        return options
    return {**options, "mp_policy": replace(options["mp_policy"], cast_forward_inputs=False)}


def _prepare(job: Job, config: ShardConfig, materialiser: Materialiser, module: nn.Module) -> None:
    """Gives memory and equal values to what ``module`` holds and no unit inside it manages."""
    materialiser.materialise([module])
    if config.sync_module_states:
        broadcast_from_first(job, [p for p in module.parameters() if not _is_sharded(p)])
        if module in job.roots:
            broadcast_from_first(job, list(module.buffers()))


def _is_sharded(parameter: torch.Tensor) -> bool:
    """Whether a unit inside manages it: a parameter on the model's own axes alone is still to be sharded.

    Experts are not: the ranks that share what is around them hold different ones.
    """
    names = parameter.device_mesh.mesh_dim_names if isinstance(parameter, DTensor) else ()
    return any(name == "expert" or name not in MODEL_AXES for name in names or ())


def _shard_trainable(
    job: Job, config: ShardConfig, options: dict[str, Any], materialiser: Materialiser
) -> None:
    """Makes one unit of all modules that own trainable parameters, gathered once a step."""
    frozen = any(not parameter.requires_grad for parameter in job.module.parameters())
    modules = [
        module
        for module in job.module.modules()
        if module is not job.module and any(p.requires_grad for p in module.parameters(recurse=False))
        if module not in apart(job)
    ]
    if not frozen or not modules:
        raise InputError(
            "wrap_trainable_outmost gathers the trainable parameters of a model that is mostly frozen (LoRA); "
            "here " + ("nothing is frozen." if not frozen else "nothing is trainable.")
        )
    for module in modules:
        _prepare(job, config, materialiser, module)
    fully_shard(modules, **{**options, "reshard_after_forward": False})


def skip_sync(roots: Iterable[nn.Module], switch: Switch) -> SkipSync:
    """Keeps gradients of sharded or replicated ``roots`` local for a while."""
    sharded = [root for root in roots if isinstance(root, FSDPModule)]

    @contextmanager
    def skip() -> Iterator[None]:
        for root in sharded:
            root.set_requires_gradient_sync(False)
        switch.on = False
        try:
            yield
        finally:
            for root in sharded:
                root.set_requires_gradient_sync(True)
            switch.on = True

    return skip


def _prefetch_forward(units: list[nn.Module]) -> None:
    for current, following in itertools.pairwise(units):
        assert isinstance(current, FSDPModule)
        assert isinstance(following, FSDPModule)
        current.set_modules_to_forward_prefetch([following])


def _explain(
    job: Job, method: str, config: ShardConfig, counts: tuple[int, int, int], options: dict[str, Any]
) -> None:
    assert job.mesh is not None
    num_units, num_norms, num_ignored = counts
    ranks = job.mesh.shard.size()
    copies = job.num_data_ranks // ranks
    text = f"{num_units} unit(s) and the rest, each sharded over {ranks} rank(s)"
    if copies > 1:
        text += f", {copies} replicas"
    elif config.sharding_strategy in ("HYBRID_SHARD", "_HYBRID_SHARD_ZERO2"):
        text += " and not replicated: hybrid sharding wants both data and zero in parallel_mode"
    policy = options.get("mp_policy")
    if policy is not None and policy.param_dtype is not None:
        text += f", gathered in {str(policy.param_dtype).removeprefix('torch.')}"
    if num_norms:
        text += f", but for {num_norms} batch norm(s), units of their own in full precision"
    if num_ignored:
        text += f"; {num_ignored} parameter(s) replicated"
    job.explain(method, text)

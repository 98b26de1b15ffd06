"""Sharding a model with torch's ``fully_shard`` (FSDP2), shared by fsdp and zero2."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard

from atorch_ns.errors import InputError
from atorch_ns.job import Job, Materialiser
from opt_lib._shard_config import ShardConfig
from opt_lib._shard_parts import (
    Switch,
    average_ignored,
    broadcast_from_first,
    dtype_of,
    ignored_parameters,
    init_function,
    place_ignored,
    wanted_precision,
    wrap_units,
)

__all__ = ["shard"]


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
    units = wrap_units(job.module, config)
    if config.wrap_trainable_outmost:
        _shard_trainable(job, config, options, materialiser)
    # Children before parents: a unit manages what no unit inside it manages.
    for module in reversed(units):
        _prepare(job, config, materialiser, module)
        fully_shard(module, **options)
    _prepare(job, config, materialiser, job.module)
    root = fully_shard(job.module, **options)
    place_ignored(job, ignored)
    if config.forward_prefetch:
        _prefetch_forward(units)
    job.skip_sync = _skip_sync(root, average_ignored(job, ignored))
    job.placed = True
    _explain(job, method, config, len(units), len(ignored), options)


def _options(
    job: Job, config: ShardConfig, ignored: set[nn.Parameter], keep_gathered: bool
) -> dict[str, Any]:
    assert job.mesh is not None
    options: dict[str, Any] = {"mesh": job.mesh.replicate_and_shard, "ignored_params": ignored}
    if config.reshard_after_forward is not None:
        options["reshard_after_forward"] = config.reshard_after_forward
    elif keep_gathered or config.keeps_gathered:
        options["reshard_after_forward"] = False
    policy = _mixed_precision(job, config)
    if policy is not None:
        options["mp_policy"] = policy
    if config.cpu_offload:
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=job.device.type == "cuda")
    return options


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


def _prepare(job: Job, config: ShardConfig, materialiser: Materialiser, module: nn.Module) -> None:
    """Gives memory and equal values to what ``module`` holds and no unit inside it manages."""
    materialiser.materialise([module])
    if config.sync_module_states:
        broadcast_from_first(job, [p for p in module.parameters() if not _is_sharded(p)])
        if module is job.module:
            broadcast_from_first(job, list(module.buffers()))


def _is_sharded(parameter: torch.Tensor) -> bool:
    return isinstance(parameter, torch.distributed.tensor.DTensor)


def _shard_trainable(
    job: Job, config: ShardConfig, options: dict[str, Any], materialiser: Materialiser
) -> None:
    """Makes one unit of all modules that own trainable parameters, gathered once a step."""
    frozen = any(not parameter.requires_grad for parameter in job.module.parameters())
    modules = [
        module
        for module in job.module.modules()
        if module is not job.module and any(p.requires_grad for p in module.parameters(recurse=False))
    ]
    if not frozen or not modules:
        raise InputError(
            "wrap_trainable_outmost gathers the trainable parameters of a model that is mostly frozen (LoRA); "
            "here " + ("nothing is frozen." if not frozen else "nothing is trainable.")
        )
    for module in modules:
        _prepare(job, config, materialiser, module)
    fully_shard(modules, **{**options, "reshard_after_forward": False})


def _skip_sync(root: FSDPModule, switch: Switch) -> Any:
    @contextmanager
    def skip() -> Iterator[None]:
        root.set_requires_gradient_sync(False)
        switch.on = False
        try:
            yield
        finally:
            root.set_requires_gradient_sync(True)
            switch.on = True

    return skip


def _prefetch_forward(units: list[nn.Module]) -> None:
    for current, following in itertools.pairwise(units):
        assert isinstance(current, FSDPModule)
        assert isinstance(following, FSDPModule)
        current.set_modules_to_forward_prefetch([following])


def _explain(
    job: Job, method: str, config: ShardConfig, num_units: int, num_ignored: int, options: dict[str, Any]
) -> None:
    assert job.mesh is not None
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
    if num_ignored:
        text += f"; {num_ignored} parameter(s) replicated"
    job.explain(method, text)

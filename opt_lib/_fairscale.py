"""fairscale as a backend of zero1 and zero2."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from operator import attrgetter
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from atorch_ns.cluster import Cluster
from atorch_ns.errors import BackendError, InputError, Problem
from atorch_ns.job import Job, ParameterStates, explained_groups
from atorch_ns.method import Conflict
from atorch_ns.strategy import Plan
from opt_lib._flat_shards import require_share
from opt_lib._optional import missing_problem, require
from opt_lib._partial_gradients import clip_parts
from opt_lib._reduced_gradients import ReducedGradients
from opt_lib._shown_part import show_part, with_checkpoint_hint
from opt_lib._whole_world import one_axis_only

__all__ = ["INSTALL", "check", "conflicts", "plan", "shard_gradients", "shard_optimizer"]

INSTALL = "pip install --no-build-isolation fairscale"
"""Without isolation: its build reads the installed torch."""

_WHY_NO_MASTERS = (
    "ShardedDataParallel reduces the gradients of the optimizer's own parameters, so these cannot be fp32 copies. "
    "Use amp_native, half in bf16 without master_weights, or another backend."
)
_STATES = partial(ParameterStates, holder=attrgetter("optim"))


def conflicts(used: Callable[[Any], bool]) -> tuple[Conflict, ...]:
    """Methods that cannot stand with ShardedDataParallel.

    Args:
        used: whether a config of the method that these are for chooses it.
    """
    return (
        Conflict("half", _WHY_NO_MASTERS, when=lambda mine, half: used(mine) and half.keeps_masters),
        one_axis_only(used, "ShardedDataParallel"),
    )


def check(method: str, cluster: Cluster) -> list[Problem]:
    """The package must be there."""
    return missing_problem(method, "fairscale", install=INSTALL)


def plan(plan: Plan) -> Plan:
    """The plan under ShardedDataParallel: each gradient goes to the rank that updates the parameter."""
    axes = plan.shard_axes
    return replace(
        plan,
        gradient_sync="reduce_scatter",
        gradients_over=axes,
        optimizer_over=axes,
        shard_layout="parameters",
    )


def shard_optimizer(job: Job, method: str) -> None:
    """OSS under whatever averages the gradients."""
    job.make_optimizer = partial(_sharded_optimizer, job)
    job.make_states = _STATES
    job.explain(method, "OSS of fairscale")


def shard_gradients(job: Job, method: str) -> None:
    """OSS with ShardedDataParallel, which leaves each gradient on the rank that updates the parameter.

    Where a parameter takes part in the loss on some ranks only, gradients are lost, as in DDP without
    ``find_unused_parameters``.
    """
    if job.inputs.optim_func is None:
        raise InputError("ShardedDataParallel follows its optimizer, so auto_accelerate needs optim_func.")
    job.place()
    job.make_states = _STATES

    def take_over(groups: list[dict[str, Any]]) -> tuple[nn.Module, torch.optim.Optimizer]:
        optimizer = _sharded_optimizer(job, groups)
        return _sharded_model(job, optimizer), optimizer

    job.take_over = take_over
    job.explain(method, "OSS and ShardedDataParallel of fairscale, gradients reduced one by one")


def _sharded_optimizer(job: Job, groups: list[dict[str, Any]]) -> Any:
    assert job.mesh is not None
    _require_one_dtype(groups)
    oss = require("fairscale.optim.oss", needed_by="OSS", install=INSTALL)
    # OSS gives each parameter in turn to the rank that has least: largest first, the shares come out even.
    groups = [{**group, "params": sorted(group["params"], key=torch.numel, reverse=True)} for group in groups]
    with explained_groups(job, groups):
        optimizer = with_checkpoint_hint(oss.OSS)(
            groups,
            optim=job.inputs.optim_func,
            group=job.mesh.shard.get_group(),
            **dict(job.inputs.optim_args or {}),
        )
    show_part(optimizer)
    return optimizer


def _require_one_dtype(groups: list[dict[str, Any]]) -> None:
    dtypes = {p.dtype for group in groups for p in group["params"] if p.requires_grad}
    if len(dtypes) > 1:
        raise BackendError(
            f"OSS packs each rank's parameters into one buffer, but they have {len(dtypes)} dtypes: "
            f"{', '.join(sorted(map(str, dtypes)))}. Use another backend."
        )


def _sharded_model(job: Job, optimizer: Any) -> nn.Module:
    assert job.mesh is not None
    group, device = job.mesh.data_group, job.device
    parallel = require("fairscale.nn.data_parallel", needed_by="ShardedDataParallel", install=INSTALL)
    model: Any = parallel.ShardedDataParallel(
        job.module,
        optimizer,
        process_group=group,
        # Gradients in buffers are not reduced once `zero_grad` has set them to None, as it does by default.
        reduce_buffer_size=0,
        warn_on_trainable_params_changed=False,
    )
    rank = dist.get_rank(group)
    if job.plan.loss_scaling:
        own = [p for part in optimizer.partition_parameters()[rank] for p in part["params"]]
        require_share(job, "ShardedDataParallel", own)
    reduced = ReducedGradients(model, optimizer, num_ranks=job.num_data_ranks)

    def clip(parameters: Iterable[torch.Tensor], max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        return clip_parts(gradients, max_norm, norm_type, group=group, device=device)

    job.clip = clip
    job.skip_sync = reduced.pausing(model.no_sync)
    return model  # type: ignore[no-any-return]

"""zero1: optimizer states are sharded."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, final

import torch
from pydantic import Field, model_validator

from atorch_ns.cluster import Cluster
from atorch_ns.errors import Problem
from atorch_ns.job import (
    OPTIMIZER,
    Job,
    ParameterStates,
    explained_groups,
    make_user_optimizer,
    optimizer_arguments,
    step_on_local_parts,
)
from atorch_ns.job.batch_norm import synchronise_batch_norms
from atorch_ns.method import Conflict, Flag, Method, MethodConfig, Need, Phase
from atorch_ns.profile import Profile
from atorch_ns.strategy import MODEL_AXES, Plan
from atorch_ns.torch_compat import zero_redundancy_of_parts
from opt_lib import _fairscale as fairscale
from opt_lib._config_checks import SyncBatchNorm
from opt_lib._deepspeed import zero
from opt_lib._optimizer_parts import local_state_view, with_checkpoint_hint

if TYPE_CHECKING:
    from torch.distributed.optim import ZeroRedundancyOptimizer


_WHY_WHOLE = (
    "fairscale's OSS is for ranks that hold the whole model, because it sends whole parameters as plain tensors, and the mesh "
    f"has an axis of {', '.join(MODEL_AXES)} that is larger than 1. Use the default backend."
)


class Zero1Config(MethodConfig):
    """The backend."""

    backend: Literal["native", "fairscale", "deepspeed"] = Field(
        default="native", description="native is torch's ZeroRedundancyOptimizer under DDP."
    )
    use_ds_zero: Flag = Field(default=False, description="Short for backend: deepspeed.")
    cpu_offload: Flag = Field(default=False, description="Not here: zero2 offloads, by the same key.")
    sync_batchnorm: SyncBatchNorm = False

    @model_validator(mode="after")
    def _one_backend(self) -> Zero1Config:
        if self.use_ds_zero and self.backend == "fairscale":
            raise ValueError("backend=fairscale and use_ds_zero name two backends; choose one")
        if self.cpu_offload:
            raise ValueError("zero1 cannot offload; ('zero2', {'cpu_offload': True}) can, with torch")
        return self

    @property
    def deepspeed(self) -> bool:
        """True if DeepSpeed shards the optimizer."""
        return self.use_ds_zero or self.backend == "deepspeed"


@final
class Zero1(Method[Zero1Config]):
    """Shards optimizer states: each rank updates its part of the parameters and sends it to the others."""

    name = "zero1"
    phase = Phase.OPTIMIZER
    Config = Zero1Config
    provides = ("optimizer_sharding",)
    conflicts = (
        *zero.conflicts(lambda config: config.deepspeed),
        Conflict(
            "parallel_mode",
            _WHY_WHOLE,
            when=lambda mine, mesh: (
                mine.backend == "fairscale"
                and any(size > 1 and axis in MODEL_AXES for axis, size in mesh.axes)
            ),
        ),
    )
    variants = MappingProxyType({"fairscale": {"backend": "fairscale"}, "DeepSpeed": {"use_ds_zero": True}})
    needs_process_group = True

    def roles(self, config: Zero1Config) -> tuple[str, ...]:
        """DeepSpeed also synchronises gradients."""
        return ("gradient_sync", *self.provides) if config.deepspeed else self.provides

    def needs(self, config: Zero1Config, cluster: Cluster) -> Iterable[Need]:
        """Ranks to shard over, and gradients that agree on them."""
        yield Need("mesh", "zero1 shards over a group of ranks")
        yield Need("gradient_sync", "zero1 shards the optimizer only; gradients must agree")

    def check(self, config: Zero1Config, cluster: Cluster, profile: Profile | None) -> list[Problem]:
        """The backend must be there."""
        if config.deepspeed:
            return zero.check(self.name, cluster)
        if config.backend == "fairscale":
            return fairscale.check(self.name, cluster)
        return []

    def plan(self, plan: Plan, config: Zero1Config) -> Plan:
        """Optimizer states are sharded."""
        if config.deepspeed:
            return zero.plan(plan)
        return plan.changed(sharding={"optimizer_over": plan.shard_axes, "layout": "parameters"})

    def options(self, profile: Profile, cluster: Cluster) -> Iterable[Zero1Config]:
        """The default config, torch's, on several ranks."""
        return (Zero1Config(),) if cluster.world_size > 1 else ()

    def apply(self, job: Job, config: Zero1Config) -> None:
        """Chooses how the optimizer is made."""
        if config.sync_batchnorm:
            synchronise_batch_norms(job)
        if config.deepspeed:
            zero.shard(job, self.name, stage=1)
        elif config.backend == "fairscale":
            fairscale.shard_optimizer(job, self.name)
        else:
            _shard_optimizer(job)
            job.explain(self.name, "ZeroRedundancyOptimizer of torch")


def _shard_optimizer(job: Job) -> None:
    mesh = job.mesh
    assert mesh is not None
    torchs: Any = zero_redundancy_of_parts()
    kind = with_checkpoint_hint(torchs)
    # Ranks along expert hold other experts: without a zero axis only copies can share states.
    ranks = mesh.shard if mesh.size("expert") == 1 or mesh.size("zero") > 1 else mesh.copies

    def make(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        assert job.inputs.optim_func is not None
        if not any(group["params"] for group in groups):  # a stage may train none
            return make_user_optimizer(job, groups)
        arguments, why = optimizer_arguments(job.inputs.optim_func, job.inputs.optim_args, groups, job.roots)
        job.explain(OPTIMIZER, why)
        with explained_groups(job, groups):
            optimizer: ZeroRedundancyOptimizer = kind(
                groups,
                optimizer_class=job.inputs.optim_func,  # any callable does
                process_group=ranks.get_group(),
                **arguments,
            )
        local_state_view(optimizer)
        step_on_local_parts(_inner_optimizer(optimizer))
        return optimizer

    job.optimizer.make = make
    # Masters come into being with the partition, which stays as it is.
    job.optimizer.takes_frozen = not (job.plan.precision.master_dtype or job.plan.offload_optimizer)
    job.make_states = partial(ParameterStates, holder=_inner_optimizer)


def _inner_optimizer(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    result: torch.optim.Optimizer = getattr(optimizer, "optim", optimizer)
    return result

"""zero2: gradients and optimizer states are sharded."""

from __future__ import annotations

from collections.abc import Iterable
from types import MappingProxyType
from typing import final

from pydantic import Field, model_validator

from atorch_ns.cluster import Cluster
from atorch_ns.errors import Problem
from atorch_ns.job import Job
from atorch_ns.job.batch_norm import synchronise_batch_norms
from atorch_ns.method import Flag, Method, Need, Phase
from atorch_ns.profile import Profile
from atorch_ns.strategy import Plan
from opt_lib import _fairscale as fairscale
from opt_lib._deepspeed import zero
from opt_lib._sharded.config import ShardConfig, plan_shards, unmatched_selectors
from opt_lib._sharded.fully_shard import shard


class Zero2Config(ShardConfig):
    """The backend, and with the default backend every setting of fsdp."""

    not_use_fsdp: Flag = Field(default=False, description="Use fairscale instead of torch.")
    use_ds_zero: Flag = Field(default=False, description="Use DeepSpeed instead of torch.")

    @model_validator(mode="after")
    def _one_backend(self) -> Zero2Config:
        if self.not_use_fsdp and self.use_ds_zero:
            raise ValueError("not_use_fsdp and use_ds_zero name two backends; choose one")
        if self.cpu_offload and (self.not_use_fsdp or self.use_ds_zero):
            raise ValueError("only torch supports cpu_offload: leave out not_use_fsdp and use_ds_zero")
        return self


@final
class Zero2(Method[Zero2Config]):
    """Shards gradients and optimizer states; parameters stay gathered between forward and backward."""

    name = "zero2"
    phase = Phase.SHARD_DATA
    Config = Zero2Config
    provides = ("gradient_sync", "optimizer_sharding")
    conflicts = (
        *zero.conflicts(lambda config: config.use_ds_zero),
        *fairscale.conflicts(lambda config: config.not_use_fsdp),
    )
    variants = MappingProxyType({"fairscale": {"not_use_fsdp": True}, "DeepSpeed": {"use_ds_zero": True}})
    needs_process_group = True

    def needs(self, config: Zero2Config, cluster: Cluster) -> Iterable[Need]:
        """A mesh to shard over."""
        return (Need("mesh", "zero2 shards over a group of ranks"),)

    def notices(self, config: Zero2Config, cluster: Cluster) -> Iterable[str]:
        """Arguments of FSDP1 that FSDP2 has no counterpart for."""
        return (f"zero2: {text}" for text in config.not_used())

    def check(self, config: Zero2Config, cluster: Cluster, profile: Profile | None) -> list[Problem]:
        """The backend and the selected modules must exist."""
        if config.use_ds_zero:
            return zero.check(self.name, cluster)
        if config.not_use_fsdp:
            return fairscale.check(self.name, cluster)
        return unmatched_selectors(self.name, config, profile)

    def plan(self, plan: Plan, config: Zero2Config) -> Plan:
        """Gradients and optimizer states are sharded."""
        if config.use_ds_zero:
            return zero.plan(plan).changed(sharding={"gradients_over": plan.shard_axes})
        if config.not_use_fsdp:
            return fairscale.plan(plan)
        return plan_shards(plan, config, keep_gathered=True)

    def options(self, profile: Profile, cluster: Cluster) -> Iterable[Zero2Config]:
        """The default config, torch's block by block, on several ranks."""
        return (Zero2Config(),) if cluster.world_size > 1 else ()

    def following(self, config: Zero2Config, plan: Plan) -> Zero2Config:
        """Gradients reduced after every micro-batch, where a search has found that whole ones do not fit."""
        return config.following(plan)

    def apply(self, job: Job, config: Zero2Config) -> None:
        """Shards through the chosen backend. Collective."""
        if config.sync_batchnorm:  # before sharding: it may exchange modules
            synchronise_batch_norms(job)
        if config.use_ds_zero:
            zero.shard(job, self.name, stage=2)
        elif config.not_use_fsdp:
            fairscale.shard_gradients(job, self.name)
        else:
            shard(job, self.name, config)

"""fsdp: parameters, gradients and optimizer states are sharded (ZeRO 3)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import final

from atorch_ns.cluster import Cluster
from atorch_ns.errors import Problem
from atorch_ns.job import Job
from atorch_ns.job.batch_norm import synchronise_batch_norms
from atorch_ns.method import Method, Need, Phase
from atorch_ns.profile import Profile
from atorch_ns.strategy import Plan
from opt_lib._sharded.config import ShardConfig, plan_shards, unmatched_selectors
from opt_lib._sharded.fully_shard import shard

_WHOLE = 2 * 10**9
"""Parameters of the largest model tried as one unit: its gather takes 4 GB in 16 bits, none of it hidden."""


class FsdpConfig(ShardConfig):
    """Arguments of fully sharded training."""


@final
class Fsdp(Method[FsdpConfig]):
    """Shards parameters, gradients and optimizer states over the ranks (ZeRO 3)."""

    name = "fsdp"
    aliases = ("fsdp2",)
    phase = Phase.SHARD_DATA
    Config = FsdpConfig
    provides = ("gradient_sync", "optimizer_sharding")
    needs_process_group = True

    def needs(self, config: FsdpConfig, cluster: Cluster) -> Iterable[Need]:
        """A mesh to shard over."""
        return (Need("mesh", "fsdp shards over a group of ranks"),)

    def notices(self, config: FsdpConfig, cluster: Cluster) -> Iterable[str]:
        """Arguments of FSDP1 that FSDP2 has no counterpart for."""
        return (f"fsdp: {text}" for text in config.not_used())

    def check(self, config: FsdpConfig, cluster: Cluster, profile: Profile | None) -> list[Problem]:
        """The selected modules must exist."""
        return unmatched_selectors(self.name, config, profile)

    def plan(self, plan: Plan, config: FsdpConfig) -> Plan:
        """Everything is sharded."""
        return plan_shards(plan, config, keep_gathered=False)

    def options(self, profile: Profile, cluster: Cluster) -> Iterable[FsdpConfig]:
        """Block by block; as one unit, unless too large for a rank; on GPUs also with host memory."""
        if cluster.world_size == 1:
            return
        yield FsdpConfig()
        if profile.blocks and profile.num_parameters <= _WHOLE:
            yield FsdpConfig(atorch_wrap_cls=())
        if cluster.device_type == "cuda":
            yield FsdpConfig(cpu_offload=True)

    def following(self, config: FsdpConfig, plan: Plan) -> FsdpConfig:
        """Gradients reduced after every micro-batch, where a search has found that whole ones do not fit."""
        return config.following(plan)

    def apply(self, job: Job, config: FsdpConfig) -> None:
        """Shards the model. Collective."""
        if config.sync_batchnorm:  # before sharding: it may exchange modules
            synchronise_batch_norms(job)
        shard(job, self.name, config)

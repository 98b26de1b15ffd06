"""fsdp: parameters, gradients and optimizer states are sharded (ZeRO 3)."""

from __future__ import annotations

from collections.abc import Iterable
from types import MappingProxyType
from typing import final

from atorch_ns.cluster import Cluster
from atorch_ns.errors import Problem
from atorch_ns.job import Job
from atorch_ns.method import Conflict, Method, Need, Phase
from atorch_ns.profile import Profile
from atorch_ns.strategy import Plan
from opt_lib import _fsdp1
from opt_lib._fully_shard import shard
from opt_lib._selectors import unmatched_problem
from opt_lib._shard_config import ShardConfig
from opt_lib._shard_plan import plan_shards
from opt_lib._whole_world import whole_models_only

__all__ = ["Fsdp", "FsdpConfig"]


_WHOLE = 2 * 10**9
"""Parameters of the largest model that is tried as one unit: gathering all of it takes 4 GB in 16 bits, and nothing
of that is hidden."""


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
    conflicts = (
        Conflict("half", _fsdp1.WHY_NOT_HALF, when=lambda mine, _: mine.version == 1),
        Conflict("compile", _fsdp1.WHY_NOT_COMPILE, when=lambda mine, _: mine.version == 1),
        whole_models_only(lambda config: config.version == 1, "version 1", why=_fsdp1.WHY_WHOLE),
    )
    variants = MappingProxyType({"version 1": {"version": 1}})
    needs_process_group = True

    def needs(self, config: FsdpConfig, cluster: Cluster) -> Iterable[Need]:
        """A mesh to shard over."""
        return (Need("mesh", "fsdp shards over a group of ranks"),)

    def notices(self, config: FsdpConfig, cluster: Cluster) -> Iterable[str]:
        """FSDP1 arguments without a counterpart."""
        return (f"fsdp: {text}" for text in config.without_counterpart(cluster.device_type))

    def check(self, config: FsdpConfig, cluster: Cluster, profile: Profile | None) -> list[Problem]:
        """The selected modules must exist."""
        if profile is None:
            return []
        return [
            *unmatched_problem(self.name, "atorch_wrap_cls", config.atorch_wrap_cls, profile),
            *unmatched_problem(self.name, "atorch_ignored_cls", config.ignored, profile),
        ]

    def plan(self, plan: Plan, config: FsdpConfig) -> Plan:
        """Everything is sharded."""
        return plan_shards(plan, config, keep_gathered=False)

    def options(self, profile: Profile, cluster: Cluster) -> Iterable[FsdpConfig]:
        """Block by block, or the whole model at once, which suits models of a few small blocks; of large models no
        rank could hold all of it.

        On GPUs also with everything in host memory, for models that fit in no other way.
        """
        if cluster.world_size == 1:
            return
        yield FsdpConfig()
        if profile.blocks and profile.num_parameters <= _WHOLE:
            yield FsdpConfig(atorch_wrap_cls=())
        if cluster.device_type == "cuda":
            yield FsdpConfig(cpu_offload=True)

    def apply(self, job: Job, config: FsdpConfig) -> None:
        """Shards the model; collective."""
        if config.version == 1:
            _fsdp1.shard(job, self.name, config, keep_gathered=False)
        else:
            shard(job, self.name, config, keep_gathered=False)

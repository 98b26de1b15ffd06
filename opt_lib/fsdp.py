"""fsdp: parameters, gradients and optimizer states are sharded (ZeRO 3)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
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

__all__ = ["Fsdp", "FsdpConfig"]


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
        axes = plan.shard_axes
        return replace(
            plan,
            gradient_sync="reduce_scatter",
            parameters_over=axes,
            gradients_over=axes,
            optimizer_over=axes,
            offload=config.cpu_offload,
        )

    def apply(self, job: Job, config: FsdpConfig) -> None:
        """Shards the model; collective."""
        if config.version == 1:
            _fsdp1.shard(job, self.name, config, keep_gathered=False)
        else:
            shard(job, self.name, config, keep_gathered=False)

"""optimizer_offload: the optimizer's states, and fp32 copies of the weights, in host memory."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, final

from atorch_ns.cluster import Cluster
from atorch_ns.job import Job
from atorch_ns.method import Conflict, Method, MethodConfig, Phase
from atorch_ns.profile import Profile
from atorch_ns.strategy import Plan
from atorch_ns.text import bytes_text

_SHARDED: Final = "sharded states are offloaded with their shards, by ('fsdp', {'cpu_offload': True})."
_DIVIDED: Final = "norms of gradients over ranks that divide a model are taken on the device."
_SCALED: Final = "fp16's gradients are checked on the device before they leave it; use bf16."


class OptimizerOffloadConfig(MethodConfig):
    """There is nothing to set."""


_AXES = (
    "tensor_parallel", "sequence_parallel", "expert_parallel", "pipeline_parallel", "mixed_parallel", "ds_3d_parallel",
)  # fmt: skip


@final
class OptimizerOffload(Method[OptimizerOffloadConfig]):
    """Updates the weights in host memory, where the optimizer's states stay.

    Once a step gradients go to the host, the optimizer runs on the CPU, and updated weights come back. A
    model with Adam keeps a third to a seventh of its states on the device.
    """

    name = "optimizer_offload"
    phase = Phase.OPTIMIZER
    Config = OptimizerOffloadConfig
    provides = ("optimizer_placement",)
    conflicts = (
        *(Conflict(name, _SHARDED) for name in ("fsdp", "zero1", "zero2")),
        *(Conflict(name, _DIVIDED) for name in _AXES),
        *(
            Conflict(name, _SCALED, when=lambda _, theirs: theirs.dtype == "float16")
            for name in ("half", "amp_native")
        ),
        Conflict(
            "amp_native",
            "its gradients are checked on the device.",
            when=lambda _, theirs: theirs.skip_if_nonfinite,
        ),
    )

    def unavailable(self, config: OptimizerOffloadConfig, cluster: Cluster) -> str | None:
        """On a CPU there is nothing to offload from."""
        return "the model is in host memory already" if cluster.device_type == "cpu" else None

    def plan(self, plan: Plan, config: OptimizerOffloadConfig) -> Plan:
        """fp32 weights and their states are on the host, where the optimizer gets copies of the gradients."""
        return plan.changed(offload_optimizer=True)

    def options(self, profile: Profile, cluster: Cluster) -> Iterable[OptimizerOffloadConfig]:
        """The default config on one GPU, for models that fit in no other way; several GPUs shard."""
        if cluster.device_type == "cuda" and cluster.world_size == 1:
            yield OptimizerOffloadConfig()

    def apply(self, job: Job, config: OptimizerOffloadConfig) -> None:
        """Says what the plan has decided: the job makes the copies when it makes the optimizer."""
        count = sum(p.numel() for p in job.module.parameters() if p.requires_grad)
        job.explain(
            self.name, f"{bytes_text(12 * count)} of fp32 weights, gradients and more in pinned memory"
        )

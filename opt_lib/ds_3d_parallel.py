"""ds_3d_parallel: the stages of a pipeline are run by DeepSpeed's pipeline engine."""

from __future__ import annotations

from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, Literal, final

from pydantic import Field, field_validator

from atorch_ns.cluster import Cluster
from atorch_ns.errors import Problem
from atorch_ns.job import Job
from atorch_ns.method import Conflict, Expansion, Method, MethodConfig, Phase
from atorch_ns.profile import Profile
from atorch_ns.strategy import Plan
from atorch_ns.system import table_rows
from opt_lib._deepspeed import zero as zero_module
from opt_lib._deepspeed.pipeline import run_by_deepspeed
from opt_lib._model_axes.pipeline_cut import cut_pipeline
from opt_lib._model_axes.pipeline_plan import PipelineParallelConfig

_OWNED: Final = {
    row["key"]: row["decides"] for row in table_rows(Path(__file__).parent / "_deepspeed" / "decided.csv")
}
"""Keys of DeepSpeed's configuration that others decide, and who does."""

_WHY_PIPELINE = (
    "DeepSpeed's engine runs the stages of a pipeline, and the mesh has no pipeline axis larger than 1. Add one, "
    "as in ('parallel_mode', ([('pipeline', 2)], None)), or use zero1 with use_ds_zero."
)
_WHY_NO_EXPERTS = (
    "DeepSpeed's engine averages every gradient over all data ranks, and experts that are divided are held by a "
    "part of them. Use pipeline_parallel, which composes with an expert axis."
)
_WHY_PLAIN = (
    "DeepSpeed's ZeRO cuts plain parameters that every rank of a stage holds whole, and an axis tensor or sequence "
    "larger than 1 divides them or their gradients. Use zero_stage 0, or pipeline_parallel with zero2 or fsdp."
)
_WHY_FP32 = (
    "DeepSpeed's ZeRO keeps the fp32 copies of half-precision weights itself and leaves the optimizer's steps to "
    "none but its own. Use zero_stage 0, or amp_native with bf16."
)
_WHY_NO_SCALE = "DeepSpeed's ZeRO scales fp16 losses by a scheme of its own. Use bf16, or zero_stage 0."


class Ds3dParallelConfig(MethodConfig):
    """How the model is cut, and DeepSpeed's own settings."""

    num_micro_batches: int | None = Field(
        default=None,
        ge=1,
        description="Parts that the batch of a data rank is split into; null for "
        "gradient_accumulation_steps, or for what fits the batch where that is 1.",
    )
    split_points: tuple[str, ...] = Field(
        default=(), description="Names of the modules that begin a stage; empty to let split_method decide."
    )
    split_method: Literal["auto", "uniform", "parameters"] = Field(
        default="auto",
        description="How the cuts are found: by estimated time, by number of blocks, or by number of parameters.",
    )
    zero_stage: Literal[0, 1] = Field(
        default=0,
        description="1 shards optimizer states over the data ranks. DeepSpeed runs no higher stage in a pipeline.",
    )
    ds_config: dict[str, Any] = Field(
        default_factory=dict, description="More of DeepSpeed's configuration, by the keys of its file."
    )

    @field_validator("ds_config")
    @classmethod
    def _leave_what_others_decide(cls, value: dict[str, Any]) -> dict[str, Any]:
        clashes = [f"{key}: {_OWNED[key]}" for key in value if key in _OWNED]
        if clashes:
            raise ValueError("these keys are decided elsewhere: " + "; ".join(clashes))
        zero = value.get("zero_optimization", {})
        if not isinstance(zero, dict):
            raise ValueError(
                "zero_optimization must be a mapping of DeepSpeed's keys; set its stage as zero_stage"
            )
        if "stage" in zero:
            raise ValueError("zero_optimization.stage is decided by zero_stage")
        return value


@final
class Ds3dParallel(Method[Ds3dParallelConfig]):
    """Runs a pipeline by DeepSpeed's engine, with data parallelism or ZeRO 1 and divided layers inside."""

    name = "ds_3d_parallel"
    aliases = ("deepspeed_3d_parallel",)
    phase = Phase.CUT
    Config = Ds3dParallelConfig
    provides = ("axis:pipeline", "gradient_sync")
    conflicts = (
        Conflict("parallel_mode", _WHY_PIPELINE, when=lambda _, mesh: _axis_size(mesh, "pipeline") == 1),
        Conflict("parallel_mode", _WHY_NO_EXPERTS, when=lambda _, mesh: _axis_size(mesh, "expert") > 1),
        Conflict(
            "parallel_mode",
            _WHY_PLAIN,
            when=lambda mine, mesh: (
                mine.zero_stage > 0 and max(_axis_size(mesh, "tensor"), _axis_size(mesh, "sequence")) > 1
            ),
        ),
        Conflict("half", _WHY_FP32, when=lambda mine, _: mine.zero_stage > 0),
        Conflict(
            "amp_native", _WHY_NO_SCALE, when=lambda mine, amp: mine.zero_stage > 0 and amp.dtype == "float16"
        ),
    )
    variants = MappingProxyType({"ZeRO 1": {"zero_stage": 1}})
    needs_process_group = True

    def expand(self, config: Ds3dParallelConfig, others: Plan, cluster: Cluster) -> Expansion | None:
        """Expands to ZeRO by DeepSpeed and micro-batches if the pipeline has one rank."""
        if dict(others.axes).get("pipeline") != 1:
            return None
        steps: list[tuple[str, Any]] = [("zero1", {"use_ds_zero": True})] if config.zero_stage else []
        if config.num_micro_batches:
            steps.append(("gradient_accumulation", {"num_micro_batches": config.num_micro_batches}))
        note = ", and ds_config is not used" if config.ds_config else ""
        return Expansion(tuple(steps), (f"nothing is cut, since parallel_mode has pipeline=1{note}",))

    def roles(self, config: Ds3dParallelConfig) -> tuple[str, ...]:
        """The roles it fills; with ZeRO also the sharding of the optimizer."""
        return (*self.provides, "optimizer_sharding") if config.zero_stage else self.provides

    def check(self, config: Ds3dParallelConfig, cluster: Cluster, profile: Profile | None) -> list[Problem]:
        """DeepSpeed must be there."""
        return zero_module.check(self.name, cluster)

    def plan(self, plan: Plan, config: Ds3dParallelConfig) -> Plan:
        """One forward, one backward over the stages; gradients are averaged."""
        if config.zero_stage:
            plan = zero_module.plan(plan)
        return plan.changed(
            gradient_sync="all_reduce",
            num_micro_batches=config.num_micro_batches or plan.num_micro_batches,
            pipeline={
                "schedule": "1F1B",
                "stages_per_rank": 1,
                "split_method": config.split_method if not config.split_points else "custom",
                "split_points": config.split_points,
            },
        )

    def apply(self, job: Job, config: Ds3dParallelConfig) -> None:
        """Cuts the model and leaves the rest to the engine. Collective."""
        pipeline = PipelineParallelConfig(
            num_micro_batches=config.num_micro_batches,
            split_method=config.split_method,
            split_points=config.split_points,
        )
        stage_set = cut_pipeline(job, self.name, pipeline)  # before placing: a rank holds its stage alone
        job.place()
        run_by_deepspeed(job, stage_set, zero_stage=config.zero_stage, settings=config.ds_config)
        job.explain(self.name, f"run by DeepSpeed's pipeline engine, ZeRO stage {config.zero_stage}")


def _axis_size(mesh: Any, axis: str) -> int:
    size: int = dict(mesh.axes).get(axis, 1)  # mesh: the config of parallel_mode
    return size

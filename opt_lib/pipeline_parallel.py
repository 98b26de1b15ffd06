"""pipeline_parallel: cuts the model into stages and runs micro-batches through them."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any, Literal, final

import torch
from pydantic import Field, field_validator

from atorch_ns.cluster import Cluster
from atorch_ns.errors import InputError
from atorch_ns.job import BatchRunner, Job, first_loss
from atorch_ns.method import Method, MethodConfig, Need, Phase
from atorch_ns.pipeline import PipelineRunner, get_schedule
from atorch_ns.profile import Profile
from atorch_ns.strategy import Plan
from opt_lib._model_axes.pipeline_cut import CutPipeline, OutputsAlone, cut_pipeline, pipeline_groups
from opt_lib._model_axes.pipeline_plan import CutRequest


class PipelineParallelConfig(MethodConfig):
    """How the model is cut, and how the stages are run."""

    split_points: tuple[str, ...] = Field(
        default=(), description="Names of the modules that begin a stage, the first stage's left out."
    )
    split_method: Literal["auto", "uniform", "uniform_floor", "parameters", "custom"] = Field(
        default="auto",
        description="How the cuts are found: by estimated time, by number of units, or by number of parameters; "
        "custom takes custom_partition.",
    )
    custom_partition: tuple[int, ...] = Field(
        default=(), description="For custom: the first unit of every stage, then the number of units."
    )
    num_micro_batches: int | None = Field(
        default=None,
        ge=1,
        description="Parts that the batch of a data rank is split into; null for gradient_accumulation_steps, or "
        "for what fits the batch where that is 1.",
    )
    schedule: str = Field(
        default="1F1B",
        description="Order of forward and backward passes: GPipe, 1F1B, Interleaved1F1B, LoopedBFS, "
        "InterleavedZeroBubble, ZBVZeroBubble, DualPipeV, or auto for the fastest by a timed simulation.",
    )
    stages_per_rank: int | None = Field(
        default=None, ge=1, description="Stages on each rank; null for the schedule's usual number."
    )
    memory_limit_gib: float | None = Field(
        default=None, gt=0, description="What a rank may hold, for schedule auto; null for no limit."
    )

    @field_validator("schedule")
    @classmethod
    def _known_schedule(cls, name: str) -> str:
        try:
            return name if name == "auto" else get_schedule(name).name
        except InputError as error:
            raise ValueError(str(error)) from error


@final
class PipelineParallel(Method[PipelineParallelConfig]):
    """Cuts the model into stages and runs micro-batches through them."""

    name = "pipeline_parallel"
    phase = Phase.CUT
    Config = PipelineParallelConfig
    provides = ("axis:pipeline",)
    default_for = "axis:pipeline"
    needs_process_group = True

    def needs(self, config: PipelineParallelConfig, cluster: Cluster) -> Iterable[Need]:
        """A mesh to cut over."""
        return (Need("mesh", "pipeline_parallel puts stages on the ranks of an axis"),)

    def plan(self, plan: Plan, config: PipelineParallelConfig) -> Plan:
        """The schedule and the cut."""
        custom = bool(config.split_points or config.custom_partition)
        method: Any = "uniform" if config.split_method == "uniform_floor" else config.split_method
        return plan.changed(
            num_micro_batches=config.num_micro_batches or plan.num_micro_batches,
            pipeline={
                "schedule": config.schedule,
                "stages_per_rank": config.stages_per_rank or 0,
                "split_method": "custom" if custom else method,
                "split_points": config.split_points,
            },
        )

    def options(self, profile: Profile, cluster: Cluster) -> Iterable[PipelineParallelConfig]:
        """Two schedules with two stages on each rank: half the bubble of 1F1B, and a sixth of it where backward
        passes can be taken apart.

        The others wait as long as one of these three, or longer, and hold as much or more. ``auto`` is one of
        them, chosen as the search would.
        """
        if cluster.world_size > 1 and len(profile.blocks) >= 4:
            for schedule in ("1F1B", "Interleaved1F1B", "InterleavedZeroBubble"):
                yield PipelineParallelConfig(schedule=schedule)

    def apply(self, job: Job, config: PipelineParallelConfig) -> None:
        """Cuts the model; collective."""
        assert job.mesh is not None
        if job.mesh.size("pipeline") == 1:
            job.explain(self.name, "nothing is cut: parallel_mode has no axis pipeline")
            return
        request = CutRequest(
            schedule=config.schedule,
            stages_per_rank=config.stages_per_rank,
            num_micro_batches=config.num_micro_batches,
            split_method=config.split_method,
            split_points=config.split_points,
            custom_partition=config.custom_partition,
            memory_limit_bytes=None if config.memory_limit_gib is None else config.memory_limit_gib * 2**30,
        )
        cut = cut_pipeline(job, self.name, request)
        job.step.make_runner = partial(_runner, cut)


def _runner(cut: CutPipeline, job: Job, loss_func: Any) -> BatchRunner:
    assert job.mesh is not None
    places = tuple(range(job.mesh.size("pipeline")))
    group = pipeline_groups(job, [places]).pop(places)

    watched = OutputsAlone.once(job.module, loss_func)

    def loss_of(batch: Any, output: Any) -> torch.Tensor:
        return first_loss(watched(batch, output)).reshape(())

    return PipelineRunner(
        cut.stage_set,
        cut.plan.info,
        group=group,
        device=job.device,
        loss_of=loss_of,
        whole_backward=job.plan.whole_backward,
    )

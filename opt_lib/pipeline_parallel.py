"""pipeline_parallel: cuts the model into stages and runs micro-batches through them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, final

import torch

from atorch_ns.cluster import Cluster
from atorch_ns.data import BatchRunner
from atorch_ns.errors import Problem
from atorch_ns.job import Job, first_loss
from atorch_ns.method import Method, Need, Phase
from atorch_ns.pipeline import Links, Orders, PipelineRunner, StageSet, checked_orders, get_schedule
from atorch_ns.profile import Profile
from atorch_ns.strategy import Plan
from opt_lib._config_checks import unmatched_problem
from opt_lib._model_axes.pipeline_cut import OutputsAlone, cut_pipeline, pipeline_groups
from opt_lib._model_axes.pipeline_plan import PipelineParallelConfig


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

    def check(
        self, config: PipelineParallelConfig, cluster: Cluster, profile: Profile | None
    ) -> list[Problem]:
        """The leaf modules must exist."""
        return unmatched_problem(self.name, "leaf_modules", config.leaf_modules, profile)

    def plan(self, plan: Plan, config: PipelineParallelConfig) -> Plan:
        """The schedule and the cut."""
        begins = config.split_points if config.shards == "units" else ()
        custom = bool(begins or config.custom_partition)
        return plan.changed(
            num_micro_batches=config.num_micro_batches or plan.num_micro_batches,
            pipeline={
                "schedule": config.schedule,
                "stages_per_rank": config.stages_per_rank or 0,
                "split_method": "custom" if custom else config.split_method,
                "split_points": begins,
            },
        )

    def options(self, profile: Profile, cluster: Cluster) -> Iterable[PipelineParallelConfig]:
        """1F1B, and two schedules of two stages a rank: half its bubble, or a sixth if backward passes split.

        The others idle as long as one of these or longer, and hold as much or more; ``auto`` is one of them.
        """
        if cluster.world_size > 1 and len(profile.blocks) >= 4:
            for schedule in ("1F1B", "Interleaved1F1B", "InterleavedZeroBubble"):
                yield PipelineParallelConfig(schedule=schedule)

    def apply(self, job: Job, config: PipelineParallelConfig) -> None:
        """Cuts the model. Collective."""
        assert job.mesh is not None
        if job.mesh.size("pipeline") == 1:
            job.explain(self.name, "nothing is cut: parallel_mode has no axis pipeline")
            return
        stage_set = cut_pipeline(job, self.name, config)
        job.step.make_runner = partial(_make_runner, stage_set)


def _make_runner(stage_set: StageSet, job: Job, loss_func: Any) -> BatchRunner:
    assert job.mesh is not None
    num_ranks, pipeline = job.mesh.size("pipeline"), job.plan.pipeline
    info, on_rank = get_schedule(pipeline.schedule), pipeline.stages_per_rank
    orders = partial(checked_orders, info, num_ranks, stages_per_rank=on_rank)
    orders(job.step.num_micro_batches)  # what is wrong with them is said now
    if job.plan.recomputation.kind == "none":
        orders = partial(_without_recomputation, orders)
    loss = OutputsAlone.once(job.module, loss_func)

    def loss_of(batch: Any, output: Any) -> torch.Tensor:
        return first_loss(loss(batch, output)).reshape(())

    return PipelineRunner(
        stage_set,
        orders,
        links=Links(*(pipeline_groups(job, [tuple(range(num_ranks))]).popitem()[1] for _ in range(2))),
        device=job.device,
        loss_of=loss_of,
        keeping=job.step.kept_activations,
        kept=(len(stage_set.rank_of) - 1,) if info.keeps_last else (),  # the last stage recomputes nothing
        whole_backward=job.plan.whole_backward,
    )


def _without_recomputation(orders: Callable[[int], Orders], num_micro_batches: int) -> Orders:
    # R recomputes activations before a backward pass needs them.
    return tuple(
        tuple(action for action in order if action.kind != "R") for order in orders(num_micro_batches)
    )

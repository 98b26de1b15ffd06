"""Cutting a job's model into stages, for every engine that runs them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from atorch_ns.cluster import agree, same_everywhere
from atorch_ns.errors import BatchSizeError
from atorch_ns.job import Job, is_on_meta
from atorch_ns.pipeline import (
    CallGraph,
    HowToRun,
    Signature,
    StageSet,
    StageSettings,
    divide_parameters,
    get_schedule,
    install_stages,
    signature,
    train_step_only,
    without_memory,
)
from opt_lib._pipeline_batches import splitter
from opt_lib._pipeline_checks import make_weights_equal
from opt_lib._pipeline_plan import CutRequest, PipelinePlan, plan_pipeline
from opt_lib._pipeline_shared import share_parameters

__all__ = ["CutPipeline", "cut_pipeline"]


@dataclass(frozen=True, kw_only=True)
class CutPipeline:
    """A job's model in stages.

    Attributes:
        plan: what was decided.
        stage_set: this rank's stages.
    """

    plan: PipelinePlan
    stage_set: StageSet


def cut_pipeline(job: Job, method: str, request: CutRequest) -> CutPipeline:
    """Cuts ``job.module`` into this rank's stages, which become ``job.stages``; collective.

    Args:
        job: with a mesh that has the axis ``pipeline``.
        method: its name, for the report.
        request: what the user asks.

    Raises:
        InputError: if the model cannot be cut so; on all ranks.
        RankError: if the ranks would cut differently.
    """
    assert job.mesh is not None
    plan = agree(
        lambda: plan_pipeline(job, request),
        what="cutting the model into stages",
        distributed=job.cluster.distributed,
    )
    same_everywhere(
        {"units, in the order of their calls": ", ".join(plan.graph.paths)},
        distributed=job.cluster.distributed,
    )
    plan = _as_first_rank(plan)
    make_weights_equal(job, method)
    num_ranks = job.mesh.size("pipeline")
    rank_of = plan.rank_of(num_ranks)
    division = divide_parameters(job.module, plan.units, plan.graph, plan.cuts, rank_of)
    _place_what_lies_between(job, plan)
    if any(job.mesh.size(axis) > 1 for axis in ("tensor", "sequence", "expert")):
        job.uncut = without_memory(job.module)
    share_parameters(job, division)
    stages = install_stages(
        job.module,
        plan.units,
        division,
        job.mesh.axis("pipeline").get_local_rank(),
        StageSettings(
            device=job.device,
            model_input_format=job.inputs.model_input_format,
            method=method,
        ),
    )
    job.stages = stages
    job.pipeline = plan.step
    job.num_micro_batches = plan.num_micro_batches
    job.split = splitter(plan, num_ranks)
    job.plan = replace(
        job.plan,
        schedule=plan.info.name,
        stages_per_rank=plan.stages_per_rank,
        num_micro_batches=plan.num_micro_batches,
    )
    _explain(job, method, plan, num_ranks, len(division.shared))
    return CutPipeline(
        plan=plan,
        stage_set=StageSet(
            stages, plan.cuts, rank_of, plan.graph.paths, _tracing(job, plan), lambda: _seed(job)
        ),
    )


def _as_first_rank(plan: PipelinePlan) -> PipelinePlan:
    """What rank 0 has decided: estimates may differ between ranks, by the samples they have seen or by their nodes."""
    decided: list[Any] = [(plan.info.name, plan.stages_per_rank, plan.num_micro_batches, plan.cuts)]
    dist.broadcast_object_list(decided, src=0)
    name, on_rank, num, cuts = decided[0]
    if (plan.info.name, plan.stages_per_rank, plan.cuts) == (name, on_rank, cuts):
        return plan
    return replace(
        plan, info=get_schedule(name), stages_per_rank=on_rank, num_micro_batches=num, cuts=tuple(cuts)
    )


def _tracing(job: Job, plan: PipelinePlan) -> Callable[[Any], CallGraph]:
    def trace(micro_batch: Any) -> CallGraph:
        same = signature(micro_batch) == plan.traced_with
        if plan.tracer is None and not same:
            raise BatchSizeError(
                "the model does not run on tensors without memory, so its stages can only exchange what they did "
                f"when it was cut, for micro-batches of {_shapes(plan.traced_with)}; this one has "
                f"{_shapes(signature(micro_batch))}. Use drop_last=True and samples of one length."
            )
        if plan.tracer is None or (same and job.autocast is None and job.input_dtype is None):
            return plan.graph
        how = HowToRun(
            model_input_format=job.inputs.model_input_format,
            loss_func=job.inputs.loss_func,
            autocast=_autocast(job),
            weights=job.input_dtype,
        )
        return plan.tracer.trace(micro_batch, how)

    return trace


def _shapes(traced: Signature) -> str:
    return ", ".join(str(list(shape)) for shape, _ in traced)


def _seed(job: Job) -> int:
    """Of the next batch: it goes on with training where a checkpoint was taken, and is another on other data."""
    state = job.randomness.state().tolist() if job.randomness is not None else [job.seed]
    text = repr((*state, job.data_rank)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=7).digest(), "big")


def _autocast(job: Job) -> torch.dtype | None:
    return job.autocast.dtype if job.autocast is not None else None


def _place_what_lies_between(job: Job, plan: PipelinePlan) -> None:
    """Gives memory to buffers that belong to no unit: every stage computes with them."""
    if not is_on_meta(job.module):
        return
    inside = {id(child) for unit in plan.units for child in unit.module.modules()}
    between = [
        module
        for module in job.module.modules()
        if id(module) not in inside and module._buffers and not module._parameters
    ]
    job.materialiser().materialise(between, recurse=False)


def _cut_names(plan: PipelinePlan) -> str:
    return ", ".join(plan.graph.paths[cut] for cut in plan.cuts)


def _explain(job: Job, method: str, plan: PipelinePlan, num_ranks: int, num_shared: int) -> None:
    on_rank = f", {plan.stages_per_rank} on each rank" if plan.stages_per_rank > 1 else ""
    text = (
        f"{len(plan.cuts) + 1} stages{on_rank}, cut before {_cut_names(plan)}; {plan.info.name} with "
        f"{plan.num_micro_batches} micro-batches"
    )
    if num_shared:
        text += f"; {num_shared} parameter(s) shared by stages"
    if job.kept_whole and job.num_data_ranks > 1:
        text += (
            f"; {len(job.kept_whole)} of them whole on every data rank, since two stages of a rank use them"
        )
    job.explain(method, text)
    job.explain(method, train_step_only(method))
    if plan.choice is not None and len(plan.choice.candidates) > 1:
        weighed = [one for one in plan.choice.candidates if not one.problem][:3]
        shown = ", ".join(
            f"{one.schedule.name} {one.step_seconds * 1e3:.3g} ms with {one.bubble_share:.0%} idle"
            for one in weighed
        )
        job.explain(method, f"the fastest by simulation (predicted): {shown}")
    if plan.refused:
        cut, reason = next(iter(plan.refused.items()))
        job.explain(
            method,
            f"cannot be cut in {len(plan.refused)} place(s), as before {plan.graph.paths[cut]}: {reason}",
        )
    if plan.info.note:
        job.explain(method, plan.info.note)

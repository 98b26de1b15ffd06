"""A job whose model is cut into stages, run by DeepSpeed's pipeline engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from atorch_ns.errors import InputError
from atorch_ns.job import Job, make_user_optimizer, on_all_stages, parameter_names
from atorch_ns.pipeline import StageModule, StageSet
from opt_lib._deepspeed import require_fp32, states
from opt_lib._deepspeed_optimizer import DeepSpeedOptimizer
from opt_lib._ds_pipeline_engine import make_engine
from opt_lib._ds_pipeline_layer import StageLayer
from opt_lib._ds_pipeline_runner import DsPipelineRunner
from opt_lib._flat_shards import require_elementwise
from opt_lib._shard_parts import broadcast_from_first

__all__ = ["run_by_deepspeed"]

_BACKEND = "DeepSpeed's pipeline engine"


def run_by_deepspeed(job: Job, stage_set: StageSet, *, zero_stage: int, settings: Mapping[str, Any]) -> None:
    """Lets DeepSpeed run the stage that this rank has, and average or shard over the data.

    Args:
        job: cut, and on its device.
        stage_set: of one stage.
        zero_stage: 0, or 1 to shard optimizer states over the data ranks.
        settings: more of DeepSpeed's configuration.

    Raises:
        InputError: if there is no optimizer, without which the engine does not run.
    """
    if job.inputs.optim_func is None:
        raise InputError(f"{_BACKEND} runs only with an optimizer, so auto_accelerate needs optim_func.")
    if zero_stage:
        require_elementwise(job, _BACKEND)
    broadcast_from_first(job, [t for root in job.stages for t in (*root.parameters(), *root.buffers())])

    (stage,) = stage_set.stages

    def take_over(groups: list[dict[str, Any]]) -> tuple[nn.Module, torch.optim.Optimizer]:
        make = _sharded if zero_stage else _whole
        engine, layer, optimizer = make(job, stage, groups, settings)
        job.make_runner = partial(_runner, engine, layer, stage_set, optimizer)
        return job.model, optimizer

    job.take_over = take_over


def _runner(
    engine: Any,
    layer: StageLayer,
    stage_set: StageSet,
    optimizer: torch.optim.Optimizer,
    job: Job,
    loss_func: Callable[[Any, Any], Any],
) -> DsPipelineRunner:
    reduce: Callable[[], object] = partial(_average, job, engine)
    if isinstance(optimizer, DeepSpeedOptimizer):  # it reduces when gradients are clipped or stepped
        reduce, job.clip = _nothing, optimizer.clip_gradients
    return DsPipelineRunner(job, engine, layer, stage_set=stage_set, loss_func=loss_func, reduce=reduce)


def _nothing() -> None:
    """Leaves gradients as they are."""


_Made = tuple[Any, StageLayer, torch.optim.Optimizer]
"""Engine, layer, and what the user steps."""


def _whole(job: Job, stage: StageModule, groups: list[dict[str, Any]], settings: Mapping[str, Any]) -> _Made:
    """Every data rank has the optimizer states of its stage; DeepSpeed averages the gradients.

    The engine is told of no parameter but one that stands for them, so that these may be anything, shards of
    layers included.
    """
    stand_in = nn.Parameter(torch.zeros(1, device=job.device))
    layer = StageLayer(stage, parameters=[stand_in], device=job.device)
    engine = make_engine(job, layer, torch.optim.SGD([stand_in], lr=0.0), zero_stage=0, settings=settings)
    return engine, layer, make_user_optimizer(job, groups)


def _sharded(
    job: Job, stage: StageModule, groups: list[dict[str, Any]], settings: Mapping[str, Any]
) -> _Made:
    """DeepSpeed's ZeRO 1 within each stage."""
    require_fp32(job)
    _require_all_groups(job, groups)
    layer = StageLayer(stage, parameters=list(stage.parameters()), device=job.device)
    engine = make_engine(job, layer, make_user_optimizer(job, groups), zero_stage=1, settings=settings)
    names = {parameter: own[0] for parameter, own in parameter_names(job.module).items()}
    assert job.mesh is not None
    optimizer = DeepSpeedOptimizer(
        engine,
        group=job.mesh.data_group,
        skip_if_nonfinite=job.skip_if_nonfinite,
        stages=dist.group.WORLD,
        elsewhere=[parameter for parameter, name in names.items() if name in job.elsewhere],
        names=names,
    )
    job.use_optim_backward = True
    job.make_states = partial(states, engine.optimizer)
    return engine, layer, optimizer


def _require_all_groups(job: Job, groups: list[dict[str, Any]]) -> None:
    """DeepSpeed drops groups that are empty on a stage, after which ranks would number the others differently."""
    counts = on_all_stages(job, [len(group["params"]) for group in groups])
    for stage, sizes in enumerate(counts):
        if 0 in sizes:
            raise InputError(
                f"stage {stage} of {len(counts)} has no parameter of group {sizes.index(0)} of optim_param_func, and "
                "DeepSpeed's ZeRO needs some of every group on every stage. Use zero_stage 0 or fewer stages."
            )


@torch.no_grad()
def _average(job: Job, engine: Any) -> None:
    """Averages gradients over the data ranks; a parameter that none of them used keeps none."""
    if job.num_data_ranks == 1:
        return
    assert job.mesh is not None
    trained = [p for root in job.stages for p in root.parameters() if p.requires_grad]
    used = torch.tensor([p.grad is not None for p in trained], dtype=torch.int32, device=job.device)
    dist.all_reduce(used, op=dist.ReduceOp.MAX, group=job.mesh.data_group)
    grads = []
    for parameter, seen in zip(trained, used.tolist(), strict=True):
        if not seen:
            continue
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        grad = parameter.grad
        grads.append(grad.to_local() if isinstance(grad, DTensor) else grad)
    engine.buffered_allreduce_fallback(grads=grads)

"""From a job that every method has been applied to, to the objects a user trains with."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from atorch_ns.data import TrainLoader, build_dataloader, default_prepare_input
from atorch_ns.errors import InputError
from atorch_ns.job._clip import clip_gradients, gradient_norm
from atorch_ns.job._fused import optimizer_arguments
from atorch_ns.job._groups import parameter_groups
from atorch_ns.job._job import OPTIMIZER, Job, ParameterGroups
from atorch_ns.job._loss import LossFunction, wrap_loss
from atorch_ns.job._masters import MasterWeights
from atorch_ns.job._optim_func import explained_groups, optim_func_parameters
from atorch_ns.job._optimizer import StepOptimizer
from atorch_ns.job._optimizer_limits import refuse_what_fails
from atorch_ns.job._precision import autocast_forward, cast_inputs
from atorch_ns.job._randomness import SharedRandomness
from atorch_ns.job._report import MethodRow, Report
from atorch_ns.job._result import Result
from atorch_ns.job._scaling import LossScaler
from atorch_ns.job._separable import require_separable
from atorch_ns.job._train_step import TrainStep
from atorch_ns.method import Resolved
from atorch_ns.torch_compat import plain_name

__all__ = ["build"]


def build(job: Job, resolved: Resolved) -> Result:
    """Makes optimizer, data loader, loss function and step.

    Raises:
        InputError: if one of the user's functions does not give what it should.
    """
    if not job.placed and job.take_over is None:
        job.place()
    scaler = _scaler(job)
    optimizer = _optimizer(job, scaler)
    _wrap_forward(job)
    _agree_over_model_axes(job)
    loader = _loader(job)
    loss_func = _loss(job, scaler)
    prepare_input = job.inputs.prepare_input or default_prepare_input
    runner = None
    if job.make_runner is not None and loss_func is not None:
        runner = job.make_runner(job, loss_func)
    step = TrainStep(
        job=job, optimizer=optimizer, loss_func=loss_func, prepare_input=prepare_input, runner=runner
    )
    return Result.of(
        model=job.model,
        optim=optimizer,
        dataloader=loader,
        loss_func=loss_func,
        prepare_input=prepare_input,
        lr_scheduler=_scheduler(job, optimizer),
        args={
            "use_optim_backward": job.use_optim_backward,
            "requires_set_gradient_accumulation_boundary": job.requires_boundary,
        },
        train_step=step,
        make_applied=partial(_report, job, resolved, _bytes_per_rank(job)),
        job=job,
    )


def _scaler(job: Job) -> LossScaler | None:
    if job.loss_scaling is None:
        return None
    return LossScaler(
        job.cluster.device_type,
        init_scale=job.loss_scaling.init_scale,
        growth_interval=job.loss_scaling.growth_interval,
        group=job.agreeing_group,
    )


def _optimizer(job: Job, scaler: LossScaler | None) -> torch.optim.Optimizer | None:
    if job.inputs.optim_func is None:
        return None
    groups = parameter_groups(job.module, job.groups, whole=not job.stages, tied=job.tied)
    masters = _masters(job)
    if masters is not None:
        groups = masters.groups(groups)
    untried = require_separable(job, groups)
    if job.take_over is not None:
        model, optimizer = job.take_over(groups)
        job.wrap(model)
    else:
        optimizer = (job.make_optimizer or partial(make_user_optimizer, job))(groups)
    if untried:
        _tell(job, untried)
    norm = _count_once(job, masters)
    steps_alone = scaler is None and masters is None and not job.skip_if_nonfinite
    if steps_alone or job.use_optim_backward:  # a backward pass of its own goes with a step of its own
        if job.sums:
            optimizer.register_step_pre_hook(lambda *_: job.sums.run(job.module))
        return optimizer
    return StepOptimizer(
        optimizer,
        scaler=scaler,
        masters=masters,
        skip_if_nonfinite=job.skip_if_nonfinite,
        group=job.agreeing_group,
        finish=partial(job.sums.run, job.module) if job.sums else None,
        norm=norm,
    )


def _tell(job: Job, text: str) -> None:
    job.explain(OPTIMIZER, text)
    if job.cluster.rank == 0:
        warnings.warn(text, stacklevel=2)


def _masters(job: Job) -> MasterWeights | None:
    """fp32 copies that the optimizer updates; ``None`` where it updates the weights themselves."""
    if job.plan.offload_optimizer:
        return MasterWeights(job.module.parameters(), on_host=True, pinned=job.device.type == "cuda")
    return MasterWeights(job.module.parameters()) if job.plan.master_dtype else None


def _count_once(job: Job, masters: MasterWeights | None) -> Callable[[list[torch.Tensor]], torch.Tensor]:
    """Norms of gradients over all stages of a pipeline, with the job's clipping made to use them."""
    stages = job.stage_group
    if stages is None:
        return gradient_norm
    elsewhere = [
        parameter if masters is None else masters.of(parameter)
        for name, parameter in job.module.named_parameters(remove_duplicate=False)
        if plain_name(name) in job.elsewhere
    ]
    job.clip = partial(clip_gradients, stages=stages, elsewhere=elsewhere)
    return partial(gradient_norm, stages=stages, elsewhere=elsewhere)


def _agree_over_model_axes(job: Job) -> None:
    """What ranks that hold parts of one model must do alike."""
    if job.sums:
        job.sums.watch(job.module)
    if job.mesh is not None and job.mesh.divides_model:
        stages = job.stage_group
        job.randomness = SharedRandomness(
            seed=job.seed,
            data_rank=job.data_rank,
            stage=0 if stages is None else stages.rank(),
            device=job.device,
        )
        job.randomness.attach([job.module, *job.stages])


def _data_group(job: Job) -> dist.ProcessGroup | None:
    return job.mesh.data_group if job.mesh is not None and job.num_data_ranks > 1 else None


def make_user_optimizer(job: Job, groups: ParameterGroups) -> torch.optim.Optimizer:
    """Calls the user's ``optim_func`` with what :func:`optim_func_parameters` makes of the groups.

    Raises:
        InputError: if it takes other arguments, or does not return a torch optimizer.
    """
    assert job.inputs.optim_func is not None
    arguments, why = optimizer_arguments(job.inputs.optim_func, job.inputs.optim_args, groups, job.roots)
    if why:
        job.explain(OPTIMIZER, why)
    parameters = optim_func_parameters(job, groups)
    with explained_groups(job, parameters):
        optimizer = job.inputs.optim_func(parameters, **arguments)
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise InputError(f"optim_func returned a {type(optimizer).__name__}, not a torch.optim.Optimizer.")
    refuse_what_fails(optimizer)
    return optimizer


def _wrap_forward(job: Job) -> None:
    module = job.model if job.hooked is None else job.hooked
    if job.input_dtype is not None:
        cast_inputs(module, job.input_dtype)
    if job.autocast is not None:
        autocast_forward(module, job.autocast.device_type, job.autocast.dtype)


def _loader(job: Job) -> TrainLoader | None:
    if job.inputs.dataset is None:
        return None
    return build_dataloader(
        job.inputs.dataset,
        args=job.inputs.dataloader_args,
        sampler_cls=job.inputs.distributed_sampler_cls,
        seed=job.inputs.sampler_seed,
        data_rank=job.data_rank,
        num_data_ranks=job.num_data_ranks,
        group=_data_group(job),
    )


def _loss(job: Job, scaler: LossScaler | None) -> LossFunction | None:
    if job.inputs.loss_func is None:
        return None
    own = job.inputs.loss_func
    return wrap_loss(
        own if job.watch_loss is None else job.watch_loss(own),
        autocast=job.autocast,
        scaler=scaler,
        upcast=job.input_dtype is not None,
    )


def _scheduler(job: Job, optimizer: torch.optim.Optimizer | None) -> Any:
    if job.inputs.lr_scheduler_cls is None:
        return None
    try:
        return job.inputs.lr_scheduler_cls(optimizer, **dict(job.inputs.lr_scheduler_args or {}))
    except TypeError as error:
        raise InputError(
            f"lr_scheduler_cls cannot be called with lr_scheduler_args={job.inputs.lr_scheduler_args}: {error}"
        ) from error


def _report(job: Job, resolved: Resolved, bytes_per_rank: int) -> Report:
    rows = []
    steps = {step.name: step for step in resolved.strategy}
    for item in resolved.chosen:
        step = steps[item.method.name]
        done = job.explained(item.method.name)
        why = "; ".join([item.method.explain(item.config, job.cluster).rstrip("."), *done])
        settings = str(step).removeprefix(step.name).strip("()")
        rows.append(MethodRow(name=item.method.name, settings=settings, why=why))
    return Report(
        strategy=resolved.strategy,
        rows=tuple(rows),
        notes=(*(note.text for note in resolved.notes), *job.explained(OPTIMIZER)),
        world_size=job.cluster.world_size,
        axes=job.mesh.axes if job.mesh is not None else (),
        device=job.cluster.device,
        num_parameters=job.num_parameters,
        parameter_bytes_per_rank=bytes_per_rank,
    )


def _bytes_per_rank(job: Job) -> int:
    local = (p.to_local() if isinstance(p, DTensor) else p for p in job.module.parameters())
    return sum(parameter.numel() * parameter.element_size() for parameter in local)

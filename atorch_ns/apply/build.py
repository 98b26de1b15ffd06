"""Build: the objects that a user trains with, made of a job that every method has been applied to."""

from __future__ import annotations

from collections.abc import Callable, Sized
from functools import partial
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from atorch_ns.data import TrainLoader, build_dataloader, default_prepare_input
from atorch_ns.errors import InputError
from atorch_ns.job.agreement import SameBatch
from atorch_ns.job.batch_norm import note_batch_norms
from atorch_ns.job.census import watch_first_step
from atorch_ns.job.job import MODEL, OPTIMIZER, Job
from atorch_ns.job.loss import ForwardScope, LossCheck, LossFunction, LossScaler, cast_inputs, wrap_loss
from atorch_ns.job.optimizer.build import make_optimizer
from atorch_ns.job.randomness import SharedRandomness
from atorch_ns.job.result import MethodRow, Report, Result
from atorch_ns.job.train_step import TrainStep
from atorch_ns.method import Resolved

MakeReport = Callable[[Job, int], Report]
"""``(job, bytes of parameters on this rank) -> what was applied``."""


def build(job: Job, make_report: MakeReport) -> Result:
    """Builds optimizer, data loader, loss function and step.

    Raises:
        InputError: if one of the user's functions returns an unusable value.
    """
    if not job.placed and job.optimizer.take_over is None:  # such a backend places the model itself
        job.place()  # first: the optimizer is made of parameters that have their memory
    job.precision.scaler = _build_scaler(job)  # the optimizer and the loss share it
    optimizer = make_optimizer(job)  # a backend may put its engine around the model here
    watch_first_step(job, optimizer)
    _wrap_forward(job)
    _agree_over_model_axes(job)  # random states of ranks that hold one model begin outside autocast
    loader = _build_loader(job)  # needs the mesh alone
    loss_func = _build_loss(job)  # under the same autocast and scale as the model
    if batch_norms := note_batch_norms(job):
        job.explain(MODEL, batch_norms)
        job.warn(batch_norms)
    runner = None
    if job.step.make_runner is not None:  # runs the final model with the final loss
        runner = job.step.make_runner(job, _no_loss if loss_func is None else loss_func)
    prepare_input = job.inputs.prepare_input or default_prepare_input
    step = TrainStep(
        job=job, optimizer=optimizer, loss_func=loss_func, prepare_input=prepare_input, runner=runner
    )
    return Result.of(
        model=job.model,
        optim=optimizer,
        dataloader=loader,
        loss_func=loss_func,
        prepare_input=prepare_input,
        lr_scheduler=_build_scheduler(job, optimizer),  # may change the optimizer's rates, so last
        args={
            "use_optim_backward": job.optimizer.use_optim_backward,
            "requires_set_gradient_accumulation_boundary": job.optimizer.requires_boundary,
        },
        train_step=step,
        make_applied=partial(make_report, job, _bytes_per_rank(job)),
        job=job,
    )


def _build_scaler(job: Job) -> LossScaler | None:
    if job.precision.loss_scaling is None:
        return None
    return LossScaler(job.cluster.device_type, job.precision.loss_scaling, group=job.agreeing_group)


def _agree_over_model_axes(job: Job) -> None:
    """Sets up equal data and random states on ranks that hold parts of one model."""
    if job.gradients.sums:
        job.gradients.sums.watch(job.module)
        if not job.parts.stages:  # the user's loop does not call a pipeline
            job.gradients.follow_passes(job.module)
    if job.mesh is not None and job.mesh.divides_model:
        job.step.randomness = SharedRandomness(seed=job.seed, data_rank=job.data_rank, device=job.device)
        job.step.same_batch = SameBatch(job.mesh)
        if not job.parts.stages:  # a pipeline seeds every unit's call itself, and is run by train_step alone
            job.step.randomness.attach([job.module])
            SameBatch(job.mesh).attach(job.module)  # a custom loop may call it with different samples


def _wrap_forward(job: Job) -> None:
    # Inside wrappers: the user's code may call the model itself, and DeepSpeed's on a GPU switches off any autocast around it.
    if job.precision.input_dtype is not None:
        cast_inputs(job.module, job.precision.input_dtype)
    autocast = job.precision.autocast
    if autocast is not None:
        ForwardScope(partial(torch.autocast, autocast.device_type, autocast.dtype)).attach(job.module)


def _build_loader(job: Job) -> TrainLoader | None:
    dataset = job.inputs.dataset
    if dataset is None:
        return None
    if hasattr(dataset, "__getitem__") and isinstance(dataset, Sized) and len(dataset) == 0:
        raise InputError("dataset is empty: len(dataset) is 0.")
    args, num_ranks = dict(job.inputs.dataloader_args or {}), job.num_data_ranks
    extra = -len(dataset) % num_ranks if isinstance(dataset, Sized) and hasattr(dataset, "__getitem__") else 0
    if extra and not {"sampler", "batch_sampler"} & {*args} and not args.get("drop_last"):
        job.warn(
            f"{num_ranks} ranks do not divide {len(dataset)} samples: the last batch of an epoch is padded with the epoch's first "
            f"{extra} samples, which one process would not train on twice. Set drop_last=True in dataloader_args to drop the rest."
        )
    return build_dataloader(
        dataset,
        args=job.inputs.dataloader_args,
        sampler_cls=job.inputs.distributed_sampler_cls,
        seed=job.inputs.sampler_seed,
        data_rank=job.data_rank,
        num_data_ranks=job.num_data_ranks,
        group=job.mesh.data_group if job.mesh is not None and job.num_data_ranks > 1 else None,
    )


def _build_loss(job: Job) -> LossFunction | None:
    if job.inputs.loss_func is None:
        return None
    loss_func = job.inputs.loss_func
    if not job.step.divides_outputs:  # otherwise a part of a batch has other parts of the outputs
        averages = job.inputs.weight_func is None and job.num_data_ranks > 1  # also in a custom loop
        is_divided = any(isinstance(parameter, DTensor) for parameter in job.module.parameters())
        check = LossCheck(job.device, None if averages else "", gathers=is_divided)
        job.step.loss_check = check
        job.explain(MODEL, lambda: check.finding)
        loss_func = check.around(loss_func)
    return wrap_loss(
        loss_func,
        autocast=job.precision.autocast,
        scaler=job.precision.scaler,
        upcast=job.precision.input_dtype is not None,
    )


def _no_loss(batch: Any, output: Any) -> torch.Tensor:
    """The missing loss of a pipeline that only infers."""
    return torch.zeros(())


def _build_scheduler(job: Job, optimizer: torch.optim.Optimizer | None) -> Any:
    if job.inputs.lr_scheduler_cls is None:
        return None
    try:
        return job.inputs.lr_scheduler_cls(optimizer, **dict(job.inputs.lr_scheduler_args or {}))
    except TypeError as error:
        raise InputError(
            f"lr_scheduler_cls cannot be called with lr_scheduler_args={job.inputs.lr_scheduler_args}: {error}"
        ) from error


def report_applied(resolution: Resolved, job: Job, bytes_per_rank: int) -> Report:
    """Report of the applied methods of a strategy, and the reasons."""
    rows = []
    steps = {step.name: step for step in resolution.strategy}
    for item in resolution.chosen:
        step = steps[item.method.name]
        explanations = job.explained(item.method.name)
        why = "; ".join([item.method.explain(item.config, job.cluster).rstrip("."), *explanations])
        settings = str(step).removeprefix(step.name).strip("()")
        rows.append(MethodRow(name=item.method.name, settings=settings, why=why))
    return Report(
        strategy=resolution.strategy,
        rows=tuple(rows),
        notes=(*(note.text for note in resolution.notes), *job.explained(MODEL), *job.explained(OPTIMIZER)),
        world_size=job.cluster.world_size,
        axes=job.mesh.axes if job.mesh is not None else (),
        device=job.cluster.device,
        num_parameters=job.original.num_parameters,
        parameter_bytes_per_rank=bytes_per_rank,
    )


def _bytes_per_rank(job: Job) -> int:
    local = (p.to_local() if isinstance(p, DTensor) else p for p in job.module.parameters())
    return sum(parameter.numel() * parameter.element_size() for parameter in local)

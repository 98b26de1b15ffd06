"""Optimizer of a job: made of what methods have left of the parameters, with the job or after it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

from atorch_ns.errors import InputError, StepError
from atorch_ns.job.agreement import SameWeights
from atorch_ns.job.gradients import clip_gradients, gradient_norm, warn_where_none_come
from atorch_ns.job.job import OPTIMIZER, Job
from atorch_ns.job.model import NamedGroup, parameter_groups
from atorch_ns.job.optimizer.checks import require_separable
from atorch_ns.job.optimizer.step_optimizer import MasterWeights, StepOptimizer, inner_optimizer
from atorch_ns.job.optimizer.user_optimizer import make_user_optimizer
from atorch_ns.job.result import WATCH, Result
from atorch_ns.job.same_place import SamePlace
from atorch_ns.text import did_you_mean, with_article
from atorch_ns.torch_compat import has_step_hooks, plain_name


def attach_optimizer(
    result: Result,
    optim_func: Callable[..., torch.optim.Optimizer],
    *,
    options_of: Callable[[str], Mapping[str, Any]] | None = None,
    **optim_args: Any,
) -> Result:
    """Gives an optimizer to a job that was applied without one. Collective.

    Args:
        result: the result of ``auto_accelerate`` without ``optim_func``.
        optim_func: ``(parameters, **optim_args) -> torch.optim.Optimizer``.
        options_of: options of a parameter by its name in the user's model, such as ``{"weight_decay": 0.0}``.
            Parameters with equal options form a group. ``None`` for one group.
        optim_args: keyword arguments of ``optim_func``.

    Returns:
        The same objects with ``optim``. ``train_step`` of the given result also uses it.

    Raises:
        InputError: on all ranks, if the job has an optimizer, or a function returns an unusable value.
    """
    job = result.job

    def make() -> torch.optim.Optimizer | None:
        if result.train_step.optimizer is not None:
            raise InputError("the job has an optimizer already; apply it without optim_func to attach one.")
        for name, argument in (("optim_func", optim_func), ("options_of", options_of)):
            if not callable(argument) and (argument is not None or name == "optim_func"):
                raise InputError(f"{name} must be callable; it is {with_article(argument)}.")
        if job.precision.scaler is not None and job.inputs.loss_func is None:
            raise InputError("fp16 scales the loss, so a job with an optimizer needs loss_func.")
        groups = None if options_of is None else _group_by_options(job, options_of)
        job.original = replace(job.original, groups=groups)
        job.inputs = replace(job.inputs, optim_func=optim_func, optim_args=optim_args)
        instance = make_optimizer(job)
        assert instance is not None
        _refuse_misspelt(groups or (), inner_optimizer(instance).defaults)
        return instance

    optimizer = job.cluster.agree(make, what="attaching the optimizer")
    result.train_step.optimizer = optimizer
    assert optimizer is not None
    result.train_step.memory.follow(optimizer)
    new_result = result.having(optim=optimizer)
    if (watch := WATCH.get()) is not None:
        watch.follow(new_result)
    return new_result


def _group_by_options(job: Job, options_of: Callable[[str], Mapping[str, Any]]) -> tuple[NamedGroup, ...]:
    left_out = set() if job.optimizer.takes_frozen else {plain_name(name) for name, _ in _frozen_tensors(job)}
    groups: list[tuple[dict[str, Any], list[str]]] = []
    for name in job.original.parameter_order:
        if name in left_out:
            continue
        options = options_of(name)
        if not isinstance(options, Mapping) or "params" in options:
            text = "'params'" if isinstance(options, Mapping) else with_article(options)
            raise InputError(
                f"options_of gave {text} for {name}; it must give a dictionary of options, such as "
                "{'weight_decay': 0.0}, or an empty one."
            )
        names = next((names for other, names in groups if other == options), None)
        if names is None:
            groups.append((dict(options), [name]))
        else:
            names.append(name)
    return tuple(NamedGroup(tuple(names), options) for options, names in groups)


def _refuse_misspelt(groups: Iterable[NamedGroup], defaults: Collection[str]) -> None:
    for option in {option for group in groups for option in group.options}:
        if option not in defaults and (hint := did_you_mean(option, defaults)):  # torch accepts any key
            raise InputError(f"options_of gave {option!r}, which the optimizer does not know.{hint}")


def make_optimizer(job: Job) -> torch.optim.Optimizer | None:
    """The job's optimizer with the wrappers of its strategy, or ``None`` if the user gave none.

    Raises:
        InputError: if the user's function returns no optimizer, or the strategy cannot use it.
    """
    if job.inputs.optim_func is None:
        return None
    groups = parameter_groups(
        job.module, job.original.groups, whole=not job.parts.stages, tied=job.original.tied
    )
    if job.original.groups is None and not job.optimizer.takes_frozen:
        groups = _without_frozen(job, groups)
    masters = _make_master_weights(job)
    if masters is not None:
        groups = masters.groups(groups)
    warning = require_separable(job, groups)
    if job.optimizer.take_over is not None:
        model, optimizer = job.optimizer.take_over(groups)
        job.wrap(model)
    else:
        optimizer = (job.optimizer.make or partial(make_user_optimizer, job))(groups)
    if warning:
        job.explain(OPTIMIZER, warning)
        job.warn(warning)
    _watch_ranks(job, optimizer)
    if job.cluster.world_size > 1 and job.optimizer.take_over is None:
        _refuse_foreign_parameters(job, optimizer, groups)
    scaler, norm = job.precision.scaler, _count_once(job)
    steps_alone = scaler is None and masters is None and not job.precision.skip_if_nonfinite
    # An optimizer with its own backward pass needs its own step.
    steps_itself = steps_alone or job.optimizer.use_optim_backward
    if has_step_hooks(optimizer):
        if steps_itself:
            optimizer.register_step_pre_hook(lambda *_: job.gradients.complete(job.module))
        if job.step.same_weights is not None:
            job.step.same_weights.follow(optimizer)  # with gradients that are complete
    if steps_itself:
        return optimizer
    return StepOptimizer(
        optimizer,
        scaler=scaler,
        masters=masters,
        skip_if_nonfinite=job.precision.skip_if_nonfinite,
        group=job.agreeing_group,
        finish=partial(job.gradients.complete, job.module),
        norm=norm,
    )


def _ranks_together(job: Job) -> list[int]:
    assert job.mesh is not None
    sharding = job.plan.sharding
    if sharding.parameters_over and not sharding.keeps_gathered:  # every pass gathers from all ranks
        return list(range(job.cluster.world_size))
    axes = [name for name in ("tensor", "sequence") if job.mesh.size(name) > 1]  # they share samples
    return dist.get_process_group_ranks(job.mesh.axis(axes[0]).get_group()) if axes else []


def _watch_ranks(job: Job, optimizer: torch.optim.Optimizer) -> None:
    is_known = bool(job.name) and job.optimizer.take_over is None and has_step_hooks(optimizer)
    if job.mesh is None or not is_known:
        return  # the optimizer's steps cannot be observed, or its weights are elsewhere
    if job.num_data_ranks > 1 and job.plan.sharding.layout != "flat":
        roots, sends = [job.module, *job.parts.stages], job.plan.sharding.layout == "parameters"
        job.step.same_weights = SameWeights(job.mesh, roots, job.name, gradients=sends)
        if job.inputs.weight_func is None:
            look = torch.compiler.disable(job.step.same_weights.note_batch)
            job.module.register_forward_pre_hook(look, with_kwargs=True)
    if not job.parts.stages:
        together = _ranks_together(job)
        everyone = range(job.cluster.world_size) if job.plan.sharding.parameters_over else together
        job.step.same_place = SamePlace(job.name, together, everyone)
        job.step.same_place.follow(job.module, optimizer)
    if any(isinstance(module, FSDPModule) for module in job.module.modules()):  # of replicate too
        warn_where_none_come(job.module, optimizer)


def _refuse_foreign_parameters(
    job: Job, optimizer: torch.optim.Optimizer, groups: Iterable[Mapping[str, Any]]
) -> None:
    known_ids = {id(parameter) for group in groups for parameter in group["params"]}
    last_number, foreign = 0, list[torch.Tensor]()

    def look(*_: Any) -> None:
        nonlocal last_number, foreign
        if (number := sum(len(group["params"]) for group in optimizer.param_groups)) != last_number:
            ours = known_ids | {id(p) for part in (job.module, *job.parts.stages) for p in part.parameters()}
            members = (parameter for group in optimizer.param_groups for parameter in group["params"])
            last_number, foreign = number, [parameter for parameter in members if id(parameter) not in ours]
        for parameter in foreign:  # such as by a later add_param_group
            if parameter.grad is not None:
                raise StepError(
                    f"the optimizer has a parameter of shape {list(parameter.shape)} that is not the model's: each rank would "
                    "train it on its own samples. Make it a parameter of the model before auto_accelerate, or average its "
                    "gradient over the ranks and give it a separate optimizer."
                )

    if has_step_hooks(optimizer):
        optimizer.register_step_pre_hook(look)


def _frozen_tensors(job: Job) -> list[tuple[str, torch.Tensor]]:
    entries = job.module.named_parameters()
    return [(plain_name(name), parameter) for name, parameter in entries if not parameter.requires_grad]


def _without_frozen(job: Job, groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    left_out = _frozen_tensors(job)

    def require_frozen(*_: Any) -> None:
        for name, parameter in left_out:
            if parameter.requires_grad:
                raise StepError(
                    f"{name} was frozen when the optimizer was created, and under this strategy it accepts no parameters later, so "
                    "it would never be trained. Call requires_grad_(True) before auto_accelerate, which does not freeze it; or use "
                    "torch's ddp, zero2 or fsdp, but no fp32 masters with zero1."
                )

    if left_out:  # the optimizer accepts none later, so a step reports thawed ones
        job.module.register_forward_pre_hook(require_frozen)
    return [{**group, "params": [p for p in group["params"] if p.requires_grad]} for group in groups]


def _make_master_weights(job: Job) -> MasterWeights | None:
    if job.plan.offload_optimizer:
        return MasterWeights(job.module.parameters(), on_host=True, is_pinned=job.device.type == "cuda")
    return MasterWeights(job.module.parameters()) if job.plan.precision.master_dtype else None


def _count_once(job: Job) -> Callable[[list[torch.Tensor]], torch.Tensor]:
    stages = job.stage_group
    if stages is None:
        return gradient_norm
    remote = [
        parameter
        for name, parameter in job.module.named_parameters(remove_duplicate=False)
        if plain_name(name) in job.gradients.remote_norm_names  # another stage counts them
    ]
    job.gradients.clip = partial(clip_gradients, stages=stages, remote=remote)
    return partial(gradient_norm, stages=stages, remote=remote)

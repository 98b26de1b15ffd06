"""Parallel submodules of a Trainer's model: modules of given classes, replaced after construction, in a job of the whole."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import fields, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from atorch_ns.apply.optimizer import make_optimizer
from atorch_ns.capture.random_states import caches_off, random_states_kept, turn_off_caches
from atorch_ns.cluster import Cluster
from atorch_ns.data import call_model, default_prepare_input
from atorch_ns.errors import InputError
from atorch_ns.job import Inputs, Job, Result
from atorch_ns.job.gradients import Gradients
from atorch_ns.job.model import OriginalModel
from atorch_ns.job.reducer import GradientReducer
from atorch_ns.job.train_step import TrainStep
from atorch_ns.parallel import ComputeConfig, ParallelModule, parallelize
from atorch_ns.parallel.optimizer import reducer_of_the_rest
from atorch_ns.parallel.parallelize import own_loss
from atorch_ns.trainer.args import ModuleParallelizeConfig, OptionalComputeConfig, TrainerArgs
from atorch_ns.trainer.components import named
from atorch_ns.trainer.model import cast, dtype_of, load_weights
from atorch_ns.trainer.policy import Policy

log = logging.getLogger("atorch_ns")


def replaced(
    args: TrainerArgs, model: nn.Module, config: ComputeConfig, cluster: Cluster, sample: Any
) -> dict[str, ParallelModule]:
    """Parallelizes the modules that the configuration names, each with its own weights; by path. Collective.

    Modules of one class have one plan. Without ``run_mode=run`` plans are made alone.

    Raises:
        InputError: if there is no module of a class, or it cannot be divided as asked.
    """
    made: dict[str, ParallelModule] = {}
    for place, one in enumerate(args.model.parallel_modules):
        what = f"model.parallel_modules.{place}"
        kind = named(one.type, what=f"{what}.type")
        paths = [path for path, module in model.named_modules() if type(module) is kind and path]
        if not paths:
            raise InputError(
                f"{what}.type: the model has no module of {getattr(kind, '__qualname__', kind)}."
            )
        dummies = _dummies(args, one, model, paths[0], sample, what)
        for path in paths:
            found = _one(
                args,
                one,
                model.get_submodule(path),
                path,
                dummies,
                _merged(config, one.compute_config),
                cluster,
            )
            if found is not None:
                parent, _, name = path.rpartition(".")
                setattr(model.get_submodule(parent), name, found)
                made[path] = found
    return made


def _one(
    args: TrainerArgs,
    one: ModuleParallelizeConfig,
    module: nn.Module,
    path: str,
    dummies: dict[str, Any],
    config: ComputeConfig,
    cluster: Cluster,
) -> ParallelModule | None:
    if one.tracing_from_weights is not None:
        load_weights(module, one.tracing_from_weights, "tracing_from_weights")
    elif one.tracing_from_weights_prefix is not None:
        if args.tracing_from_weights is None:
            raise InputError(
                "tracing_from_weights_prefix is of the trainer's tracing_from_weights, which is not set."
            )
        load_weights(
            module, args.tracing_from_weights, "tracing_from_weights", f"{one.tracing_from_weights_prefix}."
        )
    if one.precision is not None:
        cast(module, dtype_of(one.precision, "param"), dtype_of(one.precision, "buffer"))
    policy = Policy.of(args.pas_policy if one.pas_policy is None else one.pas_policy)
    if policy.rule is None:
        raise InputError(
            "model.parallel_modules are divided by a policy of parallelize; a strategy is for the whole model."
        )
    runs = args.run_mode == "run"
    reuse = one.gen_reuse or args.gen_reuse
    found = parallelize(
        module,
        dummies,
        policy.rule,
        config,
        gen_savedir=one.gen_savedir or args.gen_savedir,
        reuse="moo" if reuse == "auto" else reuse,
        instance_name=one.instance_name or args.instance_name,
        load_module=runs,
        broadcast_strategy=(one.broadcast_strategy or args.broadcast_strategy)
        if runs and cluster.distributed
        else "none",
    )
    return found if isinstance(found, ParallelModule) else None


def _merged(config: ComputeConfig, own: OptionalComputeConfig | None) -> ComputeConfig:
    """The trainer's configuration with what a module has in its place."""
    given = {} if own is None else {one.name: getattr(own, one.name) for one in fields(own)}
    known = {one.name for one in fields(ComputeConfig)}
    idle = [name for name, value in given.items() if value is not None and name not in known]
    if idle:
        log.info("%s: of nnScaler's reducers, and without meaning here.", ", ".join(idle))
    changed = {name: value for name, value in given.items() if value is not None and name in known}
    return replace(config, use_end2end=False, **changed)


def _dummies(
    args: TrainerArgs, one: ModuleParallelizeConfig, model: nn.Module, path: str, sample: Any, what: str
) -> dict[str, Any]:
    """Arguments of a module's ``forward``: those that a function gives, or that the model gives it for a sample."""
    if one.forward_args_gen_fn is not None:
        found: dict[str, Any] = named(one.forward_args_gen_fn, what=f"{what}.forward_args_gen_fn")(args)
        return found
    seen: list[dict[str, Any]] = []
    module = model.get_submodule(path)

    def note(_: nn.Module, positional: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        bound = inspect.signature(module.forward).bind(*positional, **keywords)
        seen.append(dict(bound.arguments))

    handle = module.register_forward_pre_hook(note, with_kwargs=True)
    try:
        with torch.no_grad(), random_states_kept(), caches_off(model, always=True):  # as in training
            call_model(model, sample, None)
    finally:
        handle.remove()
    if not seen:
        raise InputError(f"{what}: the model does not call {path}; give forward_args_gen_fn.")
    return seen[0]


def job_of(
    inputs: Inputs,
    original: OriginalModel,
    parts: dict[str, ParallelModule],
    optim_func: Callable[..., torch.optim.Optimizer],
) -> Result:
    """What trains a model with parallel modules in it; collective.

    Args:
        inputs: with the model.
        original: the model as it was before.
        parts: its parallel modules, by path.
        optim_func: ``parameters -> optimizer``.
    """
    model, first = inputs.model, next(iter(parts.values()))
    own = first.result.job
    job = Job(
        inputs=replace(inputs, optim_func=optim_func, loss_func=partial(own_loss, type(model).__qualname__)),
        cluster=own.cluster,
        plan=own.plan,
        original=original,
        model=model,
        module=model,
        seed=own.seed,
        mesh=own.mesh,
        placed=True,
    )
    turn_off_caches(model)
    model.to(job.device)
    for path, part in parts.items():
        packings = part.result.job.parts.packings.items()
        job.parts.packings |= {f"{path}.{name}": packing for name, packing in packings}
    rest = reducer_of_the_rest(model, parts, first.compute_config)
    job.gradients = _JointGradients([part.result.job for part in parts.values()], rest)
    optimizer = job.cluster.agree(lambda: make_optimizer(job), what="making the optimizer")
    step = TrainStep(
        job=job,
        optimizer=optimizer,
        loss_func=job.inputs.loss_func,
        prepare_input=default_prepare_input,
    )
    return Result.of(
        model=model,
        optim=optimizer,
        dataloader=None,
        loss_func=job.inputs.loss_func,
        prepare_input=default_prepare_input,
        lr_scheduler=None,
        args={"use_optim_backward": False, "requires_set_gradient_accumulation_boundary": False},
        train_step=step,
        make_applied=first.result.make_applied,
        job=job,
    )


class _JointGradients(Gradients):
    """Gradients of parallel modules, and of the rest of the model around them."""

    def __init__(self, jobs: Sequence[Job], rest: GradientReducer | None) -> None:
        super().__init__(skip_sync=self._skip)
        self._jobs, self._rest = jobs, rest

    @property
    def are_left(self) -> bool:
        """There is something to complete."""
        return True

    def complete(self, module: nn.Module) -> None:
        """Reduces what is left, part by part; collective."""
        for job in self._jobs:
            job.gradients.complete(job.module)
        if self._rest is not None:
            self._rest.sync_grad()

    @contextmanager
    def _skip(self) -> Iterator[None]:
        with ExitStack() as stack:
            for job in self._jobs:
                stack.enter_context(job.gradients.skip_sync())
            if self._rest is not None:
                stack.enter_context(self._rest.no_sync())
            yield

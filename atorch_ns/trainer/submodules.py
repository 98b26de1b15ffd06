"""Parallel submodules of a Trainer's model: modules of given classes, replaced in a job of the whole."""

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

from atorch_ns.apply.build import build
from atorch_ns.capture.nests import floats_to
from atorch_ns.capture.random_states import buffers_lent, caches_off, random_states_kept, turn_off_caches
from atorch_ns.cluster import Cluster
from atorch_ns.data import call_model
from atorch_ns.errors import InputError
from atorch_ns.job import Inputs, Job, Result
from atorch_ns.job.gradients import Gradients
from atorch_ns.job.model import OriginalModel
from atorch_ns.job.reducer import GradientReducer
from atorch_ns.parallel import ComputeConfig, ParallelModule
from atorch_ns.parallel.optimizer import reducer_of_the_rest
from atorch_ns.parallel.parallelize import own_loss
from atorch_ns.torch_compat import plain_name
from atorch_ns.trainer.args import ModuleParallelizeConfig, OptionalComputeConfig, TrainerArgs
from atorch_ns.trainer.components import resolve_component
from atorch_ns.trainer.model import cast, dtype_of, load_weights, takes_by_name
from atorch_ns.trainer.policy import divide_module

log = logging.getLogger("atorch_ns")


def parallelize_modules(
    args: TrainerArgs, model: nn.Module, config: ComputeConfig, cluster: Cluster, *, sample: Any
) -> dict[str, ParallelModule]:
    """Parallelizes the modules that the configuration names, each with its own weights, by path. Collective.

    Modules of one class have one plan. Without ``run_mode=run`` only plans are created.

    Raises:
        InputError: if there is no module of a class, or it cannot be divided as requested.
    """
    kinds = [
        (spec, resolve_component(spec.type, what=f"model.parallel_modules.{index}.type"))
        for index, spec in enumerate(args.model.parallel_modules)
    ]
    matches = [
        (path, spec)
        for spec, kind in kinds
        for path, module in model.named_modules()
        if type(module) is kind and path  # the root is the model itself
    ]
    missing = [kind for spec, kind in kinds if not any(spec is other for _, other in matches)]
    if missing:
        raise InputError(f"model.parallel_modules: the model has no module of {missing[0].__qualname__}.")
    _refuse_nested([path for path, _ in matches])
    _refuse_shared(model, [path for path, _ in matches])
    dummies = _collect_forward_args(args, matches, model, sample)
    parts: dict[str, ParallelModule] = {}
    for path, spec in matches:
        module = model.get_submodule(path)
        if isinstance(module, ParallelModule):  # the same one at another path
            continue
        part = _parallelize_module(
            args,
            spec,
            module,
            dummies[path],
            config=_merge_config(config, spec.compute_config),
            cluster=cluster,
        )
        if part is not None:
            for other, same in list(model.named_modules(remove_duplicate=False)):  # at all of its paths
                if same is module:
                    parent, _, name = other.rpartition(".")
                    setattr(model.get_submodule(parent), name, part)
            parts[path] = part
    return parts


def _refuse_nested(paths: Sequence[str]) -> None:
    for path in paths:
        inner = next((other for other in paths if other.startswith(f"{path}.")), None)
        if inner is not None:
            raise InputError(
                f"model.parallel_modules: {inner} is inside {path}, which is itself parallel: name only one of their classes."
            )


def _refuse_shared(model: nn.Module, paths: Sequence[str]) -> None:
    # Each of two parallel modules would divide a weight that they share by itself.
    owners: dict[int, str] = {}
    for path in paths:
        for name, parameter in model.get_submodule(path).named_parameters():
            other = owners.setdefault(id(parameter), f"{path}.{name}")
            if not other.startswith(f"{path}."):
                raise InputError(
                    f"model.parallel_modules: {other} and {path}.{name} are the same weight in two parallel modules."
                )


def _refuse_untied(model: nn.Module, original: OriginalModel) -> None:
    # A part that divides a tied weight holds a new tensor, which the rest of the model does not use.
    weights = {plain_name(name): tensor for name, tensor in model.named_parameters(remove_duplicate=False)}
    for first, others in original.tied.items():
        for other in others:
            if weights.get(first) is not weights.get(other):
                raise InputError(
                    f"model.parallel_modules: {first} and {other} are the same weight, but a parallel module replaced "
                    "one of them: choose a larger module with both, or a policy that leaves it whole (dp without use_zero)."
                )


def _parallelize_module(
    args: TrainerArgs,
    settings: ModuleParallelizeConfig,
    module: nn.Module,
    dummies: dict[str, Any],
    *,
    config: ComputeConfig,
    cluster: Cluster,
) -> ParallelModule | None:
    if settings.tracing_from_weights is not None:
        load_weights(module, settings.tracing_from_weights)
    elif settings.tracing_from_weights_prefix is not None:
        if args.tracing_from_weights is None:
            raise InputError(
                "tracing_from_weights_prefix needs the trainer's tracing_from_weights, which is not set."
            )
        load_weights(module, args.tracing_from_weights, f"{settings.tracing_from_weights_prefix}.")
    inputs = dtype_of(settings.precision, "input")
    if settings.precision is not None:
        cast(module, dtype_of(settings.precision, "param"), dtype_of(settings.precision, "buffer"))
        dummies = dummies if inputs is None else floats_to(dummies, inputs)
    part = divide_module(args, settings, module, dummies, config=config, cluster=cluster)
    if part is not None and inputs is not None:
        part.register_forward_pre_hook(  # the model around it may compute in another dtype
            lambda _, positional, keywords: (floats_to(positional, inputs), floats_to(keywords, inputs)),
            with_kwargs=True,
            prepend=True,
        )
    return part


def _merge_config(config: ComputeConfig, overrides: OptionalComputeConfig | None) -> ComputeConfig:
    values = (
        {}
        if overrides is None
        else {field.name: getattr(overrides, field.name) for field in fields(overrides)}
    )
    names = {field.name for field in fields(ComputeConfig)}
    idle = [name for name, value in values.items() if value is not None and name not in names]
    if idle:
        log.info("%s: of nnScaler's reducers, and without meaning here.", ", ".join(idle))
    changes = {name: value for name, value in values.items() if value is not None and name in names}
    return replace(config, use_end2end=False, **changes)  # a part returns no loss


def _collect_forward_args(
    args: TrainerArgs, modules: Sequence[tuple[str, ModuleParallelizeConfig]], model: nn.Module, sample: Any
) -> dict[str, dict[str, Any]]:
    calls: dict[str, dict[str, Any]] = {}  # arguments of forward, by path
    paths = []
    for path, spec in modules:
        if spec.forward_args_gen_fn is None:
            paths.append(path)
        else:
            calls[path] = resolve_component(spec.forward_args_gen_fn, what="forward_args_gen_fn")(args)
    if not paths:
        return calls

    def note(path: str, module: nn.Module, positional: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        call = inspect.signature(module.forward).bind(*positional, **keywords)
        calls.setdefault(path, dict(call.arguments))  # the first call counts

    with ExitStack() as stack:
        for path in paths:
            hook = model.get_submodule(path).register_forward_pre_hook(partial(note, path), with_kwargs=True)
            stack.callback(hook.remove)
        stack.enter_context(torch.no_grad())
        stack.enter_context(random_states_kept())
        stack.enter_context(buffers_lent(model))
        stack.enter_context(caches_off(model, always=True))  # as in training
        call_model(model, sample, "unpack_dict" if takes_by_name(model, sample) else None)
    idle = next((path for path in paths if path not in calls), None)
    if idle is not None:
        raise InputError(f"model.parallel_modules: the model does not call {idle}; give forward_args_gen_fn.")
    return calls


def job_of(
    inputs: Inputs,
    original: OriginalModel,
    parts: dict[str, ParallelModule],
    optim_func: Callable[..., torch.optim.Optimizer],
) -> Result:
    """The job that trains a model with parallel modules in it. Collective.

    Args:
        inputs: inputs with the model.
        original: the model before parallelization.
        parts: its parallel modules, by path.
        optim_func: ``parameters -> optimizer``.
    """
    model, first = inputs.model, next(iter(parts.values()))
    first_job = first.result.job
    job = Job(
        inputs=replace(inputs, optim_func=optim_func, loss_func=partial(own_loss, type(model).__qualname__)),
        cluster=first_job.cluster,
        plan=first_job.plan,
        original=original,
        model=model,
        module=model,
        seed=first_job.seed,
        mesh=first_job.mesh,
        placed=True,
    )
    turn_off_caches(model)
    model.to(job.device)
    for path, part in parts.items():
        packings = part.result.job.parts.packings.items()
        job.parts.packings |= {f"{path}.{name}": packing for name, packing in packings}
    rest = reducer_of_the_rest(model, parts, first.compute_config)
    _refuse_untied(model, original)
    for part in parts.values():  # one for all: parts of one class would draw the same masks by themselves
        if (randomness := part.result.job.step.randomness) is not None:
            randomness.give_way()
    job.gradients = _JointGradients([part.result.job for part in parts.values()], rest)
    return job.cluster.agree(lambda: build(job, lambda *_: first.result.applied), what="making the optimizer")


class _JointGradients(Gradients):
    """Gradients of parallel modules, and of the rest of the model around them."""

    def __init__(self, jobs: Sequence[Job], rest: GradientReducer | None) -> None:
        super().__init__(skip_sync=self._skip_all_syncs)
        self._jobs, self._rest = jobs, rest

    def complete(self, module: nn.Module) -> None:
        for job in self._jobs:
            job.gradients.complete(job.module)
        if self._rest is not None:
            self._rest.sync_grad()

    @contextmanager
    def _skip_all_syncs(self) -> Iterator[None]:
        with ExitStack() as stack:
            for job in self._jobs:
                stack.enter_context(job.gradients.skip_sync())
            if self._rest is not None:
                stack.enter_context(self._rest.no_sync())
            yield

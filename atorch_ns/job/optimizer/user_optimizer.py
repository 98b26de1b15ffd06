"""User's optimizer: ``optim_func``, given a list of parameters if possible, with fused kernels that fit."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, Final

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Partial

from atorch_ns.errors import InputError
from atorch_ns.job.job import OPTIMIZER, Job, ParameterGroups
from atorch_ns.job.optimizer.checks import refuse_what_fails
from atorch_ns.sharding.rank_context import local_part
from atorch_ns.text import with_article
from atorch_ns.torch_compat import TorchDispatchMode, has_step_hooks, laid_out, plain_name


def optim_func_parameters(job: Job, groups: ParameterGroups) -> list[Any]:
    """The first argument of ``optim_func``.

    A function that receives a list may filter it and create its own groups. That is correct only if
    parameters have their own shapes and this rank has all of them. Otherwise groups stay groups, and
    :func:`explained_groups` reports that to a function that expects parameters.
    """
    whole = job.plan.sharding.layout == "rows" and job.stage_group is None
    (first, *others) = groups
    if (
        not whole
        or job.inputs.optim_param_func is not None
        or others
        or len(first) > 1
        or not first["params"]
    ):
        return list(groups)
    return list(first["params"])


@contextmanager
def explained_groups(job: Job, entries: list[Any]) -> Iterator[None]:
    """Translates errors of an ``optim_func`` that mistakes groups for parameters, or lacks some on this rank.

    Raises:
        InputError: for a ``TypeError``, for an ``AttributeError`` if it received groups, and for a
            ``ValueError`` if each rank gives it some of the parameters.
    """
    try:
        yield
    except ValueError as error:
        is_whole = job.stage_group is None and job.plan.sharding.layout != "parameters"
        if is_whole or isinstance(error, InputError):
            raise
        what = "zero1" if job.stage_group is None else "a pipeline"
        raise InputError(
            f"optim_func failed: {error}. Under {what} it gets only the parameters of rank {job.cluster.rank}. If it needs all "
            "of them, choose zero2, fsdp or ddp."
        ) from error
    except (AttributeError, TypeError) as error:
        in_groups = any(isinstance(entry, dict) for entry in entries)
        if isinstance(error, AttributeError) and not in_groups:
            raise
        hint = (
            " It is called with parameter groups here, [{'params': [...]}], since optim_param_func is given or this "
            "strategy cuts parameters or the model in parts; split groups by optim_param_func."
        )
        raise InputError(
            f"optim_func cannot be called with optim_args={job.inputs.optim_args}: {error}."
            f"{hint if in_groups else ''}"
        ) from error


def make_user_optimizer(job: Job, groups: ParameterGroups) -> torch.optim.Optimizer:
    """Calls the user's ``optim_func`` with the result of :func:`optim_func_parameters` for the groups.

    Raises:
        InputError: if it takes other arguments, or does not return a torch optimizer.
    """
    assert job.inputs.optim_func is not None
    arguments, why = optimizer_arguments(job.inputs.optim_func, job.inputs.optim_args, groups, job.roots)
    job.explain(OPTIMIZER, why)
    parameters = optim_func_parameters(job, groups)
    with explained_groups(job, parameters):
        optimizer = job.inputs.optim_func(parameters, **arguments)
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise InputError(f"optim_func returned {with_article(optimizer)}, not a torch.optim.Optimizer.")
    refuse_what_fails(optimizer)
    step_on_local_parts(optimizer)
    if any(group.get("fused") for group in optimizer.param_groups):
        optimizer.register_step_pre_hook(_lay_out_gradients)
    return optimizer


def step_on_local_parts(optimizer: torch.optim.Optimizer) -> None:
    """Makes fused kernels update this rank's parts of DTensors, and torch's optimizers complex parts.

    Each element is updated independently, so no rank needs another's elements. torch refuses DTensors beside
    plain tensors. It updates complex numbers as pairs of real ones, but copies parts of unequal sizes. The
    parameter would then not change.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    shards = [parameter for parameter in parameters if isinstance(parameter, DTensor)]
    if shards and has_step_hooks(optimizer):
        optimizer.register_step_pre_hook(_average_whole_gradients)
    has_complex = _is_of_torch(optimizer) and any(map(torch.is_complex, shards))
    if has_complex or (shards and type(optimizer) in _FUSED):
        optimizer.__class__ = class_above(_OnLocalParts, type(optimizer))


def _average_whole_gradients(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            whole, mesh = parameter.grad, getattr(parameter, "device_mesh", None)
            if whole is not None and mesh is not None and not isinstance(whole, DTensor):
                # A plain gradient of a divided parameter is this rank's own, or already the mean of all.
                summands = DTensor.from_local(whole / mesh.size(), mesh, [Partial()] * mesh.ndim)
                parameter.grad = summands.redistribute(placements=parameter.placements)


@torch.no_grad()  # local parts are available here
def _lay_out_gradients(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            grad, is_divided = parameter.grad, isinstance(parameter, DTensor)
            if grad is None or grad.layout != torch.strided or isinstance(grad, DTensor) != is_divided:
                continue
            gradient, weight = local_part(grad), local_part(parameter)
            # After p.grad = g.t() strides differ, and fused kernels read memory in order.
            if gradient.stride() != weight.stride() and gradient.shape == weight.shape:
                copy = torch.empty_like(weight).copy_(gradient)
                parameter.grad = laid_out(copy, grad) if is_divided else copy


def class_above(mixin: type, kind: type) -> type:
    """``kind`` with the methods of ``mixin`` above its own. It keeps its name, which checkpoints store."""
    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
    return type(kind.__name__, (mixin, kind), names)


class _OnLocalParts(torch.optim.Optimizer):
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        by_parts = any(g.get("fused") or any(map(torch.is_complex, g["params"])) for g in self.param_groups)
        if not by_parts:
            return super().step(closure)
        with _LocalParts() as mode:
            wrapper = None if closure is None else mode.suspend_for(closure)
            return super().step(wrapper)


class _LocalParts(TorchDispatchMode):
    """Runs fused kernels of optimizers on local parts, and treats complex numbers as pairs in place."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._is_paused = False

    def suspend_for(self, closure: Callable[[], float]) -> Callable[[], float]:
        """Wraps the closure of a step so that the model is always evaluated outside this mode."""

        def evaluate() -> float:
            self._is_paused = True
            try:
                with torch.enable_grad():
                    return closure()
            finally:
                self._is_paused = False

        return evaluate

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._is_paused:
            return func(*args, **(kwargs or {}))
        if func is torch.ops.aten.view_as_real.default and isinstance(args[0], DTensor):
            return _view_as_pairs(args[0])  # torch would copy uneven parts
        if getattr(func, "overloadpacket", None) in _KERNELS:
            parameters, *_ = args
            args = [list(map(_local_part, values, parameters)) for values in args]
        return func(*args, **(kwargs or {}))


def _view_as_pairs(value: DTensor) -> DTensor:
    pairs = torch.view_as_real(value.to_local())
    shape = torch.Size((*value.shape, 2))  # [..., 2]
    stride = (*(2 * step for step in value.stride()), 1)
    return DTensor.from_local(pairs, value.device_mesh, value.placements, shape=shape, stride=stride)


def _is_of_torch(optimizer: torch.optim.Optimizer) -> bool:
    # torch's optimizers call the closure once, before the update; LBFGS calls it during the update.
    mro = set(type(optimizer).__mro__) - {torch.optim.Optimizer}
    return torch.optim.LBFGS not in mro and any(kind.__module__.startswith("torch.optim.") for kind in mro)


def _local_part(value: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    if not isinstance(value, DTensor):
        return value
    if isinstance(parameter, DTensor) and value.placements != parameter.placements:
        value = value.redistribute(parameter.device_mesh, parameter.placements)
    return value.to_local()


_KERNELS: Final = (torch.ops.aten._fused_adam_, torch.ops.aten._fused_adamw_, torch.ops.aten._fused_sgd_)
_FUSED: Final = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD)
"""Optimizers with fused kernels for CPUs and for CUDA. Adagrad has one for CPUs only."""
_DEVICES: Final = ("cpu", "cuda")  # with fused kernels
_DECIDES: Final = ("fused", "foreach", "differentiable")  # options by which the user decides


def choose_fused(
    optim_func: Any,
    optim_args: Mapping[str, Any] | None,
    groups: Iterable[Mapping[str, Any]],
    models: Iterable[nn.Module] = (),
) -> tuple[bool, str]:
    """Decides whether an optimizer gets its fused kernel, and why, for the report. Empty without a choice.

    A fused kernel updates all parameters of a group in one pass over memory, with no temporary, and this
    rank's parts of DTensors (:func:`step_on_local_parts`). For CPUs and DTensors torch defaults to a loop.

    Args:
        optim_func: a class of torch, or a ``functools.partial`` of one. Others are not changed.
        optim_args: the user's keywords. If they decide, nothing is added.
        groups: the parameter groups passed to ``optim_func``, with the user's options.
        models: modules that hold the parameters. Their embeddings may declare sparse gradients.
    """
    kind, options = _unwrap_partials(optim_func, dict(optim_args or {}))
    if kind not in _FUSED:
        return False, ""
    groups = list(groups)
    if any(options.get(key) is not None or any(key in each for each in groups) for key in _DECIDES):
        return False, ""
    reason = (
        _find_sparse_module(models)
        or _find_late_fault(kind, options, groups)
        or next((reason for group in groups if (reason := _find_obstacle(group["params"]))), None)
    )
    if reason is not None:
        return False, f"{kind.__name__}: not fused, since {reason}"
    what = "fused, in one pass over all parameters; optim_args={'fused': False} for a loop"
    return True, f"{kind.__name__}: {what}"


def _unwrap_partials(function: Any, keywords: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    while isinstance(function, partial):
        keywords = {**function.keywords, **keywords}  # outer keywords win, as in the call
        function = function.func
    return function, keywords


def optimizer_arguments(
    optim_func: Any,
    optim_args: Mapping[str, Any] | None,
    groups: Iterable[Mapping[str, Any]],
    models: Iterable[nn.Module] = (),
) -> tuple[dict[str, Any], str]:
    """The keywords for ``optim_func``, and a text about them for the report. See :func:`choose_fused`.

    Raises:
        InputError: if the user requests a fused kernel that fails or is wrong for these parameters. If ranks
            have parts of them, torch would refuse it only on some ranks.
    """
    groups, models = list(groups), list(models)
    kind, keywords = _unwrap_partials(optim_func, dict(optim_args or {}))
    if kind in _FUSED and keywords.get("fused"):
        reason = _find_sparse_module(models) or _find_fused_fault(kind, keywords, groups)
        if reason is not None:
            raise InputError(
                f"optim_args has fused=True for {kind.__name__}, and {reason}. Leave fused out: the kernel is then used where "
                "it fits."
            )
    use_fused, why = choose_fused(optim_func, optim_args, groups, models)
    options = dict(optim_args or {})
    return ({**options, "fused": True} if use_fused else options), why


def _find_sparse_module(models: Iterable[nn.Module]) -> str | None:
    for model in models:
        for name, module in model.named_modules():
            if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse:
                kind = type(module).__name__
                return f"{plain_name(name) or 'the model'} is an {kind} with sparse=True, and no fused kernel takes sparse gradients"
    return None


def _find_fused_fault(
    kind: type[torch.optim.Optimizer], keywords: Mapping[str, Any], groups: Iterable[Mapping[str, Any]]
) -> str | None:
    for group in groups:
        if any(parameter.is_complex() for parameter in group["params"]):
            return "no fused kernel updates complex parameters, which the model has"
        has_momentum = kind is torch.optim.SGD and {**keywords, **group}.get("momentum")
        if has_momentum and any(p.device.type == "cpu" and p.itemsize < 4 for p in group["params"]):
            return "torch's fused SGD for CPUs loses the momentum of parameters in 16 bits"
    return None


def _find_late_fault(
    kind: type[torch.optim.Optimizer], keywords: Mapping[str, Any], groups: Iterable[Mapping[str, Any]]
) -> str | None:
    # The kernel takes momenta of all parameters or of none (torch 2.13).
    if kind is torch.optim.SGD and any({**keywords, **group}.get("momentum") for group in groups):
        return "torch's fused SGD with momentum fails where a parameter gets its first gradient after the first step"
    return None


def _find_obstacle(parameters: Iterable[torch.Tensor]) -> str | None:
    for parameter in parameters:
        if not parameter.is_floating_point():
            return f"a parameter is {parameter.dtype}"
        if parameter.device.type not in _DEVICES:
            return f"there is no fused kernel for {parameter.device.type}"
        if parameter.device.type == "cpu" and parameter.itemsize < 4:
            # SGD's kernel loses 16-bit momentum (torch 2.13); the others round differently from a loop.
            return f"torch's fused kernels for CPUs are not right for {parameter.dtype}"
    return None

"""parallelize: a module, or a class of modules, divided over scale units of ranks, as in nnScaler."""

from __future__ import annotations

import copy
import functools
import inspect
import math
import os
from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any, TypeVar

import torch
from torch import nn

from atorch_ns.apply import make_job, resolve_alike
from atorch_ns.cluster import Cluster, join_process_group, or_refusal
from atorch_ns.errors import InputError
from atorch_ns.job import Inputs, Result
from atorch_ns.method import Resolved
from atorch_ns.parallel.config import BroadcastGenFilesStrategy, ComputeConfig, ReuseType
from atorch_ns.parallel.module import ParallelModule, parallel_modules
from atorch_ns.parallel.planning import Planned, PlanSource, plan_module, resolved_steps
from atorch_ns.parallel.policies import POLICIES, is_strategy_file
from atorch_ns.parallel.saved import Made, PlanFolder
from atorch_ns.strategy import MODEL_AXES, Strategy
from atorch_ns.text import did_you_mean, with_article
from atorch_ns.torch_compat import has_user_hooks

E = TypeVar("E", bound=Enum)

_DIVIDED = "_divided_by_parallelize"  # marks plain modules, which are changed in place


def parallelize(
    module_or_module_class: nn.Module | type[nn.Module],
    dummy_forward_args: Mapping[str, Any],
    pas_policy: str | Callable[[Any, ComputeConfig], Any],
    compute_config: ComputeConfig,
    *,
    gen_savedir: str | os.PathLike[str] = "./.atorch_ns",
    reuse: ReuseType | str = ReuseType.MATCH,
    instance_name: str | None = None,
    load_module: bool = True,
    module_dtype: torch.dtype | None = None,
    module_fn: Callable[[], nn.Module] | None = None,
    init_module_params: bool = True,
    broadcast_strategy: BroadcastGenFilesStrategy | str = "none",
) -> ParallelModule | type[ParallelModule] | None:
    """Divides a module over the ranks of scale units. Collective if ``load_module`` is true.

    The first rank plans for all, and writes a file that later calls reuse. The module is changed in place.

    Args:
        module_or_module_class: a module or a class to parallelize.
        dummy_forward_args: arguments of ``forward`` by name, on one rank. Tensor values are not read.
        pas_policy: ``dp``, ``tp``, ``pp``, ``data``, ``hybrid``, ``autodist``, or
            ``(graph, compute_config) -> graph``, or a strategy file of any front end.
        compute_config: the ranks, and settings of the policy.
        gen_savedir, reuse: the folder of plans, and the use of an existing plan.
        instance_name: distinguishes plans of one class.
        load_module: whether to create the module. Otherwise only the plan is created, without other ranks.
        module_dtype: the dtype that the module is cast to.
        module_fn: creates a module of the class. By default the class itself, without arguments.
        init_module_params: whether parameters keep the module's values. See :class:`ParallelModule`.
        broadcast_strategy: see :class:`BroadcastGenFilesStrategy`.

    Returns:
        A module for a module, a class for a class, ``None`` without ``load_module``. A parallel one itself.

    Raises:
        InputError: on all ranks, if arguments contradict each other, or the module cannot be divided so.
    """
    target = module_or_module_class
    if isinstance(target, ParallelModule) or (
        isinstance(target, type) and issubclass(target, ParallelModule)
    ):
        return target
    if not isinstance(load_module, bool):
        raise InputError(f"load_module must be True or False; got {load_module!r}.")
    cluster = Cluster.detect()
    if load_module:
        join_process_group(cluster)

    def check_arguments() -> tuple[PlanSource, PlanFolder, ReuseType]:
        is_joined = torch.distributed.is_available() and torch.distributed.is_initialized()
        sharing = _enum_member(BroadcastGenFilesStrategy, broadcast_strategy, "broadcast_strategy")
        if sharing is not BroadcastGenFilesStrategy.NONE and not is_joined:
            raise InputError(
                f"broadcast_strategy={sharing.value!r} needs a process group: start the script with torchrun, or leave it 'none'."
            )
        source = _make_source(
            target,
            module_fn,
            dtype=module_dtype,
            config=compute_config,
            dummies=dummy_forward_args,
            policy=pas_policy,
        )
        if load_module and cluster.world_size != compute_config.runtime_ngpus:
            raise InputError(
                f"runtime_ngpus={compute_config.runtime_ngpus}, but there are {cluster.world_size} ranks: start that many with "
                "torchrun, or only plan, with load_module=False."
            )
        folder = PlanFolder.of(gen_savedir, type(source.module), instance_name)
        return source, folder, _enum_member(ReuseType, reuse, "reuse")

    source, folder, reusing = cluster.agree(check_arguments, what="checking the arguments of parallelize")
    # Only the first rank plans. A refusal is returned as a value, so that all ranks raise the same error.
    plan = cluster.on_first(
        lambda: or_refusal(lambda: _obtain_plan(source, folder, reusing, cluster)), what="planning a module"
    )
    if isinstance(plan, InputError):  # of the first rank, on all ranks
        raise plan
    if not load_module:
        return None
    new_class = _parallel_class(source, cluster, plan, folder)
    return new_class(init_module_params) if isinstance(target, nn.Module) else new_class


def _make_source(
    target: Any,
    module_fn: Callable[[], nn.Module] | None,
    *,
    dtype: torch.dtype | None,
    config: ComputeConfig,
    dummies: Mapping[str, Any],
    policy: str | Callable[..., Any],
) -> PlanSource:
    is_class = isinstance(target, type) and issubclass(target, nn.Module)
    if not isinstance(config, ComputeConfig):
        raise InputError(f"compute_config must be a ComputeConfig; it is {with_article(config)}.")
    if not (is_class or isinstance(target, nn.Module)):
        raise InputError(
            f"parallelize takes a torch.nn.Module or a class of them; it got {with_article(target)}."
        )
    if isinstance(policy, str) and policy not in POLICIES and not is_strategy_file(policy):
        raise InputError(
            f"unknown policy {policy!r}.{did_you_mean(policy, POLICIES)} Policies are {', '.join(POLICIES)}, a "
            "function (graph, compute_config) -> graph, or a strategy file."
        )
    if not (isinstance(policy, str) or callable(policy)):
        raise InputError(f"pas_policy must be a name or a function; got {with_article(policy)}.")
    module = _make_module(target, module_fn) if is_class else target
    if module_fn is not None and not is_class:
        raise InputError("module_fn makes modules of a class, but a module was given.")
    if parallel_modules(module):
        raise InputError("Parallel modules can not be nested: one of the module's parts is parallel already.")
    if any(_DIVIDED in vars(part) for part in module.modules()):
        raise InputError(
            f"this {type(module).__qualname__} is already parallel, and was changed for that: use the module that parallelize "
            "returned, or parallelize its class to make several."
        )
    hook_owner = next((name for name, param in module.named_parameters() if has_user_hooks(param)), None)
    if hook_owner is not None:
        raise InputError(
            f"{hook_owner} has a hook on its gradient, which does not carry over to its parts: register it on the parallel module's "
            "parameters."
        )
    if dtype is not None:
        if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
            raise InputError(
                f"module_dtype must be a floating dtype, such as torch.bfloat16; it is {dtype!r}."
            )
        module.to(dtype)
    sample = _build_sample(module, dummies, config)
    whole = config.use_end2end and len(dummies) == 1  # the sample is the argument
    return PlanSource(module, is_class, config, dummies, policy, sample, None if whole else "unpack_dict")


def _make_module(kind: type[nn.Module], module_fn: Callable[[], nn.Module] | None) -> nn.Module:
    try:
        module = kind() if module_fn is None else module_fn()
    except TypeError as error:
        if module_fn is not None:
            raise
        raise InputError(
            f"{kind.__qualname__}() cannot be made without arguments ({error}): give module_fn, which makes one."
        ) from error
    if type(module) is not kind:
        raise InputError(f"module_fn must make a {kind.__qualname__}; it made {with_article(module)}.")
    return module


def _build_sample(module: nn.Module, dummies: Mapping[str, Any], config: ComputeConfig) -> Any:
    if not isinstance(dummies, Mapping):
        raise InputError(
            f"dummy_forward_args must be a dictionary keyed by forward's argument names; got {with_article(dummies)}."
        )
    parameters = inspect.signature(module.forward).parameters
    what = f"{type(module).__qualname__}.forward"
    if any(arg.kind is inspect.Parameter.POSITIONAL_ONLY for arg in parameters.values()):
        raise InputError(f"{what} has positional-only arguments, which dummy_forward_args cannot name.")
    open_ended = any(arg.kind is inspect.Parameter.VAR_KEYWORD for arg in parameters.values())
    problems = [
        f"{what} has no argument {name!r}.{did_you_mean(str(name), parameters)}"
        for name in dummies
        if name not in parameters and not open_ended
    ]
    arguments = [arg for arg in parameters.values() if arg.kind not in (arg.VAR_POSITIONAL, arg.VAR_KEYWORD)]
    problems += [
        f"dummy_forward_args lacks {arg.name!r}, which {what} needs."
        for arg in arguments
        if arg.default is arg.empty and arg.name not in dummies
    ]
    if problems:
        raise InputError("\n".join(problems))
    if not config.use_end2end or len(dummies) > 1:
        return dict(dummies)  # arguments by name
    first, *others = arguments
    required_names = [arg.name for arg in others if arg.default is arg.empty]
    if required_names:
        raise InputError(
            f"use_end2end: {what} must take one sample as its first argument; {', '.join(required_names)} need default values."
        )
    return dummies[first.name]  # the sample of an end-to-end module


def _obtain_plan(source: PlanSource, folder: PlanFolder, reuse: ReuseType, cluster: Cluster) -> Planned:
    origin = Made.of(source.module, source.dummies, source.policy, source.config)
    old_plan = folder.reused(origin, reuse)
    if old_plan is not None:
        return old_plan
    plan = plan_module(source, cluster)
    folder.write(origin, plan)
    return plan


def _parallel_class(
    source: PlanSource, cluster: Cluster, plan: Planned, folder: PlanFolder
) -> type[ParallelModule]:
    plain, config = source.module, source.config
    uses: list[bool] = []  # an entry for each module made

    def apply_plan(init_params: bool) -> Result:
        if source.is_class:
            module = copy.deepcopy(plain)  # a class may make several modules
        elif uses:
            raise InputError(
                "a module can be made parallel only once; parallelize its class to make several."
            )
        else:
            module = plain
        uses.append(True)
        vars(module)[_DIVIDED] = True
        result = _divide_module(module, source, cluster, plan, init_params=init_params)
        if cluster.rank == 0 and len(uses) == 1:  # all have one plan
            folder.keep_resolved(resolved_steps(result, plan.steps))
        return result

    @functools.wraps(type(plain).forward)  # keeps the plain module's signature
    def forward(self: ParallelModule, *args: Any, **kwargs: Any) -> Any:
        return ParallelModule.forward(self, *args, **kwargs)

    name = type(plain).__name__
    body = {
        "compute_config": config,
        "_state_names": tuple(plain.state_dict(keep_vars=True)),
        "_apply_plan": staticmethod(apply_plan),
        "forward": forward,
        "__doc__": f"{name}, divided over {config.plan_ngpus} of {config.runtime_ngpus} ranks.",
        "__module__": type(plain).__module__,
    }
    return type(f"Parallel{name}", (ParallelModule,), body)


def _divide_module(
    module: nn.Module, source: PlanSource, cluster: Cluster, plan: Planned, *, init_params: bool
) -> Result:
    config = source.config
    if config.inference_only:
        module.requires_grad_(False)
        module.eval()
    if not init_params:
        with torch.no_grad():
            for parameter in module.parameters():
                if parameter.is_floating_point():
                    parameter.fill_(float("nan"))  # so that a weight that is never loaded shows
    inputs = Inputs(
        model=module,
        loss_func=functools.partial(own_loss, type(module).__qualname__) if config.use_end2end else None,
        model_input_format=source.input_format,
        sample_batch=source.sample,
        sample_is_micro_batch=True,
    )

    def check(resolved: Resolved) -> None:
        degree = math.prod(resolved.plan.size(axis) for axis in MODEL_AXES)  # ranks of a scale unit
        if degree != config.plan_ngpus:
            raise InputError(
                f"{source.policy} divides a module over {degree} rank(s), but plan_ngpus is {config.plan_ngpus}: set "
                f"plan_ngpus={degree}."
            )
        if resolved.plan.size("pipeline") > 1 and not config.use_end2end:
            raise InputError(
                f"{source.policy} makes a pipeline, which trains micro-batches with train_step: set use_end2end=True, for a module "
                "that returns the loss first."
            )

    with cluster.sharing_failures("parallelize"):
        trains = any(parameter.requires_grad for parameter in module.parameters())  # it may be thawed later
        resolved = resolve_alike(inputs, cluster, Strategy(plan.steps), check=check, trains=trains)
        return make_job(inputs, cluster, resolved, notes=plan.notes, takes_late_hooks=False)


def own_loss(name: str, _: Any, output: Any) -> Any:
    """The loss of an end-to-end module: the result named ``name``, or the first result."""
    entry = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    loss = output if entry is None else entry
    first = loss[0] if isinstance(loss, (list, tuple)) and loss else loss
    if not (isinstance(first, torch.Tensor) and first.numel() == 1):
        what = f"of shape {tuple(first.shape)}" if isinstance(first, torch.Tensor) else with_article(first)
        raise InputError(
            f"use_end2end: the first result of {name}.forward must be the loss, a tensor of one number, or be named 'loss'; it "
            f"is {what}."
        )
    return loss


def _enum_member(kind: type[E], value: Any, name: str) -> E:
    if isinstance(value, kind):
        return value
    values = [member.value for member in kind]
    if not isinstance(value, str) or value not in values:
        near = did_you_mean(value, values) if isinstance(value, str) else ""
        raise InputError(f"{name} is {value!r}.{near} It must be one of {', '.join(values)}.")
    return kind(value)

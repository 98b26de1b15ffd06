"""fp8 by Transformer Engine: ``te.Linear`` in the places of linears, with scales from earlier steps."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from types import ModuleType
from typing import Any

import torch.distributed as dist
from torch import nn

from atorch_ns.errors import InputError
from atorch_ns.job import Job
from atorch_ns.job.loss import ForwardScope
from atorch_ns.strategy import MODEL_AXES, Plan
from opt_lib._config_checks import require
from opt_lib._fp8.config import TE_KEYS, Fp8Config

INSTALL = "pip install 'transformer-engine[pytorch]'"

_WHY_WHOLE = (
    "Transformer Engine updates its scales when a forward pass of the whole model ends, and its linears divide "
    "themselves; use the backend torchao"
)


def load() -> ModuleType:
    """``transformer_engine.pytorch``.

    Raises:
        MissingPackageError: if it cannot be imported; a wheel without its CUDA libraries raises RuntimeError.
    """
    return require("transformer_engine.pytorch", needed_by="the backend te of fp8", install=INSTALL)


def why_not(plan: Plan) -> str | None:
    """Why it cannot be used in this plan; ``None`` if it can."""
    for axis in MODEL_AXES:
        if plan.size(axis) > 1:
            return f"the mesh has {axis}={plan.size(axis)}, and {_WHY_WHOLE}"
    return None


def reads_interval() -> bool:
    """True if the recipe has the setting ``interval``. Versions from 2.0 on find scales in every step."""
    return "interval" in inspect.signature(_import_recipes().DelayedScaling).parameters


def replace_linears(job: Job, names: Iterable[str], config: Fp8Config) -> None:
    """Replaces these linears by ``te.Linear`` with the same parameters, and runs the model in fp8.

    Raises:
        InputError: for linears on the meta device, which Transformer Engine would initialise in its own way.
    """
    te = load()
    linears = {name: job.module.get_submodule(name) for name in names}
    if any(parameter.is_meta for module in linears.values() for parameter in module.parameters()):
        raise InputError(
            "Transformer Engine cannot replace linears on the meta device: it would draw its own initial "
            "values. Use the backend torchao, or build the model on a device."
        )
    kind = _without_extra_state(te.Linear)
    new = {id(module): _make_te_linear(kind, module) for module in linears.values()}
    for path, module in list(job.module.named_modules(remove_duplicate=False)):
        if id(module) in new:
            if path:
                job.module.set_submodule(path, new[id(module)])
            else:
                job.replace_model(new[id(module)])
    scope = ForwardScope(functools.partial(_autocast_context, _make_recipe(config), job.cluster.distributed))
    scope.attach(job.module)
    job.precision.restore = functools.partial(_leave_fp8, scope)
    if job.plan.recomputation.kind != "none":
        job.step.recompute = _recompute_function(te)


def _leave_fp8(scope: ForwardScope, _: nn.Module) -> None:
    scope.make = nullcontext


def _make_te_linear(kind: type[nn.Module], module: nn.Module) -> nn.Module:
    weight, bias = module.weight, module.bias
    layer = kind(
        module.in_features,
        module.out_features,
        bias=bias is not None,
        params_dtype=weight.dtype,
        device="meta",  # without memory: the weights are moved in
    )
    layer.weight = weight
    if bias is not None:
        layer.bias = bias
    return layer.train(module.training)


@functools.cache
def _without_extra_state(linear: Any) -> type[nn.Module]:
    """The class with no extra state in state dicts: their keys stay those of the user's model."""
    return type(
        "Fp8Linear",
        (linear,),
        {
            "__doc__": "``te.Linear`` with the state dict of ``nn.Linear``.",
            "__module__": __name__,
            # So the history of amaxes is in no checkpoint, and begins anew after a resume.
            "get_extra_state": nn.Module.get_extra_state,
            "set_extra_state": nn.Module.set_extra_state,
        },
    )


def __getattr__(name: str) -> Any:
    """The class of the replaced layers, by whose name pickles find it."""
    if name != "Fp8Linear":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return _without_extra_state(load().Linear)


def _import_recipes() -> ModuleType:
    return require("transformer_engine.common.recipe", needed_by="the backend te of fp8", install=INSTALL)


def _make_recipe(config: Fp8Config) -> Any:
    recipes = _import_recipes()
    settings = {key: getattr(config, key) for key in TE_KEYS}
    settings["fp8_format"] = getattr(recipes.Format, config.fp8_format)
    if not reads_interval():
        del settings["interval"]
    return recipes.DelayedScaling(**settings)


def _autocast_context(recipe: Any, distributed: bool) -> AbstractContextManager[None]:
    te = load()
    # The amax reduction is over all ranks: none holds a part of the model, so all see different data.
    group = dist.group.WORLD if distributed else None
    context: AbstractContextManager[None]
    if hasattr(te, "autocast"):  # since 2.9, where the older name is deprecated
        context = te.autocast(enabled=True, recipe=recipe, amax_reduction_group=group)
    else:
        context = te.fp8_autocast(enabled=True, fp8_recipe=recipe, fp8_group=group)
    return context


def _recompute_function(te: ModuleType) -> Callable[..., Any]:
    """Transformer Engine's recomputation, which computes in fp8 again and records no amax twice."""
    if "use_reentrant" not in inspect.signature(te.checkpoint).parameters:
        raise InputError(
            "fp8 with checkpoint needs the recomputation of Transformer Engine 1.5 or later. Update it, use the "
            "backend torchao, or leave checkpoint out."
        )
    return functools.partial(te.checkpoint, use_reentrant=False)

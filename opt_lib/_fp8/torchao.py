"""fp8 by torchao: ``Float8Linear`` in the places of linears, with scales found in every step."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import logging
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from atorch_ns.job import Job, ParameterStates, make_user_optimizer
from atorch_ns.sharding import traced_gather, traced_scatter
from opt_lib._config_checks import require
from opt_lib._fp8.config import Fp8Config

INSTALL = "pip install 'atorch-ns[fp8]'"

_LOUD = ("torchao", "torch.utils._pytree")
"""Loggers that warn during torchao's import: of kernels that float8 does not use, and of its use of torch."""


def load() -> ModuleType:
    """``torchao.float8``, imported without the warnings that its import gives.

    Raises:
        MissingPackageError: if it cannot be imported.
    """
    with warnings.catch_warnings(), _silence_loggers(_LOUD):
        warnings.simplefilter("ignore")
        return require("torchao.float8", needed_by="the backend torchao of fp8", install=INSTALL)


def gathers_in_fp8(job: Job, config: Fp8Config) -> bool:
    """Returns whether weights are gathered in fp8. Only ``fully_shard`` asks a weight how to gather it."""
    sharding = job.plan.sharding
    return config.fsdp_all_gather and bool(sharding.gradients_over) and sharding.layout == "rows"


def replace_linears(job: Job, names: Iterable[str], config: Fp8Config) -> None:
    """Replaces each of these linears by a ``Float8Linear`` with the same parameters.

    A linear with several names stays one module. On CPUs, too, it casts its input to the dtype of autocast.
    """
    float8 = load()
    settings = dataclasses.replace(
        float8.Float8LinearConfig.from_recipe_name(config.recipe),
        enable_fsdp_float8_all_gather=gathers_in_fp8(job, config),
        emulate=config.emulate,
    )
    ids = {id(job.module.get_submodule(name)) for name in names}
    everywhere = job.module.named_modules(remove_duplicate=False)
    linears = {path: module for path, module in everywhere if id(module) in ids}
    model = float8.convert_to_float8_training(
        job.module, module_filter_fn=lambda module, _: id(module) in ids, config=settings
    )
    if model is not job.module:  # the model is one linear
        job.replace_model(model)
    # Torchao replaces one of the names in one parent, and makes one for each parent.
    layers: dict[int, nn.Module] = {}
    for path, module in linears.items():
        new: Any = job.module.get_submodule(path)
        if new is not module:
            layers.setdefault(id(module), new)
    for path, module in linears.items():
        new = layers[id(module)]
        if path:
            job.module.set_submodule(path, new)
        if not hasattr(new, "is_exact"):  # a module of several names comes again
            kind: Any = type(new)
            new.__class__ = _switchable_class(kind)
        new.train(module.training)
    job.precision.restore = _restore_precision


@functools.cache
def _switchable_class(kind: Any) -> type[nn.Module]:
    """torchao's class with a switch to the dtype of the weights; a RoundingLinear."""
    from opt_lib._fp8 import exchanges

    def forward(module: Any, x: torch.Tensor) -> torch.Tensor:
        if module.is_exact:
            return F.linear(x, module.weight, module.bias)
        out: torch.Tensor = module.product(x, module.weight)
        return out if module.bias is None else out + module.bias.to(out.dtype)

    def product(module: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.linear(x, weight) if module.is_exact else exchanges.multiply(module, _cast_input(x), weight)

    def gathered(module: Any, x: torch.Tensor, dim: int, group: dist.ProcessGroup) -> torch.Tensor:
        if module.is_exact:
            return traced_gather(x, dim, group)
        return exchanges.gather_input(module, _cast_input(x), dim, group)

    def scattered(module: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        return traced_scatter(x, 0, group) if module.is_exact else exchanges.scatter_sum(module, x, group)

    body = {"__doc__": kind.__doc__, "__module__": __name__, "is_exact": False, "forward": forward}
    return type("Float8Linear", (kind,), {**body, **{f.__name__: f for f in (product, gathered, scattered)}})


def _cast_input(x: torch.Tensor) -> torch.Tensor:
    # torchao's own module casts to autocast's dtype on GPUs alone.
    device = x.device.type
    return x.to(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else x


def __getattr__(name: str) -> Any:
    """The class of the replaced layers, by whose name pickles find it."""
    if name != "Float8Linear":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    load()
    return _switchable_class(importlib.import_module("torchao.float8.float8_linear").Float8Linear)


def _restore_precision(model: nn.Module) -> None:
    """Makes the linears compute in the dtype of their weights or of autocast."""
    # In fp8 a divided layer rounds by other scales, which hides errors that a test looks for.
    modules: Iterator[Any] = model.modules()
    for module in modules:
        if hasattr(module, "is_exact"):
            module.is_exact = True


def scale_after_steps(job: Job) -> None:
    """Finds the scales of all weights that are gathered in fp8 at once, whenever the weights have changed.

    One small all-reduce replaces one a weight. With fp32 masters, rounded later, each gather finds its own.
    """
    if job.plan.precision.master_dtype is not None or job.inputs.optim_func is None:
        return
    precompute = load().precompute_float8_dynamic_scale_for_fsdp

    def make(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        optimizer = make_user_optimizer(job, groups)
        optimizer.register_step_post_hook(lambda *_: precompute(job.module))
        return optimizer

    job.optimizer.make = make
    job.make_states = _ScaledStates


class _ScaledStates(ParameterStates):
    """Weights whose scales are recomputed when a checkpoint is loaded."""

    def set_weights(self, weights: Mapping[str, torch.Tensor]) -> None:
        super().set_weights(weights)
        load().precompute_float8_dynamic_scale_for_fsdp(self._job.module)


@contextmanager
def _silence_loggers(names: Iterable[str]) -> Iterator[None]:
    before = {name: logging.getLogger(name).disabled for name in names}
    try:
        for name in before:
            logging.getLogger(name).disabled = True
        yield
    finally:
        for name, flag in before.items():
            logging.getLogger(name).disabled = flag

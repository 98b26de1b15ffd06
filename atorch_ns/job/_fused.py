"""Fused kernels for optimizers of torch that have them, where the user chose none."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any, Final, NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from atorch_ns.torch_compat import plain_name

__all__ = ["FusedChoice", "choose_fused", "optimizer_arguments"]

_FUSED: Final = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD)
"""Optimizers with fused kernels for CPUs and for CUDA. Adagrad has one for CPUs only."""
_DEVICES: Final = ("cpu", "cuda")
_DECIDES: Final = ("fused", "foreach", "differentiable")


class FusedChoice(NamedTuple):
    """Whether an optimizer is asked for its fused kernel.

    Attributes:
        use: whether ``fused=True`` is passed.
        why: for the report; empty where there is nothing to decide.
    """

    use: bool
    why: str


def choose_fused(
    optim_func: Any,
    optim_args: Mapping[str, Any] | None,
    groups: Iterable[Mapping[str, Any]],
    models: Iterable[nn.Module] = (),
) -> FusedChoice:
    """Decides for parameter groups as they will be given to ``optim_func``.

    A fused kernel updates all parameters of a group in one pass over memory, with no temporary. torch itself leaves
    it off; a loop over parameters is what it runs on CPUs, and for DTensors on GPUs too.

    Args:
        optim_func: a class of torch, or a ``functools.partial`` of one; others are left alone.
        optim_args: the user's; where they decide, nothing is added.
        groups: with ``params``, and the user's options of each.
        models: what holds the parameters; embeddings in it may say that their gradients are sparse.
    """
    kind, given = _unwrapped(optim_func, dict(optim_args or {}))
    if kind not in _FUSED:
        return FusedChoice(False, "")
    groups = list(groups)
    decided = [key for key in _DECIDES if given.get(key) is not None or any(key in each for each in groups)]
    if decided:
        return FusedChoice(False, "")
    reason = _sparse(models) or next(
        (reason for group in groups if (reason := _obstacle(kind, group["params"]))), None
    )
    if reason is not None:
        return FusedChoice(False, f"{kind.__name__}: not fused, since {reason}")
    return FusedChoice(
        True,
        f"{kind.__name__}: fused, in one pass over all parameters; optim_args={{'fused': False}} for a loop",
    )


def _unwrapped(function: Any, given: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The class behind partials, and all keywords that it will be called with."""
    while isinstance(function, partial):
        given = {**function.keywords, **given}
        function = function.func
    return function, given


def optimizer_arguments(
    optim_func: Any,
    optim_args: Mapping[str, Any] | None,
    groups: Iterable[Mapping[str, Any]],
    models: Iterable[nn.Module] = (),
) -> tuple[dict[str, Any], str]:
    """The keywords that ``optim_func`` is called with, and what to say of them; arguments as :func:`choose_fused`."""
    choice = choose_fused(optim_func, optim_args, groups, models)
    given = dict(optim_args or {})
    return ({**given, "fused": True} if choice.use else given), choice.why


def _sparse(models: Iterable[nn.Module]) -> str | None:
    """The module whose gradient is sparse, which fused kernels refuse in the first step."""
    for model in models:
        for name, module in model.named_modules():
            if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse:
                kind = type(module).__name__
                return f"{plain_name(name) or 'the model'} is an {kind} with sparse=True, and no fused kernel takes sparse gradients"
    return None


def _obstacle(kind: type[torch.optim.Optimizer], parameters: Iterable[torch.Tensor]) -> str | None:
    """Why one fused call cannot update these parameters; ``None`` if it can."""
    layouts = set()
    for parameter in parameters:
        if not parameter.is_floating_point():
            return f"a parameter is {parameter.dtype}"
        if parameter.device.type not in _DEVICES:
            return f"there is no fused kernel for {parameter.device.type}"
        if parameter.device.type == "cpu" and parameter.itemsize < 4:
            # SGD's kernel loses the momentum of 16-bit numbers (torch 2.13); the others round otherwise than a loop.
            return f"torch's fused kernels for CPUs are not right for {parameter.dtype}"
        layouts.add(parameter.device_mesh if isinstance(parameter, DTensor) else None)
    if kind is torch.optim.SGD and layouts - {None}:
        return "torch has no fused SGD for DTensors"
    if len(layouts) > 1:
        kinds = "DTensors and plain tensors" if None in layouts else "DTensors on several meshes"
        return f"a group holds {kinds}, which one call cannot update"
    return None

"""The user's parameter groups, kept by name while methods change what the names stand for."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from atorch_ns.errors import InputError
from atorch_ns.torch_compat import plain_name

if TYPE_CHECKING:
    from atorch_ns.job._inputs import Inputs

__all__ = ["NamedGroup", "name_groups", "parameter_groups"]


@dataclass(frozen=True)
class NamedGroup:
    """One group of an optimizer: the names of its parameters, and its options (``lr``, …)."""

    names: tuple[str, ...]
    options: dict[str, Any]


def name_groups(inputs: Inputs) -> tuple[NamedGroup, ...] | None:
    """Asks ``optim_param_func`` about the user's model before anything is done to it.

    Only then does the function see whole parameters with their own shapes and names, whatever the strategy
    makes of them afterwards.

    Returns:
        The groups; ``None`` if there is no such function: then every parameter that requires a gradient
        when the optimizer is made is in one group.

    Raises:
        InputError: if the function gives something else than parameters or groups of them, or tensors that
            are not parameters of the model.
    """
    if inputs.optim_param_func is None:
        return None
    names = {id(parameter): name for name, parameter in inputs.model.named_parameters()}
    return tuple(_named(group, names) for group in _as_groups(inputs.optim_param_func(inputs.model)))


def parameter_groups(
    model: nn.Module,
    groups: tuple[NamedGroup, ...] | None,
    *,
    whole: bool = True,
    tied: Mapping[str, Sequence[str]] = MappingProxyType({}),
) -> list[dict[str, Any]]:
    """The same groups over the parameters that the model has now.

    Args:
        model: what this rank holds.
        groups: by name.
        whole: whether that is the whole model; else groups keep what there is of them.
        tied: other names of parameters, of which a part of the model may have kept one only.

    Raises:
        InputError: if nothing is trainable, or a method has removed one of the parameters.
    """
    if groups is None:
        trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
        if not trainable and whole:
            raise InputError(
                "the model has no parameter that requires a gradient, so there is nothing to optimize."
            )
        return [{"params": trainable}]
    now = {plain_name(name): parameter for name, parameter in model.named_parameters()}
    for name, others in tied.items():
        kept = [other for other in others if other in now]
        if name not in now and kept:
            now[name] = now[kept[0]]
    missing = [name for group in groups for name in group.names if name not in now]
    if missing and whole:
        raise InputError(
            f"optim_param_func chose {missing[0]} ({len(missing)} such), which the model no longer has after "
            "the strategy's methods. Leave that module out of module_replace, or group by what remains."
        )
    return [
        {"params": [now[name] for name in group.names if name in now], **group.options} for group in groups
    ]


def _named(group: dict[str, Any], names: dict[int, str]) -> NamedGroup:
    for parameter in group["params"]:
        if id(parameter) not in names:
            raise InputError(
                f"optim_param_func gave a {type(parameter).__name__} that is no parameter of the model it was "
                "called with. Build the groups from the model that is passed to the function."
            )
    options = {key: value for key, value in group.items() if key != "params"}
    return NamedGroup(tuple(names[id(parameter)] for parameter in group["params"]), options)


def _as_groups(given: Iterable[Any]) -> list[dict[str, Any]]:
    try:
        entries = list(given)
    except TypeError:
        raise InputError(
            f"optim_param_func returned a {type(given).__name__}; it must return parameters or groups of them."
        ) from None
    if all(isinstance(entry, dict) for entry in entries):
        return [{**entry, "params": _listed(entry)} for entry in entries]
    return [{"params": _plain(entries)}]


def _listed(group: dict[str, Any]) -> list[Any]:
    if "params" not in group:
        raise InputError(f"optim_param_func gave a group without 'params'; it has {sorted(group)}.")
    params = group["params"]
    return _plain([params] if isinstance(params, torch.Tensor) else list(params))


def _plain(entries: list[Any]) -> list[Any]:
    """Parameters, of which some may come as ``(name, parameter)``."""
    return [entry[1] if isinstance(entry, tuple) and len(entry) == 2 else entry for entry in entries]

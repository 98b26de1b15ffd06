"""A job's model: what it was before any method, and what methods have made of its parts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from atorch_ns.errors import InputError
from atorch_ns.job.inputs import Inputs
from atorch_ns.pipeline import PipelineStep
from atorch_ns.sharding import Packing
from atorch_ns.text import with_article
from atorch_ns.torch_compat import plain_name


def parameter_names(module: nn.Module) -> dict[torch.Tensor, list[str]]:
    """All names of every parameter, the first name first, as in the model without inner wrappers."""
    names: dict[torch.Tensor, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(plain_name(name))
    return names


@dataclass(frozen=True)
class NamedGroup:
    """One group of an optimizer: the names of its parameters, and its options (``lr``, …)."""

    names: tuple[str, ...]
    options: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class OriginalModel:
    """The user's model before any method.

    Attributes:
        model_class: name of the model's class.
        num_parameters: number of parameter elements.
        num_trainable: number of elements that require gradients.
        parameter_order: the first name of every parameter, in the model's order.
        tied: other names of tied parameters, by the first name.
        groups: the user's parameter groups by name; ``None`` for a single group of all parameters.
    """

    model_class: str
    num_parameters: int
    num_trainable: int
    parameter_order: tuple[str, ...]
    tied: dict[str, list[str]]
    groups: tuple[NamedGroup, ...] | None

    @classmethod
    def of(cls, inputs: Inputs) -> OriginalModel:
        """Describes the user's model. Raises the errors of :func:`name_groups`."""
        names = parameter_names(inputs.model).values()
        return cls(
            model_class=type(inputs.model).__name__,
            num_parameters=sum(parameter.numel() for parameter in inputs.model.parameters()),
            num_trainable=sum(p.numel() for p in inputs.model.parameters() if p.requires_grad),
            parameter_order=tuple(first for first, *_ in names),
            tied={first: others for first, *others in names if others},
            groups=name_groups(inputs),
        )

    def ordered(self, names: Iterable[str]) -> list[str]:
        """``names`` without repetition: parameters in the model's order, then the others in given order."""
        order = {name: index for index, name in enumerate(self.parameter_order)}
        return sorted(dict.fromkeys(names), key=lambda name: order.get(name, len(order)))

    def first_name(self, names: Sequence[str]) -> str:
        """The model's first name for a parameter of which a stage may hold only later names."""
        for first, others in self.tied.items():
            if first in names or not set(others).isdisjoint(names):
                return first
        return names[0]


@dataclass(kw_only=True)
class ModelParts:
    """Stages and experts into which methods have divided the model.

    Attributes:
        stages: modules of this rank that are called instead of the model, in pipeline order. Empty
            if the model is called as one module. Together they hold this rank's parameters.
        pipeline: the schedule and predicted stage costs, for the report; ``None`` without a pipeline.
        full_structure: the whole model before it was cut into stages, its parameters without memory;
            ``None`` if it is in one piece.
        experts: modules whose parameters are divided over the expert axis. Only the other data ranks
            hold replicas of them. They scale their own gradients to the mean over the expert axis.
        listed_experts: like ``experts``, but never called. ``job.gradients.sums`` averages gradients
            of their replicas, and nothing may shard them further.
        packings: parameters divided over the tensor axis in another order than the user's, by name.
    """

    stages: tuple[nn.Module, ...] = ()
    pipeline: PipelineStep | None = None
    full_structure: nn.Module | None = None
    experts: tuple[nn.Module, ...] = ()
    listed_experts: tuple[nn.Module, ...] = ()
    packings: dict[str, Packing] = field(default_factory=dict)


def name_groups(inputs: Inputs) -> tuple[NamedGroup, ...] | None:
    """Calls ``optim_param_func`` on the user's model before any method is applied.

    Only then does the function see whole parameters with their own shapes and names, independent of the
    strategy.

    Returns:
        The groups, or ``None`` without such a function: all parameters, frozen or not, then form one group.

    Raises:
        InputError: if the function returns anything but parameters or groups of them, or tensors that
            are not parameters of the model.
    """
    if inputs.optim_param_func is None:
        return None
    names = {id(parameter): name for name, parameter in inputs.model.named_parameters()}
    return tuple(_name_group(group, names) for group in _as_groups(inputs.optim_param_func(inputs.model)))


def parameter_groups(
    model: nn.Module,
    groups: tuple[NamedGroup, ...] | None,
    *,
    whole: bool = True,
    tied: Mapping[str, Sequence[str]] = MappingProxyType({}),
) -> list[dict[str, Any]]:
    """The same groups over the current parameters of the model.

    Args:
        model: the part of the model that this rank holds.
        groups: the groups by parameter names.
        whole: whether ``model`` is the whole model. Otherwise groups keep only the parameters in it.
        tied: other names of parameters, of which a part of the model may hold only one.

    Raises:
        InputError: if nothing is trainable, or a method has removed one of the parameters.
    """
    if groups is None:
        if whole and not any(parameter.requires_grad for parameter in model.parameters()):
            raise InputError(
                "the model has no parameter that requires a gradient, so there is nothing to optimize."
            )
        return [{"params": [p for p in model.parameters() if p.is_floating_point() or p.is_complex()]}]
    now = {plain_name(name): parameter for name, parameter in model.named_parameters()}
    for name, others in tied.items():
        later_names = [other for other in others if other in now]  # a stage may keep only a later name
        if name not in now and later_names:
            now[name] = now[later_names[0]]
    missing = [name for group in groups for name in group.names if name not in now]
    if missing and whole:
        raise InputError(
            f"optim_param_func chose {missing[0]} ({len(missing)} in total), which the model no longer has after "
            "the strategy's methods. Leave that module out of module_replace, or group the remaining parameters."
        )
    return [
        {"params": [now[name] for name in group.names if name in now], **group.options} for group in groups
    ]


def _name_group(group: dict[str, Any], names: dict[int, str]) -> NamedGroup:
    for parameter in group["params"]:
        if id(parameter) not in names:
            raise InputError(
                f"optim_param_func gave {with_article(parameter)} that is not a parameter of the model it was "
                "called with. Build the groups from the model that is passed to the function."
            )
    options = {key: value for key, value in group.items() if key != "params"}
    return NamedGroup(tuple(names[id(parameter)] for parameter in group["params"]), options)


def _as_groups(result: Iterable[Any]) -> list[dict[str, Any]]:
    try:
        entries = list(result)
    except TypeError:
        raise InputError(
            f"optim_param_func returned {with_article(result)}; it must return parameters or groups of them."
        ) from None
    if all(isinstance(entry, dict) for entry in entries):
        return [{**entry, "params": _list_parameters(entry)} for entry in entries]
    return [{"params": _strip_names(entries)}]  # bare parameters form one group


def _list_parameters(group: dict[str, Any]) -> list[Any]:
    if "params" not in group:
        raise InputError(f"optim_param_func gave a group without 'params'; it has {sorted(group)}.")
    params = group["params"]
    return _strip_names([params] if isinstance(params, torch.Tensor) else list(params))


def _strip_names(entries: list[Any]) -> list[Any]:
    # Entries may be (name, parameter), as named_parameters() gives them.
    return [entry[1] if isinstance(entry, tuple) and len(entry) == 2 else entry for entry in entries]

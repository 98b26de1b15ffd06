"""Copies of a model that share no memory with it: of its structure alone, or of its values too."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from atorch_ns.profile._boundaries import tensors_in
from atorch_ns.profile._truncate import Container

__all__ = ["MakeTensor", "copy_structure"]

MakeTensor = Callable[[str, torch.Tensor], torch.Tensor]
"""``(kind, tensor) -> its copy``; the kind is ``"parameter"``, ``"plain"``, or the name of a buffer."""


def copy_structure(model: nn.Module, make: MakeTensor, containers: Mapping[str, Container]) -> nn.Module:
    """A deep copy of ``model`` whose tensors ``make`` makes, with shortened containers.

    Tensors that are one object stay one object. The memory of the model's tensors is not copied.
    """
    memo: dict[int, Any] = {}
    shortened = {path: model.get_submodule(path) for path in containers}
    for module in _modules_kept(model, shortened, containers):
        for parameter in module._parameters.values():
            if parameter is not None and id(parameter) not in memo:
                memo[id(parameter)] = _parameter(parameter, make)
        for name, buffer in module._buffers.items():
            if buffer is not None and id(buffer) not in memo:
                memo[id(buffer)] = make(name, buffer)
        plain = {k: v for k, v in vars(module).items() if k not in ("_parameters", "_buffers", "_modules")}
        for tensor in tensors_in(plain):
            if id(tensor) not in memo:
                memo[id(tensor)] = make("plain", tensor)
    children: list[tuple[dict[str, Any], str, nn.Module]] = []
    for path, container in containers.items():
        modules: dict[str, Any] = {}
        memo[id(shortened[path]._modules)] = modules
        for place, index in enumerate(container.kept):
            children.append((modules, str(place), list(shortened[path].children())[index]))
    try:
        made = _deep_copy(model, children, dict(memo))
    except Exception:  # a lock, a file, a generator among a module's attributes
        memo.update(_shared_attributes(model, memo))
        made = _deep_copy(model, children, memo)
    _shorten_settings(model, made, containers.values())
    for container in containers.values():
        _renumber(made, container)
    return made


def _deep_copy(
    model: nn.Module, children: Iterable[tuple[dict[str, Any], str, nn.Module]], memo: dict[int, Any]
) -> nn.Module:
    for modules, name, child in children:
        modules[name] = copy.deepcopy(child, memo)
    made: nn.Module = copy.deepcopy(model, memo)
    return made


def _shared_attributes(model: nn.Module, memo: Mapping[int, Any]) -> dict[int, Any]:
    """Attributes of modules that cannot be copied, and are therefore shared with the copy."""
    shared: dict[int, Any] = {}
    for module in model.modules():
        for name, value in vars(module).items():
            if name in ("_parameters", "_buffers", "_modules"):
                continue
            try:
                copy.deepcopy(value, dict(memo))
            except Exception:
                shared[id(value)] = value
    return shared


def _shorten_settings(model: nn.Module, made: nn.Module, containers: Iterable[Container]) -> None:
    """Lists with one entry for each block (``config.layer_types``) lose those of the blocks left out."""
    kept: dict[int, tuple[int, ...] | None] = {}
    for container in containers:
        length = len(container.blocks)
        kept[length] = container.kept if kept.get(length, container.kept) == container.kept else None
    originals = {id(owner) for module in model.modules() for owner in _owners(module)}
    seen: set[int] = set()
    for module in made.modules():
        for owner in _owners(module):
            if id(owner) in originals or id(owner) in seen:
                continue
            seen.add(id(owner))
            for name, value in list(vars(owner).items()):
                places = kept.get(len(value)) if isinstance(value, (list, tuple)) else None
                if places is not None and not tensors_in(value):
                    vars(owner)[name] = type(value)(value[place] for place in places)


def _renumber(made: nn.Module, container: Container) -> None:
    """Blocks that know their place know the one in the shortened list."""
    for place, index in enumerate(container.kept):
        for counter in container.counters:
            path, _, name = f"{container.copy_path(place)}.{counter}".rpartition(".")
            owner = made.get_submodule(path)
            setattr(owner, name, getattr(owner, name) - index + place)


def _owners(module: nn.Module) -> list[Any]:
    """What holds a module's settings: itself and its config."""
    config = vars(module).get("config")
    return [module] if config is None or not hasattr(config, "__dict__") else [module, config]


def _modules_kept(
    model: nn.Module, shortened: Mapping[str, nn.Module], containers: Mapping[str, Container]
) -> Iterator[nn.Module]:
    dropped: set[int] = set()
    for path, holder in shortened.items():
        for index, child in enumerate(holder._modules.values()):
            if index not in containers[path].kept and child is not None:
                dropped.update(id(module) for module in child.modules())
    for path, holder in shortened.items():
        for index in containers[path].kept:  # a module shared with a dropped block stays
            dropped.difference_update(id(module) for module in list(holder.children())[index].modules())
    for module in model.modules():
        if id(module) not in dropped:
            yield module


def _parameter(parameter: nn.Parameter, make: MakeTensor) -> nn.Parameter:
    made = nn.Parameter(make("parameter", parameter), requires_grad=parameter.requires_grad)
    made.__dict__.update(vars(parameter))
    return made

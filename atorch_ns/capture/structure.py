"""Copies of a model that share no memory with it: of its structure alone, or of its values too."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from atorch_ns.capture.blocks import by_container, counters
from atorch_ns.capture.nests import unique_tensors_of


@dataclass(frozen=True)
class Container:
    """A shortened list of blocks.

    Attributes:
        path: path of the ``ModuleList`` or ``Sequential``.
        blocks: paths of all its blocks, in order.
        kept: positions of the blocks that are kept.
        stands_for: position in ``kept`` of each block's representative.
        kinds: fingerprints of the blocks that are kept.
        counters: attributes that hold a block's position, as dotted paths below the block.
    """

    path: str
    blocks: tuple[str, ...]
    kept: tuple[int, ...]
    stands_for: tuple[int, ...]
    kinds: tuple[str, ...]
    counters: tuple[str, ...] = ()

    def copy_path(self, index: int) -> str:
        """The path, in the shallow model, of the kept block at ``index`` in :attr:`kept`."""
        return f"{self.path}.{index}" if self.path else str(index)


def truncate(
    model: nn.Module, blocks: Mapping[str, nn.Module], prints: Mapping[str, str]
) -> dict[str, Container]:
    """Containers to shorten, by path: they keep the first block, the last, and one of each kind in between.

    The first and the last block do not always save the same tensors as identical blocks in the middle.

    Only ``ModuleList`` and ``Sequential`` that hold nothing but blocks are shortened: another module in
    one could change the shapes between blocks.
    """
    containers: dict[str, Container] = {}
    for container, paths in by_container(blocks).items():
        holder = model.get_submodule(container)
        is_list = isinstance(holder, (nn.ModuleList, nn.Sequential))
        if not is_list or len(holder._modules) != len(paths):
            continue
        kinds = [prints[path] for path in paths]
        indices, stands_for = _choose_kept_blocks(kinds)
        if len(indices) < len(paths):
            containers[container] = Container(
                path=container,
                blocks=tuple(paths),
                kept=indices,
                stands_for=stands_for,
                kinds=tuple(kinds[index] for index in indices),
                counters=counters([blocks[path] for path in paths]),
            )
    return containers


def _choose_kept_blocks(kinds: list[str]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    last = len(kinds) - 1
    indices = [0]
    positions: dict[str, int] = {}
    for index, kind in enumerate(kinds[1:last], 1):  # one of each kind in between
        if kind not in positions:
            positions[kind] = len(indices)
            indices.append(index)
    indices.append(last)
    return tuple(indices), (0, *(positions[kind] for kind in kinds[1:last]), len(indices) - 1)


MakeTensor = Callable[[str, torch.Tensor], torch.Tensor]
"""``(kind, tensor) -> its copy``; the kind is ``"parameter"``, ``"plain"``, or the name of a buffer."""


def copy_structure(model: nn.Module, make: MakeTensor, containers: Mapping[str, Container]) -> nn.Module:
    """A deep copy of ``model`` whose tensors ``make`` makes, with shortened containers.

    Tensors that are one object stay one object. The memory of the model's tensors is not copied.
    """
    memo: dict[int, Any] = {}  # deepcopy's memo: it does not copy tensors that are in it
    holders = {path: model.get_submodule(path) for path in containers}
    for module in _modules_kept(model, holders, containers):
        for parameter in module._parameters.values():
            if parameter is not None and id(parameter) not in memo:
                memo[id(parameter)] = _copy_parameter(parameter, make)
        for name, buffer in module._buffers.items():
            if buffer is not None and id(buffer) not in memo:
                memo[id(buffer)] = make(name, buffer)
        plain = {k: v for k, v in vars(module).items() if k not in ("_parameters", "_buffers", "_modules")}
        for tensor in unique_tensors_of(plain):
            if id(tensor) not in memo:
                memo[id(tensor)] = make("plain", tensor)
    children: list[tuple[dict[str, Any], str, nn.Module]] = []
    for path, container in containers.items():
        modules: dict[str, Any] = {}
        memo[id(holders[path]._modules)] = modules  # filled before the rest is copied
        for position, index in enumerate(container.kept):
            children.append((modules, str(position), list(holders[path].children())[index]))
    try:
        clone = _deep_copy(model, children, dict(memo))  # a copy of the memo, since this may fail half-way
    except Exception:  # a lock, a file, a generator among a module's attributes
        memo.update(_shared_attributes(model, memo))
        clone = _deep_copy(model, children, memo)
    _shorten_settings(model, clone, containers.values())
    for container in containers.values():
        _renumber_blocks(clone, container)
    return clone


def _deep_copy(
    model: nn.Module, children: Iterable[tuple[dict[str, Any], str, nn.Module]], memo: dict[int, Any]
) -> nn.Module:
    for modules, name, child in children:
        modules[name] = copy.deepcopy(child, memo)
    clone: nn.Module = copy.deepcopy(model, memo)
    return clone


def _shared_attributes(model: nn.Module, memo: Mapping[int, Any]) -> dict[int, Any]:
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


def _shorten_settings(model: nn.Module, clone: nn.Module, containers: Iterable[Container]) -> None:
    by_size: dict[int, tuple[int, ...] | None] = {}
    for container in containers:
        length = len(container.blocks)
        # Two containers of equal length that keep different blocks: the owner of a list is unclear.
        by_size[length] = container.kept if by_size.get(length, container.kept) == container.kept else None
    originals = {id(owner) for module in model.modules() for owner in _setting_owners(module)}
    ids: set[int] = set()
    for module in clone.modules():
        for owner in _setting_owners(module):
            if id(owner) in originals or id(owner) in ids:  # shared with the model, or visited
                continue
            ids.add(id(owner))
            for name, value in list(vars(owner).items()):
                # A list as long as a container has an entry for each block, as config.layer_types.
                places = by_size.get(len(value)) if isinstance(value, (list, tuple)) else None
                if places is not None and not unique_tensors_of(value):
                    vars(owner)[name] = type(value)(value[index] for index in places)


def _renumber_blocks(clone: nn.Module, container: Container) -> None:
    for position, index in enumerate(container.kept):
        for counter in container.counters:
            path, _, name = f"{container.copy_path(position)}.{counter}".rpartition(".")
            owner = clone.get_submodule(path)
            setattr(owner, name, getattr(owner, name) - index + position)  # positions may count from 1


def _setting_owners(module: nn.Module) -> list[Any]:
    config = vars(module).get("config")
    return [module] if config is None or not hasattr(config, "__dict__") else [module, config]


def _modules_kept(
    model: nn.Module, holders: Mapping[str, nn.Module], containers: Mapping[str, Container]
) -> Iterator[nn.Module]:
    dropped_ids: set[int] = set()
    for path, holder in holders.items():
        for index, child in enumerate(holder._modules.values()):
            if index not in containers[path].kept and child is not None:
                dropped_ids.update(id(module) for module in child.modules())
    for path, holder in holders.items():
        for index in containers[path].kept:  # a module shared with a dropped block is kept
            dropped_ids.difference_update(id(module) for module in list(holder.children())[index].modules())
    for module in model.modules():
        if id(module) not in dropped_ids:
            yield module


def _copy_parameter(parameter: nn.Parameter, make: MakeTensor) -> nn.Parameter:
    clone = nn.Parameter(make("parameter", parameter), requires_grad=parameter.requires_grad)
    clone.__dict__.update(vars(parameter))  # attributes that users have set
    return clone

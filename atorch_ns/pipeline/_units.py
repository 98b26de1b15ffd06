"""Units: the modules at whose boundaries a model can be cut."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import nn

from atorch_ns.errors import InputError
from atorch_ns.profile import NamedModule, repeated_blocks

__all__ = ["find_units"]


def find_units(model: nn.Module, *, at_least: int = 1, starts: Sequence[str] = ()) -> list[NamedModule]:
    """The modules that stages are made of, in the order of the model's modules.

    These are the repeated blocks, and the largest other modules that have parameters and hold no block
    (embeddings, the last norm, the head). What lies between them, modules without parameters and the code of
    their parents, runs on every stage that needs it.

    Args:
        model: the model.
        at_least: how many are wanted. Where a model repeats no block, the largest modules are taken apart
            until there are enough; blocks are never taken apart for that.
        starts: paths of modules that must begin a unit: whatever holds one is taken apart.

    Raises:
        InputError: if there is no module at one of ``starts``.
    """
    blocks = {id(block.module) for block in repeated_blocks(model)}
    units = list(_inside(NamedModule("", model), blocks))
    if not blocks:
        while len(units) < at_least and _take_apart_largest(units):
            pass
    for path in starts:
        _begin_at(model, units, path)
    return units


def _inside(found: NamedModule, blocks: set[int]) -> Iterator[NamedModule]:
    """The units of a module that is not one itself unless it holds no block."""
    if not _has_parameters(found.module):
        return
    holds_block = any(id(child) in blocks for child in found.module.modules())
    if id(found.module) in blocks or (not holds_block and found.name):
        yield found
    else:
        for child in _children(found):
            yield from _inside(child, blocks)


def _take_apart_largest(units: list[NamedModule]) -> bool:
    """Replaces the unit with the most parameters that has parts by its parts; false if none has any."""
    sizes = [(_size(unit.module), -place) for place, unit in enumerate(units) if _parts(unit)]
    if not sizes:
        return False
    place = -max(sizes)[1]
    units[place : place + 1] = _parts(units[place])
    return True


def _begin_at(model: nn.Module, units: list[NamedModule], path: str) -> None:
    try:
        wanted = model.get_submodule(path)
    except AttributeError:
        raise InputError(f"the model has no module {path!r}, at which a stage should begin.") from None
    if not _has_parameters(wanted):
        raise InputError(
            f"{path!r} has no parameters, so no stage can begin there. Name a module that has some."
        )
    while True:
        place = next((i for i, unit in enumerate(units) if path.startswith(f"{unit.name}.")), None)
        if place is None:
            return
        units[place : place + 1] = _parts(units[place])


def _parts(unit: NamedModule) -> list[NamedModule]:
    return [child for child in _children(unit) if _has_parameters(child.module)]


def _children(found: NamedModule) -> Iterator[NamedModule]:
    prefix = f"{found.name}." if found.name else ""
    for name, child in found.module.named_children():
        yield NamedModule(prefix + name, child)


def _has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def _size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())

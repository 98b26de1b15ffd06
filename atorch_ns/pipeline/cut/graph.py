"""Call graph: the calls of a model's units in one forward pass, and the values that flow between them."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import nn

from atorch_ns.capture.blocks import NamedModule, can_be_called, matches, repeated_blocks
from atorch_ns.costs import OperatorCounts
from atorch_ns.errors import InputError
from atorch_ns.torch_compat import plain_name, unwrap_checkpoint


def find_units(
    model: nn.Module, *, at_least: int = 1, starts: Sequence[str] = (), leaves: Sequence[str] = ()
) -> list[NamedModule]:
    """The units from which stages are made, in the order of the model's modules.

    These are the repeated blocks, and the largest other modules that have parameters and hold no block
    (embeddings, the last norm, the head). What lies between them, modules without parameters and the code of
    their parents, runs on every stage that needs it.

    Args:
        at_least: minimum number of units. A model without repeated blocks gets its largest modules split.
        starts: paths of modules that must begin a unit. A unit that holds one is split.
        leaves: selectors of modules that are never split into units.

    Raises:
        InputError: if one of ``starts`` is not a module, or lies inside a leaf.
    """
    blocks = {id(block.module) for block in repeated_blocks(model)}
    units = list(_walk_units(NamedModule("", model), blocks, leaves))
    if not blocks:
        while len(units) < at_least and _split_largest(units, leaves):
            pass
    for path in starts:
        _begin_at(model, units, path, leaves)
    return units


def split_units(
    units: Iterable[NamedModule], paths: Collection[str], *, leaves: Sequence[str] = ()
) -> list[NamedModule]:
    """Replaces the units at ``paths`` by their parts.

    Raises:
        InputError: if one of these is a leaf.
    """
    modules: list[NamedModule] = []
    for unit in units:
        if unit.name in paths and _is_leaf(unit, leaves):
            raise InputError(
                f"{unit.name} must stay whole, but the model calls modules inside it from outside. Select the "
                "module whose forward calls them, or none."
            )
        modules += _inner_units(unit, leaves) if unit.name in paths else [unit]
    return modules


def _walk_units(entry: NamedModule, blocks: set[int], leaves: Sequence[str]) -> Iterator[NamedModule]:
    """The units of a module: the module itself if it is a block, a leaf, or callable and without blocks."""
    if not _has_parameters(entry.module):
        return
    holds_block = any(id(child) in blocks for child in entry.module.modules())
    whole = id(entry.module) in blocks or _is_leaf(entry, leaves)
    if whole or (not holds_block and entry.name and can_be_called(entry.module)):  # the root is not a unit
        yield entry
    else:
        for child in _child_modules(entry):
            yield from _walk_units(child, blocks, leaves)


def _is_leaf(entry: NamedModule, leaves: Sequence[str]) -> bool:
    if not (
        leaves and entry.name and matches(plain_name(entry.name), unwrap_checkpoint(entry.module), leaves)
    ):
        return False
    if not can_be_called(entry.module):
        raise InputError(
            f"{entry.name} cannot stay whole: it is a {type(entry.module).__name__}, which is never called. Select "
            "the module whose forward calls its children."
        )
    return True


def _split_largest(units: list[NamedModule], leaves: Sequence[str]) -> bool:
    sizes = [
        (_count_parameters(unit.module), -index)  # of equal ones the first
        for index, unit in enumerate(units)
        if _inner_units(unit, leaves)
    ]
    if not sizes:
        return False
    index = -max(sizes)[1]
    units[index : index + 1] = _inner_units(units[index], leaves)
    return True


def _begin_at(model: nn.Module, units: list[NamedModule], path: str, leaves: Sequence[str]) -> None:
    try:
        target = model.get_submodule(path)
    except AttributeError:
        raise InputError(f"the model has no module {path!r} to start a stage at.") from None
    if not _has_parameters(target):
        raise InputError(
            f"{path!r} has no parameters, so no stage can begin there. Name a module that has some."
        )
    while True:  # splits one level at a time, until a unit begins at the path
        index = next((i for i, unit in enumerate(units) if path.startswith(f"{unit.name}.")), None)
        if index is None:
            return
        if _is_leaf(units[index], leaves):
            raise InputError(
                f"no stage can begin at {path!r}: {units[index].name}, which holds it, must stay whole."
            )
        units[index : index + 1] = _inner_units(units[index], leaves)


def _inner_units(unit: NamedModule, leaves: Sequence[str]) -> list[NamedModule]:
    if _is_leaf(unit, leaves):
        return []
    # No blocks are passed: inside of a unit that is split, a block is a module like any other.
    return [part for child in _child_modules(unit) for part in _walk_units(child, set(), leaves)]


def _child_modules(parent: NamedModule) -> Iterator[NamedModule]:
    prefix = f"{parent.name}." if parent.name else ""
    for name, child in parent.module.named_children():
        yield NamedModule(prefix + name, child)


def _has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def _count_parameters(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


@dataclass(frozen=True)
class TensorSignature:
    """A tensor's shape, dtype and need of a gradient."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    @property
    def num_bytes(self) -> int:
        """Bytes of its elements."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, kw_only=True)
class Value:
    """A version of a tensor that the code between units sees. A change in place makes a new value.

    Attributes:
        spec: shape and dtype.
        position: the number of calls made before it.
        inputs: numbers of the values it was computed from, by an operator between calls.
        parameters: names of the parameters that this operator read.
        last_call: the last call that it depends on; -1 for none, so that it is equal on every stage.
        call, leaf: for an output, its call and its index among the call's output tensors; else -1.
        followable: whether it can be computed again from its inputs.
        hidden: description such as ``"blocks.0.aux"`` of a value that a unit holds but does not return.
    """

    spec: TensorSignature
    position: int
    inputs: tuple[int, ...] = ()
    parameters: tuple[str, ...] = ()
    last_call: int = -1
    call: int = -1
    leaf: int = -1
    followable: bool = True
    hidden: str = ""

    @property
    def is_output(self) -> bool:
        """Whether a unit returned it."""
        return self.call >= 0


@dataclass(frozen=True, kw_only=True)
class UnitCall:
    """One call of a unit.

    Attributes:
        arguments, outputs: value numbers of their tensors, in order.
        output: its output, with a :class:`TensorSignature` in place of each tensor.
        counts: operator counts of its forward pass, including the code before it.
        saved_bytes: bytes kept for the backward pass, without parameters.
    """

    path: str
    arguments: tuple[int, ...]
    outputs: tuple[int, ...]
    output: Any
    counts: OperatorCounts = field(default_factory=OperatorCounts)
    saved_bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class CallGraph:
    """One forward pass.

    Attributes:
        calls, values: calls and values in the order of execution. Their numbers are their indices.
        results: value numbers of the model's result, which is the loss or the outputs.
        shown: value numbers of outputs wanted besides the loss, which have no gradients.
        reads: ``(calls before, value)`` for each read of elements of a value that depends on a call.
        mutates: whether a value that depends on a call was changed in place.
        taken_apart: paths of units whose parts were called from outside.
        sealed: positions inside the model's own autograd functions.
        unreached: values that require gradients but that no backward pass reaches, as before a ``detach``.
    """

    calls: tuple[UnitCall, ...]
    values: tuple[Value, ...]
    results: tuple[int, ...]
    shown: tuple[int, ...] = ()
    reads: tuple[tuple[int, int], ...] = ()
    mutates: bool = False
    taken_apart: frozenset[str] = frozenset()
    sealed: frozenset[int] = frozenset()
    unreached: frozenset[int] = frozenset()

    @property
    def paths(self) -> tuple[str, ...]:
        """The path of each call."""
        return tuple(call.path for call in self.calls)

    @cached_property
    def needed_until(self) -> tuple[int, ...]:
        """The last call that needs each value; -1 if nothing uses it."""
        last = [-1] * len(self.values)
        for number, call in enumerate(self.calls):
            for value in call.arguments:
                last[value] = max(last[value], number)
        for position, value in self.reads:
            last[value] = max(last[value], position - 1)
        for value in (*self.results, *self.shown):
            last[value] = len(self.calls)
        for number in range(len(self.values) - 1, -1, -1):  # values follow the values they are computed from
            consumer = self.values[number]
            if last[number] < 0 or consumer.is_output:  # unused, or not made by the code between units
                continue
            for source in consumer.inputs:
                last[source] = max(last[source], consumer.position - 1)
        return tuple(last)

    @cached_property
    def trained(self) -> frozenset[int]:
        """The values that a backward pass from the results reaches."""
        numbers: set[int] = set()
        waiting = list(self.results)
        while waiting:
            number = waiting.pop()
            if number in numbers:
                continue
            numbers.add(number)
            value = self.values[number]
            waiting += value.inputs
            if value.last_call >= 0 and not value.inputs:  # an output of a call, or what it left behind
                waiting += self.calls[value.last_call].arguments
        return frozenset(numbers) - self.unreached

    @cached_property
    def sources(self) -> tuple[frozenset[int] | None, ...]:
        """For each value, the call outputs that it is computed from; ``None`` if they cannot be followed."""
        origins: list[frozenset[int] | None] = []  # by value; inputs come before what is computed from them
        for number, value in enumerate(self.values):
            if value.last_call < 0:
                origins.append(frozenset())  # the same on every stage without being sent
            elif value.is_output:
                origins.append(frozenset([number]))
            elif not value.followable:
                origins.append(None)
            else:
                parts = [origins[source] for source in value.inputs]
                origins.append(None if None in parts else frozenset().union(*(p for p in parts if p)))
        return tuple(origins)

    def alive_at(self, cut: int) -> list[int]:
        """The values that depend on calls before ``cut`` and are used after it."""
        until = self.needed_until
        return [
            number
            for number, value in enumerate(self.values)
            if value.last_call >= 0 and value.position <= cut <= until[number]
        ]

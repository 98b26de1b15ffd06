"""The calls of a model's units in one forward pass, and what flows between them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

__all__ = ["Call", "CallGraph", "TensorSpec", "Value"]


@dataclass(frozen=True)
class TensorSpec:
    """What is known of a tensor without its elements."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    @property
    def num_bytes(self) -> int:
        """Bytes of its elements."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, kw_only=True)
class Value:
    """A tensor that the code between units sees, as it is at one time: an operator that changes it in place makes
    a new value.

    Attributes:
        spec: shape and dtype.
        position: calls that had been made when it came to be.
        inputs: numbers of the values it was computed from, by an operator between calls.
        parameters: names of the parameters that this operator read.
        last_call: the last call that it depends on; -1 for none: such a value is the same on every stage.
        call, leaf: where it is an output, of which call, and which of the tensors in it; else -1.
        followable: whether it can be computed again from its inputs.
        hidden: where it is not an output though a unit made or holds it, what it is: ``"blocks.0.aux"``.
    """

    spec: TensorSpec
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
class Call:
    """One call of a unit.

    Attributes:
        path: of the unit.
        arguments: numbers of the values of the tensors in its arguments, in order.
        outputs: numbers of the values of the tensors in its output, in order.
        output: its output with a :class:`TensorSpec` in the place of each tensor.
        flops: floating point operations of its forward pass; those of the code before it are among them.
        moved_bytes: what these operators read and write.
        saved_bytes: what is kept for the backward pass, parameters left out.
    """

    path: str
    arguments: tuple[int, ...]
    outputs: tuple[int, ...]
    output: Any
    flops: int = 0
    moved_bytes: int = 0
    saved_bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class CallGraph:
    """One forward pass.

    Attributes:
        calls: in the order in which they were made.
        values: by their numbers, in the order in which they came to be.
        results: numbers of the values that the model's result is used for: the loss, or its outputs.
        reads: ``(position, value)``: when so many calls had been made, the code looked into that value, which
            depends on a call, and went on according to what it saw.
        mutates: whether a value that depends on a call was changed in place.
    """

    calls: tuple[Call, ...]
    values: tuple[Value, ...]
    results: tuple[int, ...]
    reads: tuple[tuple[int, int], ...] = ()
    mutates: bool = False

    @property
    def paths(self) -> tuple[str, ...]:
        """The path of each call."""
        return tuple(call.path for call in self.calls)

    @cached_property
    def needed_until(self) -> tuple[int, ...]:
        """For each value the last call before which it must be at hand; -1 if nothing uses it."""
        last = [-1] * len(self.values)
        for number, call in enumerate(self.calls):
            for value in call.arguments:
                last[value] = max(last[value], number)
        for position, value in self.reads:
            last[value] = max(last[value], position - 1)
        for value in self.results:
            last[value] = len(self.calls)
        for number in range(len(self.values) - 1, -1, -1):
            made = self.values[number]
            if last[number] < 0 or made.is_output:
                continue
            for source in made.inputs:
                last[source] = max(last[source], made.position - 1)
        return tuple(last)

    @cached_property
    def _sources(self) -> tuple[frozenset[int] | None, ...]:
        found: list[frozenset[int] | None] = []
        for number, value in enumerate(self.values):
            if value.last_call < 0:
                found.append(frozenset())
            elif value.is_output:
                found.append(frozenset([number]))
            elif not value.followable:
                found.append(None)
            else:
                parts = [found[source] for source in value.inputs]
                found.append(None if None in parts else frozenset().union(*(p for p in parts if p)))
        return tuple(found)

    def sources(self, value: int) -> frozenset[int] | None:
        """The outputs of calls that ``value`` can be computed from by the code between calls; ``None`` if that
        code cannot be followed."""
        return self._sources[value]

    def alive_at(self, cut: int) -> list[int]:
        """The values that depend on calls before ``cut`` and that what comes after it uses."""
        until = self.needed_until
        return [
            number
            for number, value in enumerate(self.values)
            if value.last_call >= 0 and value.position <= cut <= until[number]
        ]

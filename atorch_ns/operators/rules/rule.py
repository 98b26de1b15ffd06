"""Rules: how one call of an operator may be divided over the ranks of an axis.

A rule gives each tensor argument and each result a placement, torch's own: ``Replicate`` (whole, and equal on all ranks),
``Shard(d)`` (equal pieces along ``d``, in the order of the ranks) or ``Partial`` (the whole is the sum over the ranks).
In text a shard is its dimension: ``1 <- 2,1,R`` has its result divided along 1, its first argument along 2.

Gradients follow: that of a shard is divided alike, that of a partial sum is whole on every rank. A rule that divides
anything leaves each rank a part of the gradient of an argument that it takes replicated; what is inserted before such an
argument sums it (:mod:`~atorch_ns.operators.divided.conversions`). Rules are therefore about the forward pass alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch.distributed.tensor import Partial, Replicate, Shard

from atorch_ns.errors import InputError

Placement = Replicate | Shard | Partial

UNKNOWN_SIZE = 2**31 - 1
"""Stands for a size that depends on values: a prime, which no number of ranks divides."""

WHOLE = Replicate()
SUM = Partial()


def placement_text(placement: Placement) -> str:
    """``R``, ``P``, or the dimension of a shard."""
    if isinstance(placement, Shard):
        return str(placement.dim)
    return "R" if isinstance(placement, Replicate) else "P"


def read_placement(text: str) -> Placement:
    """The placement that :func:`placement_text` writes as ``text``.

    Raises:
        InputError: for another text.
    """
    stripped = text.strip()
    if stripped.isdecimal():
        return Shard(int(stripped))
    if stripped not in ("R", "P"):
        raise InputError(
            f"{text!r} is no placement. Write R, P, or the number of the dimension that is divided."
        )
    return WHOLE if stripped == "R" else SUM


@dataclass(frozen=True)
class Rule:
    """One way to divide a call.

    Attributes:
        outputs: placements of its results, in order.
        inputs: placements of its tensor arguments, in the order of :attr:`Call.tensors`.
        source: where the rule comes from, and why it holds, in a few words.
        kernel: name of the function in :mod:`~atorch_ns.operators.divided.kernels` that computes on pieces in the operator's place;
            empty for the operator itself.
    """

    outputs: tuple[Placement, ...]
    inputs: tuple[Placement, ...]
    source: str = field(default="", compare=False)
    kernel: str = field(default="", compare=False)

    def __str__(self) -> str:
        return " <- ".join(",".join(map(placement_text, side)) for side in (self.outputs, self.inputs))

    @classmethod
    def read(cls, text: str) -> Rule:
        """The rule that ``str(rule)`` gave.

        Raises:
            InputError: for a text that is none.
        """
        outputs, arrow, inputs = text.partition("<-")
        if not arrow:
            raise InputError(
                f"{text!r} is no rule. Write placements of results and arguments, as in '1 <- 2,1,R'."
            )
        results, arguments = (
            tuple(read_placement(one) for one in side.split(",") if one.strip()) for side in (outputs, inputs)
        )
        return cls(results, arguments)

    @cached_property
    def divides(self) -> bool:
        """Whether it divides anything: if not, every rank computes the same."""
        return any(not isinstance(one, Replicate) for one in (*self.outputs, *self.inputs))


@dataclass(frozen=True)
class TensorSpec:
    """Shape and dtype of a tensor; sizes that follow the batch are those of the captured sample."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool = False

    @property
    def is_float(self) -> bool:
        """Whether gradients may flow through it, and sums of it are meant as real numbers."""
        return self.dtype.is_floating_point

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole tensor; a size that depends on values counts once."""
        count = 1
        for size in self.known_shape:
            count *= size
        return count * self.dtype.itemsize

    @property
    def known_shape(self) -> tuple[int, ...]:
        """The shape, with 1 for sizes that depend on values."""
        return tuple(1 if size == UNKNOWN_SIZE else size for size in self.shape)


@dataclass(frozen=True, eq=False)
class Call:
    """One call of an operator, as rules see it.

    Attributes:
        operator: such as ``torch.ops.aten.linear.default``.
        args, kwargs: its arguments; a :class:`TensorSpec` stands for each tensor, also inside lists.
        outputs: its results.
    """

    operator: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    outputs: tuple[TensorSpec, ...]

    @cached_property
    def name(self) -> str:
        """The operator's name with its namespace and overload: ``aten.linear.default``."""
        return str(self.operator)

    @cached_property
    def tensors(self) -> tuple[TensorSpec, ...]:
        """Its tensor arguments, in order; those in a list one after the other."""
        return tuple(_specs((self.args, tuple(self.kwargs.values()))))

    @cached_property
    def whole(self) -> Rule:
        """The rule that divides nothing."""
        return Rule((WHOLE,) * len(self.outputs), (WHOLE,) * len(self.tensors), "nothing is divided")

    def argument(self, name: str) -> Any:
        """The value of an argument by the name that the operator's schema gives it, its default included."""
        return self._arguments[name]

    @cached_property
    def _arguments(self) -> dict[str, Any]:
        declared = self.operator._schema.arguments  # type: ignore[attr-defined]
        values = {one.name: one.default_value if one.has_default_value() else None for one in declared}
        values.update(zip((one.name for one in declared), self.args, strict=False))
        return values | dict(self.kwargs)


def _specs(value: Any) -> Iterable[TensorSpec]:
    if isinstance(value, TensorSpec):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _specs(item)


Rules = Callable[[Call, int], Sequence[Rule]]
"""``(call, degree) -> the rules that divide it over so many ranks``, without :attr:`Call.whole`."""

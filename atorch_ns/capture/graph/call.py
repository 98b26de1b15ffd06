"""Calls of operators: what each is given and gives, as shapes and values."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

UNKNOWN_SIZE = 2**31 - 1
"""Placeholder of a size that depends on values: a prime that no number of ranks divides."""


@dataclass(frozen=True)
class TensorSpec:
    """Shape and dtype of a tensor. Sizes that depend on the batch are those of the captured sample."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool = False

    @property
    def is_float(self) -> bool:
        """Whether its dtype is floating point, so that gradients may flow and partial sums make sense."""
        return self.dtype.is_floating_point

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole tensor. A size that depends on values counts as 1."""
        return math.prod(self.known_shape) * self.dtype.itemsize

    @property
    def known_shape(self) -> tuple[int, ...]:
        """The shape, with 1 in place of sizes that depend on values."""
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
    def short_name(self) -> str:
        """The operator's name without namespace and overload: ``linear``."""
        return self.name.split(".")[1]

    @cached_property
    def argument_names(self) -> list[str]:
        """The names of the operator's arguments, in the order of its schema."""
        return [argument.name for argument in self.operator._schema.arguments]  # type: ignore[attr-defined]

    @cached_property
    def tensors(self) -> tuple[TensorSpec, ...]:
        """Its tensor arguments in order, lists flattened."""
        items = iter_items((self.args, tuple(self.kwargs.values())))
        return tuple(item for item in items if isinstance(item, TensorSpec))

    def argument(self, name: str) -> Any:
        """The value of an argument by its name in the operator's schema, or its default."""
        return self._bound_arguments[name]

    @cached_property
    def _bound_arguments(self) -> dict[str, Any]:
        arguments = self.operator._schema.arguments  # type: ignore[attr-defined]
        values = {arg.name: arg.default_value if arg.has_default_value() else None for arg in arguments}
        values.update(zip((arg.name for arg in arguments), self.args, strict=False))  # the rest keep defaults
        return values | dict(self.kwargs)


def iter_items(value: Any) -> Iterator[Any]:
    """The items of nested tuples and lists, in order; the value itself if it is neither."""
    if isinstance(value, (tuple, list)):
        for item in value:
            yield from iter_items(item)
    else:
        yield value

"""Rules of operators: the user's own, else those of our tables, else torch's for DTensors, else none but to divide nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.tensor import Replicate, Shard

from atorch_ns.operators.rules.dims import Dims, broadcast, letters
from atorch_ns.operators.rules.products import PRODUCTS
from atorch_ns.operators.rules.rule import SUM, WHOLE, Call, Rule
from atorch_ns.operators.rules.views import VIEWS, divides_partial_sums
from atorch_ns.torch_compat import dtensor_rules

Registered = Callable[[Call, int], Sequence[Rule] | None]
"""The user's rules of a call; ``None`` where the user has none."""

RUN_AS: Mapping[Callable[..., Any], Callable[..., Any]] = {
    torch.ops.aten.view.default: torch.ops.aten.reshape.default
}
"""What runs on pieces in an operator's place: pieces need not be contiguous."""

_POINTWISE = frozenset(
    [
        *(
            "to",
            "_to_copy",
            "clone",
            "contiguous",
            "alias",
            "detach",
            "lift_fresh_copy",
            "dropout",
            "type_as",
        ),
        *(
            "masked_fill",
            "where",
            "ones_like",
            "zeros_like",
            "empty_like",
            "full_like",
            "rand_like",
            "randn_like",
        ),
        *(
            "__and__",
            "__or__",
            "__xor__",
            "bernoulli",
            "fill",
            "copy",
            "native_dropout",
            "isfinite",
            "isnan",
            "logit",
        ),
        *(
            "softplus",
            "hardtanh",
            "relu",
            "relu6",
            "selu",
            "celu",
            "prelu",
            "mish",
            "square",
            "rsub",
            "float_power",
        ),
    ]
)
"""Operators that compute element by element and lack torch's tag for it, or have it in some versions only."""

_LINEAR = frozenset(["to", "_to_copy", "clone", "contiguous", "alias", "neg", "type_as"])


def rules_of(call: Call, degree: int, registered: Registered | None = None) -> tuple[Rule, ...]:
    """All rules by which ``degree`` ranks may divide a call; the first divides nothing."""
    own = registered(call, degree) if registered is not None else None
    if own is not None:
        found: Iterator[Rule] | Sequence[Rule] = own
    elif not hasattr(call.operator, "_schema"):  # control flow and other operators on functions
        found = ()
    else:
        found = _of_tables(call, degree)
    return tuple(dict.fromkeys((call.whole, *found)))


def _of_tables(call: Call, degree: int) -> Iterator[Rule]:
    name = call.name.split(".")[1]
    table = PRODUCTS.get(name) or VIEWS.get(name)
    if table is not None:
        dims = table(call)
        if dims is not None:
            yield from dims.rules(call, degree)
        if divides_partial_sums(name) and call.outputs[0].is_float and len(call.tensors) >= 1:
            yield _summands(call, range(len(call.tensors)))
    elif name in _POINTWISE or torch.Tag.pointwise in getattr(call.operator, "tags", ()):
        yield from _pointwise(call, degree)
    else:
        yield from dtensor_rules(call, degree)


def _pointwise(call: Call, degree: int) -> Iterator[Rule]:
    """Element by element: any dim of the result, and of the arguments that have it."""
    shape = call.outputs[0].shape
    dims = letters(len(shape))
    inputs = [broadcast(shape, dims, spec.shape) for spec in call.tensors]
    yield from Dims(inputs, [dims] * len(call.outputs), why="element by element").rules(call, degree)
    name = call.name.split(".")[1]
    if not call.outputs[0].is_float or not all(spec.is_float for spec in call.tensors):
        return
    both = len(call.tensors) == 2
    if name in _LINEAR or (name in ("mul", "div") and not both and call.argument("other") is not None):
        yield _summands(call, [0])
    elif name in ("add", "sub") and both:
        yield _summands(call, [0, 1])
    elif name in ("mul", "div") and both:
        yield _summands(call, [0])
        if name == "mul":
            yield _summands(call, [1])


def _summands(call: Call, partial: Sequence[int]) -> Rule:
    """The rule that takes some arguments as partial sums and gives one: the operator is linear in them together."""
    inputs = tuple(SUM if number in partial else WHOLE for number in range(len(call.tensors)))
    return Rule((SUM,) * len(call.outputs), inputs, "linear in its summands")


def divides_evenly(rule: Rule, call: Call, degree: int) -> bool:
    """Whether every dim that a rule divides is divisible."""
    sides = zip((*rule.inputs, *rule.outputs), (*call.tensors, *call.outputs), strict=True)
    return all(
        isinstance(one, Replicate)
        or not isinstance(one, Shard)
        or (one.dim < len(spec.shape) and spec.shape[one.dim] % degree == 0)
        for one, spec in sides
    )

"""Rules of operators: the user's, else our tables', else torch's for DTensors, else the whole rule alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from atorch_ns.capture.graph.call import Call, TensorSpec
from atorch_ns.operators.rules.dims import Dims, Table, broadcast, frozen, letters
from atorch_ns.operators.rules.indexing import INDEXING
from atorch_ns.operators.rules.products import PRODUCTS
from atorch_ns.operators.rules.reductions import REDUCTIONS
from atorch_ns.operators.rules.rule import Rule, whole_rule
from atorch_ns.operators.rules.views import VIEWS
from atorch_ns.torch_compat import dtensor_rules

UserRules = Callable[[Call, int], Sequence[Rule] | None]
"""Returns the user's rules of a call; ``None`` if there are none."""

RUN_AS: Mapping[Callable[..., Any], Callable[..., Any]] = {
    torch.ops.aten.view.default: torch.ops.aten.reshape.default
}
"""Replacements of operators that run on pieces, since pieces need not be contiguous."""

_TABLES: Mapping[str, Table] = {**PRODUCTS, **REDUCTIONS, **INDEXING, **VIEWS}

_POINTWISE = frozenset(  # computed element by element, without torch's tag for it in some versions or all
    [
        *("to", "_to_copy", "type_as", "clone", "contiguous", "alias", "detach", "lift_fresh_copy", "copy", "fill"),
        *("zeros_like", "ones_like", "empty_like", "full_like", "rand_like", "randn_like", "randint_like"),
        *("dropout", "alpha_dropout", "native_dropout", "bernoulli", "masked_fill", "where", "nan_to_num"),
        *("__and__", "__or__", "__xor__", "isfinite", "isnan", "isinf", "greater", "less", "not_equal"),
        *("softplus", "hardtanh", "hardswish", "relu", "relu6", "selu", "celu", "mish", "log_sigmoid", "logit"),
        *("square", "rsub", "float_power", "floor_divide", "subtract", "multiply", "divide", "true_divide"),
        *("absolute", "negative", "clip", "addcmul", "addcdiv", "lerp", "complex", "real", "imag"),
    ]
)  # fmt: skip

_LIKE = frozenset(["type_as", "to"])  # they take the dtype alone of a second tensor

_LINEAR = frozenset(  # f(x + y) = f(x) + f(y)
    ["to", "_to_copy", "type_as", "clone", "contiguous", "alias", "neg", "negative", "lift_fresh_copy"]
)
_SUMS = frozenset(["add", "sub", "subtract"])  # linear in both together
_TIMES = frozenset(["mul", "multiply"])  # linear in either
_OVER = frozenset(["div", "divide", "true_divide"])  # linear in the first


def rules_of(call: Call, degree: int, user_rules: UserRules | None = None) -> tuple[Rule, ...]:
    """All rules by which ``degree`` ranks may divide a call. The first rule divides nothing."""
    custom_rules = user_rules(call, degree) if user_rules is not None else None
    if custom_rules is not None:
        rules: Iterator[Rule] | Sequence[Rule] = custom_rules  # the user's rules replace all others
    elif not hasattr(call.operator, "_schema"):  # control flow and other operators on functions
        rules = ()
    else:
        rules = _of_tables(call, degree)
    return tuple(dict.fromkeys((whole_rule(call), *rules)))  # the first of equal placements holds


def _of_tables(call: Call, degree: int) -> Iterator[Rule]:
    name = call.short_name
    # A write would reach a converted copy alone; tables expect tensors by place, not by name.
    if call.operator._schema.is_mutable or _is_reordered(call):  # type: ignore[attr-defined]
        return
    if any(spec.dtype.is_complex for spec in (*call.tensors, *call.outputs)):  # tables are of real numbers
        return
    if name in ("max", "min") and "other" in call.argument_names:  # of two tensors: element by element
        dims: Dims | None = _dims_of_pointwise(call)
    elif name == "prelu":
        dims = _dims_of_prelu(call)
    elif name in _TABLES:
        dims = _TABLES[name](call)
    elif name in _POINTWISE or torch.Tag.pointwise in getattr(call.operator, "tags", ()):
        dims = _dims_of_pointwise(call)
    else:
        yield from dtensor_rules(call, whole_rule(call), degree)  # torch's own strategies
        return
    if dims is not None:
        yield from dims.rules(call, degree)


def _is_reordered(call: Call) -> bool:
    keywords = {a.name for a in call.operator._schema.arguments if a.kwarg_only}  # type: ignore[attr-defined]
    return any(isinstance(value, TensorSpec) and name not in keywords for name, value in call.kwargs.items())


def _dims_of_pointwise(call: Call) -> Dims | None:
    shape = call.outputs[0].shape
    if any(spec.shape != shape for spec in call.outputs) or call.name == "aten.where.default":
        return None  # where(mask) gives indices, as many as the mask has True
    dims = letters(len(shape))
    count = 1 if call.short_name in _LIKE else len(call.tensors)  # the other one gives its dtype
    inputs = [broadcast(shape, dims, spec.shape) for spec in call.tensors[:count]]
    inputs += frozen(call, count)
    return Dims(inputs, [dims] * len(call.outputs), linear=_linear_groups(call), why="element by element")


def _linear_groups(call: Call) -> list[list[int]]:
    name, count = call.short_name, len(call.tensors)
    if name in _LINEAR or (name in _TIMES | _OVER and count == 1 and isinstance(call.args[0], TensorSpec)):
        return [[0]] if name not in _OVER or _is_exact(call) else []  # or scaled by a number
    if name in _SUMS and count == 2:
        return [[0, 1]]  # both: a number in place of one would be added by every rank
    if count == 2 and name in _TIMES | _OVER:
        return [[0], [1]] if name in _TIMES else [[0]] if _is_exact(call) else []
    if name == "where" and count == 3:
        return [[1, 2]]  # both branches under one whole condition
    return [[0]] if name == "masked_fill" and call.argument("value") == 0 else []  # zeros add up to 0


def _is_exact(call: Call) -> bool:
    return "rounding_mode" not in call.argument_names or call.argument("rounding_mode") is None


def _dims_of_prelu(call: Call) -> Dims:
    dims = letters(len(call.tensors[0].shape))
    slopes = dims[1:2] if call.tensors[1].shape != (1,) else (None,)  # [C] for [N, C, …], or one slope
    return Dims([dims, slopes], [dims], why="element by element")

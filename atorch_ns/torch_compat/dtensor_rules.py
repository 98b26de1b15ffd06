"""Rules of DTensors: how torch's own sharding propagation would divide an operator over one mesh dimension.

It keeps strategies of two kinds: ``op_single_dim_strategy_funcs`` need no mesh, ``op_strategy_funcs`` one.
Operators whose arguments torch changes, such as sizes, and those that it handles elsewhere are left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.utils._pytree import tree_map

_WRONG = frozenset(["aten.native_group_norm.default", "aten.linalg_solve_triangular.default"])
"""Operators whose strategies fail (torch 2.13): the number of samples is an argument, or one is broadcast."""


def dtensor_rules(call: Any, whole: Any, degree: int) -> tuple[Any, ...]:
    """Rules of a call from torch's DTensor strategies; empty if torch has none under the known names.

    Args:
        call, whole: an operator call, and the rule without any division, which serves as a template.
    """
    try:
        placements = dict.fromkeys(_strategy_placements(call, degree))
    except Exception:  # private code, called with tensors that it does not expect
        return ()
    count = len(call.outputs)
    specs = (*call.outputs, *call.tensors)
    return tuple(
        replace(whole, outputs=sides[:count], inputs=sides[count:], source="torch's DTensor")
        for sides in placements
        if len(sides) == len(specs)
        and all(_can_place(side, specs[number], degree, number < count) for number, side in enumerate(sides))
        and any(not isinstance(placement, Replicate) for placement in sides[:count])
    )


def _can_place(placement: Any, spec: Any, degree: int, is_result: bool) -> bool:
    """True if a tensor can have this placement in equal pieces. Results can also be sums of real numbers."""
    if type(placement) is Shard:
        return (
            placement.dim < len(spec.shape)
            and spec.shape[placement.dim] % degree == 0 < spec.shape[placement.dim]
        )
    if type(placement) is Partial:
        return is_result and spec.is_float and placement.reduce_op == "sum"
    return isinstance(placement, Replicate)


def _strategy_placements(call: Any, degree: int) -> Iterator[tuple[Any, ...]]:
    """The placements of results and tensor arguments by each strategy."""
    if not call.tensors or not all(spec.is_float for spec in call.tensors) or _counts_from_last(call):
        return  # strategies for masks and indices, too, are right for some calls alone
    dispatcher, operator = DTensor._op_dispatcher, call.operator
    propagator = dispatcher.sharding_propagator
    special_cases = (*propagator.op_to_shape_and_stride_idx, *dispatcher._custom_op_handlers)
    if operator in special_cases or call.name in _WRONG:  # torch changes their arguments
        return
    if operator in propagator.op_single_dim_strategy_funcs:
        yield from _of_one_dim(call, propagator.op_single_dim_strategy_funcs[operator])
    elif operator in propagator.op_strategy_funcs:
        yield from _of_mesh(call, propagator.op_strategy_funcs[operator], degree)


def _as_meta(spec: Any) -> Any:
    from torch.distributed.tensor._dtensor_spec import TensorMeta

    strides = torch.empty(spec.shape, device="meta").stride()
    return TensorMeta(torch.Size(spec.shape), strides, spec.dtype)


def _map_arguments(call: Any, function: Callable[[Any], Any]) -> tuple[Any, Any]:
    kind = type(call.outputs[0])
    arguments = (call.args, dict(call.kwargs))
    result: tuple[Any, Any] = tree_map(lambda arg: function(arg) if isinstance(arg, kind) else arg, arguments)
    return result


def _counts_from_last(call: Any) -> bool:
    # Strategies for scans take a negative dim literally and would shard it (torch 2.13).
    names = [argument.name for argument in call.operator._schema.arguments]
    arguments = [*zip(names, call.args, strict=False), *call.kwargs.items()]
    return any(name.startswith("dim") and "-" in str(value) for name, value in arguments)


def _of_one_dim(call: Any, strategy: Callable[..., Sequence[Sequence[Any]]]) -> Iterator[tuple[Any, ...]]:
    args, kwargs = _map_arguments(call, _as_meta)
    for sides in strategy(call.operator, args, kwargs):
        # A placeholder stands for a shard of any kind.
        yield tuple(
            Shard(side.dim) if type(side).__name__ == "_ShardingPlaceholder" else side for side in sides
        )


def _of_mesh(call: Any, strategy: Callable[[Any], Any], degree: int) -> Iterator[tuple[Any, ...]]:
    from torch.distributed.tensor._dtensor_spec import DTensorSpec
    from torch.distributed.tensor._op_schema import OpSchema, OpSpec, OpStrategy

    mesh = DeviceMesh("cpu", torch.arange(degree), _init_backend=False, _rank=0)

    def options(spec: Any) -> Any:
        shards = [Shard(dim) for dim in range(len(spec.shape))]
        specs = [
            DTensorSpec(mesh, (entry,), tensor_meta=_as_meta(spec))
            for entry in (Replicate(), *shards, Partial())
        ]
        return OpStrategy([OpSpec(entry, input_specs=()) for entry in specs])

    args, kwargs = _map_arguments(call, options)
    for choice in strategy(OpSchema(call.operator, args, kwargs)).strategies:
        results = choice.output_specs if isinstance(choice.output_specs, tuple) else (choice.output_specs,)
        yield tuple(entry.placements[0] for entry in (*results, *choice.input_specs))

"""Narrow inputs: attention whose code takes the width of its input for that of its results.

Such code works out the size of a head from its input: ``B, T, C = x.shape``, ``q.view(B, T, H, C // H)``,
``y.view(B, T, C)``. Divided, its results have C / n features, and so should C be. The module's code gets a
stand-in for ``x`` with C / n features, and layers that get it from the code see ``x`` itself. A stand-in
holds NaN: code that computes with it gives NaN in the self-test, never a slightly wrong number.

Legend: B batch, T tokens, C width, H heads, n ranks.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from atorch_ns.errors import InputError
from atorch_ns.sharding.tensor.plan import Layout, forward_arguments, layer_sizes
from atorch_ns.sharding.tensor.trace import LayerGraph

_WHOLE = "_whole_input"  # the attribute in which a stand-in holds the tensor that it stands for


def narrowable(
    model: nn.Module, graph: LayerGraph, path: str, columns: Iterable[str], *, degree: int
) -> list[tuple[str, ...]]:
    """Sets of arguments that columns could get whole while the module sees a share, the largest first.

    Args:
        path: the module's path; the graph has a call of it.
        columns: paths of column-parallel layers in it.
        degree: n.
    """
    module, call = model.get_submodule(path), graph.calls[path]
    widths = {layer_sizes(model.get_submodule(column))[1] for column in columns}
    try:
        binding = inspect.signature(module.forward).bind_partial(*call.args, **call.kwargs)
    except (TypeError, ValueError):  # a forward that is not a Python function
        return []
    head = f"{path}." if path else ""
    parameters = forward_arguments(module)
    names = [
        f"{head}{name}"
        for name, value in binding.arguments.items()
        if name in parameters and _can_divide(value, degree) and value.size(-1) in widths
    ]
    return [tuple(names), *((name,) for name in names if len(names) > 1)] if names else []


def narrow_inputs(modules: Mapping[str, nn.Module], layout: Layout, degree: int) -> None:
    """Makes the code of modules see one rank's share of the width of ``layout.narrow_inputs``."""
    homes: dict[str, list[str]] = {}
    for argument in layout.narrow_inputs:
        path, _, name = argument.rpartition(".")
        homes.setdefault(path, []).append(name)
    layer_ids = {id(modules[path]) for path in layout.layers}
    columns = {id(modules[path]) for path, layer in layout.layers.items() if layer.style != "rowwise"}
    for path, names in homes.items():
        _Home(path, names, degree).attach(modules[path], layer_ids, columns)


class _Home:
    """The hooks of one module that sees stand-ins."""

    def __init__(self, path: str, names: Sequence[str], degree: int) -> None:
        self._path = path  # path of the module, for messages
        self._names = names  # arguments of its forward that are replaced
        self._degree = degree  # n
        self._places: dict[str, int] = {}  # their positions among all arguments
        self._inputs: dict[int, torch.Tensor] = {}  # by module: the input that replaces a stand-in

    def attach(self, home: nn.Module, layer_ids: set[int], columns: set[int]) -> None:
        order = list(inspect.signature(home.forward).parameters)
        self._places = {name: order.index(name) for name in self._names}
        home.register_forward_pre_hook(self._narrow_arguments, with_kwargs=True)
        for module in home.modules():
            if id(module) in columns:
                module.register_forward_pre_hook(self._into_column)
            elif module is not home and _stays_whole(module, layer_ids):  # a norm of the input
                module.register_forward_pre_hook(self._into_other, with_kwargs=True)
                module.register_forward_hook(self._out_of_other)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _narrow_arguments(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        inputs = list(args)
        keywords = dict(kwargs)
        for name, index in self._places.items():
            if name in keywords:
                keywords[name] = self._stand_in(keywords[name])
            elif index < len(inputs):
                inputs[index] = self._stand_in(inputs[index])
        return tuple(inputs), keywords

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _into_column(self, column: nn.Module, args: tuple[Any, ...]) -> Any:
        x = _unwrap_stand_in(args[0])
        # Code has computed with the stand-in: its result has the width of one rank.
        if x.size(-1) != layer_sizes(column)[1]:
            raise InputError(
                f"{self._path} computes with its input {', '.join(self._names)} before a divided layer takes it: the "
                f"layer gets {x.size(-1)} features in place of {layer_sizes(column)[1]}. The code takes another course here "
                "than in the self-test (evaluation on a small input). Hand the layers the input as it is, or give "
                "tensor_parallel a plan that leaves them whole."
            )
        return (x, *args[1:])

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _into_other(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._inputs.pop(id(module), None)  # of a call that failed
        for value in (*args, *kwargs.values()):
            if _unwrap_stand_in(value) is not value:
                self._inputs[id(module)] = _unwrap_stand_in(value)
        return tuple(map(_unwrap_stand_in, args)), {
            name: _unwrap_stand_in(value) for name, value in kwargs.items()
        }

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _out_of_other(self, module: nn.Module, args: Any, output: Any) -> Any:
        argument = self._inputs.pop(id(module), None)
        if argument is None or not isinstance(output, torch.Tensor) or output.shape != argument.shape:
            return output
        return self._stand_in(output)  # as wide as its input: the code may reshape by it

    def _stand_in(self, x: Any) -> Any:
        if not _can_divide(x, self._degree):
            return x
        narrow = x.new_full((1,) * x.dim(), float("nan"))  # one element of memory
        narrow = narrow.expand(*x.shape[:-1], x.size(-1) // self._degree)  # [..., C / n]
        vars(narrow)[_WHOLE] = x
        return narrow


def _unwrap_stand_in(value: Any) -> Any:
    return vars(value).get(_WHOLE, value) if isinstance(value, torch.Tensor) else value


def _can_divide(value: Any, degree: int) -> bool:
    if not isinstance(value, torch.Tensor) or not value.is_floating_point() or value.dim() < 2:
        return False
    return value.size(-1) % degree == 0


def _stays_whole(module: nn.Module, layer_ids: set[int]) -> bool:
    if next(module.parameters(), None) is None:  # such as a dropout: it may compute on the stand-in
        return False
    return not any(id(inner) in layer_ids for inner in module.modules())

"""Divisibility: what a tensor-parallel degree divides, and errors that name the degrees that would work."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

from torch import nn

from atorch_ns.capture.blocks import num_heads, num_key_value_heads
from atorch_ns.errors import InputError
from atorch_ns.sharding.tensor.attention import Dims, attention_dims, why_not_by_heads
from atorch_ns.sharding.tensor.plan import (
    LayerStyle,
    Layout,
    RegionSpec,
    common_parent,
    divided_dims,
    integers,
    kind_of,
    layer_sizes,
)
from atorch_ns.sharding.tensor.regions import candidate_regions, counts_heads
from atorch_ns.sharding.tensor.trace import LayerGraph
from atorch_ns.text import first_few
from atorch_ns.torch_compat import plain_name


class UndividedError(InputError):
    """Tensor parallelism divides no layer of the model."""


def misfits(model: nn.Module, layout: Layout, degree: int) -> dict[str, str]:
    """The reasons why layers of the layout cannot be divided by ``degree``, by path."""
    problems: dict[str, str] = {}
    names = names_of(model)
    for path, layer in layout.layers.items():
        module = model.get_submodule(path)
        why = _misfit_reason(module, layer, degree) or _tied_mismatch(model, layout, path, names)
        if why is not None:
            problems[path] = why
    return problems


def parameter_dims(module: nn.Module, layer: LayerStyle) -> Dims:
    """The dimension of each divided parameter and the parts of fused ones, by name in ``module``."""
    if isinstance(module, nn.MultiheadAttention):
        return attention_dims(module)
    kind = kind_of(module)
    if kind is None:
        return {}
    parts = layer.parts if layer.style != "rowwise" else None
    return {name: (dim, parts) for name, dim in divided_dims(layer.style, kind).items()}


def names_of(model: nn.Module) -> dict[int, list[str]]:
    """All names of each parameter, by identity."""
    names_by_id: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names_by_id.setdefault(id(parameter), []).append(plain_name(name))
    return names_by_id


def _misfit_reason(module: nn.Module, layer: LayerStyle, degree: int) -> str | None:
    if layer.style == "heads":
        return why_not_by_heads(module, degree)
    kind = kind_of(module)
    if kind is None:
        return f"{type(module).__name__} is not a layer with one weight of two dimensions"
    if (layer.style == "embedding_rowwise") != isinstance(module, nn.Embedding):
        return f"{layer.style} does not go with {type(module).__name__}"
    outputs, inputs = kind.sizes(module)
    row = layer.style == "rowwise"
    # Rows divide inputs and columns outputs; of fused columns every part must divide.
    sizes = layer.parts if layer.parts and not row else (inputs,) if row else (outputs,)
    if layer.parts and not row and sum(layer.parts) != outputs:
        return f"its parts {list(layer.parts)} do not add up to {outputs} outputs"
    if any(size % degree for size in sizes):
        text = " + ".join(map(str, sizes))
        return f"{text} {'inputs' if row else 'outputs'} do not divide by {degree}"
    return None


def _tied_mismatch(model: nn.Module, layout: Layout, path: str, names: Mapping[int, list[str]]) -> str | None:
    # A tied parameter is divided once: all layers that hold it must divide it along one dimension.
    module = model.get_submodule(path)
    mine = parameter_dims(module, layout.layers[path])
    for name, parameter in module.named_parameters(recurse=False):
        for other in names[id(parameter)]:
            holder, _, its_name = other.rpartition(".")
            theirs = model.get_submodule(holder)
            if kind_of(theirs) is None:
                continue  # it only holds the parameter; a trace shows the layers whose parameters others use
            layer = layout.layers.get(holder)
            dims = {} if layer is None else parameter_dims(theirs, layer)
            if dims.get(its_name) != mine.get(name):
                return f"its {name} is also {other}, which is not divided in the same way"
    return None


def check_degree(model: nn.Module, degree: int) -> None:
    """Checks that ``degree`` divides the model's attention heads, where the model says how many it has.

    Raises:
        InputError: naming the numbers and the degrees that would work.
    """
    heads = num_heads(model)
    if degree < 1 or (heads and heads % degree):
        raise InputError(
            f"tensor={degree} does not divide the {heads} attention heads of {type(model).__name__}, and a head "
            f"is computed by one rank. Use tensor in {_format_set(degrees(model))}, or set undivided='keep' in "
            "tensor_parallel to leave attention whole on every rank."
        )


def degrees(model: nn.Module) -> list[int]:
    """The degrees that divide the model's attention heads, and key/value heads where one above 1 does.

    Empty where the model does not say how many heads it has.
    """
    heads = num_heads(model)
    groups = num_key_value_heads(model)
    both = _find_divisors(math.gcd(heads, groups)) if heads else []
    return both if len(both) > 1 else _find_divisors(heads)  # one shared key head: those of queries


def no_layer_divides(
    model: nn.Module, degree: int, whole_layers: Mapping[str, str], works: Sequence[int]
) -> UndividedError:
    """The error for a model in which nothing can be divided.

    Args:
        whole_layers: the reasons why layers stay whole, by path.
        works: degrees that divide some of its layers.
    """
    reasons = first_few([f"{path}: {why}" for path, why in whole_layers.items()], 3, "; ")
    advice = f"Use tensor in {_format_set(works)}, " if works else ""
    return UndividedError(
        f"tensor={degree} divides no layer of {type(model).__name__}{f' ({reasons})' if reasons else ''}. "
        f"{advice or 'Use '}another axis than tensor, or name layers in the plan of tensor_parallel."
    )


def _find_divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0] if number else []


def _format_set(numbers: Iterable[int]) -> str:
    return "{" + ", ".join(map(str, numbers)) + "}"


def check_heads(model: nn.Module, layout: Layout, graph: LayerGraph, degree: int) -> None:
    """Checks that no attention stays whole that another degree would divide.

    Raises:
        InputError: naming the heads, those of keys and values, and the degrees that would work.
    """
    for path, heads in _whole_attention(model, layout, graph):
        works = _find_divisors(math.gcd(*heads.values()))
        if degree in works or len(works) == 1:  # it stays whole for another reason, or no degree divides it
            continue
        counts = " and ".join(f"{name}={number}" for name, number in heads.items())
        raise InputError(
            f"tensor={degree} does not divide the heads of {path} ({type(model.get_submodule(path)).__name__}: "
            f"{counts}), and a head is computed by one rank. Use tensor in {_format_set(works)}, or set "
            "undivided='keep' in tensor_parallel to leave such attention whole on every rank."
        )


def heads_reason(model: nn.Module, spec: RegionSpec, degree: int) -> str:
    """The reason why heads keep attention whole, and degrees that divide them; empty where they do not."""
    outputs, inputs = _region_widths(model, spec)
    if len(outputs) == 1 and outputs[0] <= inputs:  # an MLP, which has no heads
        return ""
    heads = _head_counts(model, spec, common_parent(spec.layers))
    uneven = [f"{name}={number}" for name, number in heads.items() if number % degree]
    if not uneven:
        return ""
    works = _find_divisors(math.gcd(*heads.values()))
    verb = "is" if len(uneven) == 1 else "are"
    return f"{' and '.join(uneven)} {verb} not divisible by {degree}; tensor in {_format_set(works)} would divide the heads"


def _whole_attention(
    model: nn.Module, layout: Layout, graph: LayerGraph
) -> Iterator[tuple[str, dict[str, int]]]:
    # An nn.MultiheadAttention is in no region: it never calls its layers, but reads their weights.
    for path, module in model.named_modules():
        if isinstance(module, nn.MultiheadAttention) and path in graph.calls and path not in layout.layers:
            yield path, {"num_heads": module.num_heads}
    for spec in candidate_regions(graph):
        if any(row in layout.layers for row in spec.rows):
            continue
        path = common_parent(spec.layers)
        heads = _attention_head_counts(model, spec, path)
        if heads:
            yield path, heads


def _attention_head_counts(model: nn.Module, spec: RegionSpec, path: str) -> dict[str, int]:
    # Attention has columns for queries, keys and values, or a fused one that is wider than the row's input.
    outputs, inputs = _region_widths(model, spec)
    return {} if len(outputs) < 3 and max(outputs) <= inputs else _head_counts(model, spec, path)


def _region_widths(model: nn.Module, spec: RegionSpec) -> tuple[list[int], int]:
    outputs = [layer_sizes(model.get_submodule(column))[0] for column in spec.columns]
    return outputs, layer_sizes(model.get_submodule(spec.rows[0]))[1]


def _head_counts(model: nn.Module, spec: RegionSpec, path: str) -> dict[str, int]:
    _, inputs = _region_widths(model, spec)
    home = model.get_submodule(path)
    counts: dict[str, int] = {}
    for module in home.modules():
        if kind_of(module) is not None:  # the sizes of a layer count no heads
            continue
        for name, number, _ in integers(module):
            attribute = name.rpartition(".")[2]
            if number > 0 and not attribute.startswith("_") and counts_heads(attribute):
                counts.setdefault(attribute, number)
    # A count that does not divide the width is that of something else.
    return {name: number for name, number in counts.items() if inputs % number == 0}

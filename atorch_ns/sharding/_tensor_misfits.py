"""What a layout asks of a model that cannot be done."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from atorch_ns.sharding._tensor_attention import Dims, attention_dims, why_not_by_heads
from atorch_ns.sharding._tensor_kinds import kind_of
from atorch_ns.sharding._tensor_layers import divided_dims
from atorch_ns.sharding._tensor_plan import LayerStyle, Layout
from atorch_ns.torch_compat import plain_name

__all__ = ["misfits", "names_of", "parameter_dims"]


def misfits(model: nn.Module, layout: Layout, degree: int) -> dict[str, str]:
    """Why layers of the layout cannot be divided by ``degree``, by path."""
    found: dict[str, str] = {}
    names = names_of(model)
    for path, layer in layout.layers.items():
        module = model.get_submodule(path)
        why = _misfit(module, layer, degree) or _tied_apart(model, layout, path, names)
        if why is not None:
            found[path] = why
    return found


def parameter_dims(module: nn.Module, layer: LayerStyle) -> Dims:
    """For each parameter that is divided, by its name in ``module``: the dimension, and the parts of a fused one."""
    if isinstance(module, nn.MultiheadAttention):
        return attention_dims(module)
    kind = kind_of(module)
    if kind is None:
        return {}
    parts = layer.parts if layer.style != "rowwise" else None
    return {name: (dim, parts) for name, dim in divided_dims(layer.style, kind).items()}


def names_of(model: nn.Module) -> dict[int, list[str]]:
    """All names of each parameter, by identity."""
    found: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        found.setdefault(id(parameter), []).append(plain_name(name))
    return found


def _misfit(module: nn.Module, layer: LayerStyle, degree: int) -> str | None:
    if layer.style == "heads":
        return why_not_by_heads(module, degree)
    kind = kind_of(module)
    if kind is None:
        return f"{type(module).__name__} is no layer with one weight of two dimensions"
    if (layer.style == "embedding_rowwise") != isinstance(module, nn.Embedding):
        return f"{layer.style} does not go with {type(module).__name__}"
    outputs, inputs = kind.sizes(module)
    row = layer.style == "rowwise"
    wanted = layer.parts if layer.parts and not row else (inputs,) if row else (outputs,)
    if layer.parts and not row and sum(layer.parts) != outputs:
        return f"its parts {list(layer.parts)} do not add up to {outputs} outputs"
    if any(size % degree for size in wanted):
        shown = " + ".join(map(str, wanted))
        return f"{shown} {'inputs' if row else 'outputs'} do not divide by {degree}"
    return None


def _tied_apart(model: nn.Module, layout: Layout, path: str, names: Mapping[int, list[str]]) -> str | None:
    """Layers that share a parameter must divide it alike."""
    module = model.get_submodule(path)
    mine = parameter_dims(module, layout.layers[path])
    for name, parameter in module.named_parameters(recurse=False):
        for other in names[id(parameter)]:
            holder, _, its_name = other.rpartition(".")
            theirs = model.get_submodule(holder)
            if kind_of(theirs) is None:
                continue  # it only holds the parameter: a trace shows layers whose parameters others use
            layer = layout.layers.get(holder)
            dims = {} if layer is None else parameter_dims(theirs, layer)
            if dims.get(its_name) != mine.get(name):
                return f"its {name} is also {other}, which is not divided in the same way"
    return None

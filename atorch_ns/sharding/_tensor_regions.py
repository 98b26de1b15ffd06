"""Regions: columns and the rows that their results flow into, found in the graph of a model's layers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from torch import nn

from atorch_ns.sharding._tensor_apply import RegionSpec, common_parent
from atorch_ns.sharding._tensor_plan import LayerStyle, Layout
from atorch_ns.sharding._tensor_trace import LayerGraph

PLACES = ("idx", "index", "layer", "depth")
"""In names of numbers that say where a module stands: they differ from block to block."""

__all__ = ["PLACES", "candidate_regions", "layout_of", "regions_in", "relative", "signature"]


def candidate_regions(graph: LayerGraph) -> list[RegionSpec]:
    """Stretches that could be divided, smallest first, then in the order of calls; they may overlap.

    A column's results must all flow into rows, and a row's input must come from columns alone: the connected
    components of the graph from layers to the layers that take their results. The residual stream of a
    transformer is one, huge, component (all layers that write to it, all that read it); the small ones inside
    blocks exclude it.
    """
    order = {path: place for place, path in enumerate(graph.nodes)}
    groups = _components(graph)
    specs = []
    for columns, rows in groups:
        leaks = columns & graph.outputs
        outside = [path for path in columns | rows if graph.nodes[path].used_elsewhere]
        if leaks or outside or columns & rows:
            continue
        inside = tuple(sorted(columns, key=order.__getitem__))
        spec = RegionSpec(inside, tuple(sorted(rows, key=order.__getitem__)))
        specs.append(replace(spec, random=bool(columns & graph.random)))
    return sorted(specs, key=lambda spec: (len(spec.columns) + len(spec.rows), order[spec.rows[0]]))


def _components(graph: LayerGraph) -> list[tuple[set[str], set[str]]]:
    found: list[tuple[set[str], set[str]]] = []
    for path, node in graph.nodes.items():
        if not node.sources:
            continue
        columns, rows = set(node.sources), {path}
        apart = []
        for group in found:
            if group[0] & columns:
                columns |= group[0]
                rows |= group[1]
            else:
                apart.append(group)
        found = [*apart, (columns, rows)]
    return found


def regions_in(graph: LayerGraph, layout: Layout) -> list[RegionSpec]:
    """The regions that a layout makes: columns whose results flow into rows of the layout."""
    style = {path: layer.style for path, layer in layout.layers.items()}
    return [
        spec
        for spec in candidate_regions(graph)
        if all(style.get(path) == "colwise" for path in spec.columns)
        and all(style.get(path) == "rowwise" for path in spec.rows)
    ]


def layout_of(
    spec: RegionSpec,
    parts: Mapping[str, tuple[int, ...] | None] | None = None,
    attributes: Iterable[str] = (),
) -> Layout:
    """The layout that divides one region."""
    fused = parts or {}
    layers = {path: LayerStyle("colwise", fused.get(path)) for path in spec.columns}
    layers |= {path: LayerStyle("rowwise") for path in spec.rows}
    return Layout(layers, tuple(attributes))


def signature(model: nn.Module, spec: RegionSpec) -> tuple[object, ...]:
    """Equal for regions that are divided in the same way: the same code, names, sizes and numbers."""
    parent = common_parent((*spec.columns, *spec.rows))
    names = tuple(relative(path, parent) for path in (*spec.columns, *spec.rows))
    shapes = tuple(
        tuple(model.get_submodule(path).weight.shape)  # type: ignore[arg-type]
        for path in (*spec.columns, *spec.rows)
    )
    home = model.get_submodule(parent)
    shared = parent if isinstance(home, (nn.ModuleList, nn.Sequential)) or not parent else ""
    return type(home), shared, len(spec.columns), names, shapes, _numbers(home)


def _numbers(home: nn.Module) -> tuple[tuple[str, int], ...]:
    """Integers that code may reshape by; not those that say where a module stands."""
    return tuple(
        (f"{path}.{name}", value)
        for path, module in home.named_modules()
        for name, value in vars(module).items()
        if type(value) is int and not any(word in name for word in PLACES)
    )


def relative(path: str, parent: str) -> str:
    """``path`` as ``parent`` sees it."""
    return path.removeprefix(f"{parent}.") if parent else path

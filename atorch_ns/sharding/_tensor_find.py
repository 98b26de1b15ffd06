"""Finding how to divide the layers of a model that nobody prepared."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

from torch import nn

from atorch_ns.sharding._tensor_apply import RegionSpec, common_parent
from atorch_ns.sharding._tensor_candidates import candidate_layouts
from atorch_ns.sharding._tensor_heads import heads_reason
from atorch_ns.sharding._tensor_kinds import kind_of
from atorch_ns.sharding._tensor_misfits import misfits
from atorch_ns.sharding._tensor_narrow import narrowable
from atorch_ns.sharding._tensor_plan import LayerStyle, Layout, TensorPlan, with_wildcards
from atorch_ns.sharding._tensor_reasons import narrow_reason, reshape_reason
from atorch_ns.sharding._tensor_regions import candidate_regions, layout_of, relative, signature
from atorch_ns.sharding._tensor_test import fits
from atorch_ns.sharding._tensor_trace import LayerGraph
from atorch_ns.sharding._tensor_units import Unit, unit_for

__all__ = ["Accept", "find_tensor_plan", "plan_from", "with_vocabulary"]

Accept = Callable[[Unit, Layout, list[RegionSpec]], bool]
"""``(unit, layout, regions) -> whether it computes what the whole unit does``; paths are the unit's."""

_MOST_TRIES = 24
"""Layouts of one region that run and are then compared with the whole, at most."""


@dataclass
class _Found:
    layout: Layout = field(default_factory=lambda: Layout({}))
    left: dict[str, str] = field(default_factory=dict)


def find_tensor_plan(
    model: nn.Module, degree: int, graph: LayerGraph, *, accept: Accept | None = None
) -> TensorPlan:
    """A plan for ``model``, from how its layers are connected.

    Columns and rows are found in the graph, the smallest stretches first; of each, the first layout that runs
    and that ``accept`` agrees to. Then the embedding of the vocabulary and the head are divided, where that
    is possible.

    Args:
        model: whole; not changed.
        degree: ranks that layers are divided over.
        graph: of :func:`trace_layers`.
        accept: the numerical test; ``None`` to go by shapes alone, which a wrong order of heads passes.
    """
    found = _Found()
    known: dict[object, tuple[Layout | None, str]] = {}
    for spec in candidate_regions(graph):
        if any(path in found.layout.layers for path in (*spec.columns, *spec.rows)):
            continue
        key = signature(model, spec)
        parent = common_parent((*spec.columns, *spec.rows))
        if key not in known:
            layout, why = _divide_region(model, degree, graph, spec, accept)
            known[key] = (None if layout is None else layout.within(parent), why)
        inner, why = known[key]
        if inner is None:
            found.left = {**dict.fromkeys((*spec.columns, *spec.rows), why), **found.left}
        else:
            found.layout = found.layout.joined(inner.placed(parent))
    _divide_attention(model, degree, graph, found, accept)
    found.layout = with_vocabulary(model, found.layout, degree, graph)
    found.left = {p: why for p, why in found.left.items() if p not in found.layout.layers}
    _name_the_rest(model, graph, found, degree)
    return plan_from(model, found.layout, left=found.left)


def _divide_region(
    model: nn.Module, degree: int, graph: LayerGraph, spec: RegionSpec, accept: Accept | None
) -> tuple[Layout | None, str]:
    """The first layout that works, or why none does."""
    apart = misfits(model, layout_of(spec), degree)
    if apart:
        path, why = next(iter(apart.items()))
        return None, why if path in spec.columns else f"{path}: {why}"
    unit = unit_for(model, graph, common_parent((*spec.columns, *spec.rows)))
    inner = RegionSpec(
        tuple(relative(path, unit.path) for path in spec.columns),
        tuple(relative(path, unit.path) for path in spec.rows),
        random=False,
    )
    refusals: list[str] = []
    wrong: list[Layout] = []
    inputs = narrowable(model, graph, unit.path, spec.columns, degree)
    for layout in candidate_layouts(model, spec, degree, inputs):
        if misfits(model, layout, degree):
            continue
        local = layout.within(unit.path)
        refused = fits(unit, local, [inner], degree, training=bool(layout.narrow_inputs))
        if refused is None:
            if accept is None or accept(unit, local, [inner]):
                return layout, ""
            refused = "no layout tried gives the results of the whole"
            wrong.append(layout)
        refusals.append(refused)
        if len(wrong) >= _MOST_TRIES:
            break
    if wrong:
        return None, narrow_reason(wrong) or refusals[0]
    layers = (kind_of(model.get_submodule(path)) for path in (*spec.columns, *spec.rows))
    widths = [
        size
        for path, kind in zip((*spec.columns, *spec.rows), layers, strict=True)
        if kind is not None
        for size in kind.sizes(model.get_submodule(path))
    ]
    why = reshape_reason(refusals, widths, degree) or heads_reason(model, spec, degree)
    return None, why or next(iter(refusals), "")


def _divide_attention(
    model: nn.Module, degree: int, graph: LayerGraph, found: _Found, accept: Accept | None
) -> None:
    """Divides modules of torch's own attention by heads."""
    known: dict[object, str | None] = {}
    for path, module in model.named_modules():
        if not isinstance(module, nn.MultiheadAttention) or path not in graph.calls:
            continue
        layout = Layout({path: LayerStyle("heads")})
        unit = unit_for(model, graph, path.rpartition(".")[0])
        key = (type(unit.module), relative(path, unit.path), module.num_heads, module.embed_dim)
        if key not in known:
            local = layout.within(unit.path)
            refused = misfits(model, layout, degree).get(path) or fits(unit, local, [], degree)
            if refused is None and accept is not None and not accept(unit, local, []):
                refused = "divided by heads it does not give the results of the whole"
            known[key] = refused
        refused = known[key]
        if refused is None:
            found.layout = found.layout.joined(layout)
        else:
            found.left[path] = refused


def with_vocabulary(model: nn.Module, layout: Layout, degree: int, graph: LayerGraph) -> Layout:
    """The layout with the embedding of the vocabulary and the heads that end the model divided too."""
    ends = _ends(model, layout, graph)
    wanted = layout.joined(Layout(ends))
    while apart := misfits(model, wanted, degree).keys() & ends.keys():
        wanted = replace(wanted, layers={p: s for p, s in wanted.layers.items() if p not in apart})
    return wanted


def _ends(model: nn.Module, layout: Layout, graph: LayerGraph) -> dict[str, LayerStyle]:
    """The embedding of the vocabulary and the heads that end the model, where the layout leaves them whole."""
    heads = {
        path: LayerStyle("colwise_gather_output")
        for path in graph.nodes
        if path in graph.outputs and _is_head(model, path, graph)
    }
    tables = {path: LayerStyle("embedding_rowwise") for path in _vocabularies(model, graph)}
    return {path: style for path, style in {**heads, **tables}.items() if path not in layout.layers}


def _is_head(model: nn.Module, path: str, graph: LayerGraph) -> bool:
    module = model.get_submodule(path)
    kind = kind_of(module)
    if kind is None or isinstance(module, nn.Embedding) or graph.nodes[path].used_elsewhere:
        return False
    read = any(path in node.sources for node in graph.nodes.values())
    outputs, inputs = kind.sizes(module)
    return not read and outputs >= inputs


def _vocabularies(model: nn.Module, graph: LayerGraph) -> Iterable[str]:
    """Embeddings with about as many rows as the largest, those of positions left out."""
    rows = {
        path: module.num_embeddings
        for path, node in graph.nodes.items()
        if isinstance(module := model.get_submodule(path), nn.Embedding) and not node.used_elsewhere
    }
    words = {
        path: n
        for path, n in rows.items()
        if "pos" not in path.rpartition(".")[2].lower() and "wpe" not in path
    }
    return [path for path, n in words.items() if 2 * n >= max(words.values())]


def _name_the_rest(model: nn.Module, graph: LayerGraph, found: _Found, degree: int) -> None:
    ends = _ends(model, found.layout, graph)
    uneven = {
        path: f"its size {size} is not divisible by {degree}"
        for path in ends
        if (kind := kind_of(module := model.get_submodule(path))) and (size := kind.sizes(module)[0]) % degree
    }
    for path in graph.nodes:
        if path not in found.layout.layers and path not in found.left:
            elsewhere = graph.nodes[path].used_elsewhere
            found.left[path] = uneven.get(
                path, "its weight is used outside it too" if elsewhere else "no pair of layers to divide"
            )


def plan_from(model: nn.Module, layout: Layout, *, left: dict[str, str] | None = None) -> TensorPlan:
    """A plan that resolves to ``layout``, in patterns."""
    paths = [path for path, _ in model.named_modules()]
    styles: dict[str, str] = {}
    parts: dict[str, tuple[int, ...]] = {}
    for layer in dict.fromkeys(layout.layers.values()):
        same = [path for path, other in layout.layers.items() if other == layer]
        for pattern in with_wildcards(same, paths):
            styles[pattern] = layer.style
            if layer.parts is not None:
                parts[pattern] = layer.parts
    numbers = tuple(with_wildcards(layout.attributes, layout.attributes))
    inputs = tuple(with_wildcards(layout.narrow_inputs, layout.narrow_inputs))
    return TensorPlan(
        styles=styles, attributes=numbers, parts=parts, narrow_inputs=inputs, where="found", left=left or {}
    )

"""Regions of divided layers: where a model could be divided, and the layouts that may divide a region."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from torch import nn

from atorch_ns.sharding.tensor.plan import (
    LayerStyle,
    Layout,
    RegionSpec,
    common_parent,
    integers,
    kind_of,
    layer_sizes,
    relative,
)
from atorch_ns.sharding.tensor.trace import LayerGraph

# Parts of the names of numbers that give a module's place in the model: they differ from block to block.
_PLACE_WORDS = ("idx", "index", "layer", "depth")


def candidate_regions(graph: LayerGraph) -> list[RegionSpec]:
    """The regions that could be divided, smallest first, then in the order of calls; they may overlap.

    The results of a column-parallel layer must all flow into row-parallel layers, whose inputs must come from
    column-parallel layers alone. So regions are connected components of the graph from layers to layers that
    take their results. The residual stream of a transformer is a huge one; small ones inside blocks exclude
    it.
    """
    order = {path: index for index, path in enumerate(graph.nodes)}
    specs = []
    for columns, rows in _find_components(graph):
        leaks = columns & graph.outputs  # results that leave the model must be whole
        outside = [path for path in columns | rows if graph.nodes[path].used_elsewhere]
        if leaks or outside or columns & rows:
            continue
        inside = tuple(sorted(columns, key=order.__getitem__))
        spec = RegionSpec(inside, tuple(sorted(rows, key=order.__getitem__)))
        # Its layers are on several ranks of a pipeline.
        if len({graph.stage_of(layer) for layer in spec.layers}) > 1:
            continue
        specs.append(replace(spec, random=bool(columns & graph.random)))
    return sorted(specs, key=lambda spec: (len(spec.layers), order[spec.rows[0]]))


def _find_components(graph: LayerGraph) -> list[tuple[set[str], set[str]]]:
    components: list[tuple[set[str], set[str]]] = []
    for path, node in graph.nodes.items():
        if not node.sources:
            continue
        # A row joins all components with which it shares a column.
        columns, rows = set(node.sources), {path}
        separate = []
        for component in components:
            if component[0] & columns:
                columns |= component[0]
                rows |= component[1]
            else:
                separate.append(component)
        components = [*separate, (columns, rows)]
    return components


def regions_in(graph: LayerGraph, layout: Layout) -> list[RegionSpec]:
    """The regions whose layers a layout divides as columns and rows."""
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
    """The layout that divides one region, with the parts of fused layers by path."""
    fused = parts or {}
    layers = {path: LayerStyle("colwise", fused.get(path)) for path in spec.columns}
    layers |= {path: LayerStyle("rowwise") for path in spec.rows}
    return Layout(layers, tuple(attributes))


def signature(model: nn.Module, spec: RegionSpec) -> tuple[object, ...]:
    """A key that is equal for regions that are divided alike: same code, names, sizes and numbers."""
    parent = common_parent(spec.layers)
    names = tuple(relative(path, parent) for path in spec.layers)
    shapes = tuple(tuple(model.get_submodule(path).weight.shape) for path in spec.layers)  # type: ignore[arg-type]
    home = model.get_submodule(parent)
    # Containers have no code of their own: regions in two of them may differ in the code around.
    shared = parent if isinstance(home, (nn.ModuleList, nn.Sequential)) or not parent else ""
    return type(home), shared, len(spec.columns), names, shapes, _integer_attributes(home)


def _integer_attributes(home: nn.Module) -> tuple[tuple[str, int], ...]:
    # Numbers by which code may reshape: those of a place differ from block to block.
    return tuple(
        (f"{path}.{name}", value)
        for path, module in home.named_modules()
        for name, value in vars(module).items()
        if type(value) is int and not any(word in name for word in _PLACE_WORDS)
    )


_MOST_SUBSETS = 6  # the most numbers of which all subsets are tried; of more, only whole groups

_MOST_LAYERS = 8  # a region of more layers is not an attention or MLP, and is slow to try

_MOST_OTHERS = 64  # the most sets tried of numbers whose names do not show what they are

Parts = Mapping[str, tuple[int, ...] | None]


def candidate_layouts(
    model: nn.Module, spec: RegionSpec, degree: int, inputs: Iterable[tuple[str, ...]] = ()
) -> Iterator[Layout]:
    """Layouts that may divide one region, the likeliest first; a test must decide between them.

    Code that reshapes by the sizes it finds needs no attribute changed; code that reshapes by the number of
    heads needs that one divided, and code that splits a fused result by widths needs those. A fused layer is
    ``[q | k | v]`` or lies head by head, which only its results show. Code that takes its input's width for
    that of its results must see a narrower one: ``inputs`` are sets of such arguments.
    """
    likely = _unique_sets(_likely_sets(model, spec, degree))
    for sets in (likely, _unique_sets(_other_sets(model, spec, degree), earlier=likely)):
        for narrow, attributes in itertools.product(((), *inputs), sets):
            for parts in _part_choices(model, spec):
                yield replace(layout_of(spec, parts, attributes), narrow_inputs=narrow)


def _part_choices(model: nn.Module, spec: RegionSpec) -> Iterator[Parts]:
    inner = layer_sizes(model.get_submodule(spec.rows[0]))[1]  # the width between columns and rows
    outputs = {path: layer_sizes(model.get_submodule(path))[0] for path in spec.columns}
    alone = len(set(outputs.values())) == 1  # several are summands of one result, as a layer and its adapter
    options: list[list[tuple[str, tuple[int, ...] | None]]] = [
        [(path, parts) for parts in _list_splits(size, inner, alone=alone)] for path, size in outputs.items()
    ]
    if len(options) > 1 and max(len(option) for option in options) > 1:
        # Layers of equal sizes are cut alike.
        count = max(len(option) for option in options)
        for choice in range(count):
            yield dict(option[min(choice, len(option) - 1)] for option in options)
        return
    for combination in itertools.product(*options):
        yield dict(combination)


def _list_splits(outputs: int, inner: int, *, alone: bool) -> list[tuple[int, ...] | None]:
    # A column of `outputs` features may be fused in these ways, where rows take `inner` features.
    splits: list[tuple[int, ...] | None] = []
    if alone and outputs > inner:
        rest = outputs - inner
        if outputs % inner == 0:
            splits.append((inner,) * (outputs // inner))  # [q | k | v], or gate and up
        if rest % 2 == 0:
            splits.append((inner, rest // 2, rest // 2))  # queries, fewer keys and values
    elif outputs == 2 * inner:
        splits.append((inner, inner))  # [k | v] beside queries
    return list(dict.fromkeys([*splits, None]))  # None: not fused, or fused head by head


def _unique_sets(
    groups: Iterable[tuple[str, ...]], earlier: Iterable[tuple[str, ...]] = ()
) -> list[tuple[str, ...]]:
    keys = {frozenset(group) for group in earlier}  # their order does not matter
    result = []
    for group in groups:
        if frozenset(group) not in keys:
            keys.add(frozenset(group))
            result.append(group)
    return result


def _likely_sets(model: nn.Module, spec: RegionSpec, degree: int) -> Iterator[tuple[str, ...]]:
    attributes, settings = (
        _size_candidates(model, spec, degree, of_settings=of_settings) for of_settings in (False, True)
    )
    for numbers in (attributes, settings, [*attributes, *settings]):
        heads, wide, _ = _sorted_numbers(model, spec, numbers)
        yield from ((), heads, (*heads, *wide), wide)  # none first: code may go by the sizes that it finds
        both = (*heads, *wide)
        if len(both) <= _MOST_SUBSETS:
            yield from (s for n in range(1, len(both) + 1) for s in itertools.combinations(both, n))


def _other_sets(model: nn.Module, spec: RegionSpec, degree: int) -> Iterator[tuple[str, ...]]:
    if len(spec.layers) > _MOST_LAYERS:
        return
    attributes = _size_candidates(model, spec, degree, of_settings=False)
    for numbers in (attributes, [*attributes, *_size_candidates(model, spec, degree, of_settings=True)]):
        heads, wide, others = _sorted_numbers(model, spec, numbers)
        # Few numbers first, each set with and without the likely ones.
        sets = (
            (*likely, *extra)
            for n in range(1, len(others) + 1)
            for extra in itertools.combinations(others, n)
            for likely in ((), heads, (*heads, *wide), wide)
        )
        yield from itertools.islice(sets, _MOST_OTHERS)


def _sorted_numbers(
    model: nn.Module, spec: RegionSpec, numbers: list[tuple[str, int]]
) -> tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]:
    sizes = {size for path in spec.layers for size in layer_sizes(model.get_submodule(path))}
    # Widths of layers, and halves and thirds of fused ones.
    widths = sizes | {size // parts for size in sizes for parts in (2, 3) if size % parts == 0}
    heads = tuple(path for path, _ in numbers if counts_heads(path))  # by name; widths by value
    wide = tuple(path for path, value in numbers if value in widths and path not in heads)
    others = tuple(
        path
        for path, value in numbers
        if path not in (*heads, *wide)
        and any(size % value == 0 for size in sizes)
        and not any(word in path.rpartition(".")[2].lower() for word in _PLACE_WORDS)
    )
    return heads, wide, others


def counts_heads(path: str) -> bool:
    """Returns whether the name of a number, which may be a path, says that it counts attention heads."""
    name = path.rpartition(".")[2].lower()
    if name in ("h", "n_h", "nh", "nhead", "n_head", "heads", "kv", "n_kv", "num_kv"):
        return True
    # head_dim, head_size and num_kv_head_groups count no heads.
    return "head" in name and not any(
        word in name for word in ("dim", "size", "width", "group", "idx", "index")
    )


def _size_candidates(
    model: nn.Module, spec: RegionSpec, degree: int, *, of_settings: bool
) -> list[tuple[str, int]]:
    parent = common_parent(spec.layers)
    pairs = [
        (".".join(filter(None, (parent, inner, name))), value)
        for inner, module in model.get_submodule(parent).named_modules()
        if kind_of(module) is None  # as_divided changes the numbers of layers
        for name, value, in_settings in integers(module)
        if in_settings is of_settings
    ]
    return [
        (path, value)
        for path, value in pairs
        if value > 1 and value % degree == 0 and not path.rpartition(".")[2].startswith("_")
    ]

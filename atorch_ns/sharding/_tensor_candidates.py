"""Ways in which a region could be divided: how fused layers are cut, which numbers become smaller."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from torch import nn

from atorch_ns.sharding._tensor_apply import RegionSpec, common_parent
from atorch_ns.sharding._tensor_kinds import kind_of
from atorch_ns.sharding._tensor_plan import Layout, is_settings
from atorch_ns.sharding._tensor_regions import PLACES, layout_of

__all__ = ["candidate_layouts", "counts_heads"]

_MOST_SUBSETS = 6
"""With more numbers than this only whole groups of them are tried."""

_MOST_LAYERS = 8
"""A stretch of more layers is no attention or MLP, and is slow to try."""

_MOST_OTHERS = 64
"""Sets that hold numbers whose names say nothing, at most."""

Parts = Mapping[str, tuple[int, ...] | None]


def candidate_layouts(
    model: nn.Module, spec: RegionSpec, degree: int, inputs: Iterable[tuple[str, ...]] = ()
) -> Iterator[Layout]:
    """Layouts of one region, the likeliest first; a test must decide between them.

    Code that reshapes by the size it finds needs no number changed; code that reshapes by the number of heads
    needs that, and code that splits a fused result by widths needs those. A fused layer is
    ``[q | k | v]`` or lies head by head; only its results tell. Code that takes the width of its input for that
    of its results needs to see another: ``inputs`` are sets of such arguments.
    """
    likely = _distinct(_likely_sets(model, spec, degree))
    for sets in (likely, _distinct(_other_sets(model, spec, degree), known=likely)):
        for narrow, attributes in itertools.product(((), *inputs), sets):
            for parts in _part_choices(model, spec):
                yield replace(layout_of(spec, parts, attributes), narrow_inputs=narrow)


def _sizes(model: nn.Module, path: str) -> tuple[int, int]:
    module = model.get_submodule(path)
    kind = kind_of(module)
    assert kind is not None
    return kind.sizes(module)


def _part_choices(model: nn.Module, spec: RegionSpec) -> Iterator[Parts]:
    inner = _sizes(model, spec.rows[0])[1]
    options: list[list[tuple[str, tuple[int, ...] | None]]] = []
    for path in spec.columns:
        outputs = _sizes(model, path)[0]
        options.append([(path, parts) for parts in _splits(outputs, inner, alone=len(spec.columns) == 1)])
    if len(options) > 1 and max(len(option) for option in options) > 1:
        # Layers of equal sizes are cut alike.
        count = max(len(option) for option in options)
        for choice in range(count):
            yield dict(option[min(choice, len(option) - 1)] for option in options)
        return
    for combination in itertools.product(*options):
        yield dict(combination)


def _splits(outputs: int, inner: int, *, alone: bool) -> list[tuple[int, ...] | None]:
    """How a layer with that many outputs may be fused, where rows take ``inner`` inputs."""
    found: list[tuple[int, ...] | None] = []
    if alone and outputs > inner:
        rest = outputs - inner
        if outputs % inner == 0:
            found.append((inner,) * (outputs // inner))
        if rest % 2 == 0:
            found.append((inner, rest // 2, rest // 2))  # queries, fewer keys and values
    elif outputs == 2 * inner:
        found.append((inner, inner))
    return list(dict.fromkeys([*found, None]))


def _distinct(
    groups: Iterable[tuple[str, ...]], known: Iterable[tuple[str, ...]] = ()
) -> list[tuple[str, ...]]:
    """The first of equal sets, without those that are ``known``."""
    seen = {frozenset(group) for group in known}
    found = []
    for group in groups:
        if frozenset(group) not in seen:
            seen.add(frozenset(group))
            found.append(group)
    return found


def _likely_sets(model: nn.Module, spec: RegionSpec, degree: int) -> Iterator[tuple[str, ...]]:
    """Sets of numbers to divide whose names or values tell what they are."""
    for of_settings in (False, True):
        heads, wide, _ = _sorted_numbers(model, spec, _numbers(model, spec, degree, of_settings=of_settings))
        yield from ((), heads, (*heads, *wide), wide)
        both = (*heads, *wide)
        if len(both) <= _MOST_SUBSETS:
            yield from (s for n in range(1, len(both) + 1) for s in itertools.combinations(both, n))


def _other_sets(model: nn.Module, spec: RegionSpec, degree: int) -> Iterator[tuple[str, ...]]:
    """Sets with numbers whose names say nothing, few of these first, each with and without the likely ones."""
    if len(spec.columns) + len(spec.rows) > _MOST_LAYERS:
        return
    own = _numbers(model, spec, degree, of_settings=False)
    for numbers in (own, [*own, *_numbers(model, spec, degree, of_settings=True)]):
        heads, wide, others = _sorted_numbers(model, spec, numbers)
        sets = (
            (*likely, *chosen)
            for n in range(1, len(others) + 1)
            for chosen in itertools.combinations(others, n)
            for likely in ((), heads, (*heads, *wide), wide)
        )
        yield from itertools.islice(sets, _MOST_OTHERS)


def _sorted_numbers(
    model: nn.Module, spec: RegionSpec, numbers: list[tuple[str, int]]
) -> tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]:
    """The paths of numbers that count heads, that are widths, and of others that divide a width."""
    sizes = {size for path in (*spec.columns, *spec.rows) for size in _sizes(model, path)}
    widths = sizes | {size // parts for size in sizes for parts in (2, 3) if size % parts == 0}
    heads = tuple(path for path, _ in numbers if counts_heads(path))
    wide = tuple(path for path, value in numbers if value in widths and path not in heads)
    others = tuple(
        path
        for path, value in numbers
        if path not in (*heads, *wide)
        and any(size % value == 0 for size in sizes)
        and not any(word in path.rpartition(".")[2].lower() for word in PLACES)
    )
    return heads, wide, others


def counts_heads(path: str) -> bool:
    """Whether a number's name, which may be a path, says that it counts attention heads."""
    name = path.rpartition(".")[2].lower()
    if name in ("h", "n_h", "nh", "nhead", "n_head", "heads", "kv", "n_kv", "num_kv"):
        return True
    return "head" in name and not any(
        word in name for word in ("dim", "size", "width", "group", "idx", "index")
    )


def _numbers(model: nn.Module, spec: RegionSpec, degree: int, *, of_settings: bool) -> list[tuple[str, int]]:
    """Numbers that the degree divides, in the modules around the layers of the region."""
    layers = {*spec.columns, *spec.rows}
    parent = common_parent(tuple(layers))
    home = model.get_submodule(parent)
    found = []
    for inner, module in home.named_modules():
        path = ".".join(part for part in (parent, inner) if part)
        if kind_of(module) is not None:
            continue
        for name, value in vars(module).items():
            where = f"{path}.{name}" if path else name
            if type(value) is int and not of_settings:
                found.append((where, value))
            elif of_settings and is_settings(value):
                found += [(f"{where}.{n}", v) for n, v in vars(value).items() if type(v) is int]
    return [
        (path, value)
        for path, value in found
        if value > 1 and value % degree == 0 and not path.rpartition(".")[2].startswith("_")
    ]

"""Attention that stays whole because the degree does not divide its heads."""

from __future__ import annotations

import math
from collections.abc import Iterator

from torch import nn

from atorch_ns.errors import InputError
from atorch_ns.sharding._tensor_apply import RegionSpec, common_parent
from atorch_ns.sharding._tensor_candidates import counts_heads
from atorch_ns.sharding._tensor_kinds import kind_of
from atorch_ns.sharding._tensor_plan import Layout, is_settings
from atorch_ns.sharding._tensor_regions import candidate_regions
from atorch_ns.sharding._tensor_trace import LayerGraph

__all__ = ["check_heads", "heads_reason"]


def check_heads(model: nn.Module, layout: Layout, graph: LayerGraph, degree: int) -> None:
    """Checks that no attention stays whole that another degree would divide.

    Raises:
        InputError: naming the heads, those of keys and values, and the degrees that would work.
    """
    for path, heads in _left_whole(model, layout, graph):
        works = [n for n in range(1, math.gcd(*heads.values()) + 1) if not _apart(heads, n)]
        if not _apart(heads, degree) or len(works) == 1:
            continue
        told = " and ".join(f"{name}={number}" for name, number in heads.items())
        raise InputError(
            f"tensor={degree} does not divide the heads of {path} ({type(model.get_submodule(path)).__name__}: "
            f"{told}), and a head is computed by one rank. Use tensor in {{{', '.join(map(str, works))}}}, or set "
            "undivided='keep' in tensor_parallel to leave such attention whole on every rank."
        )


def heads_reason(model: nn.Module, spec: RegionSpec, degree: int) -> str:
    """Why attention's heads keep a region whole, and what would divide them; empty where they do not."""
    if len(spec.columns) == 1 and _size(model, spec.columns[0], 0) <= _size(model, spec.rows[0], 1):
        return ""
    heads = _counts(model, spec, common_parent((*spec.columns, *spec.rows)))
    uneven = [f"{name}={number}" for name, number in heads.items() if number % degree]
    if not uneven:
        return ""
    works = [n for n in range(1, math.gcd(*heads.values()) + 1) if not _apart(heads, n)]
    told = "is" if len(uneven) == 1 else "are"
    return (
        f"{' and '.join(uneven)} {told} not divisible by {degree}; tensor in {{{', '.join(map(str, works))}}} "
        "would divide the heads"
    )


def _apart(heads: dict[str, int], degree: int) -> bool:
    return any(number % degree for number in heads.values())


def _left_whole(model: nn.Module, layout: Layout, graph: LayerGraph) -> Iterator[tuple[str, dict[str, int]]]:
    """Modules of attention that the layout leaves whole, with their numbers of heads by name."""
    for path, module in model.named_modules():
        if isinstance(module, nn.MultiheadAttention) and path in graph.calls and path not in layout.layers:
            yield path, {"num_heads": module.num_heads}
    for spec in candidate_regions(graph):
        if any(row in layout.layers for row in spec.rows):
            continue
        path = common_parent((*spec.columns, *spec.rows))
        heads = _heads(model, spec, path)
        if heads:
            yield path, heads


def _heads(model: nn.Module, spec: RegionSpec, path: str) -> dict[str, int]:
    """What the code around the layers says of its heads; empty where they cannot be attention's."""
    rows, columns = _size(model, spec.rows[0], 1), [_size(model, column, 0) for column in spec.columns]
    if len(columns) < 3 and max(columns) <= rows:
        return {}
    return _counts(model, spec, path)


def _counts(model: nn.Module, spec: RegionSpec, path: str) -> dict[str, int]:
    """The numbers of heads that the modules around the layers hold, by name."""
    rows = _size(model, spec.rows[0], 1)
    home = model.get_submodule(path)
    found: dict[str, int] = {}
    for module in home.modules():
        if kind_of(module) is not None:
            continue
        for name, value in vars(module).items():
            inner = vars(value) if is_settings(value) else {name: value}
            for own, number in inner.items():
                if type(number) is int and number > 0 and not own.startswith("_") and counts_heads(own):
                    found.setdefault(own, number)
    # A count that does not divide the width is that of something else.
    return {name: number for name, number in found.items() if rows % number == 0}


def _size(model: nn.Module, path: str, place: int) -> int:
    module = model.get_submodule(path)
    kind = kind_of(module)
    assert kind is not None
    return kind.sizes(module)[place]

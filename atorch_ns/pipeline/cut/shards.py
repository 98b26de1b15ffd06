"""Shards: runs of calls between which alone a pipeline is cut, found by the values that cross each place.

A place ``c`` is before call ``c``. Merak divides the nodes of a traced model by the same methods. Here they
divide calls of units, which are fewer: inside of a unit nothing is cut.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Literal, NamedTuple

from torch import nn

from atorch_ns.capture.blocks import NamedModule, class_names
from atorch_ns.pipeline.cut.crossing import plan_crossings
from atorch_ns.pipeline.cut.graph import CallGraph
from atorch_ns.text import first_few

_SKIP_READERS = 2
"""Calls that read what a skip connection carries: the next one, and the one that it skips to."""


class Shards(NamedTuple):
    """Starts of all shards but the first, with a description that is empty if every call is a shard."""

    starts: tuple[int, ...]
    text: str = ""


def make_shards(
    method: Literal["units", "farthest_min_deps", "nearest_min_deps"],
    graph: CallGraph,
    units: Iterable[NamedModule],
    sizes: Sequence[int],
    *,
    count: int,
    refused: Collection[int],
) -> Shards:
    """The shards of a model.

    Args:
        method: ``units`` for one shard per call, or the name of one of the functions below.
        graph, units: a pass of the model, and the modules that it calls.
        sizes: parameters of each call.
        count: for ``farthest_min_deps``, at most the number of calls; 0 for the number of calls.
        refused: places that cannot be cut. ``units`` includes them nevertheless.
    """
    num = len(graph.calls)
    if method == "units":
        return Shards(tuple(range(1, num)))
    live, count = live_values(graph, refused), min(count or num, num)
    if method == "nearest_min_deps":
        starts, count_text = nearest_min_deps(live), ""
    else:
        starts = farthest_min_deps(sizes, live, count, embeddings=_embedding_calls(graph, units))
        count_text = f" with shard_count={count}"
    begin = first_few([graph.paths[start] for start in (0, *starts)], 24)
    return Shards(
        starts,
        f"{len(starts) + 1} shard(s) of the model's {num} units by {method}{count_text}, which begin with {begin}",
    )


def live_values(graph: CallGraph, refused: Collection[int]) -> dict[int, frozenset[int]]:
    """The values that cross each possible cut, in ascending order of places.

    Context is left out: values that more calls read than a skip connection (an encoder's output, a bias of
    positions). They cross every place of a long stretch, and so say nothing about where to cut.
    """
    readers: Counter[int] = Counter()
    for call in graph.calls:
        read = set(call.arguments)
        for value in call.arguments:  # what is computed from one output alone is that output in another form
            sources = graph.sources[value] or ()
            read.update(sources if len(sources) == 1 else ())
        readers.update(read)
    return {
        cut: frozenset(
            tensor.value
            for tensor in plan_crossings(graph, [cut])[0].carried
            if readers[tensor.value] <= _SKIP_READERS
        )
        for cut in range(1, len(graph.calls))
        if cut not in refused
    }


def farthest_min_deps(
    sizes: Sequence[int], live: Mapping[int, Collection[int]], count: int, *, embeddings: Collection[int] = ()
) -> tuple[int, ...]:
    """Starts of about ``count`` shards with equal numbers of parameters, except the first shard's.

    The target is a shard's part of all parameters but embeddings'; an embedding counts as just more. A shard
    ends between one and two targets after its begin, at the first of the places that the fewest values cross,
    or at the next place that can be cut if none can there. So a skip connection is cut only if it is longer.
    Merak ends a shard once it exceeds the target, and joins all that a value skips over.

    Args:
        sizes: parameters of each call.
        live: the values that cross each possible cut.
        count: the number of shards, 1 or more; there are fewer where single calls exceed the target.
        embeddings: calls of embeddings.

    Example:
        >>> everywhere = {place: {place} for place in range(1, 6)}
        >>> farthest_min_deps([1, 1, 1, 1, 1, 1], everywhere, 3)
        (2, 4)
        >>> farthest_min_deps([9, 1, 1, 1, 1, 1], everywhere, 2, embeddings=[0])
        (1, 3, 5)
    """
    target = sum(size for call, size in enumerate(sizes) if call not in embeddings) // count
    call_sizes = [target + 1 if call in embeddings else size for call, size in enumerate(sizes)]
    before = [0, *accumulate(call_sizes)]  # parameters before each call
    starts = [0]
    while True:
        begin = starts[-1]
        after = [p for p in sorted(live) if p > begin and before[p] - before[begin] >= target]
        if not after:
            return tuple(starts[1:])
        near = [cut for cut in after if before[cut] - before[begin] <= 2 * target]
        starts.append(min(near or after[:1], key=lambda cut: _crossing_cost(live[cut])))


def nearest_min_deps(live: Mapping[int, Collection[int]]) -> tuple[int, ...]:
    """Starts of the smallest shards with cuts at local minima of the number of crossing values.

    Every call begins as a shard, and neighbours are joined while the number of crossing values does not grow:
    its local minima stay. Neighbouring places with equal numbers and a common value count as one: of those
    that a skip connection crosses, all stay or none. One value crosses each end of the model.

    Args:
        live: the values that cross each place that can be cut.

    Example:
        >>> nearest_min_deps({1: {1}, 2: {2, 9}, 3: {3, 9}, 4: {4}, 5: {5}})
        (1, 4, 5)
    """
    runs: list[list[int]] = []  # neighbouring places with equal costs and a value in common
    for cut in sorted(live):
        last = live[runs[-1][-1]] if runs else ()
        if _crossing_cost(last) == _crossing_cost(live[cut]) and not set(last).isdisjoint(live[cut]):
            runs[-1].append(cut)
        else:
            runs.append([cut])
    costs = [1, *(_crossing_cost(live[run[0]]) for run in runs), 1]  # 1 for each end of the model
    beside = zip(runs, costs, costs[1:], costs[2:], strict=False)
    return tuple(cut for run, left, cost, right in beside if cost <= min(left, right) for cut in run)


def _crossing_cost(values: Collection[int]) -> int:
    return max(1, len(values))  # something always crosses, be it context alone


def _embedding_calls(graph: CallGraph, units: Iterable[NamedModule]) -> frozenset[int]:
    names = {unit.name for unit in units if _is_embedding(unit.module)}  # mostly tables of embeddings
    return frozenset(number for number, path in enumerate(graph.paths) if path in names)


def _is_embedding(unit: nn.Module) -> bool:
    tables = [module for module in unit.modules() if "Embedding" in class_names(module)]
    inside = {id(p): p.numel() for table in tables for p in table.parameters()}  # tied tables count once
    return 2 * sum(inside.values()) > sum(p.numel() for p in unit.parameters())

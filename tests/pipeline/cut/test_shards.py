"""Where shards begin, on graphs of a few calls."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn

from atorch_ns.capture.blocks import NamedModule
from atorch_ns.errors import InputError
from atorch_ns.pipeline import CallGraph, find_units, refused_cuts, split_units
from atorch_ns.pipeline.cut.graph import TensorSignature, UnitCall, Value
from atorch_ns.pipeline.cut.shards import farthest_min_deps, live_values, make_shards, nearest_min_deps
from atorch_ns.testing.models import get_case
from tests.pipeline.chains import trace
from tests.pipeline.odd_models import Base, SkipConnections, build, mean_loss, tokens

SPEC = TensorSignature((2, 2), torch.float32, True)


def graph_of(length: int, skips: Mapping[int, Collection[int]] | None = None) -> CallGraph:
    """A chain of calls, each of the output of the one before; ``skips`` are the later readers of some outputs."""
    calls = []
    for number in range(length):
        read = [number - 1] if number else []
        read += [made for made, readers in (skips or {}).items() if number in readers]
        calls.append(UnitCall(path=f"unit.{number}", arguments=tuple(read), outputs=(number,), output=SPEC))
    values = [
        Value(spec=SPEC, position=number + 1, last_call=number, call=number, leaf=0)
        for number in range(length)
    ]
    return CallGraph(calls=tuple(calls), values=tuple(values), results=(length - 1,))


def _counts(live: Mapping[int, Collection[int]]) -> list[int]:
    return [len(values) for values in live.values()]


def _chain(length: int) -> dict[int, frozenset[int]]:
    return live_values(graph_of(length), ())


def test_a_skip_connection_lives_until_its_last_reader() -> None:
    assert _counts(live_values(graph_of(6, {1: [4]}), ())) == [1, 1, 2, 2, 1]


def test_what_more_than_two_calls_read_is_context() -> None:
    assert _counts(live_values(graph_of(7, {1: [4, 5]}), ())) == [1, 0, 1, 1, 1, 1]
    assert _counts(live_values(graph_of(7, {1: [5]}), ())) == [1, 1, 2, 2, 2, 1]


def test_refused_places_have_no_values() -> None:
    assert list(live_values(graph_of(5), {2, 3})) == [1, 4]


@pytest.mark.parametrize(
    ("sizes", "count", "begin"),
    [
        ([2, 2, 2, 2], 4, (1, 2, 3)),
        ([2, 2, 2, 2], 2, (2,)),
        ([3, 3, 3, 3, 3], 2, (3,)),  # seven in each is the target, which two calls do not reach
        (
            [1, 1, 6, 1, 1, 2],
            3,
            (3,),
        ),  # the large one ends its shard; the rest does not exceed four before its end
        ([0, 0, 4, 0, 4, 0], 2, (3, 5)),  # calls without parameters belong to the shard before or after
        ([1, 1, 1], 9, (1, 2)),  # no more than there are calls
        ([5], 3, ()),
    ],
)
def test_a_shard_ends_when_it_reaches_its_share(sizes: list[int], count: int, begin: tuple[int, ...]) -> None:
    assert farthest_min_deps(sizes, _chain(len(sizes)), count) == begin


def test_all_shards_but_the_last_reach_the_target_and_none_exceeds_two_where_calls_are_small() -> None:
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        sizes = torch.randint(1, 9, (40,), generator=generator).tolist()
        live = {
            place: set(range(int(torch.randint(1, 4, (), generator=generator)))) for place in range(1, 40)
        }
        begin = farthest_min_deps(sizes, live, 5)
        target = sum(sizes) // 5
        shards = [sum(sizes[first:end]) for first, end in pairwise((0, *begin, 40))]
        assert all(target <= shard <= 2 * target for shard in shards[:-1])
        assert shards[-1] < 2 * target


def test_embeddings_are_shards_and_do_not_raise_the_target() -> None:
    sizes = [100, 20, 3, 3, 3, 3]
    assert farthest_min_deps(sizes, _chain(6), 2, embeddings={0, 1}) == (1, 2, 4)
    assert farthest_min_deps(sizes, _chain(6), 2) == (1,)


def test_a_longer_shard_spares_a_skip_connection() -> None:
    live = live_values(graph_of(9, {2: [5]}), ())  # crosses 3, 4 and 5; at 3 it is the only value
    assert farthest_min_deps([1] * 9, live, 2) == (6,)  # four and five would cut it
    assert farthest_min_deps([1] * 9, _chain(9), 2) == (4, 8)


def test_a_skip_connection_over_two_shards_is_cut_through() -> None:
    live = live_values(graph_of(12, {0: [11]}), ())
    assert farthest_min_deps([1] * 12, live, 4) == (3, 6, 9)


def test_where_nothing_near_can_be_cut_the_next_place_is() -> None:
    live = live_values(graph_of(10), {2, 3, 4, 5, 6})
    assert farthest_min_deps([1] * 10, live, 5) == (7, 9)


@pytest.mark.parametrize(
    ("skips", "length", "begin"),
    [
        ({}, 4, (1, 2, 3)),
        ({1: [4]}, 6, (1, 2, 5)),
        ({0: [7], 1: [6], 2: [5]}, 8, (1,)),  # as a U-Net: three nested
        ({0: [3], 4: [7]}, 9, (1, 4, 5, 8)),  # one after the other
        ({1: [3, 4, 5, 6]}, 7, (1, 2, 3, 4, 5, 6)),  # context spoils no place
        ({0: [8], 1: [4], 4: [7]}, 9, (1, 5)),  # a minimum between two, inside of a third
    ],
)
def test_cuts_stay_where_fewer_values_cross_than_beside(
    skips: dict[int, list[int]], length: int, begin: Sequence[int]
) -> None:
    assert nearest_min_deps(live_values(graph_of(length, skips), ())) == begin


def test_streams_of_equal_width_stay_apart() -> None:
    """Two values at each place that are new there, as hidden state and residual, are no skip connection."""
    live = {1: {1}, 2: {2, 3}, 3: {4, 5}, 4: {6, 7}, 5: {8}}
    assert nearest_min_deps(live) == (1, 3, 5)


def test_shards_of_a_traced_model_spare_its_skip_connections() -> None:
    graph = trace(build(SkipConnections), tokens(), mean_loss)
    live = live_values(graph, refused_cuts(graph))
    assert [graph.paths[place] for place in nearest_min_deps(live)] == [
        "blocks.0",
        "blocks.1",
        "blocks.3",
        "head",
    ]  # the fourth block takes a sum, which is one tensor


def test_shards_in_words_and_units_that_are_embeddings() -> None:
    class Mixed(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.table, self.linear = nn.Embedding(4, 4), nn.Linear(width, width)

    modules = [nn.Embedding(4, 4), Mixed(2), Mixed(9), nn.Linear(9, 9)]
    units = [NamedModule(f"unit.{number}", module) for number, module in enumerate(modules)]
    sizes = [sum(p.numel() for p in module.parameters()) for module in modules]

    def shards(method: Any, count: int = 0) -> tuple[tuple[int, ...], str]:
        return make_shards(method, graph_of(4), units, sizes, count=count, refused={3})

    assert shards("units") == ((1, 2, 3), "")
    assert shards("nearest_min_deps")[0] == (1, 2)
    begin, text = shards("farthest_min_deps", 1)
    assert begin == (1, 2)  # each embedding is a shard by itself
    assert text == (
        "3 shard(s) of the model's 4 units by farthest_min_deps with shard_count=1, "
        "which begin with unit.0, unit.1, unit.2"
    )
    assert "shard_count=4," in shards("farthest_min_deps")[1]
    assert "shard_count=4," in shards("farthest_min_deps", 9)[1]


def _names(model: nn.Module, **options: object) -> list[str]:
    return [unit.name for unit in find_units(model, **options)]


def test_nothing_inside_of_a_leaf_is_a_unit() -> None:
    model = get_case("hf_gpt2").build()
    assert _names(model, leaves=["GPT2Model"]) == ["transformer", "lm_head"]
    assert _names(model, leaves=["transformer.wte"]) == _names(model)
    odd = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)), nn.Bilinear(4, 4, 4))
    assert _names(odd, at_least=3) == ["0.0", "0.1", "1"]
    assert _names(odd, at_least=3, leaves=["0"]) == ["0", "1"]


def test_a_leaf_that_cannot_stay_whole_is_refused() -> None:
    with pytest.raises(InputError, match="blocks cannot stay whole: it is a ModuleList"):
        find_units(Base(), leaves=["blocks"])
    with pytest.raises(InputError, match=r"begin at 'blocks\.1\.linear': blocks\.1, which holds it"):
        find_units(Base(), starts=["blocks.1.linear"], leaves=["blocks.1"])
    units = find_units(Base(), leaves=["blocks.1"])
    assert "blocks.0.norm" in [unit.name for unit in split_units(units, ["blocks.0"], leaves=["blocks.1"])]
    with pytest.raises(InputError, match=r"blocks\.1 must stay whole, but the model calls"):
        split_units(units, ["blocks.1"], leaves=["blocks.1"])

"""mixed_parallel becomes the methods that use the axes of parallel_mode."""

from __future__ import annotations

from typing import Any

import pytest

from atorch_ns.cluster import Cluster
from atorch_ns.errors import StrategyError
from atorch_ns.method import Resolved, load_registry, resolve
from atorch_ns.strategy import Strategy
from tests.opt_lib.scenarios import Runs, Scenario, assert_equals_one_process, run_scenarios

REGISTRY = load_registry()
EIGHT = Cluster(world_size=8, local_world_size=8, distributed=True, torch="2.13.0")
ALONE = Cluster(torch="2.13.0")
CUBE = ("parallel_mode", ([("tensor", 2), ("pipeline", 2), ("data", 2)], None))


def _resolve(strategy: list[Any], cluster: Cluster = EIGHT) -> Resolved:
    return resolve(Strategy(strategy), cluster, REGISTRY)


def _names(resolved: Resolved) -> list[str]:
    return [item.method.name for item in resolved.chosen]


def test_without_a_config_it_is_the_default_method_of_every_axis() -> None:
    resolved = _resolve([CUBE, "mixed_parallel"])
    assert _names(resolved) == ["parallel_mode", "pipeline_parallel", "tensor_parallel", "ddp"]
    assert _names(resolved) == _names(_resolve([CUBE]))
    assert resolved.plan == _resolve([CUBE]).plan


def test_the_order_in_which_it_is_written_does_not_matter() -> None:
    written = ["checkpoint", ("mixed_parallel", {"data": "fsdp"}), CUBE]
    assert _names(_resolve(written)) == _names(_resolve(written[::-1]))


@pytest.mark.parametrize("data", ["ddp", "fsdp", "zero2"])
def test_the_method_of_the_data(data: str) -> None:
    assert _names(_resolve([CUBE, ("mixed_parallel", {"data": data})]))[-1] == data


def test_sub_configs_reach_their_methods() -> None:
    for axis, method in {
        "tensor": "tensor_parallel",
        "pipeline": "pipeline_parallel",
        "sequence": "sequence_parallel",
        "expert": "expert_parallel",
    }.items():
        mesh = ("parallel_mode", ([(axis, 2), ("data", 4)], None))
        resolved = _resolve([mesh, ("mixed_parallel", {axis: {}})])
        assert method in _names(resolved)
        with pytest.raises(StrategyError, match=rf"{method}\.no_such_key.*unknown key"):
            _resolve([mesh, ("mixed_parallel", {axis: {"no_such_key": 1}})])


def test_what_is_saved_resolves_to_the_same_again() -> None:
    first = _resolve([CUBE, ("mixed_parallel", {"data": "zero2", "tensor": {}}), "checkpoint"])
    assert "mixed_parallel" not in first.strategy
    again = resolve(first.strategy, EIGHT, REGISTRY)
    assert again.strategy == first.strategy
    assert again.plan == first.plan
    assert again.chosen == first.chosen


def test_what_it_stands_for_is_said() -> None:
    notes = _resolve([CUBE, ("mixed_parallel", {"data": "fsdp", "pipeline": {}})]).notes
    said = [note.text for note in notes if note.kind == "expanded"]
    assert said == ["mixed_parallel stands for pipeline_parallel, fsdp"]


def test_an_axis_of_size_1_leaves_its_method_out() -> None:
    mesh = ("parallel_mode", ([("tensor", 1), ("pipeline", 2), ("data", 4)], None))
    resolved = _resolve([mesh, ("mixed_parallel", {"tensor": {}})])
    assert _names(resolved) == ["parallel_mode", "pipeline_parallel", "ddp"]
    texts = [note.text for note in resolved.notes if note.kind == "left out"]
    assert texts == ["tensor_parallel is left out: parallel_mode has tensor=1"]


def test_axes_of_size_1_alone_divide_nothing() -> None:
    mesh = ("parallel_mode", ([("tensor", 1), ("pipeline", 1), ("data", 8)], None))
    for config in ({}, {"tensor": {}, "pipeline": {}}):
        assert _names(_resolve([mesh, ("mixed_parallel", config)])) == ["parallel_mode", "ddp"]
    assert _names(_resolve([mesh, ("mixed_parallel", {"data": "fsdp"})])) == ["parallel_mode", "fsdp"]


def test_one_process_keeps_it_for_more() -> None:
    resolved = _resolve([CUBE, ("mixed_parallel", {"data": "fsdp", "tensor": {}})], ALONE)
    assert _names(resolved) == []
    assert resolved.strategy.names == ("parallel_mode", "tensor_parallel", "fsdp")
    assert _names(resolve(resolved.strategy, EIGHT, REGISTRY)) == [
        "parallel_mode",
        "pipeline_parallel",
        "tensor_parallel",
        "fsdp",
    ]


@pytest.mark.parametrize(
    ("strategy", "words"),
    [
        (["mixed_parallel"], r"no parallel_mode with their degrees.*\('tensor', 2\)"),
        ([("parallel_mode", ([("data", 8)], None)), "mixed_parallel"], r"parallel_mode has data=8 only"),
        ([("parallel_mode", ([("zero", 8)], None)), "mixed_parallel"], r"parallel_mode has zero=8 only"),
        (
            [CUBE, ("mixed_parallel", {"sequence": {}})],
            r"mixed_parallel\.sequence: parallel_mode has tensor=2, pipeline=2, data=2 but no axis 'sequence'",
        ),
        ([CUBE, ("mixed_parallel", {"tensor": {}}), "tensor_parallel"], "tensor_parallel: given twice"),
        ([CUBE, ("mixed_parallel", {"data": "fsdp"}), "fsdp"], "fsdp: given twice"),
        ([CUBE, ("mixed_parallel", {"data": "fsdp"}), "zero2"], "cannot be combined"),
        (
            [CUBE, ("mixed_parallel", {"data": "fspd"})],
            r"mixed_parallel\.data='fspd'.*'ddp', 'fsdp' or 'zero2'",
        ),
        ([CUBE, ("mixed_parallel", {"tensr": {}})], r"Did you mean 'tensor'"),
        ([CUBE, ("mixed_parallel", {"tensor": 4})], r"mixed_parallel\.tensor=4"),
    ],
)
def test_mistakes(strategy: list[Any], words: str) -> None:
    for cluster in (EIGHT, ALONE):
        with pytest.raises(StrategyError, match=words):
            _resolve(strategy, cluster)


def test_all_mistakes_together() -> None:
    config: dict[str, Any] = {"sequence": {}, "expert": {}}
    with pytest.raises(StrategyError) as caught:
        _resolve([CUBE, ("mixed_parallel", config)])
    assert len(caught.value.problems) == 2


def test_a_method_that_already_uses_the_axis_stays() -> None:
    assert _names(_resolve([CUBE, "mixed_parallel", "tensor_parallel", "fsdp"])) == [
        "parallel_mode",
        "pipeline_parallel",
        "tensor_parallel",
        "fsdp",
    ]


SQUARE = ("parallel_mode", ([("tensor", 2), ("pipeline", 2)], None))
FOUR_RANKS = {
    "fsdp": Scenario(
        "tied_llama",
        [
            ("parallel_mode", ([("pipeline", 2), ("data", 2)], None)),
            ("mixed_parallel", {"data": "fsdp", "pipeline": {"num_micro_batches": 2}}),
        ],
    ),
    "tensor and pipeline": Scenario(
        "hf_gpt2", [SQUARE, ("mixed_parallel", {"pipeline": {"schedule": "GPipe"}}), "checkpoint"]
    ),
}


@pytest.fixture(scope="module")
def runs() -> Runs:
    return run_scenarios(FOUR_RANKS, 4)


@pytest.mark.parametrize("name", FOUR_RANKS)
def test_equals_one_process(name: str, runs: Runs) -> None:
    assert_equals_one_process(FOUR_RANKS[name], name, runs)

"""Divided pipelines: the costs of units add up to a plan's, and stages follow memory, pivots and degrees."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from atorch_ns.cluster import Cluster, cluster_from_spec
from atorch_ns.errors import InputError
from atorch_ns.operators import OperatorPrices, PipelineTask, Shallow, States, capture_shallow, staged_plan
from atorch_ns.operators.staged import _send_seconds, _solve_plans, _stage_cost
from atorch_ns.pipeline import find_units
from tests.operators.networks import network

CPU = torch.device("cpu")
STATES = States(gradients_stay=True)


@functools.cache
def captured(name: str) -> tuple[Shallow, tuple[str, ...]]:
    model, batch = network(name)
    units = tuple(unit.name for unit in find_units(model))
    return capture_shallow(model, (), batch, device=CPU, units=units), units


@functools.cache
def prices(degree: int) -> OperatorPrices:
    return OperatorPrices.on(Cluster(world_size=4, local_world_size=4, distributed=True), degree, "float32")


def kinds(name: str) -> list[str]:
    shallow, units = captured(name)
    known = {segment.path: segment.kind for segment in shallow.graph.segments}
    return [known[shallow.copy_name(unit)] for unit in units]


@pytest.mark.parametrize("recomputed", [False, True])
@pytest.mark.parametrize("degree", [1, 2])
@pytest.mark.parametrize("name", ["llama", "gpt2", "bert"])
def test_the_costs_of_all_units_are_those_of_the_plan(name: str, degree: int, recomputed: bool) -> None:
    shallow, _ = captured(name)
    found = _solve_plans(shallow, prices(degree), STATES, CPU, recompute=recomputed, allow=None)
    for one in found:
        whole = _stage_cost(one, kinds(name), 1, is_last=True)
        assert whole.seconds == pytest.approx(one.seconds, rel=1e-6)
        assert whole.memory == pytest.approx(one.memory, rel=1e-6)


def staged(name: str, pivots: Sequence[str] = (), **fields: Any) -> Any:
    shallow, units = captured(name)

    def task(num_segments: int) -> PipelineTask:
        return PipelineTask(
            **{
                "num_segments": num_segments,
                "num_devices": 4,
                "num_micro_batches": 8,
                "equal_degrees": True,
                **fields,
            }
        )

    return staged_plan(shallow, units, task, prices, states=STATES, device=CPU, pivots=pivots)


def test_stages_begin_where_they_may() -> None:
    found = staged("llama", pivots=["model.layers.1"], num_stages=2)
    assert (found.starts, found.degree, len(found.recomputed)) == (("model.layers.1",), 2, 2)
    assert found.operators.degree == 2
    with pytest.raises(InputError, match=r"no stage can begin with 'model.layer.1': stages begin with"):
        staged("llama", pivots=["model.layer.1"], num_stages=2)


@pytest.mark.parametrize(("degree", "between"), [(1, 1 / 7), (2, 1 / 3), (4, 1.0)])
def test_borders_between_nodes_are_priced_between_nodes(degree: int, between: float) -> None:
    shallow, _ = captured("llama")
    apart = OperatorPrices.on(replace(cluster_from_spec("8xH100-80GB"), local_world_size=4), 8, "float32")
    near, far = (
        _send_seconds(shallow, replace(apart, hardware=replace(apart.hardware, **links)), degree)
        for links in (
            {"between_nodes": apart.hardware.within_node},
            {"within_node": apart.hardware.between_nodes},
        )
    )
    assert near < far
    assert _send_seconds(shallow, apart, degree) == pytest.approx(near + (far - near) * between)


def test_activations_are_recomputed_where_memory_asks_for_it() -> None:
    free = staged("llama", num_stages=4)
    assert not any(free.recomputed)
    needs = max(stage.cost.memory for stage in free.stages.stages)
    tight = staged("llama", num_stages=4, memory_limit=needs * 0.9)
    assert any(tight.recomputed)
    assert max(stage.cost.memory for stage in tight.stages.stages) <= needs * 0.9
    assert tight.stages.step_seconds > free.stages.step_seconds
    with pytest.raises(InputError):
        staged("llama", num_stages=4, memory_limit=1000.0)

"""Tables of plans give back the plans they were made of, kind by kind and size by size."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from atorch_ns.estimate import PlanTable, Workload
from atorch_ns.estimate.model_shard import Memo, distinct_rows
from atorch_ns.strategy import Plan
from benchmarks._plan_tables import product

SHARDED = dict.fromkeys(("parameters_over", "gradients_over", "optimizer_over"), ("data",))
FSDP = Plan(axes=(("data", 8),)).changed(gradient_sync="reduce_scatter", sharding=SHARDED)
HYBRID = replace(FSDP, axes=(("zero", 4), ("data", 2))).changed(sharding=dict.fromkeys(SHARDED, ("zero",)))
TENSOR = replace(FSDP, axes=(("tensor", 2), ("data", 4)), num_micro_batches=3)
PIPELINE = replace(Plan(axes=(("pipeline", 2), ("data", 4)))).changed(pipeline={"schedule": "GPipe"})


def test_rows_are_the_plans() -> None:
    plans = [FSDP, HYBRID, TENSOR, PIPELINE, FSDP]
    table = PlanTable.of(plans)
    assert [table.plan(row) for row in range(len(table))] == plans


def test_plans_that_differ_in_sizes_only_are_of_one_kind() -> None:
    sizes = [replace(FSDP, axes=(("data", size),)) for size in (2, 4, 8)]
    assert len(PlanTable.of([*sizes, replace(FSDP, num_micro_batches=5)]).templates) == 1
    halved = FSDP.changed(precision={"parameter_dtype": "bfloat16"})
    assert len(PlanTable.of([*sizes, halved]).templates) == 2


def test_ways_to_use_axes_are_no_kinds() -> None:
    other = PIPELINE.changed(pipeline={"schedule": "1F1B"})
    table = PlanTable.of([PIPELINE, other])
    assert len(table.templates) == 1
    assert [use.pipeline.schedule for use in table.uses] == ["GPipe", "1F1B"]


def test_a_product_has_every_mesh_with_every_number_of_micro_batches() -> None:
    table = product([FSDP], [(8, 1), (2, 4)], [1, 2])
    found = {
        (plan.size("data"), plan.size("zero"), plan.num_micro_batches) for plan in map(table.plan, range(4))
    }
    assert found == {(8, 1, 1), (8, 1, 2), (2, 4, 1), (2, 4, 2)}
    assert table.plan(2).sharding.parameters_over == ("zero",)  # where there is such an axis


def test_a_pipeline_without_a_number_of_micro_batches_gets_the_usual_one() -> None:
    workload = Workload(global_batch=64)
    _, sizes = PlanTable.of([PIPELINE]).sizes(0, workload, Memo())
    assert sizes.micro_batches.tolist() == [4]  # twice the stages
    given = replace(PIPELINE, num_micro_batches=8)
    _, sizes = PlanTable.of([given]).sizes(0, workload, Memo())
    assert sizes.micro_batches.tolist() == [8]


def test_equal_sizes_are_one_object_in_one_pricing() -> None:
    memo, workload = Memo(), Workload(global_batch=64)
    table = PlanTable.of([FSDP, FSDP.changed(precision={"parameter_dtype": "bfloat16"})])
    (_, first), (_, second) = (table.sizes(kind, workload, memo) for kind in (0, 1))
    assert first is second


@pytest.mark.parametrize("largest", [3, 2**20])
def test_distinct_rows_are_those_of_numpy(largest: int) -> None:
    """With large numbers rows do not fit into one."""
    table = np.random.default_rng(0).integers(0, 3, (50, 4)) * (largest // 3)
    keys, row = distinct_rows(table)
    expected, places = np.unique(table, axis=0, return_inverse=True)
    assert np.array_equal(keys, expected)
    assert np.array_equal(row, places.reshape(-1))
    assert np.array_equal(keys[row], table)

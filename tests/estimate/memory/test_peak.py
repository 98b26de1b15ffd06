"""Predicted memory against what ranks really hold, and against what must hold of any prediction."""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest

from atorch_ns.estimate import Estimate, MemoryParts, TimeParts, Workload
from atorch_ns.estimate.memory.peak import price_memory
from atorch_ns.estimate.memory.reserved import CACHED_SHARE, CONTEXT_BYTES, NCCL_BYTES, workspace_bytes
from atorch_ns.estimate.table import PlanTable, with_chosen_reductions
from atorch_ns.profile import Growth, OptimizerSpec, ParameterSpec, PhaseCost, Segment, SegmentCost, Trace
from atorch_ns.strategy import Extra, Plan
from atorch_ns.testing.workers import run_ranks
from benchmarks._memory_cases import sized_case
from benchmarks._plan_tables import product
from benchmarks.estimate_memory import WORST_LIMIT, compare, measured, plan_of, profile_of

STRATEGIES: dict[str, list[list[Any]]] = {
    "mlp, small": [
        ["ddp"],
        ["zero1"],
        ["zero2"],
        ["fsdp"],
        ["fsdp", "checkpoint", ("amp_native", "bf16")],
        [("half", "fp16")],
        ["zero2", ("gradient_accumulation", 2)],
        ["ddp", ("gradient_accumulation", 2)],
        *(
            [(method, {"reduce_each_micro_batch": each}), ("gradient_accumulation", 2)]
            for method in ("fsdp", "zero2")
            for each in (True, False)
        ),
    ],
    "llama, small": [
        ["ddp", "checkpoint"],
        ["zero1", ("amp_native", "fp16")],
        ["zero2", ("half", "bf16")],
        ["fsdp", ("checkpoint", {"every_n": 2})],
        [("fsdp", {"atorch_wrap_cls": "LlamaModel"})],
        [("fsdp", {"reduce_each_micro_batch": True}), ("gradient_accumulation", 4), ("amp_native", "bf16")],
        [("fsdp", {"reduce_each_micro_batch": True}), ("gradient_accumulation", 2), "checkpoint"],
        ["ddp", ("checkpoint", {"save_operators": "every_second_product"})],
        ["fsdp", ("checkpoint", {"save_operators": "all_but_attention"}), ("amp_native", "bf16")],
    ],
}


@pytest.mark.timeout(240)
@pytest.mark.parametrize("name", STRATEGIES)
def test_predicted_is_measured(name: str) -> None:
    sized, strategies = sized_case(name), STRATEGIES[name]
    profile = profile_of(sized)
    ranks = run_ranks(measured, 2, args=(name, strategies), timeout_s=200)
    for strategy, row in zip(strategies, compare(sized, strategies, ranks, profile), strict=True):
        assert row["predicted_states"] == row["measured_states"], strategy
        assert abs(row["error"]) <= WORST_LIMIT, (strategy, row)


@pytest.mark.timeout(240)
@pytest.mark.slow
def test_replicas_of_shards() -> None:
    sized = sized_case("mlp, small")
    mesh = ("parallel_mode", ([("data", 2), ("zero", 2)], None))
    strategies = [[mesh, "fsdp"], [mesh, "zero2", ("amp_native", "bf16")], [mesh, "ddp", "zero1"]]
    profile = profile_of(sized)
    assert profile.trace is not None
    seen = run_ranks(measured, 4, args=(sized.name, strategies), timeout_s=200)
    table = PlanTable.of([plan_of(strategy, profile, num_ranks=4) for strategy in strategies])
    memory, *_ = price_memory(table, profile.trace, Workload(global_batch=sized.global_batch))
    for index, strategy in enumerate(strategies):
        peak = max(rank[index].peak_bytes for rank in seen)
        assert abs(memory[index].sum() / peak - 1) <= WORST_LIMIT, strategy


def _phase(peak: Growth) -> PhaseCost:
    return PhaseCost(flops=Growth(), moved=Growth(), num_operators=1, peak=peak, peaks=(peak,))


def _segment(name: str, width: int, saved: float, paths: tuple[str, ...] = ()) -> Segment:
    cost = SegmentCost(
        forward=_phase(Growth(per_sample=saved)),
        backward=_phase(Growth(per_sample=saved / 4)),
        saved=Growth(per_sample=saved),
        output=Growth(per_sample=4.0 * width),
        incoming=Growth(per_sample=4.0 * width),
    )
    return Segment(
        name=name,
        paths=paths,
        block_class="Block" if paths else "",
        parameters=(ParameterSpec(name="weight", shape=(width, width), dtype="float32"),),
        costs=MappingProxyType({"float32": cost}),
    )


def _trace(num_blocks: int = 4, width: int = 64) -> Trace:
    blocks = tuple(f"blocks.{index}" for index in range(num_blocks))
    return Trace(
        segments=(
            _segment("before blocks", width, 1000.0),
            _segment("blocks.0", width, 40_000.0, blocks),
            _segment("after blocks", width, 3000.0),
        ),
        num_samples=4,
        optimizer=OptimizerSpec(name="AdamW", fixed_bytes=4, parameter_temporaries=2.0),
    )


SHARDED = Plan(axes=(("data", 8),), gradient_sync="reduce_scatter").changed(
    sharding={"parameters_over": ("data",), "gradients_over": ("data",), "optimizer_over": ("data",)}
)
REPLICATED = Plan(axes=(("data", 8),), gradient_sync="all_reduce")
WORKLOAD = Workload(global_batch=64)


def _peak(plan: Plan, trace: Trace | None = None, workload: Workload = WORKLOAD, **options: Any) -> float:
    memory, *_ = price_memory(PlanTable.of([plan]), trace or _trace(), workload, **options)
    return float(memory[0].sum())


def test_a_plain_step_in_figures() -> None:
    """One process: the last block's backward pass, with what everything before it has saved."""
    memory, at, moments = price_memory(PlanTable.of([Plan()]), _trace(), Workload(global_batch=2))
    weight = 4 * 64 * 64
    parameters, gradients, optimizer, activations, temporaries, reserve, outside = memory[0]
    assert parameters == 6 * weight
    assert gradients == weight  # of what comes after the blocks
    assert optimizer == 6 * (2 * weight + 4)
    assert activations == 2 * (1000 + 4 * 40_000 + 4 * 64 + 10_000)
    assert temporaries == reserve == outside == 0
    assert moments[at[0]] == "backward of blocks.3"


@pytest.mark.parametrize(
    "plan", [SHARDED, REPLICATED, SHARDED.changed(sharding={"keeps_gathered": True})], ids=str
)
def test_rows_of_a_table_are_plans(plan: Plan) -> None:
    table = product([plan, plan.changed(recomputation={"kind": "blocks"})], [(8, 1), (2, 4), (1, 1)], [1, 2])
    memory, *_ = price_memory(table, _trace(), WORKLOAD)
    alone = [_peak(table.plan(row)) for row in range(len(table))]
    np.testing.assert_allclose(memory.sum(axis=1), alone)


def test_what_saves_memory_saves_memory() -> None:
    assert _peak(REPLICATED.changed(sharding={"optimizer_over": ("data",), "layout": "parameters"})) < _peak(
        REPLICATED
    )
    assert _peak(SHARDED.changed(sharding={"keeps_gathered": True})) < _peak(REPLICATED)
    assert _peak(SHARDED) < _peak(SHARDED.changed(sharding={"keeps_gathered": True}))
    for plan in (SHARDED, REPLICATED):
        saved = [_peak(plan.changed(recomputation={"kind": "blocks", "every": every})) for every in (1, 2)]
        assert saved[0] < saved[1] < _peak(plan)
    trace = replace(_trace(), optimizer=OptimizerSpec(name="SGD", state_dtypes=()))
    assert _peak(REPLICATED, trace) == _peak(REPLICATED) - 6 * (2 * 4 * 64 * 64 + 4)


def test_reduced_gradients_of_earlier_micro_batches_are_a_share() -> None:
    """On 8 ranks: of six matrices a block's backward pass adds to, seven eighths are not kept."""
    peaks = {}
    for passes in (1, 2):
        for each in (True, False):
            plan = replace(SHARDED, num_micro_batches=passes).changed(sharding={"reduces_each": each})
            peaks[passes, each] = _peak(plan, workload=Workload(global_batch=64 * passes))
    assert peaks[1, True] == peaks[1, False]
    assert peaks[2, False] - peaks[2, True] > 4 * 4 * 64 * 64
    table = PlanTable.of([replace(SHARDED, num_micro_batches=2).changed(sharding={"reduces_each": None})])
    chosen = [with_chosen_reductions(table, 1000, memory) for memory in (15_999, 16_000)]
    assert [one.plan(0).sharding.reduces_each for one in chosen] == [True, None]


def test_more_ranks_never_need_more() -> None:
    for plan in (SHARDED, REPLICATED):
        table = product([plan], [(size, 1) for size in (2, 4, 8, 16)], [1])
        peaks = price_memory(table, _trace(), WORKLOAD)[0].sum(axis=1)
        assert (np.diff(peaks) < 0).all()


def test_depth_costs_no_time_and_counts_exactly() -> None:
    shallow, deep = (_peak(SHARDED, _trace(num_blocks)) for num_blocks in (40, 80))
    middle = _peak(SHARDED, _trace(60))
    assert middle == pytest.approx((shallow + deep) / 2)


def test_offloaded_states_are_not_on_the_device() -> None:
    offloaded = replace(SHARDED, offload=True)
    assert _peak(offloaded) == _peak(SHARDED)  # on a CPU there is one memory
    on_gpu = price_memory(PlanTable.of([offloaded]), _trace(), WORKLOAD, device_type="cuda")[0][0]
    assert on_gpu[0] == on_gpu[2] == 0


def test_gloo_works_on_copies() -> None:
    on_gpu = price_memory(PlanTable.of([SHARDED]), _trace(), WORKLOAD, device_type="cuda")[0][0]
    needed = float(on_gpu[: MemoryParts._fields.index("reserve")].sum()) - workspace_bytes(None)
    assert needed <= _peak(SHARDED, device_type="cpu")


def test_a_gpu_holds_more_than_tensors() -> None:
    """One process: the tensors, cuBLAS's workspaces, a share of both that the allocator keeps, and the context."""
    (parts,), *_ = price_memory(
        PlanTable.of([Plan()]), _trace(), WORKLOAD, device_type="cuda", capability=(9, 0)
    )
    found = Estimate(memory=MemoryParts(*map(float, parts)), time=TimeParts(*[0.0] * 9))
    assert found.allocated_bytes == pytest.approx(_peak(Plan()) + 3 * 32 * 2**20)
    assert found.reserved_bytes == pytest.approx(found.allocated_bytes * (1 + CACHED_SHARE))
    assert found.peak_bytes == pytest.approx(found.reserved_bytes + CONTEXT_BYTES)


def test_each_axis_has_a_communicator() -> None:
    plans = [replace(Plan(), axes=axes) for axes in ((), (("data", 2),), (("data", 4), ("tensor", 2)))]
    memory, *_ = price_memory(PlanTable.of(plans), _trace(), WORKLOAD, device_type="cuda")
    outside = memory[:, MemoryParts._fields.index("outside")] - CONTEXT_BYTES
    assert outside.tolist() == [0, NCCL_BYTES[False], NCCL_BYTES[False] + NCCL_BYTES[True]]


def test_costs_of_other_methods() -> None:
    extra = Extra(method="mine", parameter_copies=0.5, gradient_copies=0.25, fixed_bytes=1000)
    whole = 6 * 4 * 64 * 64
    assert _peak(replace(SHARDED, extras=(extra,))) == _peak(SHARDED) + 0.75 * whole + 1000

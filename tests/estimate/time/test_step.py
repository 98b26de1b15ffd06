"""The model of time: what must grow, what must shrink, and figures that can be worked out by hand."""

from __future__ import annotations

import time
from dataclasses import replace
from statistics import NormalDist
from typing import Any

import numpy as np
import pytest

from atorch_ns.cluster import Cluster, Device, Hardware, Link, Rate
from atorch_ns.costs.collectives import Groups, collective_seconds, groups_along
from atorch_ns.estimate import PlanTable, TimeParts, Workload
from atorch_ns.estimate.time.step import price_time
from atorch_ns.profile import Growth, OptimizerSpec, ParameterSpec, PhaseCost, Segment, SegmentCost, Trace
from atorch_ns.strategy import Extra, Plan
from benchmarks._plan_tables import product

WIDTH = 1024
GFLOP, MB = 1e9, 1e6
WORKLOAD = Workload(global_batch=64)


def _cost(scale: float, moved: float = 1.0) -> SegmentCost:
    forward = PhaseCost(
        flops=Growth(per_sample=scale * GFLOP),
        moved=Growth(per_sample=moved * scale * MB),
        num_operators=20,
        peak=Growth(),
    )
    backward = replace(forward, flops=forward.flops * 2, moved=forward.moved * 2, num_operators=40)
    return SegmentCost(forward=forward, backward=backward, saved=Growth(), output=Growth())


def _segment(name: str, count: int, num_weights: int) -> Segment:
    weights = tuple(
        ParameterSpec(name=f"weight{number}", shape=(WIDTH, WIDTH), dtype="float32")
        for number in range(num_weights)
    )
    return Segment(
        name=name,
        paths=tuple(f"blocks.{number}" for number in range(count)) if count else (),
        fingerprint=name,
        parameters=weights,
        costs={
            "float32": _cost(1),
            "float32/bfloat16": _cost(1, 1.2),
            "bfloat16": _cost(1, 0.5),
            "bfloat16/bfloat16": _cost(1, 0.6),
        },
    )


TRACE = Trace(
    segments=(_segment("before", 0, 1), _segment("blocks.0", 8, 6), _segment("after", 0, 1)),
    num_samples=4,
    optimizer=OptimizerSpec(name="AdamW"),
)


def _cluster(kind: str = "cuda", *, world: int = 8, per_node: int = 8, **changes: Any) -> Cluster:
    device = Device(
        name="test",
        type=kind,
        memory_bytes=2**34,
        memory_bytes_per_s=1e12,
        flops_per_s={"float32": 1e14, "bfloat16": 4e14},
        launch_s=1e-6,
    )
    link = Link(name="near", rate=Rate(5e-6, 1e11))
    far = Link(name="far", rate=Rate(2e-5, 1e10))
    hardware = Hardware(device=device, within_node=link, between_nodes=far, to_host=link)
    return Cluster(
        world_size=world, local_world_size=per_node, device_type=kind, hardware=replace(hardware, **changes)
    )


DDP = Plan(axes=(("data", 8),), gradient_sync="all_reduce")
ZERO1 = DDP.changed(sharding={"optimizer_over": ("data",), "layout": "parameters"})
FSDP = DDP.changed(
    gradient_sync="reduce_scatter",
    sharding={"parameters_over": ("data",), "gradients_over": ("data",), "optimizer_over": ("data",)},
)
ZERO2 = FSDP.changed(sharding={"keeps_gathered": True})
AMP = DDP.changed(precision={"compute_dtype": "bfloat16"})
PLANS = (
    DDP,
    ZERO1,
    ZERO2,
    FSDP,
    FSDP.changed(sharding={"units": ()}),
    AMP,
    FSDP.changed(
        precision={"compute_dtype": "bfloat16"},
        sharding={"gather_dtype": "bfloat16", "reduce_dtype": "float32"},
    ),
    DDP.changed(precision={"parameter_dtype": "float16", "master_dtype": "float32", "loss_scaling": True}),
    DDP.changed(recomputation={"kind": "blocks"}),
    replace(FSDP, offload=True),
    replace(DDP, compiled=True, compiler="inductor"),
    replace(FSDP, num_micro_batches=4),
)


def _parts(plan: Plan, cluster: Cluster | None = None, trace: Trace = TRACE) -> TimeParts:
    priced = price_time(PlanTable.of([plan]), trace, cluster or _cluster(), WORKLOAD)
    return TimeParts(*map(float, priced[0]))


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_every_part_is_a_finite_time(kind: str) -> None:
    times = price_time(PlanTable.of(PLANS), TRACE, _cluster(kind), WORKLOAD)
    assert times.shape == (len(PLANS), 9)
    assert np.isfinite(times).all()
    assert (times >= 0).all()


SLOWEST = 1 + 0.08 / 5.4 * NormalDist().inv_cdf(7.625 / 8.25)
"""The slowest of eight devices, over their mean."""
STREAM = 0.87 * 1e12
"""Bytes that torch's own kernels move in a second, of the device's."""


def test_computation_by_hand() -> None:
    # 10 segments, 8 samples on each rank, 3 GFLOP and 3 MB a sample forward and backward.
    expected = SLOWEST * 10 * 8 * (3 * GFLOP / 1e14 + 3 * MB / STREAM)
    assert _parts(DDP).compute == pytest.approx(expected)
    assert _parts(AMP).compute == pytest.approx(SLOWEST * 10 * 8 * (3 * GFLOP / 4e14 + 1.2 * 3 * MB / STREAM))
    slower = replace(DDP, extras=(Extra(method="mine", compute_factor=1.5, seconds_per_step=0.5),))
    assert _parts(slower).compute == pytest.approx(1.5 * expected)
    assert _parts(slower).overhead == pytest.approx(_parts(DDP).overhead + 0.5, rel=0.1)


def test_the_slowest_of_many_devices_counts() -> None:
    of_ranks = {
        world: _parts(
            Plan(axes=(("data", world),), gradient_sync="all_reduce"), _cluster(world=world)
        ).compute
        * world
        for world in (1, 8, 64)
    }
    assert of_ranks[8] / of_ranks[1] == pytest.approx(SLOWEST)
    assert 1 < of_ranks[64] / of_ranks[8] < 1.05
    measured = _cluster(measured=True)
    assert _parts(DDP, measured).compute == pytest.approx(_parts(DDP).compute / SLOWEST)


def test_operands_of_products_move_at_the_rate_of_what_is_there_on_a_cpu() -> None:
    cluster = _cluster("cpu")
    assert cluster.hardware is not None
    device = replace(cluster.hardware.device, in_place_bytes_per_s=4e12)
    cluster = replace(cluster, hardware=replace(cluster.hardware, device=device))
    with_operands = []
    for segment in TRACE.segments:
        cost = segment.costs["float32"]
        forward = replace(cost.forward, operands=Growth(per_sample=40 * MB))
        with_operands.append(replace(segment, costs={"float32": replace(cost, forward=forward)}))
    more = _parts(DDP, cluster, replace(TRACE, segments=tuple(with_operands))).compute
    # 10 segments, 8 samples on each rank.
    added = 10 * 8 * 40 * MB / 4e12
    assert more - _parts(DDP, cluster).compute == pytest.approx(added)


def test_recomputation_is_the_forward_pass_of_what_is_recomputed() -> None:
    forward = SLOWEST * 8 * (GFLOP / 1e14 + MB / STREAM)
    assert _parts(DDP.changed(recomputation={"kind": "blocks"})).recompute == pytest.approx(8 * forward)
    half = DDP.changed(recomputation={"kind": "blocks", "every": 2})
    assert _parts(half).recompute == pytest.approx(4 * forward)
    # Every second of all blocks, though a trace tells the first and the last of a run apart.
    split = replace(
        TRACE, segments=(_segment("first", 1, 6), _segment("middle", 6, 6), _segment("last", 1, 6))
    )
    assert _parts(half, trace=split).recompute == pytest.approx(4 * forward)
    assert _parts(DDP.changed(recomputation={"kind": "blocks", "selectors": ("none.*",)})).recompute == 0


def test_a_rank_moves_to_the_host_what_it_holds_of_activations() -> None:
    gives = Growth(per_sample=64 * MB, divided=0.0)
    segments = (
        replace(part, costs={key: replace(cost, output=gives) for key, cost in part.costs.items()})
        for part in TRACE.segments
    )
    trace = replace(TRACE, segments=tuple(segments))
    plan = DDP.changed(recomputation={"kind": "blocks", "offload_activations": True})
    whole = _parts(plan, trace=trace).offload
    assert whole > 0
    latency = 2 * 8 * _latency_to_host()  # of eight blocks, there and back
    tensor = {"axes": (("tensor", 2), *DDP.axes), "tensor": {"sequence": True}}
    for divided in (plan.changed(axes=(("sequence", 2), *DDP.axes)), plan.changed(**tensor)):
        assert _parts(divided, trace=trace).offload - latency == pytest.approx((whole - latency) / 2)
    pairs = plan.changed(recomputation={"chunk": 2})  # which begin from one input
    assert _parts(pairs, trace=trace).offload == pytest.approx(whole / 2)


def _latency_to_host() -> float:
    hardware = _cluster().hardware
    assert hardware is not None
    return hardware.to_host.rate.latency_s


def test_measured_seconds_replace_the_roofline() -> None:
    timed = replace(TRACE, seconds={"blocks.0:float32:forward": 1.0}, timed_on="test")
    extra = _parts(DDP, trace=timed).compute - _parts(DDP).compute
    assert extra == pytest.approx(SLOWEST * 8 * (2.0 - 8 * (GFLOP / 1e14 + MB / STREAM))), (
        "twice the samples that were timed"
    )


def test_a_cpu_hides_nothing_behind_computation_and_a_gpu_does() -> None:
    cpu = _cluster("cpu")
    assert cpu.hardware is not None
    bare = replace(cpu.hardware, within_node=replace(cpu.hardware.within_node, overlap=0.0))
    bare_cpu = replace(cpu, hardware=bare)
    assert _parts(FSDP).gather < 0.7 * _parts(FSDP, bare_cpu).gather
    assert _parts(ZERO2).reduce < 0.7 * _parts(ZERO2, bare_cpu).reduce
    assert _parts(DDP).reduce < _parts(DDP, bare_cpu).reduce


def test_every_stage_of_a_rank_costs_its_host_for_each_micro_batch() -> None:
    """Twice the stages on a rank, of half the layers: 34 to 59 starts of operators more in a micro-batch (``schedules``)."""
    cluster, launch = _cluster("cpu", world=2), 1e-6
    one = Plan(axes=(("pipeline", 2),), num_micro_batches=8)
    one = one.changed(pipeline={"schedule": "1F1B"})
    two = one.changed(pipeline={"schedule": "Interleaved1F1B", "stages_per_rank": 2})
    more = _parts(two, cluster).overhead - _parts(one, cluster).overhead
    assert 8 * 34 * launch < more < 8 * 59 * launch


def test_what_each_method_costs_against_its_neighbour() -> None:
    cpu = _cluster("cpu")
    assert _parts(ZERO2, cpu).gather < _parts(FSDP, cpu).gather
    assert _parts(ZERO1).gather > _parts(DDP).gather == 0
    assert _parts(ZERO1).optimizer == pytest.approx(_parts(DDP).optimizer / 8)
    assert _parts(FSDP.changed(sharding={"gather_dtype": "bfloat16"}), cpu).gather < _parts(FSDP, cpu).gather
    assert _parts(FSDP.changed(sharding={"reduce_dtype": "bfloat16"}), cpu).reduce < _parts(FSDP, cpu).reduce
    assert _parts(replace(FSDP, num_micro_batches=4), cpu).gather > 3 * _parts(FSDP, cpu).gather
    each = FSDP.changed(num_micro_batches=4, sharding={"reduces_each": True})
    assert _parts(each, cpu).reduce > 3 * _parts(FSDP, cpu).reduce
    assert _parts(replace(each, num_micro_batches=1), cpu) == _parts(FSDP, cpu)
    assert _parts(replace(DDP, num_micro_batches=4), cpu).overhead > 2 * _parts(DDP, cpu).overhead
    fused = _parts(replace(DDP, compiled=True, compiler="inductor"), cpu)
    assert fused.overhead < _parts(DDP, cpu).overhead
    assert fused.compute < _parts(DDP, cpu).compute
    eager = _parts(replace(DDP, compiled=True, compiler="aot_eager"), cpu)
    assert eager.compute == _parts(DDP, cpu).compute
    assert _parts(replace(FSDP, offload=True)).offload > _parts(FSDP).offload == 0
    assert _parts(DDP.changed(precision={"loss_scaling": True})).optimizer > _parts(DDP).optimizer


def test_rings_by_hand() -> None:
    hardware = _cluster().hardware
    assert hardware is not None

    def seconds(kind: str, size: int, within: int, num_bytes: float, count: float = 1) -> float:
        groups = Groups(np.array([size]), np.array([within]))
        return float(collective_seconds(kind, num_bytes, groups, hardware, count=count)[0])

    assert seconds("all_gather", 4, 4, 4e8) == pytest.approx(3 * (5e-6 + 1e8 / 1e11))
    assert seconds("all_reduce", 4, 4, 4e8) == pytest.approx(6 * (5e-6 + 1e8 / 1e11))
    assert seconds("all_gather", 1, 1, 4e8) == 0
    assert seconds("all_gather", 4, 4, 4e8, 10) == pytest.approx(3 * (5e-5 + 1e8 / 1e11))
    across = seconds("all_gather", 16, 8, 16e8)
    assert across == pytest.approx(7 * (5e-6 + 2e8 / 1e11) + 1 * (2e-5 + 1e8 / 1e10))
    only_far = seconds("all_gather", 2, 1, 2e8)
    assert only_far == pytest.approx(2e-5 + 1e8 / 1e10)


def test_groups_lie_inside_nodes_where_their_axis_is_inner() -> None:
    cluster = _cluster(world=32, per_node=8)
    sizes = np.array([8, 4, 16])
    inner = groups_along(np.array([1, 1, 1]), sizes, cluster)
    assert inner.within.tolist() == [8, 4, 8]
    outer = groups_along(np.array([4, 8, 2]), np.array([8, 4, 16]), cluster)
    assert outer.within.tolist() == [2, 1, 4]


def test_sharding_inside_nodes_beats_sharding_across_slow_links() -> None:
    cluster = _cluster(world=32, per_node=8)
    hybrid = replace(FSDP, axes=(("zero", 8), ("data", 4)))
    hybrid = hybrid.changed(
        sharding={"parameters_over": ("zero",), "gradients_over": ("zero",), "optimizer_over": ("zero",)}
    )
    everywhere = replace(FSDP, axes=(("data", 32),))
    assert _parts(hybrid, cluster).gather < _parts(everywhere, cluster).gather


def test_many_plans_are_priced_at_once_and_as_one_by_one() -> None:
    table = product(PLANS, [(8, 1), (4, 2), (1, 8)], range(1, 400))
    started = time.process_time()
    times = price_time(table, TRACE, _cluster(), WORKLOAD)
    seconds = time.process_time() - started
    assert len(table) > 10_000
    assert len(table) / seconds > 100_000
    for row in (0, 1234, len(table) - 1):
        alone = price_time(PlanTable.of([table.plan(row)]), TRACE, _cluster(), WORKLOAD)
        np.testing.assert_allclose(times[row], alone[0], rtol=1e-12)

"""Schedules in the estimate: against simulations, against the pipeline's own choice, and against each other."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from atorch_ns.cluster import cluster_from_spec
from atorch_ns.estimate import Estimate, PlanTable, Workload, estimate, price
from atorch_ns.estimate.auto_schedule import _block_costs, with_chosen_schedules
from atorch_ns.estimate.model_shard import Memo
from atorch_ns.estimate.stages import stages_of
from atorch_ns.estimate.time.context import PricingContext
from atorch_ns.estimate.time.passes import SegmentSeconds
from atorch_ns.estimate.time.pipeline import _recompute_ratio, _simulate_bubble
from atorch_ns.pipeline import StageCosts, choose_for_device, get_schedule, live_bytes, simulate
from atorch_ns.pipeline.schedule.schedules import SCHEDULES
from atorch_ns.profile import Profile, Trace, profile_model
from atorch_ns.sharding import find_dims
from atorch_ns.strategy import AxisUse, Plan
from atorch_ns.testing.models import get_case
from tests.estimate.clusters import started_at_once

CLUSTER = started_at_once(cluster_from_spec("8xH100-80GB"))
NAMES = [
    info.name for info in SCHEDULES if not info.recomputes
]  # those stand in for each by checkpoint's own choice
OFFERED = ("1F1B", "Interleaved1F1B", "InterleavedZeroBubble")


@functools.cache
def profile(num_blocks: int = 16) -> Profile:
    """Of a Llama with so many blocks: its four, more often."""
    case = get_case("tied_llama")

    def forward_loss(model: torch.nn.Module, batch: Any) -> torch.Tensor:
        loss: torch.Tensor = case.loss_func(batch, case.call(model, batch))
        return loss

    found = profile_model(
        case.build(), case.make_batch(4, 0), forward_loss, find_dims, make_optimizer=torch.optim.AdamW
    )
    assert found.trace is not None
    segments = tuple(
        replace(one, paths=tuple(f"layers.{number}" for number in range(num_blocks))) if one.is_block else one
        for one in found.trace.segments
    )
    return replace(found, trace=replace(found.trace, segments=segments))


def trace() -> Trace:
    found = profile().trace
    assert found is not None
    return found


def priced(plan: Plan, batch: int = 64) -> Estimate:
    work = Workload(global_batch=batch, num_tokens=512)
    return price(PlanTable.of([plan]), profile(), CLUSTER, work).estimate(0)


def plan_of(schedule: str, ranks: int = 4, num: int = 16, **more: Any) -> Plan:
    plan = Plan(axes=(("pipeline", ranks),), num_micro_batches=num)
    return plan.changed(pipeline={"schedule": schedule}).changed(**more)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("ranks", "num"), [(2, 8), (4, 8), (4, 16)])
def test_a_schedule_takes_as_long_as_its_simulation(name: str, ranks: int, num: int) -> None:
    """Of the stages with the seconds that the estimate gives them; sends are left out."""
    plan = plan_of(name, ranks, num)
    found = priced(plan).time
    stages = stages_of(plan.pipeline, trace(), ranks)
    v = stages.numbers.shape[1]
    work = Workload(global_batch=64, num_tokens=512)
    sizes = PlanTable.of([plan]).sizes(0, work, Memo())[1]
    context = PricingContext.of(plan, sizes, trace(), cluster=CLUSTER, workload=work, memo=Memo())
    costs = _block_costs(context)
    order = [int(n) for n in stages.numbers.reshape(-1)]
    blocks = [int(n) for n in stages.counts.sum(axis=2).reshape(-1)]
    sizes_of = [blocks[order.index(stage)] for stage in range(ranks * v)]
    cuts = [sum(sizes_of[:stage]) for stage in range(1, ranks * v)]
    of_stages = replace(costs.stages(cuts), send=(0.0,) * (ranks * v - 1))
    timeline = simulate(get_schedule(name).orders(ranks, num, v), of_stages)
    assert found.compute + found.bubble == pytest.approx(timeline.step_seconds, rel=0.12)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("again", [0.0, 1.0])
def test_the_share_of_the_bubble_does_not_depend_on_the_size(name: str, again: float) -> None:
    """That a small pipeline is simulated in place of a large one changes little: most for DualPipeV, 0.31 for 0.36."""
    from atorch_ns.estimate.time.pipeline import _as_small

    info = get_schedule(name)
    for ranks, num in ((8, 8), (8, 16), (8, 64), (16, 48)):
        numbers = (*_as_small(ranks, num), info.usual_stages)
        if not info.problem(ranks, num):
            assert numbers[0] == 4
            whole = _simulate_bubble(info, (ranks, num, info.usual_stages), again, False)
            assert _simulate_bubble(info, numbers, again, False) == pytest.approx(whole, rel=0.1, abs=0.05)


def test_each_block_counts_in_the_share_of_recomputation() -> None:
    segments = [SegmentSeconds(1.0, 2.0, float(part.is_block), 0.0, 0.0) for part in trace().segments]
    assert _recompute_ratio(trace(), segments) == 1.0  # of sixteen blocks, and two other segments


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("num", [8, 16, 40])
def test_ranks_hold_the_micro_batches_of_the_order(name: str, num: int) -> None:
    info = get_schedule(name)
    v = info.usual_stages
    live = stages_of(plan_of(name).pipeline, trace(), 4).live(num, Memo())
    assert live.tolist() == pytest.approx(live_bytes(info.orders(4, num, v), [1 / v] * 4 * v))


@pytest.mark.parametrize("again", [0.0, 1.0])
def test_the_schedules_that_are_not_offered_wait_longer_or_hold_more(again: float) -> None:
    """For numbers of micro-batches that a search looks at, of equal stages."""

    def weigh(name: str, ranks: int, num: int) -> tuple[float, float] | None:
        info = get_schedule(name)
        v = info.usual_stages
        if info.problem(ranks, num, v):
            return None
        orders = info.orders(ranks, num, v)
        costs = StageCosts.equal(
            ranks * v, forward=1 / v, backward_input=(1 + again) / v, backward_weight=1 / v
        )
        return simulate(orders, costs).step_seconds, max(live_bytes(orders, [1 / v] * ranks * v))

    for ranks in (2, 4, 8):
        for num in (ranks, 2 * ranks, 4 * ranks):
            best = [weighed for name in OFFERED if (weighed := weigh(name, ranks, num))]
            for name in set(NAMES) - set(OFFERED):
                other = weigh(name, ranks, num)
                if other is not None:
                    assert any(t <= other[0] + 1e-9 and m <= other[1] + 1e-9 for t, m in best), (
                        name,
                        ranks,
                        num,
                    )


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"compiled": True, "compiler": "inductor"},
        {"recomputation": {"kind": "blocks"}},
        {"pipeline": {"stages_per_rank": 1}},
    ],
)
def test_auto_is_priced_as_what_the_pipeline_would_choose(more: dict[str, Any]) -> None:
    plan = plan_of("auto", **more)
    work = Workload(global_batch=64, num_tokens=512)
    table = PlanTable.of([plan, replace(plan, axes=())])
    found = with_chosen_schedules(table, trace(), CLUSTER, work, memo=Memo())
    context = PricingContext.of(
        plan,
        PlanTable.of([plan]).sizes(0, work, Memo())[1],
        trace(),
        cluster=CLUSTER,
        workload=work,
        memo=Memo(),
    )
    assert CLUSTER.hardware is not None
    best = choose_for_device(
        _block_costs(context),
        4,
        16,
        stages_per_rank=plan.pipeline.stages_per_rank or None,
        whole_backward=plan.whole_backward,
        memory_bytes=CLUSTER.hardware.device.memory_bytes,
    ).best
    chosen = AxisUse.of(found.plan(0))
    assert (chosen.pipeline.schedule, chosen.pipeline.stages_per_rank) == (
        best.schedule.name,
        best.stages_per_rank,
    )
    assert not (plan.whole_backward and best.schedule.splits_backward)
    named = chosen.onto(plan)
    assert priced(plan) == priced(named)
    assert estimate(plan, profile(), CLUSTER, work) == estimate(named, profile(), CLUSTER, work)


@pytest.mark.parametrize("per_node", [1, 4])
def test_auto_pays_for_sends_on_the_link_between_neighbours(per_node: int) -> None:
    plan, work = plan_of("auto"), Workload(global_batch=64, num_tokens=512)
    cluster = replace(CLUSTER, local_world_size=per_node)
    sizes = PlanTable.of([plan]).sizes(0, work, Memo())[1]
    costs = _block_costs(PricingContext.of(plan, sizes, trace(), cluster=cluster, workload=work, memo=Memo()))
    assert cluster.hardware is not None
    link = cluster.hardware.within_node if per_node > 1 else cluster.hardware.between_nodes
    assert costs.send == pytest.approx(
        link.message_seconds("send", np.asarray(costs.boundary_bytes)), rel=0.1
    )


@pytest.mark.parametrize("compiled", [False, True])
def test_a_backward_pass_in_two_parts_starts_more_operators(compiled: bool) -> None:
    more = {"compiled": compiled, "compiler": "inductor" if compiled else ""}
    work = Workload(global_batch=64, num_tokens=512)
    once, twice = (
        price(PlanTable.of([plan_of(name, **more)]), profile(), cluster_from_spec("4xcpu"), work).estimate(0)
        for name in ("Interleaved1F1B", "InterleavedZeroBubble")
    )
    assert twice.time.compute == once.time.compute
    assert (twice.time.overhead > once.time.overhead) != compiled
    assert (twice.time.bubble < once.time.bubble) != compiled


def test_a_divided_residual_stream_takes_memory_off_for_the_same_bytes() -> None:
    plain, divided = (
        priced(Plan(axes=(("tensor", 2),)).changed(tensor={"sequence": sequence}))
        for sequence in (False, True)
    )
    assert divided.memory.activations < plain.memory.activations
    assert divided.time.exchange == pytest.approx(plain.time.exchange, rel=0.05)


def test_parameters_that_stay_gathered_are_gathered_once() -> None:
    plan = plan_of("1F1B").changed(
        axes=(("data", 2), ("pipeline", 4)),
        gradient_sync="reduce_scatter",
        sharding=dict.fromkeys(("parameters_over", "gradients_over", "optimizer_over"), ("data",)),
    )
    kept, freed = (priced(plan.changed(sharding={"keeps_gathered": keeps})) for keeps in (True, False))
    assert kept.time.gather < freed.time.gather / 3
    assert kept.memory.temporaries > freed.memory.temporaries

"""Simulated steps against closed forms, and the choice among schedules."""

from __future__ import annotations

import time

import numpy as np
import pytest

from atorch_ns.errors import InputError
from atorch_ns.pipeline import ScheduleInfo, StageCosts, get_schedule, live_bytes, simulate
from atorch_ns.pipeline.schedule.actions import Action
from atorch_ns.pipeline.schedule.schedules import SCHEDULES
from atorch_ns.pipeline.schedule.simulate import Timeline


def _simulated(name: str, num_ranks: int, num_micro_batches: int, **costs: float) -> Timeline:
    info = get_schedule(name)
    orders = info.orders(num_ranks, num_micro_batches)
    stages = StageCosts.equal(num_ranks * info.usual_stages, **costs)
    return simulate(orders, stages)


@pytest.mark.parametrize("name", ["GPipe", "1F1B"])
@pytest.mark.parametrize(("p", "m"), [(1, 1), (2, 2), (2, 8), (4, 4), (4, 16), (8, 32)])
def test_the_bubble_of_equal_stages(name: str, p: int, m: int) -> None:
    timeline = _simulated(name, p, m, forward=1.0, backward_input=1.0, backward_weight=1.0)
    assert timeline.step_seconds == pytest.approx((m + p - 1) * 3.0)
    assert timeline.bubble_share == pytest.approx((p - 1) / (m + p - 1))
    assert timeline.idle_shares == pytest.approx([(p - 1) / (m + p - 1)] * p)


@pytest.mark.parametrize(("p", "m"), [(2, 4), (4, 8), (4, 16)])
def test_two_stages_a_rank_halve_the_bubble(p: int, m: int) -> None:
    timeline = _simulated("Interleaved1F1B", p, m, forward=0.5, backward_input=0.5, backward_weight=0.5)
    assert timeline.step_seconds == pytest.approx((m + (p - 1) / 2) * 3.0)  # arXiv:2104.04473, section 2.2


@pytest.mark.parametrize(("p", "m"), [(2, 4), (4, 8), (4, 16), (8, 32)])
def test_zero_bubble_h1_leaves_a_third_of_the_bubble(p: int, m: int) -> None:
    info = get_schedule("InterleavedZeroBubble")
    timeline = simulate(info.orders(p, m, 1), StageCosts.equal(p))
    # (p - 1)(F + I - W) of arXiv:2401.10241, table 1, with F = I = W = 1.
    assert timeline.step_seconds == pytest.approx(3.0 * m + (p - 1))


@pytest.mark.parametrize("m", [8, 16, 32])
def test_zbv_is_idle_only_while_it_fills_and_drains(m: int) -> None:
    p = 4
    timeline = _simulated("ZBVZeroBubble", p, m, forward=0.5, backward_input=0.5, backward_weight=0.5)
    assert timeline.step_seconds == pytest.approx(3.0 * m + (p - 1) / 2)


def test_unequal_stages_go_at_the_pace_of_the_slowest() -> None:
    costs = StageCosts(forward=(1, 2, 1), backward_input=(1, 2, 1), backward_weight=(1, 2, 1))
    timeline = simulate(get_schedule("1F1B").orders(3, 60), costs)
    assert timeline.step_seconds == pytest.approx(60 * (2 + 2 + 2), rel=0.05)
    assert timeline.idle_shares[1] < 0.05 < 0.45 < timeline.idle_shares[0]
    assert timeline.busy_seconds == pytest.approx((180.0, 360.0, 180.0))


def test_sends_travel_during_passes() -> None:
    timeline = simulate(get_schedule("GPipe").orders(2, 3), StageCosts.equal(2, send=0.25))
    assert timeline.step_seconds == pytest.approx(4 * 3.0 + 2 * 0.25)  # once over the boundary and back


def test_nothing_is_sent_between_stages_on_one_rank() -> None:
    info = get_schedule("ZBVZeroBubble")
    orders = info.orders(1, 4)
    assert simulate(orders, StageCosts.equal(2, send=9.0)).bubble_share == 0


def test_a_whole_backward_may_take_less_than_its_parts() -> None:
    pair = (1.0, 1.0)
    costs = StageCosts(forward=pair, backward_input=(1.2, 1.2), backward_weight=pair, backward=(2.0, 2.0))
    forwards = (Action("F", 0, 0), Action("F", 1, 0))
    whole = simulate(((*forwards, Action("B", 1, 0), Action("B", 0, 0)),), costs)
    parts = simulate(((*forwards, Action("I", 1, 0), Action("W", 1, 0), Action("B", 0, 0)),), costs)
    assert (whole.step_seconds, parts.step_seconds) == pytest.approx((6.0, 6.2))


def test_the_first_stage_splits_its_backward_pass_as_the_others() -> None:
    order = tuple(Action(kind, 0, 0) for kind in ("F", "I", "W"))
    costs = StageCosts(forward=(1.0,), backward_input=(1.25,), backward_weight=(0.75,), backward=(2.0,))
    timeline = simulate((order,), costs)
    assert (timeline.ends[0] - timeline.starts[0]).tolist() == [1.0, 1.25, 0.75]


def test_passes_of_a_rank_never_overlap_and_follow_what_they_need() -> None:
    rng = np.random.default_rng(0)
    for info in SCHEDULES:
        num_stages = 4 * info.usual_stages
        seconds = [tuple(rng.uniform(0.5, 2.0, num_stages)) for _ in range(3)]
        send = tuple(rng.uniform(0, 0.5, num_stages - 1))
        costs = StageCosts(
            forward=seconds[0], backward_input=seconds[1], backward_weight=seconds[2], send=send
        )
        timeline = simulate(info.orders(4, 8), costs)
        ends = {}
        for order, starts, finished in zip(timeline.orders, timeline.starts, timeline.ends, strict=True):
            assert (starts[1:] >= finished[:-1] - 1e-12).all()
            ends |= {
                (a.kind.replace("I", "B"), a.stage, a.micro_batch): e
                for a, e in zip(order, finished, strict=True)
            }
        for order, starts in zip(timeline.orders, timeline.starts, strict=True):
            for (kind, stage, index), start in zip(order, starts, strict=True):
                if kind == "F" and stage:
                    assert start >= ends["F", stage - 1, index] - 1e-12
                if kind in "BI" and stage < num_stages - 1:
                    assert start >= ends["B", stage + 1, index] - 1e-12


def test_live_bytes_of_a_rank_are_of_the_same_moment() -> None:
    order = (
        Action("F", 0, 0),
        Action("F", 1, 0),
        Action("I", 1, 0),
        Action("W", 1, 0),
        Action("F", 0, 1),
        Action("B", 0, 0),
        Action("B", 0, 1),
    )
    assert live_bytes((order,), (10.0, 5.0)) == (20.0,)  # not 2 × 10 + 5


def test_bad_costs_and_orders_are_refused() -> None:
    with pytest.raises(InputError, match="2 stages need 2 values in 'backward_input', but there are 1"):
        StageCosts(forward=(1, 1), backward_input=(1,), backward_weight=(1, 1))
    with pytest.raises(InputError, match="holds nan"):
        StageCosts(forward=(float("nan"),), backward_input=(1,), backward_weight=(1,))
    with pytest.raises(InputError, match="have 2 stages, but the costs have 3"):
        simulate(get_schedule("GPipe").orders(2, 2), StageCosts.equal(3))
    crossed = ((Action("B", 0, 0), Action("F", 0, 0)), (Action("F", 1, 0), Action("B", 1, 0)))
    with pytest.raises(InputError, match="never end: rank 0 with the backward of micro-batch 0 in stage 0"):
        simulate(crossed, StageCosts.equal(2))
    with pytest.raises(InputError, match="without actions"):
        simulate((), StageCosts.equal(2))


def test_64_ranks_and_256_micro_batches_take_about_a_second() -> None:
    began = time.process_time()
    for name in ("1F1B", "InterleavedZeroBubble"):
        timeline = _simulated(name, 64, 256)
        assert len(timeline.orders) == 64
    assert time.process_time() - began < 3.0  # both take about 0.6 s on an idle core


@pytest.mark.parametrize("info", SCHEDULES, ids=[info.name for info in SCHEDULES])
def test_whatever_a_schedule_accepts_comes_to_an_end(info: ScheduleInfo) -> None:
    for num_ranks in (1, 2, 3, 5):
        for on_rank in {info.fewest_stages, info.usual_stages, info.most_stages or 3}:
            for num_micro_batches in range(1, 4 * num_ranks):
                if not info.problem(num_ranks, num_micro_batches, on_rank):
                    orders = info.orders(num_ranks, num_micro_batches, on_rank)
                    timeline = simulate(orders, StageCosts.equal(num_ranks * on_rank))
                    again = [sum(action.kind == "R" for action in order) for order in orders]
                    assert timeline.busy_seconds == pytest.approx(
                        [3.0 * on_rank * num_micro_batches + more for more in again]
                    )

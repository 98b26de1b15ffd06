"""Planned pipelines against every pipeline there is, and the search's size."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import replace

import pytest

from atorch_ns.errors import InputError
from atorch_ns.pipeline import get_schedule
from atorch_ns.pipeline.plan.operator_stages import StageTables, plan_stages
from atorch_ns.pipeline.plan.stage_costs import (
    Cost,
    PipelineTask,
    Stage,
    StageCost,
    estimated_seconds,
    step_seconds,
)
from atorch_ns.pipeline.schedule.actions import live_micro_batches


def _work(weights: list[int], efficiency: float) -> Cost:
    """Stages whose seconds and bytes follow the weights of their segments."""
    totals = [0, *itertools.accumulate(weights)]

    def cost(start: int, stop: int, degree: int, recompute: bool, in_flight: int) -> StageCost:
        work = totals[stop] - totals[start]
        seconds = work / degree**efficiency
        kept = work * (0.25 if recompute else 1.0) * in_flight
        return StageCost(
            seconds, seconds * (3 if recompute else 2), (10 * work + kept) / degree, 2 * work / degree
        )

    return cost


def _any(rng: random.Random) -> Cost:
    """Stages whose seconds and bytes follow nothing, except that more in flight are slower and larger."""
    drawn: dict[tuple[int, int, int, bool], tuple[StageCost, float] | None] = {}

    def cost(start: int, stop: int, degree: int, recompute: bool, in_flight: int) -> StageCost | None:
        key = (start, stop, degree, recompute)
        if key not in drawn:
            one = StageCost(rng.randint(1, 20), rng.randint(1, 20), rng.randint(1, 9), rng.randint(0, 15))
            drawn[key] = (one, rng.choice([0, 0, 1, 0.1])) if rng.random() < 0.9 else None
        if (found := drawn[key]) is None:
            return None
        one, slope = found
        return one._replace(forward=one.forward + slope * in_flight, memory=one.memory * in_flight)

    return cost


def _every(cost: Cost, task: PipelineTask) -> Iterator[tuple[Stage, ...]]:
    """Every pipeline that fits."""
    num = task.num_segments
    for count in range(1, num + 1) if task.num_stages is None else [task.num_stages]:
        for cuts in itertools.combinations(range(1, num), count - 1):
            spans = list(itertools.pairwise((0, *cuts, num)))
            for degrees in itertools.product(task.allowed_degrees, repeat=count):
                if sum(degrees) == task.num_devices and (len(set(degrees)) == 1 or not task.equal_degrees):
                    options = [
                        [
                            Stage(start, stop, degree, again, in_flight, found)
                            for again in task.recompute
                            if (
                                found := cost(
                                    start, stop, degree, again, in_flight := task.in_flight(count - place)
                                )
                            )
                            and (task.memory_limit is None or found.memory <= task.memory_limit)
                        ]
                        for place, ((start, stop), degree) in enumerate(zip(spans, degrees, strict=True))
                    ]
                    yield from itertools.product(*options)


def _random_task(rng: random.Random) -> PipelineTask:
    num_segments = rng.randint(1, 5)
    num_devices = rng.choice([1, 2, 3, 4, 6])
    return PipelineTask(
        num_segments=num_segments,
        num_devices=num_devices,
        num_micro_batches=rng.choice([1, 2, 4, 8]),
        degrees=rng.choice([None, None, (1, 2, 3)]),
        num_stages=rng.choice([None, None, rng.randint(1, min(num_segments, num_devices))]),
        equal_degrees=rng.random() < 0.3,
        recompute=rng.choice([(False,), (True,), (False, True)]),
        schedule=rng.choice(["1F1B", "GPipe"]),
        send=[rng.randint(0, 9) for _ in range(num_segments - 1)],
        send_by_degree=rng.choice([{}, {1: 5.0, 2: 1.0}]),
        memory_limit=rng.choice([None, 20, 60, 120, 150]),
    )


@pytest.mark.parametrize("seed", range(8))
def test_the_least_estimate_is_among_the_simulated_and_the_fastest_of_them_is_taken(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(seed)
    for _ in range(50):
        task = _random_task(rng)
        cost = (
            _any(rng)
            if rng.random() < 0.5
            else _work([rng.randint(1, 9) for _ in range(5)], rng.choice([0.5, 1]))
        )
        every = list(_every(cost, task))
        if not every:
            with pytest.raises(InputError, match="no pipeline of"):
                plan_stages(cost, task)
            continue
        plan = plan_stages(cost, task)
        best = min(every, key=lambda stages: estimated_seconds(stages, task))
        assert plan.stages in every
        assert plan.step_seconds == pytest.approx(step_seconds(plan.stages, task))
        assert plan.estimated_seconds >= estimated_seconds(best, task) - 1e-9
        with monkeypatch.context() as only_one:
            only_one.setattr("atorch_ns.pipeline.plan.operator_stages._NUM_SIMULATED", 1)
            first = plan_stages(cost, task)
        assert first.estimated_seconds == pytest.approx(estimated_seconds(best, task))
        assert plan.step_seconds <= first.step_seconds


@pytest.mark.parametrize("schedule", ["1F1B", "GPipe"])
@pytest.mark.parametrize(("num_stages", "num_micro_batches"), [(1, 1), (3, 2), (4, 4), (4, 16)])
def test_stages_hold_what_the_schedule_holds(schedule: str, num_stages: int, num_micro_batches: int) -> None:
    task = PipelineTask(num_segments=4, num_devices=4, num_micro_batches=num_micro_batches, schedule=schedule)
    held = live_micro_batches(get_schedule(schedule).orders(num_stages, num_micro_batches))
    assert held == tuple(task.in_flight(position) for position in range(num_stages, 0, -1))


@pytest.mark.parametrize("schedule", ["1F1B", "GPipe"])
def test_the_estimate_of_equal_stages_is_the_simulated_step(schedule: str) -> None:
    task = PipelineTask(num_segments=4, num_devices=4, num_micro_batches=8, schedule=schedule)
    cost = StageCost(1.0, 2.0, per_step=0.5)
    stages = [Stage(place, place + 1, 1, False, 1, cost) for place in range(4)]
    assert estimated_seconds(stages, task) == pytest.approx((8 - 1 + 4) * 3.0 + 0.5)
    assert step_seconds(stages, task) == pytest.approx((8 - 1 + 4) * 3.0 + 0.5)


def test_sends_are_paid_there_and_back() -> None:
    task = PipelineTask(num_segments=3, num_devices=3, num_micro_batches=1, send=(0.25, 0.75))
    stages = [Stage(place, place + 1, 1, False, 1, StageCost(1.0, 2.0)) for place in range(3)]
    assert estimated_seconds(stages, task) == step_seconds(stages, task) == 9.0 + 2.0


def test_stages_whose_sends_are_slow_have_another_degree() -> None:
    costs = {"num_segments": 4, "num_devices": 4, "num_micro_batches": 4, "equal_degrees": True}
    task = PipelineTask(**costs, degrees=(1, 2))
    fast = plan_stages(_work([2, 2, 2, 2], 0.5), task)
    slow = plan_stages(_work([2, 2, 2, 2], 0.5), replace(task, send_by_degree={1: 60.0}))
    assert (fast.stages[0].degree, slow.stages[0].degree) == (1, 2)
    sends = replace(task, send_by_degree={1: 60.0, 2: 3.0})
    assert estimated_seconds(slow.stages, sends) == estimated_seconds(slow.stages, task) + 6.0


def test_each_stage_costs_what_it_does_with_its_micro_batches_in_flight() -> None:
    def cost(start: int, stop: int, degree: int, recompute: bool, in_flight: int) -> StageCost:
        return StageCost(1.0 + 0.5 * in_flight, 1.0)

    task = PipelineTask(num_segments=8, num_devices=8, num_micro_batches=6, num_stages=8)
    plan = plan_stages(cost, task)
    assert [stage.cost.forward for stage in plan.stages] == [4.0, 4.0, 4.0, 3.5, 3.0, 2.5, 2.0, 1.5]


def test_what_is_paid_once_a_step_does_not_slow_micro_batches() -> None:
    """Two stages synchronize for longer than the whole model takes on all devices, except that they do so once."""

    def cost(start: int, stop: int, degree: int, recompute: bool, in_flight: int) -> StageCost:
        return StageCost(stop - start, stop - start, per_step=0.0 if degree == 2 else 10.0)

    task = PipelineTask(num_segments=4, num_devices=2, num_micro_batches=16, recompute=(False,))
    assert [stage.degree for stage in plan_stages(cost, task).stages] == [1, 1]


def test_early_stages_recompute_where_late_ones_need_not() -> None:
    """The first of four stages holds four micro-batches."""
    task = PipelineTask(
        num_segments=4, num_devices=4, num_micro_batches=8, degrees=(1,), memory_limit=10 + 2.0
    )
    plan = plan_stages(_work([1, 1, 1, 1], 1.0), task)
    assert [stage.recompute for stage in plan.stages] == [True, True, False, False]
    assert [stage.in_flight for stage in plan.stages] == [4, 3, 2, 1]


def test_costly_sends_move_the_cut() -> None:
    costs = {"num_segments": 4, "num_devices": 2, "num_micro_batches": 4, "num_stages": 2}
    even = plan_stages(_work([2, 2, 2, 2], 1.0), PipelineTask(**costs))
    moved = plan_stages(_work([2, 2, 2, 2], 1.0), PipelineTask(**costs, send=(0.0, 60.0, 60.0)))
    assert (even.stages[1].start, moved.stages[1].start) == (2, 1)


def test_a_segment_that_fits_nowhere_is_named() -> None:
    task = PipelineTask(num_segments=3, num_devices=2, num_micro_batches=4, memory_limit=40.0)
    with pytest.raises(InputError, match=r"segment 2 alone needs 46 B of 40 B\. Use more devices"):
        plan_stages(_work([1, 1, 9], 1.0), task)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"schedule": "Interleaved1F1B"}, "1F1B or GPipe, not Interleaved1F1B"),
        ({"num_stages": 5}, "make 1 to 4 stages, not 5"),
        ({"degrees": (16,)}, "has a degree of"),
    ],
)
def test_tasks_without_a_pipeline_are_refused(given: dict[str, object], words: str) -> None:
    with pytest.raises(InputError, match=words):
        PipelineTask(num_segments=4, num_devices=8, num_micro_batches=4, **given)  # type: ignore[arg-type]


def test_a_long_model_takes_few_searches(monkeypatch: pytest.MonkeyPatch) -> None:
    """96 segments on 64 devices: each search is a table, and each stage is asked for at most twice where nothing varies."""
    rng = random.Random(3)
    cost, calls, searches = _work([rng.randint(1, 9) for _ in range(96)], 0.9), 0, 0
    least_sum = StageTables.least_sum

    def counted_cost(start: int, stop: int, degree: int, recompute: bool, in_flight: int) -> StageCost | None:
        nonlocal calls
        calls += 1
        return cost(start, stop, degree, recompute, in_flight)

    def counted_search(self: StageTables, most: float) -> object:
        nonlocal searches
        searches += 1
        return least_sum(self, most)

    monkeypatch.setattr(StageTables, "least_sum", counted_search)
    task = PipelineTask(num_segments=96, num_devices=64, num_micro_batches=64, degrees=(1, 2, 4, 8))
    plan = plan_stages(counted_cost, task)
    spans = 96 * 97 // 2
    assert calls <= 2 * spans * 4 * 2 + 64 * searches
    assert searches < 60
    assert sum(stage.degree for stage in plan.stages) == 64
    assert plan.step_seconds == pytest.approx(plan.estimated_seconds, rel=0.01)

"""Shares of recomputed blocks by stage: Merak's formula, stages that keep as many bytes, the least that fits."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest

from atorch_ns.errors import InputError
from atorch_ns.pipeline import BlockCosts, RecomputeShare, choose_for_device, get_schedule
from atorch_ns.pipeline.schedule.actions import live_bytes

BLOCKS = 96
COSTS = BlockCosts(
    forward=(1.0,) * BLOCKS,
    backward_input=(1.0,) * BLOCKS,
    backward_weight=(1.0,) * BLOCKS,
    recompute=(1.0,) * BLOCKS,
    state_bytes=(20.0,) * BLOCKS,
    activation_bytes=(10.0,) * BLOCKS,
    recomputed_bytes=(1.0,) * BLOCKS,
)
CUTS = (24, 48, 72)


def test_shares_of_stages() -> None:
    live = (4, 3, 2, 1)
    assert RecomputeShare(0.75, "merak").of_stages(live) == (0.75, 0.625, 0.25, 0.0)
    assert RecomputeShare(0.5).of_stages(live) == (0.5,) * 4
    assert RecomputeShare((0.5, 0.25)).of_stages(live) == (0.5, 0.25, 0.25, 0.25)
    assert RecomputeShare(0.5).of_stages(live, keeps_last=True) == (0.5, 0.5, 0.5, 0.0)
    assert RecomputeShare("auto").of_stages(live) == (1.0,) * 4
    assert RecomputeShare(0.2, "merak").of_stages((2, 1)) == pytest.approx((0.2, 0.0))
    assert RecomputeShare(0.2, "merak").of_stages((1,)) == (0.2,)


@pytest.mark.parametrize(
    ("name", "cuts"), [("1F1B", CUTS), ("PreRecompute1F1B", CUTS), ("1F1B", (20, 49, 75))]
)
@pytest.mark.parametrize("first", [1.0, 0.9, 0.6])
def test_level_stages_keep_as_many_bytes(name: str, first: float, cuts: tuple[int, ...]) -> None:
    """Also where the stages have unlike numbers of blocks, as the fastest cuts of stages that recompute unlike shares."""
    schedule = get_schedule(name)
    shares = choose_for_device(
        COSTS, 4, 16, schedule=schedule, memory_bytes=1e9, cuts=cuts, recompute=RecomputeShare(first, "level")
    ).best.shares
    assert shares[0] == pytest.approx(first)
    sizes = [stop - start for start, stop in itertools.pairwise((0, *cuts, BLOCKS))]
    kept = [
        len(blocks) * 1.0 + (size - len(blocks)) * 10.0
        for size, blocks in zip(sizes, COSTS.recomputed(cuts, shares), strict=True)
    ]
    held = live_bytes(schedule.orders(4, 16), kept, [size * 10.0 for size in sizes])
    half_a_block = 0.5 * 9.0
    for each, share, number in zip(held, shares, (4, 3, 2, 1), strict=True):
        if 0.0 < share < 1.0:  # others have nothing left to give or to take
            assert abs(each - held[0]) <= max(0.05 * held[0], number * half_a_block)
        elif share == 0.0:
            assert each <= held[0] + half_a_block * number


def _peak(shares: tuple[float, ...], name: str) -> float:
    kept = [len(blocks) * 1.0 + (24 - len(blocks)) * 10.0 for blocks in COSTS.recomputed(CUTS, shares)]
    orders = get_schedule(name).orders(4, 8)
    return max(live_bytes(orders, kept, [240.0] * 4)) + 24 * 20.0


@pytest.mark.parametrize("limit", [2000.0, 1200.0, 900.0, 600.0])
def test_auto_recomputes_the_least_that_fits(limit: float) -> None:
    """Held against every share of every stage, in steps of a block."""
    choice = choose_for_device(
        COSTS,
        4,
        8,
        schedule=get_schedule("1F1B"),
        limit_bytes=limit,
        memory_bytes=1e9,
        cuts=CUTS,
        recompute=RecomputeShare("auto"),
    ).best
    live = (4, 3, 2, 1)
    for stage, share in enumerate(choice.shares):
        fits = [n for n in range(25) if live[stage] * (240.0 - 9.0 * n) + 480.0 <= limit]
        assert round(share * 24) == fits[0]
    assert max(choice.peak_bytes) <= limit
    everything = choose_for_device(
        COSTS, 4, 8, schedule=get_schedule("1F1B"), memory_bytes=1e9, cuts=CUTS
    ).best
    assert choice.step_seconds <= everything.step_seconds


def test_auto_chooses_shares_and_schedule_together() -> None:
    """Where memory is ample nothing is recomputed, and no schedule that does; where it is short the choice is as fast as
    the best of all schedules, each with its own shares."""
    ample = choose_for_device(COSTS, 4, 8, memory_bytes=1e9, recompute=RecomputeShare("auto")).best
    assert set(ample.shares) == {0.0}
    short = choose_for_device(
        COSTS, 4, 8, limit_bytes=900.0, memory_bytes=1e9, recompute=RecomputeShare("auto")
    )
    assert any(short.best.shares)
    usable = [one for one in short.candidates if not one.problem]
    assert short.best.step_seconds == min(one.step_seconds for one in usable)
    assert len({one.shares for one in usable}) > 1
    whole = choose_for_device(COSTS, 4, 8, limit_bytes=900.0, memory_bytes=1e9).best
    assert short.best.step_seconds < whole.step_seconds


def test_what_does_not_fit_is_said_with_everything_recomputed() -> None:
    with pytest.raises(InputError, match="over the limit"):
        choose_for_device(
            COSTS,
            4,
            8,
            schedule=get_schedule("1F1B"),
            limit_bytes=500.0,
            memory_bytes=1e9,
            recompute=RecomputeShare("auto"),
        )


def test_costs_of_stages_hold_the_share() -> None:
    stages = COSTS.stages(CUTS, (1.0, 0.5, 0.0, 0.0))
    assert stages.recompute == (24.0, 12.0, 0.0, 0.0)
    assert stages.backward_input == (48.0, 36.0, 24.0, 24.0)
    assert replace(COSTS, recompute=()).stages(CUTS).recompute == (0,) * 4


@pytest.mark.parametrize(
    ("share", "by_stage", "words"),
    [
        (1.5, "same", "numbers from 0 to 1"),
        ((), "same", "numbers from 0 to 1"),
        ((0.5, 0.2), "level", "from one number"),
        ("auto", "merak", "from one number"),
    ],
)
def test_shares_that_mean_nothing_are_refused(share: object, by_stage: object, words: str) -> None:
    with pytest.raises(InputError, match=words):
        RecomputeShare(share, by_stage)  # type: ignore[arg-type]


def test_more_shares_than_stages_are_refused() -> None:
    options: dict[str, Any] = {"schedule": get_schedule("1F1B"), "memory_bytes": 1e9}
    with pytest.raises(InputError, match=r"has 3 numbers, \[1.0, 0.5, 0.2\], for 2 stages"):
        choose_for_device(COSTS, 2, 8, recompute=RecomputeShare((1.0, 0.5, 0.2)), **options)
    RecomputeShare((1.0, 0.5)).check(2)

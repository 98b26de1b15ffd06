"""The choice of a schedule."""

from __future__ import annotations

from dataclasses import replace

import pytest

from atorch_ns.errors import InputError
from atorch_ns.pipeline import BlockCosts, get_schedule, split_backward, stage_ranges
from atorch_ns.pipeline.plan.choose import ScheduleCandidate, choose_schedule

GIB = 2.0**30
EVEN = BlockCosts(
    forward=(1.0,) * 16,
    backward_input=(1.0,) * 16,
    backward_weight=(1.0,) * 16,
    state_bytes=(GIB,) * 16,
    activation_bytes=(0.25 * GIB,) * 16,
)


def _by_name(candidates: tuple[ScheduleCandidate, ...], on_rank: int = 1) -> dict[str, ScheduleCandidate]:
    return {one.schedule.name: one for one in candidates if one.stages_per_rank == on_rank}


def test_the_fastest_is_chosen_and_every_schedule_has_its_figures() -> None:
    choice = choose_schedule(EVEN, 4, 8)
    assert choice.candidates[0] is choice.best
    assert choice.best.step_seconds == min(one.step_seconds for one in choice.candidates)
    assert choice.best.schedule.splits_backward
    one_stage = _by_name(choice.candidates)
    assert one_stage["1F1B"].step_seconds == pytest.approx(11 * 4 * 3.0)
    assert one_stage["1F1B"].bubble_share == pytest.approx(3 / 11)
    assert one_stage["1F1B"].cuts == (4, 8, 12)
    assert one_stage["1F1B"].peak_bytes == pytest.approx(
        [(4 + 4) * GIB, (4 + 3) * GIB, (4 + 2) * GIB, (4 + 1) * GIB]
    )
    assert one_stage["GPipe"].peak_bytes == pytest.approx([(4 + 8) * GIB] * 4)
    assert (
        len(choice.candidates) == 10
    )  # seven schedules, three of them with one and with two stages on a rank


def test_of_equal_steps_the_one_with_less_memory_is_taken() -> None:
    plain = [get_schedule(name) for name in ("GPipe", "1F1B")]
    choice = choose_schedule(EVEN, 4, 8, schedules=plain)
    assert choice.best.schedule.name == "1F1B"
    assert [one.step_seconds for one in choice.candidates] == pytest.approx([132.0, 132.0])


def test_what_does_not_fit_is_not_chosen() -> None:
    everything = choose_schedule(EVEN, 4, 32)
    limit = max(everything.best.peak_bytes) - 1
    choice = choose_schedule(EVEN, 4, 32, limit_bytes=limit)
    assert max(choice.best.peak_bytes) <= limit
    assert "over the limit" in _by_name(choice.candidates)["GPipe"].problem
    with pytest.raises(InputError) as caught:
        choose_schedule(EVEN, 4, 32, limit_bytes=4 * GIB)
    lines = str(caught.value).splitlines()
    assert lines[0] == "no schedule runs 32 micro-batches on a pipeline of 4 ranks:"
    assert lines[2].startswith(
        "  GPipe, 1 on a rank: rank 0 would hold 36.0 GiB, 32.0 GiB over the limit of 4.00 GiB"
    )
    assert len(lines) == 1 + 10 + 1


def test_blocks_are_moved_to_fit_the_limit() -> None:
    plain = [get_schedule("1F1B")]
    choice = choose_schedule(EVEN, 4, 8, limit_bytes=7.5 * GIB, schedules=plain)
    assert max(choice.best.peak_bytes) <= 7.5 * GIB
    assert len(stage_ranges(choice.best.cuts, 16)[0]) == 3


def test_a_rank_with_two_stages_shares_its_limit_as_they_need_it() -> None:
    heavy = replace(EVEN, state_bytes=(6 * GIB, *(GIB,) * 15), forward=(0.5, *(1.0,) * 15))
    zbv = [get_schedule("zbv")]
    free = choose_schedule(heavy, 4, 8, schedules=zbv)
    limit = 12.5 * GIB
    assert max(free.best.peak_bytes) > limit
    assert max(choose_schedule(heavy, 4, 8, schedules=zbv, limit_bytes=limit).best.peak_bytes) <= limit


def test_buffers_of_two_micro_batches_are_counted_at_each_cut() -> None:
    plain = [get_schedule("GPipe")]
    sending = replace(EVEN, boundary_bytes=(MIB := 2.0**20,) * 15)
    without, within = (choose_schedule(costs, 4, 8, schedules=plain).best for costs in (EVEN, sending))
    added = [more - less for more, less in zip(within.peak_bytes, without.peak_bytes, strict=True)]
    assert added == pytest.approx([2 * MIB, 4 * MIB, 4 * MIB, 2 * MIB])


def test_sends_that_are_waited_for_favour_schedules_that_hide_them() -> None:
    names = [get_schedule(name) for name in ("1F1B", "Interleaved1F1B")]
    slow = replace(EVEN, send=(2.0,) * 15)
    choice = choose_schedule(slow, 4, 8, schedules=names, stages_per_rank=(1,))
    assert choice.best.schedule.name == "Interleaved1F1B"


def test_schedules_that_cannot_run_say_why() -> None:
    choice = choose_schedule(EVEN, 4, 3)
    assert "3 micro-batches and 8 stages" in _by_name(choice.candidates, on_rank=2)["DualPipeV"].problem
    few = BlockCosts(forward=(1.0,) * 5, backward_input=(1.0,) * 5, backward_weight=(1.0,) * 5)
    two = _by_name(choose_schedule(few, 4, 8).candidates, on_rank=2)
    assert two
    assert {one.problem[:55] for one in two.values()} == {
        "8 stages need at least 8 blocks, but the model has 5. U"
    }


def test_the_users_cuts_decide_how_many_stages_there_are() -> None:
    choice = choose_schedule(EVEN, 4, 8, cuts=(1, 8, 12))
    assert choice.best.cuts == (1, 8, 12)
    assert choice.best.stages_per_rank == 1
    assert (
        "it has 8 stages, but the cuts [1, 8, 12] make 4"
        in _by_name(choice.candidates, 2)["ZBVZeroBubble"].problem
    )


def test_a_candidate_can_be_simulated_again() -> None:
    best = choose_schedule(EVEN, 2, 4).best
    assert best.step is not None
    assert best.step.timeline().step_seconds == best.step_seconds


def test_a_split_backward_takes_as_long_as_a_whole_one() -> None:
    inputs, weights = split_backward((1.0, 2.0))
    assert (inputs[0] + weights[0], inputs[1] + weights[1]) == (1.0, 2.0)
    assert inputs[0] > weights[0]

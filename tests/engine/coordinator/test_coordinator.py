"""The state machine alone: no socket, a clock that is set by hand."""

from __future__ import annotations

from typing import Any

import pytest

from atorch_ns.engine.coordinator.coordinator import Coordinator
from atorch_ns.engine.coordinator.trial import NotJoinedError, Over
from atorch_ns.errors import CoordinatorError
from atorch_ns.search import Ended, Event, SearchNote, TrialEnded, TrialStarted, TrialTask
from tests.engine.fake_search import FakeClock, FakeSearch, InThread, report


def make(
    world_size: int = 2, search: FakeSearch | None = None, **options: Any
) -> tuple[Coordinator, FakeSearch, FakeClock]:
    search, clock = search or FakeSearch(), FakeClock()
    return (
        Coordinator(search, world_size, clock=clock, candidates=search.candidates, **options),
        search,
        clock,
    )


def joined(world_size: int = 2, **options: Any) -> tuple[Coordinator, FakeSearch, FakeClock]:
    coordinator, search, clock = make(world_size, **options)
    for rank in range(world_size):
        coordinator.join(rank, f"session {rank}")
    return coordinator, search, clock


def task_of(coordinator: Coordinator, rank: int, done_id: int = 0) -> TrialTask:
    answer = coordinator.next_task(rank, done_id)
    assert isinstance(answer, TrialTask)
    return answer


def end_of(coordinator: Coordinator, rank: int) -> Over:
    answer = coordinator.next_task(rank)
    assert isinstance(answer, Over)
    return answer


def test_a_whole_search_on_two_ranks() -> None:
    events: list[Event] = []
    coordinator, search, _ = joined(on_event=events.append)
    done = 0
    while not isinstance(coordinator.next_task(0, done), Over):
        task = task_of(coordinator, 0, done)
        assert task_of(coordinator, 1, done) == task, "every rank gets every task"
        assert coordinator.report(report(task.id, 0)) == "taken"
        assert coordinator.next_task(0, task.id) is None, "nothing new before all have reported"
        assert coordinator.report(report(task.id, 1)) == "taken"
        done = task.id
    assert [key for key, _ in search.told] == ["a", "b", "c"]
    assert end_of(coordinator, 0) == end_of(coordinator, 1), "the same on all ranks"
    kinds = [type(event) for event in events]
    assert kinds == [TrialStarted, TrialEnded] * 3 + [Ended]
    assert [event.number for event in events if isinstance(event, TrialStarted)] == [1, 2, 3]
    assert [event.candidate.label for event in events if isinstance(event, TrialEnded)] == ["a", "b", "c"]


def test_trials_begin_when_all_ranks_are_here() -> None:
    events: list[Event] = []
    coordinator, search, clock = make(3, on_event=events.append, join_timeout_s=60.0)
    coordinator.join(0)
    coordinator.join(1)
    assert coordinator.next_task(0) is None

    def beat() -> None:
        for rank in (0, 1):
            coordinator.heartbeat(rank)

    clock.pass_(25.0, beat)
    assert [event.text for event in events if isinstance(event, SearchNote)] == [
        "waiting for rank 2 to join the search, 10 s so far",
        "waiting for rank 2 to join the search, 20 s so far",
    ]
    clock.pass_(40.0, beat)
    over = end_of(coordinator, 0)
    assert over.outcome is None
    assert over.failures == {2: "did not join the search within 61 s"}
    assert search.told == []


def test_a_failure_cancels_the_others_and_the_search_goes_on() -> None:
    coordinator, search, clock = joined()
    first = task_of(coordinator, 0)
    assert coordinator.heartbeat(0).cancel == ()
    coordinator.report(report(first.id, 1, "out of memory", reason="4 GiB"))
    assert coordinator.heartbeat(0).cancel == (first.id,)
    assert coordinator.heartbeat(1).cancel == (), "it has ended already"
    clock.pass_(2.0, coordinator.tick)
    coordinator.report(report(first.id, 0, "cancelled"))
    key, outcome = search.told[0]
    assert (key, outcome.status, outcome.rank) == ("a", "out of memory", 1)
    assert task_of(coordinator, 0, first.id).key == "b"
    assert coordinator.heartbeat(0).cancel == ()


def test_reports_count_once() -> None:
    coordinator, search, _ = joined()
    first = task_of(coordinator, 0)
    assert coordinator.report(report(first.id, 0)) == "taken"
    assert coordinator.report(report(first.id, 0, "raised", reason="again")) == "duplicate"
    assert coordinator.report(report(99, 1)) == "stale"
    coordinator.report(report(first.id, 1))
    assert coordinator.report(report(first.id, 1)) == "stale", "of the trial before"
    assert [outcome.status for _, outcome in search.told] == ["ok"]
    assert coordinator.counts == {"taken reports": 2, "duplicate reports": 1, "stale reports": 2}


def test_a_task_whose_answer_was_lost_is_handed_out_again() -> None:
    coordinator, _, _ = joined()
    assert task_of(coordinator, 0) == task_of(coordinator, 0)


def test_a_rank_that_vanishes_is_noticed_in_ten_seconds() -> None:
    notes: list[str] = []
    coordinator, search, clock = joined(
        on_event=lambda event: notes.append(event.text) if isinstance(event, SearchNote) else None
    )
    task = task_of(coordinator, 0)
    clock.pass_(9.0, lambda: coordinator.heartbeat(0))
    assert not coordinator.heartbeat(0).over
    clock.pass_(2.0, lambda: coordinator.heartbeat(0))
    assert coordinator.heartbeat(0).over
    over = end_of(coordinator, 0)
    assert over.outcome is None
    assert list(over.failures) == [1]
    assert "no sign of life since" in over.error
    assert "rank 1" in over.error
    assert f"in trial {task.id}" in over.error
    assert notes == [over.error]
    assert search.told == []


def test_silence_while_the_coordinator_itself_stood_still_is_nobodys_fault() -> None:
    coordinator, _, clock = joined()
    clock.pass_(60.0, coordinator.tick, step=60.0)
    assert coordinator.over is None
    clock.pass_(11.0, coordinator.tick)
    assert coordinator.over is not None


def test_ranks_have_their_whole_time_though_the_coordinator_stood_still_in_it() -> None:
    coordinator, _, clock = make(join_timeout_s=60.0)
    coordinator.join(0)
    clock.pass_(600.0, coordinator.tick, step=600.0)
    assert coordinator.over is None, "to join"
    coordinator.join(1)
    task = task_of(coordinator, 0)
    clock.pass_(600.0, coordinator.tick, step=600.0)
    assert coordinator.heartbeat(0).cancel == (), "to report a trial"
    coordinator.report(report(task.id, 0, "raised", reason="bad"))
    clock.pass_(600.0, coordinator.tick, step=600.0)
    assert coordinator.over is None, "to end a cancelled trial"


def test_a_goodbye_with_an_error_ends_the_search_everywhere() -> None:
    coordinator, _, _ = joined()
    coordinator.leave(1, "ValueError: no data")
    over = end_of(coordinator, 0)
    assert over.failures == {1: "ValueError: no data"}
    assert "rank 1: ValueError: no data" in over.error


def test_a_rank_that_overruns_its_deadline_hangs() -> None:
    coordinator, search, clock = joined(grace_s=5.0)
    task = task_of(coordinator, 0)
    coordinator.report(report(task.id, 0))

    def beat() -> None:
        for rank in (0, 1):
            coordinator.heartbeat(rank)

    clock.pass_(task.deadline_s + 4.0, beat)
    assert coordinator.heartbeat(1).cancel == ()
    clock.pass_(2.0, beat)
    assert coordinator.heartbeat(1).cancel == (task.id,)
    coordinator.report(report(task.id, 1, "cancelled"))
    outcome = search.told[0][1]
    assert (outcome.status, outcome.rank) == ("hung", 1)
    assert "the deadline was 20 s" in outcome.reason


def test_a_rank_that_does_not_end_its_trial_ends_the_search() -> None:
    coordinator, _, clock = joined(grace_s=5.0)
    task = task_of(coordinator, 0)
    coordinator.report(report(task.id, 0, "raised", reason="bad"))

    def beat() -> None:
        for rank in (0, 1):
            coordinator.heartbeat(rank)

    clock.pass_(7.0, beat)
    over = end_of(coordinator, 0)
    assert list(over.failures) == [1]
    assert f"did not end trial {task.id} within" in over.failures[1]


def test_a_slow_rank_is_waited_for() -> None:
    coordinator, search, clock = joined()
    task = task_of(coordinator, 0)
    coordinator.report(report(task.id, 0))

    def beat() -> None:
        for rank in (0, 1):
            coordinator.heartbeat(rank)

    clock.pass_(15.0, beat)
    assert coordinator.heartbeat(1).cancel == ()
    coordinator.report(report(task.id, 1))
    assert [outcome.status for _, outcome in search.told] == ["ok"]


def test_cancel_keeps_the_best_so_far() -> None:
    coordinator, search, _ = joined()
    first = task_of(coordinator, 0)
    for rank in (0, 1):
        coordinator.report(report(first.id, rank))
    second = task_of(coordinator, 0, first.id)
    coordinator.cancel("Ctrl-C on rank 0")
    assert coordinator.heartbeat(1).cancel == (second.id,)
    for rank in (0, 1):
        coordinator.report(report(second.id, rank, "cancelled"))
    over = end_of(coordinator, 0)
    assert over.outcome is not None
    assert over.outcome.best == "a"
    assert over.outcome.stop_reason == "Ctrl-C on rank 0"
    assert search.told[1][1].status == "cancelled"


def test_cancel_does_not_wait_for_a_rank_that_is_stuck() -> None:
    coordinator, _, clock = joined(grace_s=5.0)
    task_of(coordinator, 0)
    coordinator.cancel("Ctrl-C")

    def beat() -> None:
        for rank in (0, 1):
            coordinator.heartbeat(rank)

    clock.pass_(6.0, beat)
    assert end_of(coordinator, 0).outcome is not None


def test_after_a_restart_no_id_repeats_and_a_stale_rank_must_join() -> None:
    coordinator, _, _ = make()
    with pytest.raises(NotJoinedError):
        coordinator.next_task(0)
    coordinator.join(0, "s0", last_task_id=7)
    coordinator.join(1, "s1", last_task_id=6)
    assert task_of(coordinator, 0, 7).id == 8


def test_two_processes_cannot_have_one_rank() -> None:
    coordinator, _, _ = joined()
    coordinator.join(1, "session 1")
    with pytest.raises(CoordinatorError, match="rank 1 has joined already"):
        coordinator.join(1, "another")
    with pytest.raises(CoordinatorError, match="rank 2 is not one of the job's 2 ranks"):
        coordinator.join(2, "s")


@pytest.mark.parametrize("broken", ["ask", "tell", "outcome"])
def test_a_bug_in_the_search_is_told_to_all_ranks(broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    search = FakeSearch(["a"])

    def fail(*_: object) -> None:
        raise ZeroDivisionError("no step took time")

    monkeypatch.setattr(search, broken, fail)
    coordinator, _, _ = joined(search=search)
    if broken != "ask":
        for rank in (0, 1):
            coordinator.report(report(1, rank))
    assert end_of(coordinator, 1).error == "The search itself failed: ZeroDivisionError: no step took time"


def test_an_observer_that_raises_changes_nothing() -> None:
    def broken(_: Event) -> None:
        raise RuntimeError("terminal gone")

    coordinator, search, _ = joined(on_event=broken)
    for number in (1, 2, 3):
        for rank in (0, 1):
            coordinator.report(report(number, rank))
    assert len(search.told) == 3
    assert coordinator.over is not None


def test_a_waiting_rank_is_woken() -> None:
    coordinator, _, _ = joined()
    first = task_of(coordinator, 0)
    coordinator.report(report(first.id, 0))
    waiting = InThread(lambda: coordinator.next_task(0, first.id, wait_s=10.0))
    coordinator.report(report(first.id, 1))
    waiting.wait(2.0)
    assert isinstance(waiting.value, TrialTask)
    assert waiting.value.key == "b"

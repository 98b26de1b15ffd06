"""The loop of one rank, with a coordinator in the same process."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable

import pytest

from atorch_ns.engine import RankReport
from atorch_ns.engine.coordinator.coordinator import Coordinator
from atorch_ns.engine.rpc.meeting import LocalClient, run_agent
from atorch_ns.errors import CoordinatorError, RankError
from atorch_ns.search import SearchOutcome, TrialTask
from tests.engine.fake_search import FakeSearch, FakeWorker, InThread, report, until_cancelled


def agent(coordinator: Coordinator, worker: FakeWorker) -> Callable[[], SearchOutcome]:
    return lambda: run_agent(LocalClient(coordinator, worker.rank), worker, rank=worker.rank)


def test_one_rank_needs_no_socket() -> None:
    worker = FakeWorker(0)
    outcome = agent(Coordinator(FakeSearch(), 1), worker)()
    assert outcome.num_trials == 3
    assert worker.keys == ["a", "b", "c"]
    assert worker.closed == 1


def test_ranks_return_the_same_outcome() -> None:
    coordinator = Coordinator(FakeSearch(), 4)
    calls = [InThread(agent(coordinator, FakeWorker(rank))) for rank in range(4)]
    outcomes = [call.wait().value for call in calls]
    assert outcomes[0] is not None
    assert outcomes == [outcomes[0]] * 4


def test_a_failing_rank_releases_one_that_waits_in_a_collective() -> None:
    search = FakeSearch(["a", "b"])
    coordinator = Coordinator(search, 2)

    def raises_in_a(task: TrialTask, cancelled: Callable[[], bool]) -> RankReport:
        if task.key == "a":
            return report(task.id, 1, "raised", reason="ValueError: no")
        return report(task.id, 1)

    waits = until_cancelled(0)

    def waits_in_a(task: TrialTask, cancelled: Callable[[], bool]) -> RankReport:
        return waits(task, cancelled) if task.key == "a" else report(task.id, 0)

    start = time.monotonic()
    calls = [
        InThread(agent(coordinator, FakeWorker(0, waits_in_a))),
        InThread(agent(coordinator, FakeWorker(1, raises_in_a))),
    ]
    for call in calls:
        assert call.wait().error is None
    assert time.monotonic() - start < 2.0
    assert [(key, one.status, one.rank) for key, one in search.told] == [
        ("a", "raised", 1),
        ("b", "ok", None),
    ]


def test_an_error_outside_the_trials_reaches_the_other_rank() -> None:
    coordinator = Coordinator(FakeSearch(), 2)

    def breaks(task: TrialTask, cancelled: Callable[[], bool]) -> RankReport:
        raise OSError(24, "Too many open files")

    workers = FakeWorker(0, until_cancelled(0)), FakeWorker(1, breaks)
    calls = [InThread(agent(coordinator, worker)) for worker in workers]
    assert isinstance(calls[1].wait().error, OSError)
    error = calls[0].wait().error
    assert isinstance(error, RankError)
    assert error.failures == {1: "OSError: [Errno 24] Too many open files"}
    assert [worker.closed for worker in workers] == [1, 1]


@pytest.mark.parametrize("seed", range(3))
def test_every_trial_is_told_once_whatever_the_ranks_do(seed: int) -> None:
    keys = [str(number) for number in range(60)]
    search = FakeSearch(keys)
    coordinator = Coordinator(search, 6)
    fate = {key: random.Random(f"{seed} {key}").randrange(8) for key in keys}  # 6 and 7: nobody fails

    def behave(rank: int) -> Callable[[TrialTask, Callable[[], bool]], RankReport]:
        waits, moment = until_cancelled(rank), random.Random(f"{seed} {rank}")

        def run(task: TrialTask, cancelled: Callable[[], bool]) -> RankReport:
            time.sleep(moment.random() * 0.002)
            if fate[task.key] == rank:
                return report(task.id, rank, "raised", reason=f"rank {rank}")
            return report(task.id, rank) if fate[task.key] > 5 else waits(task, cancelled)

        return run

    calls = [InThread(agent(coordinator, FakeWorker(rank, behave(rank)))) for rank in range(6)]
    assert [call.wait(30.0).error for call in calls] == [None] * 6
    assert [key for key, _ in search.told] == keys
    for key, outcome in search.told:
        assert outcome.rank == (fate[key] if fate[key] < 6 else None)


@pytest.mark.parametrize("which", [0, 1])
def test_ctrl_c_keeps_the_best_so_far(which: int) -> None:
    coordinator = Coordinator(FakeSearch(["a", "b", "c"]), 2)

    def behave(rank: int) -> Callable[[TrialTask, Callable[[], bool]], RankReport]:
        waits = until_cancelled(rank)

        def run(task: TrialTask, cancelled: Callable[[], bool]) -> RankReport:
            if task.key == "a":
                return report(task.id, rank)
            if rank == which:
                raise KeyboardInterrupt
            return waits(task, cancelled)

        return run

    calls = [InThread(agent(coordinator, FakeWorker(rank, behave(rank)))) for rank in (0, 1)]
    outcomes = [call.wait().value for call in calls]
    assert isinstance(outcomes[0], SearchOutcome)
    assert outcomes[0] == outcomes[1]
    assert outcomes[0].best == "a"
    assert outcomes[0].stop_reason == f"Ctrl-C on rank {which}"


def test_a_second_ctrl_c_ends_this_rank() -> None:
    class Impatient(LocalClient):
        asked = 0

        def next_task(self) -> TrialTask:
            self.asked += 1
            raise KeyboardInterrupt

    coordinator = Coordinator(FakeSearch(), 2)
    other = InThread(agent(coordinator, FakeWorker(1)))
    client = Impatient(coordinator, 0)
    with pytest.raises(KeyboardInterrupt):
        run_agent(client, FakeWorker(0), rank=0)
    assert client.asked == 2
    other.wait()


def test_a_second_process_of_a_rank_does_not_throw_out_the_first() -> None:
    coordinator = Coordinator(FakeSearch(["a"]), 2)
    gate = threading.Event()

    def slow(task: TrialTask, cancelled: Callable[[], bool]) -> RankReport:
        gate.wait(5.0)
        return report(task.id, 1)

    calls = [InThread(agent(coordinator, FakeWorker(0))), InThread(agent(coordinator, FakeWorker(1, slow)))]
    time.sleep(0.1)
    with pytest.raises(CoordinatorError, match="joined already"):
        agent(coordinator, FakeWorker(1))()
    gate.set()
    for call in calls:
        assert call.wait().error is None

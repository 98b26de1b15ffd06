from __future__ import annotations

import os
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor
from torch.utils.data import DataLoader

from atorch_ns.errors import BackendError, InputError, Problem, StrategyError
from atorch_ns.testing import WorkerFailure, catch_ranks, run_ranks
from tests.child_processes import child_processes


def _rank_and_sum(factor: int) -> tuple[int, torch.Tensor]:
    value = torch.full((2, 3), float(dist.get_rank() + 1))
    dist.all_reduce(value)
    return dist.get_rank() * factor, value


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_values_come_back_by_rank(num_ranks: int) -> None:
    values = run_ranks(_rank_and_sum, num_ranks, args=(10,))
    total = float(sum(range(1, num_ranks + 1)))
    assert [rank for rank, _ in values] == [10 * rank for rank in range(num_ranks)]
    assert all(torch.equal(value, torch.full((2, 3), total)) for _, value in values)


def test_closures_and_tensors_with_grad_survive() -> None:
    seen = {"weight": torch.nn.Parameter(torch.arange(3.0)), "none": None}
    (value,) = run_ranks(lambda: seen, 1)
    assert isinstance(value["weight"], torch.nn.Parameter)
    assert torch.equal(value["weight"], torch.arange(3.0))
    assert value["none"] is None


def _environment() -> dict[str, str]:
    return dict(os.environ)


def test_ranks_have_a_launchers_environment_without_a_master(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_PORT", "1")
    zero, one = run_ranks(_environment, 2, env={"EXTRA": "yes"})
    assert (zero["RANK"], one["RANK"]) == ("0", "1")
    assert (zero["LOCAL_RANK"], one["LOCAL_RANK"]) == ("0", "1")
    assert zero["WORLD_SIZE"] == zero["LOCAL_WORLD_SIZE"] == "2"
    assert zero["EXTRA"] == "yes"
    assert "MASTER_PORT" not in zero
    assert "MASTER_ADDR" not in zero
    assert "EXTRA" not in os.environ


def _start_twice(folder: str) -> list[float]:
    seen = []
    for number in range(2):
        dist.init_process_group("gloo")
        is_first, value = dist.get_rank() == 0, torch.ones(1)
        dist.all_reduce(value)
        dist.destroy_process_group()
        seen.append(value.item())
        end = Path(folder, str(number))
        if is_first:
            end.touch()
        while not end.exists():  # else rank 1 may come to the store that rank 0 is about to close
            time.sleep(0.01)
    return seen


def test_without_a_process_group_the_function_starts_its_own(tmp_path: Path) -> None:
    assert run_ranks(_start_twice, 2, args=(str(tmp_path),), init_process_group=False) == [[2.0, 2.0]] * 2


def test_ranks_draw_different_random_numbers_and_the_same_in_every_run() -> None:
    first = run_ranks(lambda: torch.rand(1).item(), 2)
    torch.rand(5)
    assert first == run_ranks(lambda: torch.rand(1).item(), 2)
    assert first[0] != first[1]


def test_the_random_state_here_is_left_alone() -> None:
    before = torch.get_rng_state()
    run_ranks(lambda: torch.rand(1).item(), 1)
    assert torch.equal(before, torch.get_rng_state())


def _fail_on_rank_one() -> None:
    if dist.get_rank() == 1:
        print("just before")  # noqa: T201
        raise ValueError("the reason")
    dist.barrier()


def test_a_failure_names_the_rank_shows_its_traceback_and_stops_the_others() -> None:
    start = time.monotonic()
    with pytest.raises(WorkerFailure, match="1 of 3 ranks failed: 1") as caught:
        run_ranks(_fail_on_rank_one, 3, timeout_s=30)
    assert time.monotonic() - start < 10
    assert set(caught.value.failures) == {1}
    text = str(caught.value)
    assert "ValueError: the reason" in text
    assert "in _fail_on_rank_one" in text
    assert "just before" in text
    assert "rank 0 was stopped" in text
    assert "in barrier" in text  # where rank 0 was
    assert [outcome.status for outcome in caught.value.outcomes] == ["stopped", "raised", "stopped"]


def _raise_everywhere() -> None:
    raise StrategyError([Problem(message=f"wrong on rank {dist.get_rank()}", method="fsdp")])


def test_a_failure_of_all_ranks_shows_all() -> None:
    with pytest.raises(WorkerFailure, match="2 of 2 ranks failed: 0, 1") as caught:
        run_ranks(_raise_everywhere, 2)
    assert "wrong on rank 0" in caught.value.failures[0]
    assert "wrong on rank 1" in caught.value.failures[1]


def _sleep_on_rank_zero() -> None:
    if dist.get_rank() == 0:
        time.sleep(1000)


def test_the_time_limit_tells_who_was_running_and_where() -> None:
    with pytest.raises(WorkerFailure, match="Still running at the time limit: 0") as caught:
        run_ranks(_sleep_on_rank_zero, 2, timeout_s=8)
    assert "in _sleep_on_rank_zero" in caught.value.failures[0]
    assert "rank_pool" not in caught.value.failures[0]
    assert set(caught.value.failures) == {0}


@pytest.mark.parametrize(
    ("end", "told"),
    [
        (lambda: os.kill(os.getpid(), signal.SIGKILL), "ended by SIGKILL"),
        (lambda: os._exit(3), "exit code 3"),
    ],
)
def test_a_rank_that_dies_without_a_word_is_a_failure(end: Any, told: str) -> None:
    with pytest.raises(WorkerFailure, match=told):
        run_ranks(end, 1)


def test_system_exit_is_a_failure() -> None:
    (outcome,) = catch_ranks(lambda: sys.exit(0), 1)
    assert (outcome.status, outcome.error_type) == ("raised", "SystemExit")


def test_caught_ranks_end_on_their_own() -> None:
    outcomes = catch_ranks(_raise_everywhere, 2)
    assert [outcome.status for outcome in outcomes] == ["raised"] * 2
    assert [outcome.error_type for outcome in outcomes] == ["StrategyError"] * 2
    assert isinstance(outcomes[1].error, StrategyError)
    assert outcomes[1].error.problems[0].method == "fsdp"
    assert outcomes[1].message == "fsdp: wrong on rank 1"
    assert all(outcome.seconds < 5 for outcome in outcomes)


def test_a_caught_peer_of_a_failed_rank_does_not_hang() -> None:
    zero, one = catch_ranks(_fail_on_rank_one, 2, timeout_s=30)
    assert one.error_type == "ValueError"
    assert one.output == "just before\n"
    assert zero.status == "raised"  # a broken connection, not the reason
    assert "the reason" not in zero.message
    assert zero.seconds > 1.0  # the failed rank kept its connections for a while


def test_caught_ranks_may_succeed_fail_and_hang() -> None:
    def one_of_each() -> int:
        rank = dist.get_rank()
        if rank == 1:
            raise KeyError("k")
        if rank == 2:
            time.sleep(1000)
        return rank

    outcomes = catch_ranks(one_of_each, 3, timeout_s=2)
    assert [outcome.status for outcome in outcomes] == ["returned", "raised", "timed_out"]
    assert outcomes[0].value == 0


class _Stubborn(Exception):
    def __init__(self, one: int, *, two: int) -> None:
        super().__init__(f"{one} and {two}")


def _raise_stubborn() -> None:
    raise _Stubborn(1, two=2)


def test_an_exception_that_does_not_pickle_is_told_by_name() -> None:
    (outcome,) = catch_ranks(_raise_stubborn, 1)
    assert outcome.error is None
    assert (outcome.error_type, outcome.message) == ("_Stubborn", "1 and 2")


def test_a_value_that_does_not_pickle_is_told_what_to_do() -> None:
    with pytest.raises(WorkerFailure, match=r"type generator cannot be sent back.*Return CPU tensors"):
        run_ranks(lambda: (number for number in range(3)), 1)


def test_a_sharded_tensor_is_refused_with_advice() -> None:
    def sharded() -> Any:
        return distribute_tensor(torch.ones(4), init_device_mesh("cpu", (2,)))

    with pytest.raises(WorkerFailure, match="CPU tensors"):
        run_ranks(sharded, 2)


def test_a_live_mesh_does_not_disturb_the_end() -> None:
    def with_mesh() -> int:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
        globals()["_kept"] = mesh
        return int(mesh["a"].size())

    for _ in range(3):
        assert run_ranks(with_mesh, 4) == [2] * 4


def test_prints_of_a_rank_do_not_reach_this_process(capfd: pytest.CaptureFixture[str]) -> None:
    def speak() -> None:
        print("from python")  # noqa: T201
        os.write(1, b"from below\n")
        print("to stderr", file=sys.stderr)  # noqa: T201

    print("before", end="")  # noqa: T201
    run_ranks(speak, 2)
    print("after", end="")  # noqa: T201
    out, err = capfd.readouterr()
    assert out == "beforeafter"
    assert err == ""


def _keep_a_data_loader() -> tuple[int, list[int]]:
    numbers: Any = list(range(4))
    loader: DataLoader[int] = DataLoader(numbers, num_workers=2, persistent_workers=True)
    globals()["_kept"] = iterator = iter(loader)
    next(iterator)
    return os.getpid(), [worker.pid for worker in psutil.Process().children()]


def test_what_a_rank_started_ends_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    # Not tmp_path: its long name would not leave room for the workers' sockets in it.
    with tempfile.TemporaryDirectory() as folder:
        monkeypatch.setattr("tempfile.tempdir", folder)
        _check_what_a_rank_started()
        assert not list(Path(folder).iterdir())


def _check_what_a_rank_started() -> None:
    ((rank, workers),) = run_ranks(_keep_a_data_loader, 1)
    assert len(workers) == 2
    deadline = time.monotonic() + 2
    while any(map(_is_running, [rank, *workers])):
        assert time.monotonic() < deadline, "a data-loading worker outlived its rank"
        time.sleep(0.01)


def _is_running(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def _signal_and_sleep(parent: int) -> None:
    os.kill(parent, signal.SIGUSR2)
    time.sleep(1000)


def test_an_interrupt_here_stops_the_ranks_and_leaves_no_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    def interrupt(_signal: int, _frame: Any) -> None:
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGUSR2, interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            run_ranks(_signal_and_sleep, 1, args=(os.getpid(),))
    finally:
        signal.signal(signal.SIGUSR2, previous)
    assert not child_processes()
    assert not list(tmp_path.iterdir())


def test_several_threads_here_are_refused() -> None:
    torch.set_num_threads(2)
    try:
        with pytest.raises(BackendError, match=r"2 threads.*OMP_NUM_THREADS=1"):
            run_ranks(lambda: None, 1)
    finally:
        torch.set_num_threads(1)


def test_a_process_group_here_is_refused(tmp_path: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        with pytest.raises(BackendError, match="holds a process group"):
            run_ranks(lambda: None, 1)
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(("num_ranks", "timeout_s"), [(0, 1.0), (2, 0.0)])
def test_senseless_numbers_are_refused(num_ranks: int, timeout_s: float) -> None:
    with pytest.raises(InputError):
        run_ranks(lambda: None, num_ranks, timeout_s=timeout_s)

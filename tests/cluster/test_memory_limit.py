"""A limit of memory that the system enforces, in fresh processes: one, and two that train."""

from __future__ import annotations

import contextlib
import math
import re
import resource
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from atorch_ns import auto_accelerate, notebook
from atorch_ns.cluster import Mesh
from atorch_ns.errors import InputError, RankError
from atorch_ns.job import is_out_of_memory, limit_memory
from atorch_ns.sharding.collectives import simulate
from atorch_ns.testing.workers import catch_ranks, run_ranks

CPU, MIB = torch.device("cpu"), 2**20

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_DATA is enforced on Linux alone"),
    pytest.mark.processes,
    pytest.mark.timeout(240),
]


def _error_with(num_bytes: int) -> tuple[str, int]:
    """The error of holding 64 MiB in tensors of ``num_bytes`` under a limit of 32, and how many there were."""
    before = torch.ones(40 * MIB, dtype=torch.uint8)
    freed = [torch.ones(24 * MIB, dtype=torch.uint8)]
    freed.clear()
    held: list[torch.Tensor] = []
    with limit_memory(32 * MIB, CPU):
        for _ in range(10):
            # What is freed counts no more. What the heap of this process had free before is part of the limit.
            torch.ones(16 * MIB, dtype=torch.uint8)
    with pytest.raises(MemoryError) as caught, limit_memory(32 * MIB, CPU):
        held.extend(torch.ones(num_bytes, dtype=torch.uint8) for _ in range(64 * MIB // num_bytes))
    assert is_out_of_memory(caught.value)
    assert torch.ones(64 * MIB, dtype=torch.uint8).nbytes > before.nbytes  # the limit has ended
    return str(caught.value), len(held)


@pytest.mark.parametrize(("num_bytes", "size"), [(8 * MIB, "8.00 MiB "), (2**14, "(16.0 KiB )?")])
def test_what_goes_beyond_the_limit_fails_in_words(num_bytes: int, size: str) -> None:
    message, num_held = notebook.run(_error_with, (num_bytes,), nproc=1)
    # Holes of the heap below 64 KiB are not filled, and small tensors fit into them.
    assert 0.7 * 32 * MIB < num_held * num_bytes <= (32 if num_bytes > 2**16 else 34) * MIB
    assert "MiB of the limit of 32.0 MiB were in use" in message
    # Small tensors may leave no room for the next arena of Python's objects first: that error has no size
    assert re.search(f"when {size}more were requested. Use a strategy", message)


def test_other_errors_pass_and_wrong_limits_are_refused() -> None:
    with pytest.raises(ValueError, match="of the user"), limit_memory(2**40, CPU):
        raise ValueError("of the user")
    with pytest.raises(InputError, match="must be a positive"), limit_memory(0, CPU):
        pass


@pytest.mark.parametrize("num_bytes", [-1, math.inf, math.nan, "1GiB", None])
def test_what_is_no_number_of_bytes_is_refused(num_bytes: Any) -> None:
    with pytest.raises(InputError, match="must be a positive number of bytes"), limit_memory(num_bytes, CPU):
        pass


def _error_of_an_inner_limit() -> str:
    with (
        pytest.raises(MemoryError) as caught,
        limit_memory(np.int64(50 * MIB), "cpu"),
        limit_memory(500 * MIB, CPU),
    ):  # type: ignore[arg-type]
        torch.ones(100 * MIB, dtype=torch.uint8)
    return str(caught.value)


def test_the_limit_that_acts_is_the_one_in_the_error() -> None:
    message = run_ranks(_error_of_an_inner_limit, 1, init_process_group=False)[0]
    (limit,) = re.findall(r"of the limit of ([\d.]+) MiB", message)
    assert float(limit) <= 50


@pytest.mark.parametrize("text", ["Resource temporarily unavailable", "could not create a primitive"])
def test_what_means_no_room_under_a_limit_means_it_there_alone(text: str) -> None:
    error = RuntimeError(text)
    assert not is_out_of_memory(error)
    assert is_out_of_memory(error, is_limited=True)
    with pytest.raises(MemoryError, match="of the limit of"), limit_memory(2**40, CPU):
        raise error


def test_a_worker_of_a_loader_that_has_no_room_is_out_of_memory() -> None:
    assert is_out_of_memory(
        RuntimeError("Caught MemoryError in DataLoader worker process 0.\nOriginal Traceback")
    )


def _start_threads(number: int) -> int:
    """Threads that start within 32 MiB, of which each would take 8 by itself."""
    end = threading.Event()
    threads = [threading.Thread(target=end.wait, args=(60,)) for _ in range(number)]
    with limit_memory(32 * MIB, CPU):
        for thread in threads:
            thread.start()
        end.set()
        for thread in threads:
            thread.join()
    return len(threads)


def test_stacks_of_threads_leave_room() -> None:
    assert run_ranks(_start_threads, 1, args=(10,), init_process_group=False) == [10]


def _divide_with_little_room() -> None:
    with limit_memory(3 * MIB if dist.get_rank() == 0 else 2**40, CPU):
        Mesh([("tensor", 2)], device_type="cpu")


def test_groups_whose_threads_have_no_room_end_all_ranks_in_words() -> None:
    short, other = catch_ranks(_divide_with_little_room, 2, timeout_s=60)
    assert short.error_type == "MemoryError"
    assert "1 process group start 3 threads with stacks of 2.00 MiB each" in short.message
    assert other.error_type == "RankError"


def _limits() -> list[int]:
    def now() -> int:
        return resource.getrlimit(resource.RLIMIT_DATA)[0]

    found = [now()]
    with limit_memory(500 * MIB, CPU):
        found.append(now())
        with limit_memory(400 * MIB, CPU):
            found.append(now())
        found.append(now())
    return [*found, now()]


def test_a_limit_inside_of_another_does_not_loosen_it() -> None:
    before, outer, inner, again, after = run_ranks(_limits, 1, init_process_group=False)[0]
    assert before == after
    assert inner <= outer == again != before


def test_simulated_ranks_do_not_wait_for_one_whose_thread_has_no_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As under a limit that leaves no room for a second stack."""
    submit, calls = ThreadPoolExecutor.submit, iter(range(9))

    def start_first(pool: ThreadPoolExecutor, *work: Any) -> Any:
        if next(calls):
            raise RuntimeError("can't start new thread")
        return submit(pool, *work)

    monkeypatch.setattr(ThreadPoolExecutor, "submit", start_first)
    with pytest.raises(RuntimeError, match="can't start new thread") as caught:
        simulate(2, lambda group: len(group.swap(1)), CPU)
    assert is_out_of_memory(caught.value)


def _kib_within_a_limit(with_holes: bool, kib: int) -> int:
    """KiB in tensors of ``kib`` within 32 MiB, after 50 MiB were freed between blocks that stay."""
    blocks = [bytearray(100 * 2**10) for _ in range(1000)] if with_holes else []
    kept = blocks[::2]
    blocks.clear()
    held: list[torch.Tensor] = []
    with contextlib.suppress(MemoryError), limit_memory(32 * MIB, CPU):
        while True:
            held.append(torch.ones(kib * 2**10, dtype=torch.uint8))
    assert len(kept) in (0, 500)
    return len(held) * kib


@pytest.mark.parametrize("kib", [80, 1024])
def test_a_limit_is_the_same_whatever_was_freed_before(kib: int) -> None:
    """Holes of a heap count already: a tensor that fits into one would come on top, and others have less room."""
    fresh, with_holes = (notebook.run(_kib_within_a_limit, (holes, kib), nproc=1) for holes in (False, True))
    assert 26 * 1024 < fresh <= 33 * 1024  # holes of less than a tensor stay
    assert abs(fresh - with_holes) <= 2 * 1024


def _train(strategy: str, limited_ranks: tuple[int, ...] = (0, 1)) -> int:
    dist.init_process_group("gloo")  # its threads' stacks are no part of what training needs
    limit = 76 if dist.get_rank() in limited_ranks else 2**20
    with limit_memory(limit * MIB, CPU):
        _, result, _ = auto_accelerate(
            nn.Sequential(*(nn.Sequential(nn.Linear(1024, 1024), nn.GELU()) for _ in range(5))),
            torch.optim.AdamW,
            torch.randn(16, 1024),
            lambda batch, output: (output - batch).square().mean(),
            dataloader_args={"batch_size": 4},
            load_strategy=[strategy],
        )
        assert result is not None
        for batch in result.dataloader:
            result.train_step(batch)
        return result.train_step.num_steps


def test_a_strategy_that_shards_trains_where_the_plain_one_cannot() -> None:
    """20 MiB of parameters: with gradients and Adam's states 80 MiB whole, 40 in halves."""
    assert notebook.run(_train, ("fsdp",), nproc=2, timeout_s=100) == 4
    with pytest.raises(RankError) as caught:
        notebook.run(_train, ("ddp",), nproc=2, timeout_s=100)
    assert "MemoryError: out of memory" in str(caught.value)
    assert sorted(caught.value.failures) == [0, 1]


def test_a_rank_that_is_left_alone_ends_too() -> None:
    with pytest.raises(RankError, match="MemoryError: out of memory") as caught:
        notebook.run(_train, ("ddp", (1,)), nproc=2, timeout_s=100)
    text = caught.value.failures[0]
    assert "RankError: a training step failed on 1 other rank(s)" in text
    assert "of the limit of 1.00 TiB" not in text  # it had enough itself

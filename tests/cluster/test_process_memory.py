"""What a process takes, tensors and all else, and how that grows."""

from __future__ import annotations

import mmap
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from atorch_ns import auto_accelerate
from atorch_ns.cluster import process_memory
from atorch_ns.cluster.process_memory import GrowthWatch, MemoryGrowth, ProcessMemory
from atorch_ns.testing.workers import run_ranks

CPU = torch.device("cpu")
MIB = 2**20


def growth(size: Callable[[int], float], num_steps: int) -> MemoryGrowth:
    found = MemoryGrowth()
    for step in range(1, num_steps + 1):
        found.add(step, int(size(step)))
    return found


def test_growth_is_judged_by_doublings() -> None:
    level = growth(lambda step: 100 * MIB + min(step, 4) * MIB, 16)
    assert level.is_level
    assert level.until(1000) == 0
    heap = growth(lambda step: 100 * MIB + 5 * MIB * step.bit_length(), 64)
    assert not heap.is_level
    assert heap.per_doubling == 5 * MIB
    assert heap.until(1024) == 4 * 5 * MIB, "four more doublings"
    assert not heap.is_steady
    leak = growth(lambda step: 100 * MIB + step * MIB, 64)
    assert leak.is_steady
    assert leak.bytes_per_step == MIB
    assert leak.since(MIB) == 1


def test_too_few_steps_show_nothing() -> None:
    few = growth(lambda step: step * MIB, 7)
    assert (few.per_doubling, few.is_level, few.is_steady) == (0, False, False)
    assert MemoryGrowth().until(1000) == 0


def _watched(size: Callable[[int], float], num_steps: int = 300) -> str:
    now = {"step": 0}
    watch = GrowthWatch(CPU, lambda device: int(size(now["step"])))
    for step in range(1, num_steps + 1):
        now["step"] = step
        watch.after_step()
    return watch.finding


def test_a_leak_is_said_with_its_rate_and_since_when() -> None:
    said = _watched(lambda step: 100 * MIB + step * MIB)
    assert (
        "grows by 1.00 MiB a step (measured over 16 steps), since about step 4; no tensors are kept" in said
    )
    late = _watched(lambda step: 100 * MIB + max(0, step - 100) * MIB)
    assert "grows by 1.00 MiB a step (measured over 32 steps), since about step 100" in late, late


def _watched_tensors(add: Callable[[list[torch.Tensor], int], None], num_steps: int = 600) -> str:
    """What is said of a process whose growth is that of tensors that are kept."""
    kept: list[torch.Tensor] = []
    watch = GrowthWatch(CPU, lambda device: 100 * MIB + sum(tensor.nbytes for tensor in kept))
    for step in range(1, num_steps + 1):
        add(kept, step)
        watch.after_step()
    return watch.finding


def test_tensors_that_are_kept_now_and_then_are_named() -> None:
    def at_each_validation(kept: list[torch.Tensor], step: int) -> None:
        if step % 50 == 0:
            kept.append(torch.empty(5 * 2**18))

    said = _watched_tensors(at_each_validation)
    assert "tensors of Python hold it" in said
    assert float(said.partition("grows by ")[2].split()[0]) == pytest.approx(5 * 1024 / 50, rel=0.6)


def test_a_tensor_that_grows_is_named() -> None:
    def longer(kept: list[torch.Tensor], step: int) -> None:
        kept[:] = [torch.empty(2**15 * step)]

    assert "tensors of Python hold it" in _watched_tensors(longer)


@pytest.mark.parametrize(
    "size",
    [
        pytest.param(lambda step: 3 * step.bit_length(), id="a heap that fragments"),
        pytest.param(lambda step: 120 * (step > 100), id="a validation"),
        pytest.param(lambda step: min(step, 100), id="a cache that is full at last"),
        pytest.param(lambda step: 0, id="level"),
    ],
)
def test_what_ends_by_itself_is_no_finding(size: Callable[[int], float]) -> None:
    assert not _watched(lambda step: 100 * MIB + size(step) * MIB)


def test_looking_never_ends_a_job() -> None:
    def fail(device: torch.device) -> int:
        raise OSError("no /proc")

    watch = GrowthWatch(CPU, fail)
    for _ in range(100):
        watch.after_step()
    assert not watch.finding


def test_a_system_that_does_not_tell_is_not_measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(process_memory, "_STATUS", tmp_path / "status")
    assert process_memory.private_bytes(CPU) is None
    assert ProcessMemory(CPU).peak_bytes() is None
    (tmp_path / "status").write_text("Name:\tpython\nVmRSS:\t  100 kB\n")
    assert process_memory.private_bytes(CPU) is None
    assert ProcessMemory(CPU).peak_bytes() is None


@pytest.mark.skipif(sys.platform != "linux", reason="private memory is read from /proc")
def test_a_peak_counts_what_was_freed_again_and_what_is_no_tensor() -> None:
    def peak() -> list[int]:
        process = ProcessMemory(CPU)
        first = process.peak_bytes()
        tensor = torch.ones(16 * MIB)  # 64 MiB, more than the C library takes from what it keeps
        other = mmap.mmap(-1, 16 * MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        for _ in range(16):
            other.write(b"x" * MIB)
        other.close()
        del tensor
        second = process.peak_bytes()
        assert first is not None
        assert second is not None
        return [first, second]

    first, second = run_ranks(peak, 1, init_process_group=False)[0]
    assert 76 * MIB < second - first < 96 * MIB


@pytest.mark.skipif(sys.platform != "linux", reason="private memory is read from /proc")
@pytest.mark.parametrize("own_loop", [False, True])
def test_a_job_that_keeps_what_it_computes_says_so_in_its_report(own_loop: bool) -> None:
    def notes(keeps: bool) -> list[str]:
        profiler = torch.profiler.profile()  # of the user's own, in the midst
        data = torch.randn(64, 256)
        _, result, _ = auto_accelerate(
            nn.Linear(256, 256),
            torch.optim.SGD,
            data,
            lambda batch, output: (output - batch).square().mean(),
            optim_args={"lr": 0.1},
            load_strategy=["ddp"],
            dataloader_args={"batch_size": 64},
        )
        assert result is not None
        kept = []
        for step in range(160):
            if step in (70, 75):
                (profiler.start if step == 70 else profiler.stop)()
            if own_loop:
                result.optim.zero_grad()
                result.loss_func(data, result.model(data)).backward()
                result.optim.step()
            else:
                result.train_step(data)
            if keeps:
                kept.append(torch.ones(256, 1024))  # 1 MiB
        return list(result.report.notes)

    (said,) = [
        note for note in run_ranks(notes, 1, args=(True,), init_process_group=False)[0] if "grows" in note
    ]
    assert "1 more tensors are alive after each" in said
    assert "grows by 1." in said, "and what a profiler keeps"
    assert not any(
        "grows" in note for note in run_ranks(notes, 1, args=(False,), init_process_group=False)[0]
    )

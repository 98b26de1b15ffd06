"""What torch's flight recorder keeps of collectives, which a trial counts: says when torch changes it."""

from __future__ import annotations

import gc
import inspect
import sys
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from atorch_ns import notebook
from atorch_ns.cluster.process_memory import private_bytes
from atorch_ns.engine.trial.report import CollectiveCount, record_entries
from atorch_ns.testing.workers import run_ranks

CPU = torch.device("cpu")
FEWER = 900  # of the recorder's entries

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="private memory is known on Linux alone"),
    pytest.mark.processes,
]


def _call_at(depth: int, action: Callable[[], None]) -> None:
    """Calls with about this many frames of Python, those of the test runner among them."""

    def further(number: int) -> None:
        if number > 0:
            further(number - 1)
        else:
            action()

    further(depth - len(inspect.stack()))


def _bytes_now() -> int:
    gc.collect()
    return private_bytes(CPU) or 0


def _measure_entries(depth: int) -> tuple[float, float]:
    """Bytes of an entry, counted and measured, and those of one where the recorder is full."""
    tensor = torch.zeros(4)

    def reduce(times: int) -> None:
        for _ in range(times):
            dist.all_reduce(tensor)

    with CollectiveCount() as count:
        _call_at(depth, lambda: reduce(10))
    _call_at(depth, lambda: reduce(FEWER))
    before = _bytes_now()
    _call_at(depth, lambda: reduce(FEWER))
    measured = (_bytes_now() - before) / FEWER
    _call_at(depth, lambda: reduce(record_entries()))
    before = _bytes_now()
    _call_at(depth, lambda: reduce(FEWER))
    full = (_bytes_now() - before) / FEWER
    return measured / (count.record_bytes / 10), full


@pytest.mark.parametrize("depth", [50, 100, 200])
def test_entries_take_what_is_counted_and_end(depth: int) -> None:
    (found,) = run_ranks(_measure_entries, 1, args=(depth,))
    measured, full = found
    assert 0.7 < measured < 1.3  # room for frames doubles: another rule is off by more
    assert abs(full) < 200


def _measure_with_a_group(depth: int) -> tuple[float, float]:
    dist.init_process_group("gloo")
    try:
        return _measure_entries(depth)
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("name", ["TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"])
def test_the_record_is_as_long_as_the_user_says(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a new interpreter: a forked rank would have the recorder that an earlier test in this process began."""
    assert record_entries() == 2000
    monkeypatch.setenv(name, "10")
    measured, _ = notebook.run(_measure_with_a_group, (50,), nproc=1, timeout_s=100)
    assert record_entries() == 10
    assert abs(measured) < 0.3


@pytest.mark.parametrize(("given", "entries"), [("1e3", 1), ("-1", 0), (" 7", 7), ("abc", 2000), ("", 2000)])
def test_any_length_is_read_as_by_the_recorder(
    given: str, entries: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the last two torch itself ends, or never does; what counts here says nothing."""
    monkeypatch.setenv("TORCH_FR_BUFFER_SIZE", given)
    assert record_entries() == entries

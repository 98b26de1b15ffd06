"""What torch's flight recorder keeps of collectives, which a trial counts: says when torch changes it."""

from __future__ import annotations

import gc
import inspect
import sys
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from atorch_ns.cluster.process_memory import private_bytes
from atorch_ns.engine.trial.report import RECORD_ENTRIES, CollectiveCount
from atorch_ns.testing.workers import run_ranks

CPU = torch.device("cpu")
FEWER = 900  # of the recorder's entries

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="private memory is known on Linux alone"),
    pytest.mark.processes,
]


def _at(depth: int, action: Callable[[], None]) -> None:
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


def _kept(depth: int) -> tuple[float, float]:
    """Bytes of an entry, counted and measured, and those of one where the recorder is full."""
    tensor = torch.zeros(4)

    def reduce(times: int) -> None:
        for _ in range(times):
            dist.all_reduce(tensor)

    with CollectiveCount() as count:
        _at(depth, lambda: reduce(10))
    _at(depth, lambda: reduce(FEWER))
    before = _bytes_now()
    _at(depth, lambda: reduce(FEWER))
    measured = (_bytes_now() - before) / FEWER
    _at(depth, lambda: reduce(RECORD_ENTRIES))
    before = _bytes_now()
    _at(depth, lambda: reduce(FEWER))
    full = (_bytes_now() - before) / FEWER
    return measured / (count.record_bytes / count.num_calls), full


@pytest.mark.parametrize("depth", [50, 100, 200])
def test_entries_take_what_is_counted_and_end(depth: int) -> None:
    (found,) = run_ranks(_kept, 1, args=(depth,))
    measured, full = found
    assert 0.7 < measured < 1.3  # room for frames doubles: another rule is off by more
    assert abs(full) < 200

"""Advice on the CUDA allocator, from what ``torch.cuda.memory_stats()`` says."""

from __future__ import annotations

import pytest

from atorch_ns.job.memory_use import fragmentation_advice

GIB = 2**30


def _stats(reserved: float, allocated: float, retries: int = 0) -> dict[str, int]:
    """The entries that are read, among others as torch has them."""
    return {
        "reserved_bytes.all.peak": int(reserved * GIB),
        "reserved_bytes.all.current": int(reserved * GIB),
        "allocated_bytes.all.peak": int(allocated * GIB),
        "allocated_bytes.all.current": 0,
        "num_alloc_retries": retries,
        "num_ooms": 0,
    }


@pytest.mark.parametrize(
    ("reserved", "allocated", "retries", "advised"),
    [
        (40.0, 38.0, 0, False),
        (40.0, 31.0, 0, True),
        (2.0, 1.2, 0, False),  # two fifths, but less than 1 GiB
        (40.0, 39.0, 3, True),
        (0.0, 0.0, 0, False),
    ],
)
def test_when(reserved: float, allocated: float, retries: int, advised: bool) -> None:
    advice = fragmentation_advice(_stats(reserved, allocated, retries), {})
    assert (advice is not None) == advised


def test_figures_and_what_to_set() -> None:
    advice = fragmentation_advice(_stats(40, 31, 2), {})
    assert advice is not None
    assert "9.00 GiB of 40.0 GiB" in advice
    assert "retried 2 allocations" in advice
    assert "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True" in advice


@pytest.mark.parametrize("name", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
def test_nothing_is_said_where_it_is_set(name: str) -> None:
    setting = {name: "max_split_size_mb:128, expandable_segments: True"}
    assert fragmentation_advice(_stats(40, 31), setting) is None


def test_without_statistics_nothing_is_said() -> None:
    assert fragmentation_advice({}, {}) is None

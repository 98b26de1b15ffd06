"""What every test here needs: a CUDA device, and a process that leaves it clean."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def _gpu() -> Iterator[None]:
    """Skips with the reason that there is no GPU; gives memory back after each test."""
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device, and torch sees none")
    yield
    gc.collect()
    torch.compiler.reset()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()

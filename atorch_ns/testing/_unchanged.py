"""A check that a block of code leaves the state of the process as it was."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

__all__ = ["nothing_changes"]


@contextmanager
def nothing_changes() -> Iterator[None]:
    """Random states and the settings of torch are the same after the block as before."""
    before = {name: read() for name, read in _READERS.items()}
    yield
    changed = [name for name, read in _READERS.items() if read() != before[name]]
    assert not changed, f"changed: {', '.join(changed)}"


def _numpy_state() -> str:
    return repr(np.random.get_state(legacy=False))


_READERS: Mapping[str, Callable[[], Any]] = {
    "the random state of torch": lambda: torch.get_rng_state().tolist(),
    "the random state of Python": random.getstate,
    "the random state of numpy": _numpy_state,
    "torch's default dtype": torch.get_default_dtype,
    "torch's number of threads": torch.get_num_threads,
    "grad mode": torch.is_grad_enabled,
    "deterministic algorithms": torch.are_deterministic_algorithms_enabled,
    "the precision of matrix products": torch.get_float32_matmul_precision,
}

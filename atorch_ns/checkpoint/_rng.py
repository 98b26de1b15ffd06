"""Random states of a rank: torch's on the CPU and on its GPU, Python's, numpy's, and those that ranks share."""

from __future__ import annotations

import hashlib
import math
import random
from collections.abc import Mapping

import numpy as np
import torch

from atorch_ns.job import SharedRandomness

__all__ = ["capture", "digest", "restore", "spread"]

_NUM_WORDS = 624
_PYTHON_VERSION = 3


def capture(device: torch.device, shared: SharedRandomness | None = None) -> dict[str, torch.Tensor]:
    """Every random state of this rank, by kind; ``cuda`` only on a GPU, ``shared`` only where ranks share states."""
    _, words, gauss = random.getstate()
    _, numpy_words, position, has_gauss, numpy_gauss = np.random.get_state(legacy=True)
    states = {
        "torch": torch.get_rng_state(),
        "python": torch.tensor(words, dtype=torch.int64),
        "python_gauss": torch.tensor([math.nan if gauss is None else gauss], dtype=torch.float64),
        "numpy": torch.tensor([*(int(word) for word in numpy_words), int(position)], dtype=torch.int64),
        "numpy_gauss": torch.tensor([float(has_gauss), float(numpy_gauss)], dtype=torch.float64),
    }
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    if shared is not None:
        states["shared"] = shared.state()
    return states


def digest(states: Mapping[str, torch.Tensor]) -> str:
    """A text that two ranks share only if their states are equal."""
    total = hashlib.sha256()
    for kind in sorted(states):
        total.update(kind.encode())
        total.update(states[kind].numpy().tobytes())
    return total.hexdigest()[:16]


def restore(
    states: Mapping[str, torch.Tensor], device: torch.device, shared: SharedRandomness | None = None
) -> None:
    """Sets what :func:`capture` gave. What there is no place for here is left out."""
    torch.set_rng_state(states["torch"])
    words, gauss = states["python"].tolist(), float(states["python_gauss"])
    random.setstate((_PYTHON_VERSION, tuple(words), None if math.isnan(gauss) else gauss))
    *numpy_words, position = states["numpy"].tolist()
    has_gauss, numpy_gauss = states["numpy_gauss"].tolist()
    np.random.set_state(
        ("MT19937", np.array(numpy_words, dtype=np.uint32), position, int(has_gauss), numpy_gauss)
    )
    if "cuda" in states and device.type == "cuda":
        torch.cuda.set_rng_state(states["cuda"], device)
    if "shared" in states and shared is not None:
        shared.restore(states["shared"])


def spread(rank: int) -> None:
    """Gives a rank without a saved state one of its own, made from the present one and its number."""
    seed = (int(torch.randint(2**62, ())) + rank) % 2**62
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)

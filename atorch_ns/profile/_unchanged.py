"""Random states of the caller."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

__all__ = ["random_states_kept"]


@contextmanager
def random_states_kept(model: nn.Module) -> Iterator[None]:
    """Random states of Python, numpy and torch are afterwards as before, whatever the user's code draws.

    Args:
        model: the states of the GPUs that it is on are kept too.
    """
    import numpy as np

    python, numpy_state = random.getstate(), np.random.get_state()
    devices = {parameter.device.index or 0 for parameter in model.parameters() if parameter.is_cuda}
    with torch.random.fork_rng(devices=sorted(devices)):
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy_state)

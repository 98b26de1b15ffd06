"""Guards of random states, buffers and training modes: a look at the user's model or data leaves no trace."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import nn


@contextmanager
def random_states_kept(*devices: torch.device) -> Iterator[None]:
    """Random states of Python, numpy, and torch on the CPU are the same after the block as before.

    Args:
        devices: further devices; those of GPUs among them are kept too.
    """
    python, numpy_state = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[device for device in devices if device.type == "cuda"]):
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy_state)


def save_generators(device: torch.device) -> Callable[[], None]:
    """Saves the states of the default generators of the CPU and of ``device``; calling the result restores them."""
    cpu = torch.get_rng_state()
    cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None

    def restore() -> None:
        torch.set_rng_state(cpu)
        if cuda is not None:
            torch.cuda.set_rng_state(cuda, device)

    return restore


@contextmanager
def buffers_and_generators_kept(module: nn.Module, device: torch.device) -> Iterator[None]:
    """The buffers of ``module`` and random states are afterwards as before, those of ``device`` too."""
    buffers = [
        (child, name, buffer, buffer.detach().clone())
        for child in module.modules()
        for name, buffer in child._buffers.items()
        if buffer is not None
    ]
    with random_states_kept(device):
        try:
            yield
        finally:
            with torch.no_grad():
                for child, name, buffer, value in buffers:
                    child._buffers[name] = buffer
                    if not torch.equal(buffer, value):  # else the backward pass may still need it as it is
                        buffer.copy_(value)


@contextmanager
def modes_kept(module: nn.Module) -> Iterator[None]:
    """Every module inside ``module`` is afterwards in training or evaluation as before."""
    modes = {child: child.training for child in module.modules()}
    try:
        yield
    finally:
        for child, mode in modes.items():
            child.training = mode

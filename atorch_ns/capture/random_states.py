"""Random states, buffers and training modes, kept while user code is inspected; seeds; caches turned off."""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from weakref import ref

import numpy as np
import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

BatchNorm = nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d | nn.SyncBatchNorm
"""Modules that use statistics of their inputs in training."""


def seed_all(seed: int) -> None:
    """Seeds the default generators of Python, numpy (which takes the low 32 bits) and torch."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


@contextmanager
def random_states_kept(*devices: torch.device) -> Iterator[None]:
    """Restores random states of Python, numpy, and torch on the CPU after the block.

    Args:
        devices: devices of which the GPUs' random states are restored too.
    """
    python, numpy_state = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[device for device in devices if device.type == "cuda"]):
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy_state)


def save_generators(device: torch.device) -> Callable[[], None]:
    """Saves the states of the default generators of the CPU and ``device``; the result restores them."""
    cpu = torch.get_rng_state()
    cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None

    def restore() -> None:
        torch.set_rng_state(cpu)
        if cuda is not None:
            torch.cuda.set_rng_state(cuda, device)

    return restore


@contextmanager
def random_stream(seed: int, device: torch.device) -> Iterator[None]:
    """Random numbers from ``seed`` inside the block; the states before it are restored after it."""
    restore = save_generators(device)
    seed_generators(seed, device)
    try:
        yield
    finally:
        restore()


def seed_generators(seed: int, device: torch.device) -> None:
    """Seeds the default generators of the CPU and ``device``, 100 times faster than ``torch.manual_seed``."""
    torch.default_generator.manual_seed(seed % 2**63)
    if device.type == "cuda":
        with torch.cuda.device(device):  # manual_seed seeds the current device
            torch.cuda.manual_seed(seed % 2**63)


@contextmanager
def buffers_and_generators_kept(module: nn.Module, device: torch.device) -> Iterator[None]:
    """Restores the buffers of ``module`` and random states after the block, those of ``device`` too."""
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
                    if not torch.equal(buffer, value):  # else the backward pass may still need this version
                        buffer.copy_(value)


@contextmanager
def buffers_lent(module: nn.Module) -> Iterator[None]:
    """Gives ``module`` copies of its buffers inside the block, so that writes to them are lost."""
    originals = [(child._buffers, dict(child._buffers)) for child in module.modules() if child._buffers]
    for target, buffers in originals:
        target.update({name: None if b is None else b.detach().clone() for name, b in buffers.items()})
    try:
        yield
    finally:
        for target, buffers in originals:
            target.update(buffers)


@contextmanager
def gradients_kept(module: nn.Module) -> Iterator[None]:
    """Restores the gradients of ``module`` after the block: the user's loss may read its parameters."""
    parameters = module.parameters() if isinstance(module, nn.Module) else ()
    # References keep no memory of parameters that others take the place of.
    gradients = [(ref(p), None if p.grad is None else p.grad.clone()) for p in parameters]
    try:
        yield
    finally:
        for find, gradient in gradients:
            if (parameter := find()) is not None:
                parameter.grad = None if gradient is None else gradient.to(parameter)


@contextmanager
def modes_kept(module: nn.Module) -> Iterator[None]:
    """Restores the training mode of every module inside ``module`` after the block."""
    modes = {child: child.training for child in module.modules()}
    try:
        yield
    finally:
        for child, mode in modes.items():
            child.training = mode


_FLAG = "use_cache"


def turn_off_caches(model: nn.Module, *, always: bool = False) -> list[RemovableHandle]:
    """Has modules with ``use_cache`` in their config run without a cache under gradients, or ``always``.

    Configs stay as they are, for evaluation and generation, and so does a caller's own ``use_cache``. Returns
    the handles of the hooks.
    """
    handles = []
    for module in model.modules():
        if getattr(getattr(module, "config", None), _FLAG, None) is not True:
            continue
        names = list(inspect.signature(module.forward).parameters)
        if _FLAG in names:
            hook = partial(_without_cache, names.index(_FLAG), always)
            handles.append(module.register_forward_pre_hook(hook, with_kwargs=True, prepend=True))
    return handles


@contextmanager
def caches_off(model: nn.Module, *, always: bool = False) -> Iterator[None]:
    """Runs :func:`turn_off_caches` inside the block, also for copies of the model made there."""
    with ExitStack() as stack:
        for handle in turn_off_caches(model, always=always):
            stack.enter_context(handle)  # which removes the hook in the end
        yield


def _without_cache(
    position: int, always: bool, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    if not (always or torch.is_grad_enabled()) or len(args) > position or kwargs.get(_FLAG) is not None:
        return None  # use_cache is given, or no gradients are computed
    return args, {**kwargs, _FLAG: False}

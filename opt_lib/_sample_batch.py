"""A small batch to look at a model with, where no batch has come yet."""

from __future__ import annotations

import inspect
import itertools
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils.data import IterableDataset, default_collate

from atorch_ns.data import default_prepare_input
from atorch_ns.job import Inputs

__all__ = ["sample_batch"]

_NUM_SAMPLES = 2


def sample_batch(inputs: Inputs) -> Any:
    """The user's sample batch, or two samples of the dataset, collated and prepared as a batch is, on the CPU.

    Without either, or with a dataset that can be read only once, a model of transformers gives its own inputs;
    ``None`` where there are none. The caller's random states are as before.
    """
    prepare = inputs.prepare_input or default_prepare_input
    with _kept_random_states():
        if inputs.sample_batch is not None:
            return prepare(inputs.sample_batch, torch.device("cpu"))
        samples = _samples(inputs.dataset)
        args = dict(inputs.dataloader_args or {})
        if samples and args.get("batch_size", 1) is None:
            batch: Any = samples[0]
        elif samples:
            batch = (args.get("collate_fn") or default_collate)(samples)
        else:
            return _own_inputs(inputs.model)
        return prepare(batch, torch.device("cpu"))


def _samples(dataset: Any) -> list[Any]:
    if dataset is None:
        return []
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__"):
        stream = iter(dataset)
        return [] if stream is dataset else list(itertools.islice(stream, _NUM_SAMPLES))
    return [dataset[index] for index in range(min(_NUM_SAMPLES, len(dataset)))]


def _own_inputs(model: nn.Module) -> Any:
    """What a model of transformers says it can be called with."""
    own = inspect.getattr_static(model, "dummy_inputs", None)
    return None if own is None else dict(model.dummy_inputs)  # type: ignore[arg-type]


@contextmanager
def _kept_random_states() -> Iterator[None]:
    """The random states of Python and torch (CPU) are the same after the block as before."""
    python, states = random.getstate(), torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(python)
        torch.set_rng_state(states)

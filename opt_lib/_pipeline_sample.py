"""A micro-batch to trace the model with: samples of the user's data, collated and prepared as in training."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch.utils.data import default_collate

from atorch_ns.data import default_prepare_input, split_batch
from atorch_ns.errors import BatchSizeError, InputError
from atorch_ns.job import Job

__all__ = ["local_batch_size", "sample_micro_batch"]


def local_batch_size(job: Job) -> int | None:
    """Samples that a data rank sees in a step; ``None`` where the loader's arguments do not say."""
    args = dict(job.inputs.dataloader_args or {})
    size = args.get("batch_size")
    if job.inputs.dataset is None or not isinstance(size, int):
        return None
    return size // job.num_data_ranks


def sample_micro_batch(job: Job, num_micro_batches: int) -> Any:
    """One micro-batch on this rank's device; random states are as before.

    Raises:
        InputError: if there is no data to take it from.
    """
    inputs = job.inputs
    prepare = inputs.prepare_input or default_prepare_input
    with _random_states_kept():
        if inputs.sample_batch is not None:
            batch = prepare(inputs.sample_batch, job.device)
            return _first_part(batch, num_micro_batches)
        if inputs.dataset is None:
            raise InputError(
                "pipeline_parallel runs the model once without its data, on tensors of the shapes of a batch, to "
                "see what is sent from stage to stage. Pass dataset, or sample_batch with one collated batch."
            )
        args = dict(inputs.dataloader_args or {})
        collate = args.get("collate_fn") or default_collate
        size = local_batch_size(job)
        if size is None and args.get("batch_size", 1) is None:  # every item is a batch
            return _first_part(prepare(next(_items(inputs.dataset)), job.device), num_micro_batches)
        rows = max(1, (size or job.num_micro_batches) // num_micro_batches)
        samples = list(itertools.islice(_items(inputs.dataset), rows))
        samples = [samples[place % len(samples)] for place in range(rows)]
        return prepare(collate(samples), job.device)


def _first_part(batch: Any, num_micro_batches: int) -> Any:
    try:
        return split_batch(batch, num_micro_batches)[0]
    except BatchSizeError:
        return batch  # only its kind matters here; train_step says what is wrong with a real batch


def _items(dataset: Any) -> Iterator[Any]:
    if hasattr(dataset, "__getitem__"):
        return (dataset[index] for index in itertools.count())
    items: Iterator[Any] = iter(dataset)
    if items is dataset:
        raise InputError(
            "the dataset can be iterated over only once, and a sample of it for pipeline_parallel would be lost to "
            "training. Give sample_batch, one collated batch, as well."
        )
    return items


@contextmanager
def _random_states_kept() -> Iterator[None]:
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])

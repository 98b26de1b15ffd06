"""Sample batches for methods that look at a model before the first batch has come."""

from __future__ import annotations

import inspect
from typing import Any

import torch

from atorch_ns.capture.random_states import random_states_kept
from atorch_ns.data import split_batch
from atorch_ns.errors import BatchSizeError, InputError
from atorch_ns.job import Inputs, Job
from atorch_ns.job.sampling import first_batch

_NUM_SAMPLES = 2


def sample_batch(inputs: Inputs, rows: int = _NUM_SAMPLES) -> Any:
    """A batch of so many samples on the CPU; see :func:`atorch_ns.job.sampling.first_batch`.

    Without such data a model of transformers gives its own inputs; ``None`` if there are none.
    """
    batch = first_batch(inputs, rows, torch.device("cpu"))
    # Static, since ``dummy_inputs`` is a property.
    if batch is None and inspect.getattr_static(inputs.model, "dummy_inputs", None) is not None:
        with random_states_kept():
            return dict(inputs.model.dummy_inputs)  # type: ignore[arg-type]
    return batch


def common_sample(job: Job, method: str, rows: int | None = None) -> Any:
    """Returns the first rank's sample batch on all ranks. Collective.

    Args:
        rows: samples that it should have; by default two.

    Raises:
        InputError: if there is none.
    """
    local_batch = job.cluster.agree(
        lambda: sample_batch(job.inputs, rows or _NUM_SAMPLES), what="taking a sample batch"
    )
    batch = job.cluster.from_first(local_batch)
    if batch is None:
        raise InputError(
            f"{method} looks at one forward pass to see how the parts of the model are connected, but there is no batch to "
            "run it on. Pass dataset to auto_accelerate, or sample_batch with one collated batch."
        )
    return batch


def local_batch_size(job: Job) -> int | None:
    """Samples that a data rank sees in a step; ``None`` where the loader's arguments do not say."""
    args = dict(job.inputs.dataloader_args or {})
    size = args.get("batch_size")
    if job.inputs.dataset is None or not isinstance(size, int):
        return None
    return size // job.num_data_ranks


def sample_micro_batch(job: Job, num_micro_batches: int) -> Any:
    """One micro-batch on this rank's device.

    Raises:
        InputError: if there is no data to take it from.
    """
    inputs = job.inputs
    rows = max(1, (local_batch_size(job) or job.step.num_micro_batches) // num_micro_batches)
    batch = first_batch(inputs, rows, job.device)
    if batch is None:
        raise InputError(
            "pipeline_parallel runs the model once without its data, on tensors of the shapes of a batch, to "
            "see what is sent from stage to stage. Pass dataset, or sample_batch with one collated batch."
            if inputs.dataset is None
            else "the dataset is empty or can be iterated over only once, and a sample of it for pipeline_parallel "
            "would be lost to training. Give sample_batch, one collated batch, as well."
        )
    # The user's own batch is whole; so is an item of a dataset that gives batches (batch_size=None).
    is_whole = (
        inputs.sample_batch is not None or dict(inputs.dataloader_args or {}).get("batch_size", 1) is None
    )
    if not is_whole or inputs.sample_is_micro_batch:
        return batch
    try:
        return split_batch(batch, num_micro_batches)[0]
    except BatchSizeError:
        return batch  # only its kind matters here; train_step says what is wrong with a real batch

"""Samples of the user's data: for profile and trials, which leave the dataset alone, and to trace models.

Legend: B global batch size.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset, default_collate

from atorch_ns.capture.nests import leaves
from atorch_ns.capture.random_states import random_states_kept
from atorch_ns.data import call_model, default_prepare_input, split_batch
from atorch_ns.errors import InputError
from atorch_ns.job import Inputs, first_loss
from atorch_ns.text import error_text, with_article

_MAX_BYTES: Final = 256 * 2**20  # limit for samples taken from the dataset
_NUM_BATCHES: Final = 64  # length of a trial's dataset in batches
_PROFILED_SAMPLES: Final = 4  # rows of the batch that is profiled


class SampledDataset(Dataset[Any]):
    """A few samples, cycled up to any length."""

    def __init__(self, samples: Sequence[Any], length: int) -> None:
        self._samples = list(samples)
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Any:
        return self._samples[index % len(self._samples)]


@dataclass(frozen=True, kw_only=True)
class Sample:
    """Stand-in for the user's data.

    Attributes:
        inputs: the user's inputs with the samples as dataset, without samplers, workers and schedulers.
        batch: a prepared batch of a few samples on the CPU, for the profile.
        num_samples: rows of ``batch``.
        global_batch: B, samples in one training step.
    """

    inputs: Inputs
    batch: Any
    num_samples: int
    global_batch: int


def sample_inputs(
    inputs: Inputs, *, num_data_ranks: int, sample_batch: Any = None, batch_size: int | None = None
) -> Sample:
    """Takes a few samples and restores the caller's random states.

    Args:
        inputs: the user's objects.
        num_data_ranks: number of ranks that see different data. Default batch size.
        sample_batch: a collated batch in place of the dataset's samples.
        batch_size: B, if ``dataloader_args`` does not contain it.

    Raises:
        InputError: if there is no data to sample, or the user's functions fail on it.
    """
    _require_inputs(inputs, sample_batch)
    with random_states_kept():
        if sample_batch is not None:
            return _from_batch(inputs, sample_batch, batch_size)
        return _from_dataset(inputs, num_data_ranks, batch_size)


def forward_loss(inputs: Inputs) -> Callable[[Any, Any], torch.Tensor]:
    """``(model, prepared batch) -> loss``, as computed by a training step without any method."""

    def run(model: Any, batch: Any) -> torch.Tensor:
        assert inputs.loss_func is not None
        loss: torch.Tensor = first_loss(
            inputs.loss_func(batch, call_model(model, batch, inputs.model_input_format))
        )
        return loss

    return run


def first_batch(inputs: Inputs, num_rows: int, device: torch.device) -> Any:
    """``inputs.sample_batch`` or a batch of the dataset's first samples, prepared as in training.

    A dataset whose items are batches gives its first item. Otherwise a batch has ``num_rows`` samples,
    repeated if the dataset is shorter. The caller's random states are restored.

    Returns:
        The batch on ``device``, or ``None`` without data or with a dataset that can be read only once.
    """
    prepare = inputs.prepare_input or default_prepare_input
    args = dict(inputs.dataloader_args or {})
    with random_states_kept(device):
        if inputs.sample_batch is not None:
            return prepare(inputs.sample_batch, device)
        given_as_batches = args.get("batch_size", 1) is None
        samples = list(
            itertools.islice(read_samples(inputs.dataset) or (), 1 if given_as_batches else num_rows)
        )
        if not samples:
            return None
        if given_as_batches:
            return prepare(samples[0], device)
        rows = [samples[index % len(samples)] for index in range(num_rows)]
        return prepare((args.get("collate_fn") or default_collate)(rows), device)


def read_samples(dataset: Any) -> Iterator[Any] | None:
    """The samples of a dataset in order.

    Returns:
        ``None`` without a dataset, or if it can be iterated over only once, since training would lose them.
    """
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__"):
        stream = None if dataset is None else iter(dataset)
        return None if stream is dataset else stream
    return (dataset[index] for index in range(len(dataset)))


def _require_inputs(inputs: Inputs, sample_batch: Any) -> None:
    if not any(parameter.requires_grad for parameter in inputs.model.parameters()):
        raise InputError(
            "the model has no parameter that requires a gradient, so there is nothing to optimize."
        )
    missing = [name for name in ("optim_func", "loss_func") if getattr(inputs, name) is None]
    if inputs.dataset is None and sample_batch is None:
        missing.append("dataset (or sample_batch)")
    if missing:
        raise InputError(
            f"the fully automatic mode runs training steps, so it needs {', '.join(missing)}. Give them, or "
            "name the methods yourself with load_strategy."
        )


def _from_batch(inputs: Inputs, batch: Any, batch_size: int | None) -> Sample:
    rows = num_samples(batch)
    size = batch_size or dict(inputs.dataloader_args or {}).get("batch_size") or rows
    pieces = split_batch(batch, rows)  # one row each
    num_rows = min(rows, _PROFILED_SAMPLES)
    trial = _trial_inputs(inputs, pieces, {"batch_size": size, "collate_fn": join_batches}, size)
    return Sample(
        inputs=trial,
        batch=_prepare_batch(inputs, join_batches(pieces[:num_rows])),
        num_samples=num_rows,
        global_batch=size,
    )


def _from_dataset(inputs: Inputs, num_data_ranks: int, batch_size: int | None) -> Sample:
    args = dict(inputs.dataloader_args or {})
    collate = args.get("collate_fn")
    if "batch_size" in args and args["batch_size"] is None:  # every item is a batch already
        items = _take_samples(inputs.dataset, 2)
        rows = num_samples(items[0])
        trial = _trial_inputs(inputs, items, {"batch_size": None}, 1)
        return Sample(
            inputs=trial, batch=_prepare_batch(inputs, items[0]), num_samples=rows, global_batch=rows
        )
    size = batch_size or args.get("batch_size") or _batch_sampler_size(args) or num_data_ranks
    samples = _take_samples(inputs.dataset, 2 * size)
    loader_args = {"batch_size": size, **({} if collate is None else {"collate_fn": collate})}
    first_samples = samples[: min(size, _PROFILED_SAMPLES)]
    try:
        batch = (collate or default_collate)(first_samples)
    except Exception as error:
        raise InputError(
            f"the samples of the dataset cannot be collated: {error_text(error)}. Give a "
            "collate_fn in dataloader_args."
        ) from error
    return Sample(
        inputs=_trial_inputs(inputs, samples, loader_args, size),
        batch=_prepare_batch(inputs, batch),
        num_samples=len(first_samples),
        global_batch=size,
    )


def _trial_inputs(inputs: Inputs, samples: Sequence[Any], args: Mapping[str, Any], batch: int) -> Inputs:
    return replace(
        inputs,
        dataset=SampledDataset(samples, _NUM_BATCHES * batch),
        dataloader_args=dict(args),
        distributed_sampler_cls=None,
        lr_scheduler_cls=None,
        lr_scheduler_args=None,
    )


def _take_samples(dataset: Any, count: int) -> list[Any]:
    samples: list[Any] = []
    num_bytes = 0
    try:
        stream = read_samples(dataset)
        if stream is None:
            raise InputError(
                "the dataset can be iterated over only once, and sampling it would lose its first samples. "
                "Give sample_batch, one collated batch, as well."
            )
        for sample in itertools.islice(stream, count):
            samples.append(sample)
            arrays = (leaf for _, leaf in leaves(sample) if isinstance(leaf, (torch.Tensor, np.ndarray)))
            num_bytes += sum(math.prod(array.shape) * array.dtype.itemsize for array in arrays)
            if num_bytes > _MAX_BYTES:
                break
    except InputError:
        raise
    except Exception as error:
        raise InputError(
            f"the dataset raised {type(error).__name__} at sample {len(samples)}: {error}"
        ) from error
    if not samples:
        raise InputError("the dataset is empty, so there is nothing to try a strategy on.")
    return samples


def _batch_sampler_size(args: Mapping[str, Any]) -> int | None:
    size = getattr(args.get("batch_sampler"), "batch_size", None)  # drawing a batch could advance it
    return size if isinstance(size, int) else None


def _prepare_batch(inputs: Inputs, batch: Any) -> Any:
    prepare = inputs.prepare_input or default_prepare_input
    try:
        return prepare(batch, torch.device("cpu"))
    except Exception as error:
        raise InputError(f"prepare_input raised {error_text(error)}") from error


def num_samples(batch: Any) -> int:
    """Number of samples in a batch. Raises InputError if its tensors do not determine it."""
    sizes = {tensor.shape[0] for tensor in _find_tensors(batch) if tensor.dim()}
    if not sizes:
        raise InputError(f"the sample batch, {with_article(batch)}, holds no tensor with a batch dimension.")
    if len(sizes) != 1:
        raise InputError(
            f"the tensors of a batch must have the same size of dim 0; they have {sorted(sizes)}."
        )
    return int(sizes.pop())


def _find_tensors(value: Any) -> Iterable[torch.Tensor]:
    for _, leaf in leaves(value):
        if isinstance(leaf, torch.Tensor):
            yield leaf
        elif isinstance(leaf, np.ndarray):
            yield torch.empty(leaf.shape, dtype=torch.uint8, device="meta").expand(leaf.shape)


def join_batches(rows: Sequence[Any]) -> Any:
    """Joins batches of equal nesting: tensors along dim 0, the rest from the first batch."""
    first = rows[0]
    if isinstance(first, torch.Tensor):
        return torch.cat(list(rows)) if first.dim() else first
    if isinstance(first, Mapping):
        return type(first)({k: join_batches([r[k] for r in rows]) for k in first})  # type: ignore[call-arg]
    if isinstance(first, tuple) and hasattr(first, "_make"):
        return first._make(join_batches(items) for items in zip(*rows, strict=True))
    if isinstance(first, (list, tuple)):
        return type(first)(join_batches(items) for items in zip(*rows, strict=True))
    return first

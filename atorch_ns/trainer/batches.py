"""Batches of a Trainer: configured datasets, samplers and loaders, and windows of a step's micro-batches."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any, Literal, NamedTuple

import torch
from torch.utils.data import DistributedSampler, IterableDataset, default_collate

from atorch_ns.capture.nests import floats_to
from atorch_ns.data.build import RankStream
from atorch_ns.errors import InputError
from atorch_ns.trainer.args import TrainerArgs
from atorch_ns.trainer.components import arguments, make, resolve_component
from atorch_ns.trainer.model import dtype_of

Split = Literal["train", "val"]

_AUTOMATIC = ("dataset", "num_replicas", "rank")  # arguments of a sampler that only the Trainer gives


class Window(NamedTuple):
    """The micro-batches of a step on this rank. Dummies, which pad a last window, count nothing."""

    samples: list[Any]
    dummies: list[bool]

    @property
    def real(self) -> list[Any]:
        """The micro-batches that count."""
        return [sample for sample, dummy in zip(self.samples, self.dummies, strict=True) if not dummy]


@dataclass(frozen=True)
class Data:
    """The data of one split on this rank.

    Attributes:
        dataset, loader: the dataset, and its loader of micro-batches.
        num_micro_batches: number of micro-batches in a step.
        input_dtype: dtype that floats in batches are cast to; ``None`` to leave them.
    """

    dataset: Any
    loader: Any
    num_micro_batches: int
    input_dtype: torch.dtype | None

    @property
    def num_steps(self) -> int | None:
        """Number of steps in an epoch, or ``None`` if the loader does not say."""
        try:
            return -(-len(self.loader) // self.num_micro_batches)  # rounded up: dummies fill the last window
        except TypeError:
            return None

    def set_epoch(self, epoch: int) -> None:
        """Passes the next epoch to the sampler and the dataset."""
        for target in (getattr(self.loader, "sampler", None), self.dataset):
            tell = getattr(target, "set_epoch", None)
            if callable(tell):
                tell(epoch)

    def windows(self) -> Iterator[Window]:
        """The windows of an epoch. The last one is padded with dummies."""
        batches = iter(self.loader)
        while taken := list(islice(batches, self.num_micro_batches)):
            missing = self.num_micro_batches - len(taken)
            if self.input_dtype is not None:
                taken = [floats_to(batch, self.input_dtype) for batch in taken]
            flags = [False] * len(taken) + [True] * missing
            yield Window(taken + [taken[-1]] * missing, flags)  # every step runs as many micro-batches


def make_dataset(args: TrainerArgs, split: Split) -> Any:
    """The dataset of a split; ``None`` if the configuration has no arguments for it."""
    options = getattr(args.dataset, f"{split}_args")
    if split != "train" and not options:
        return None
    return make(args.dataset.type, options=options, what="dataset")


def make_data(
    args: TrainerArgs,
    split: Split,
    dataset: Any,
    *,
    batch_size: int,
    num_micro_batches: int,
    data_rank: int,
    data_ranks: int,
) -> Data:
    """The data of a split on this rank, with micro-batches of ``batch_size`` samples."""
    settings = _args_of(args.dataloader, split)
    automatic: dict[str, Any] = {"dataset": dataset, "batch_size": batch_size}
    if isinstance(dataset, IterableDataset):
        if data_ranks > 1:
            automatic["dataset"] = RankStream(dataset, rank=data_rank, num_ranks=data_ranks)  # no sampler
    else:
        automatic["sampler"] = _make_sampler(args, split, dataset, data_rank, data_ranks=data_ranks)
    loader = make(args.dataloader.type, options=settings, what="dataloader", **automatic)
    return Data(dataset, loader, num_micro_batches, dtype_of(args.precision, "input"))


def sample_of(args: TrainerArgs, dataset: Any) -> Any:
    """One micro-batch for planning."""
    settings = arguments(_args_of(args.dataloader, "train"), what="dataloader.train_args")
    if isinstance(dataset, IterableDataset):
        items = list(islice(iter(dataset), args.micro_batch_size))
    else:
        items = [  # a dataset that is smaller than a micro-batch is repeated
            dataset[index % len(dataset)] for index in range(args.micro_batch_size if len(dataset) else 0)
        ]
    if not items:
        raise InputError("dataset is empty; there is nothing to train on.")
    collate = settings.get("collate_fn") or default_collate
    batch = resolve_component(collate, what="dataloader.train_args.collate_fn")(items)
    dtype = dtype_of(args.precision, "input")
    return batch if dtype is None else floats_to(batch, dtype)


def _args_of(config: Any, split: Split) -> dict[str, Any]:
    args: dict[str, Any] = getattr(config, f"{split}_args") or config.train_args
    return args


def _make_sampler(args: TrainerArgs, split: Split, dataset: Any, data_rank: int, *, data_ranks: int) -> Any:
    config = args.dataset_sampler
    options = {key: value for key, value in _args_of(config, split).items() if key not in _AUTOMATIC}
    kind = resolve_component(config.type, what="dataset_sampler.type")
    if split == "val" and isinstance(kind, type) and issubclass(kind, DistributedSampler):
        options.setdefault("shuffle", False)  # DistributedSampler's default is True
    automatic = {"dataset": dataset, "num_replicas": data_ranks, "rank": data_rank}
    return make(kind, options=options, what="dataset_sampler", **automatic)

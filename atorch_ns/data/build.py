"""Loader of one rank, built from the user's dataset and ``dataloader_args``.

Legend: B global batch size, N data-parallel ranks, r the rank of this process among them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from typing import Any, TypeVar, final

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, IterDataPipe, get_worker_info

from atorch_ns.cluster import from_first
from atorch_ns.data.loader import TrainLoader
from atorch_ns.data.loader_args import LoaderArgs, read_loader_args
from atorch_ns.data.samplers import RankSampler, distributed_position, readable_epoch
from atorch_ns.errors import InputError
from atorch_ns.text import with_article

T = TypeVar("T")
_NEVER_SET = -1  # the epoch of a stream whose set_epoch was never called


def every_nth(stream: Iterable[T], rank: int, num_ranks: int) -> Iterator[T]:
    """Entry r of each complete round of N entries. An incomplete last round gives nothing to any rank."""
    for position, entry in enumerate(stream):
        owner = position % num_ranks
        if owner == rank:
            local_entry = entry
        if owner == num_ranks - 1:  # not earlier, so that all ranks get equally many
            yield local_entry


@final
class RankStream(IterableDataset[Any]):
    """The rank's share of an iterable dataset, a single stream that every rank reads.

    The user's dataset divides itself between loader workers as torch documents, by ``get_worker_info`` or
    by a ``worker_init_fn`` that sets its attributes; the share of the rank is taken inside each worker.
    All other attributes are read from and written to the user's dataset.

    Args:
        dataset: yields the same samples in the same order on every rank.
        rank: r.
        num_ranks: N.
    """

    _OWN = frozenset({"dataset", "_share", "_epoch"})

    def __init__(self, dataset: Iterable[Any], *, rank: int, num_ranks: int) -> None:
        self.dataset = dataset
        self._share = (rank, num_ranks)
        # In shared memory, since persistent workers keep the dataset that they were started with.
        self._epoch = torch.tensor(_NEVER_SET, dtype=torch.int64).share_memory_()

    def __iter__(self) -> Iterator[Any]:
        epoch = int(self._epoch)
        if epoch != _NEVER_SET and get_worker_info() is not None:
            self._pass_epoch(epoch)
        rank, num_ranks = self._share
        return every_nth(iter(self.dataset), rank, num_ranks)

    def __len__(self) -> int:
        if not isinstance(self.dataset, Sized):
            raise TypeError(f"the dataset of type {type(self.dataset).__name__} has no __len__.")
        return len(self.dataset) // self._share[1]

    @property
    def epoch(self) -> int | None:
        """The epoch of the user's dataset, or None if it has no ``epoch``."""
        return readable_epoch(self.dataset)

    def set_epoch(self, epoch: int) -> None:
        """Passes ``epoch`` to the user's dataset, here and in every worker, if it has ``set_epoch``."""
        self._epoch.fill_(epoch)
        self._pass_epoch(epoch)

    def _pass_epoch(self, epoch: int) -> None:
        listener = getattr(self.dataset, "set_epoch", None)
        if callable(listener):
            listener(epoch)

    def __getattr__(self, name: str) -> Any:
        if name in RankStream._OWN or (name.startswith("__") and name.endswith("__")):
            raise AttributeError(name)  # not set yet: the object is being unpickled
        return getattr(self.dataset, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in RankStream._OWN:
            object.__setattr__(self, name, value)
        else:
            setattr(self.dataset, name, value)


def build_dataloader(
    dataset: Any,
    *,
    args: Mapping[str, Any] | None,
    sampler_cls: type | None,
    seed: int,
    data_rank: int,
    num_data_ranks: int,
    group: dist.ProcessGroup | None,
) -> TrainLoader:
    """The loader of data-parallel rank ``data_rank``. In each step the ranks load one global batch together.

    **Batch size.** ``batch_size`` is global (strong scaling): each rank loads B/N samples a step. Without
    one it is N, which is torch's default of 1 for each rank. With ``batch_size=None`` nothing is batched;
    that is for one rank only.

    **Order.** By default step t of all ranks together is ``order[t*B:(t+1)*B]``, where ``order`` depends on
    the seed and the epoch only, or is 0, 1, 2 … without ``shuffle``: the same for any N. If N does not
    divide the dataset, ``drop_last=False`` continues the order with its beginning, as
    ``torch.utils.data.DistributedSampler`` does; so the last global batch can then hold up to N-1 samples
    more than that of one process. With ``drop_last=True`` the global batches are equal for any N.

    With ``shuffle``, a ``generator`` gives the seed by its ``initial_seed()`` (rank 0's, on all ranks) and
    is not advanced. Without ``shuffle`` it is torch's, as given.

    **Samplers.** A distributed sampler, or a batch sampler that draws from one, is used as it is if its
    ``(num_replicas, rank)`` is ``(N, r)``. Of any other sampler every rank takes each N-th entry of the
    order that rank 0 draws, padded or dropped as above; of each batch of a ``batch_sampler`` (a global
    batch), each N-th entry. ``sampler_cls`` is made as ``sampler_cls(dataset, num_replicas=N, rank=r,
    shuffle=...)``, with ``drop_last`` and ``seed`` if it takes them. With N=1 samplers are used as given.

    **Iterable datasets** give the same stream on every rank, and each rank keeps every N-th sample of the
    complete rounds of N. With workers this happens in each worker, after the dataset has divided itself
    among them as torch documents.

    Args:
        dataset: map-style, an ``IterableDataset``, or any iterable that can be iterated again.
        args: keyword arguments of ``torch.utils.data.DataLoader``, never changed.
        sampler_cls: a class with the interface of ``DistributedSampler``.
        seed: seed of the default order, equal on all ranks.
        data_rank: r.
        num_data_ranks: N.
        group: the process group of the N ranks, in that order; None if N is 1.

    Raises:
        BatchSizeError: N does not divide the batch size (or, while iterating, a batch of ``batch_sampler``).
        InputError: any other argument that cannot be used; every problem is listed.
    """
    is_stream = _is_stream(dataset, num_data_ranks)
    read = read_loader_args(
        args,
        is_stream=is_stream,
        has_sampler_cls=sampler_cls is not None,
        rank=data_rank,
        num_ranks=num_data_ranks,
    )
    generator = read.generator
    if read.shuffle and generator is not None:
        seed = generator.initial_seed() % 2**63  # it has 64 bits, and samplers add the epoch
        seed = seed if group is None else from_first(seed, distributed=True, group=group)
        generator = generator.clone_state()  # torch advances it, for the seeds of workers
    sampler: Iterable[Any] | None = None
    batch_sampler: Iterable[Any] | None = None
    if is_stream:
        dataset = _rank_stream(dataset, read)
    elif read.batch_sampler is not None:
        batch_sampler = _rank_share("batch_sampler", read.batch_sampler, read, group)
    elif read.sampler is not None:
        sampler = _rank_share("sampler", read.sampler, read, group)
    else:
        sampler = _make_sampler(sampler_cls, dataset, read, seed)
    try:
        return TrainLoader(
            dataset,
            global_batch_size=read.batch_size,
            # Beside a batch sampler torch allows the default alone.
            batch_size=1 if batch_sampler is not None else read.batch_size_per_rank,
            sampler=sampler,
            batch_sampler=batch_sampler,
            drop_last=read.drop_last,
            generator=generator,
            **read.passed,
        )
    except (TypeError, ValueError) as error:
        raise InputError(f"dataloader_args: torch refuses them: {error}") from error


def _is_stream(dataset: Any, num_ranks: int) -> bool:
    if isinstance(dataset, DataLoader) or dataset is None:
        raise InputError(f"dataset must be a dataset; it is {with_article(dataset)}.")
    if isinstance(dataset, IterDataPipe) and num_ranks > 1:
        raise InputError(
            "dataset is a data pipe, which torch divides over all processes in its own way. Wrap it in a "
            "torch.utils.data.IterableDataset whose stream is the same on every rank."
        )
    if isinstance(dataset, IterableDataset):
        return True
    if hasattr(dataset, "__next__"):
        raise InputError(
            f"dataset is an iterator ({type(dataset).__name__}), which is empty after one epoch. "
            "Give a torch.utils.data.IterableDataset that creates it."
        )
    if hasattr(dataset, "__getitem__"):
        return False
    if hasattr(dataset, "__iter__"):
        return True
    raise InputError(
        f"dataset must have __getitem__ and __len__, or __iter__; it is {with_article(dataset)}."
    )


def _rank_stream(dataset: Any, read: LoaderArgs) -> Any:
    # Persistent workers keep the copy of the dataset that they were started with.
    passes_epochs = read.passed.get("persistent_workers") and hasattr(dataset, "set_epoch")
    if read.num_ranks == 1 and isinstance(dataset, IterableDataset) and not passes_epochs:
        return dataset
    return RankStream(dataset, rank=read.rank, num_ranks=read.num_ranks)


def _rank_share(
    key: str, sampler: Iterable[Any], read: LoaderArgs, group: dist.ProcessGroup | None
) -> Iterable[Any]:
    if read.num_ranks == 1 or distributed_position(sampler) is not None:
        return sampler
    if group is None:
        raise InputError(
            f"dataloader_args[{key!r}] needs torch.distributed to be initialised: rank 0's order is sent to all."
        )
    return RankSampler(
        sampler,
        num_replicas=read.num_ranks,
        rank=read.rank,
        group=group,
        drop_last=read.drop_last,
        draws_batches=key == "batch_sampler",
    )


def _make_sampler(sampler_cls: type | None, dataset: Any, read: LoaderArgs, seed: int) -> Iterable[Any]:
    if not hasattr(dataset, "__len__"):
        raise InputError(
            f"dataset of type {type(dataset).__name__} has no __len__, so its samples cannot be ordered. "
            "Add __len__, give a sampler, or make it an IterableDataset."
        )
    make: Callable[..., Iterable[Any]] = DistributedSampler if sampler_cls is None else sampler_cls
    arguments: dict[str, Any] = {"num_replicas": read.num_ranks, "rank": read.rank, "shuffle": read.shuffle}
    parameters = inspect.signature(make).parameters
    takes_any = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
    optional = {"drop_last": read.drop_last, "seed": seed}  # which the interface does not promise
    arguments |= {key: value for key, value in optional.items() if takes_any or key in parameters}
    try:
        return make(dataset, **arguments)
    except TypeError as error:
        raise InputError(
            f"distributed_sampler_cls={getattr(make, '__name__', make)} cannot be made as "
            f"cls(dataset, {', '.join(f'{key}={value}' for key, value in arguments.items())}): {error}"
        ) from error

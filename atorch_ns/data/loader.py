"""Data loader of a rank, which reshuffles each epoch and resumes at a saved position."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, final

import torch
from torch.utils.data import DataLoader

from atorch_ns.data.samplers import StepSampler, epoch_source, readable_epoch
from atorch_ns.errors import InputError


@final
class EpochClock:
    """The epoch of the next iteration, which the user may also set on the sampler or dataset.

    If the sampler (or the iterable dataset) has an ``epoch``, it determines the epoch. A call of its
    ``set_epoch`` by the user has the same effect as the loader's. If it has ``set_epoch`` but no
    readable ``epoch``, it receives only the epochs that the user gives to the loader. Any other call
    could undo the user's setting. Without a source the clock counts by itself.

    Args:
        source: the object with ``set_epoch``, or None.
    """

    def __init__(self, source: Any | None) -> None:
        self._source = source
        self._count = 0

    @property
    def epoch(self) -> int:
        """The epoch of the next iteration, from 0."""
        value = readable_epoch(self._source)
        return self._count if value is None else value

    def set(self, epoch: int) -> None:
        """Sets the epoch of the next iteration."""
        self._count = epoch
        if self._source is not None:
            self._source.set_epoch(epoch)

    def begin(self) -> int:
        """Starts an iteration and returns its epoch."""
        epoch = self.epoch
        if readable_epoch(self._source) is not None:
            # Persistent workers receive an epoch that the user set on the object in this process.
            self.set(epoch)
        return epoch

    def end(self, epoch: int) -> None:
        """Ends the iteration of ``epoch``. The next epoch follows, unless the user has set another since."""
        if self.epoch != epoch:
            return
        self._count = epoch + 1
        if readable_epoch(self._source) is not None:
            self.set(epoch + 1)


@dataclass(kw_only=True)
class _Run:
    """One iteration: its epoch, and the number of batches handed out."""

    epoch: int
    batches: int
    over: bool = False


@final
class TrainLoader(DataLoader[Any]):
    """A torch ``DataLoader`` that reshuffles each epoch and can be resumed.

    **Epochs.** Without any call, the first iteration is epoch 0 and each later iteration the next epoch.
    An iteration left early counts as an epoch once it has given a batch. ``set_epoch`` of the
    loader, or of its sampler, sets the epoch of the next iteration instead. An object whose ``set_epoch``
    leaves no ``epoch`` attribute to read is given only the epochs that are set on the loader.

    **Position.** :meth:`state_dict` counts the batches handed out, in global batches. A state saved with
    one number of ranks therefore loads with another. Batches loaded ahead by workers do not count.
    With ``in_order=False`` the count says how many batches, but not which ones. The place in an order is
    found by drawing the order again, so a user's sampler that draws from a generator rather than from the
    epoch resumes correctly only if that generator is back in the state it had when the epoch began.

    ``len`` is the number of batches in a whole epoch, even if the next iteration is a resumed one. For an
    iterable dataset with workers it is torch's estimate: each worker ends with an incomplete batch of its own.
    All ranks iterate together. With a sampler whose order is broadcast, the first batch of an
    iteration is a collective, so a single rank that iterates alone waits for the others.

    Args:
        dataset: the dataset, or the rank's view of it.
        global_batch_size: samples in a step of all ranks together. None if a batch sampler decides.
        batch_size: samples in a step of this rank.
        arguments: other arguments of ``torch.utils.data.DataLoader``.
    """

    def __init__(
        self, dataset: Any, *, global_batch_size: int | None, batch_size: int | None = 1, **arguments: Any
    ) -> None:
        super().__init__(dataset, batch_size=batch_size, **arguments)
        self.global_batch_size = global_batch_size
        self._steps = StepSampler(super()._index_sampler)
        self._is_stream = isinstance(dataset, torch.utils.data.IterableDataset)
        self._clock = EpochClock(_epoch_listener(dataset) if self._is_stream else epoch_source(self._steps))
        self._resume: _Run | None = None  # where the next iteration starts, if its epoch is still that one
        self._run: _Run | None = None  # the latest iteration, unless it came to its end

    @property
    def _index_sampler(self) -> StepSampler:
        # torch draws from this property. So a resumed epoch skips samples without loading them, while
        # `batch_size`, `sampler` and `batch_sampler` stay the usual ones of a DataLoader.
        return self._steps

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]  # torch promises a private class
        run, skip = self._begin_run()
        self._steps.skip = 0 if self._is_stream else skip
        batches = self._start_iterator(skip)
        try:
            if self._is_stream:
                for _ in range(skip):
                    next(batches, None)
            for batch in batches:
                run.batches += 1
                yield batch
            self._end_run(run)
            if self._run is run:  # no other iteration has begun meanwhile
                self._run = None
        finally:
            if run.batches > skip:  # left early, after a batch: it counts as an epoch
                self._end_run(run)
            elif not run.over and self._run is run:  # the first batch failed to load: it comes next
                self._run, self._resume = None, run

    def set_epoch(self, epoch: int) -> None:
        """Sets the epoch of the next iteration, on the sampler or dataset too.

        The batches to skip from a loaded state are skipped only in that state's own epoch.

        Raises:
            InputError: ``epoch`` is not an integer from 0 on.
        """
        self._clock.set(_check_count("epoch", epoch))
        if self._run is not None:
            self._run.over = True  # its end no longer sets the next epoch
            self._run = None

    def state_dict(self) -> dict[str, Any]:
        """The position: ``epoch``, ``batches`` handed out in it, and their ``global_batch_size``."""
        position = self._run or self._resume
        epoch = self._clock.epoch if self._run is None else self._run.epoch
        batches = position.batches if position is not None and position.epoch == epoch else 0
        return {"epoch": epoch, "batches": batches, "global_batch_size": self.global_batch_size}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resumes the next iteration at a position of :meth:`state_dict`, with any number of ranks.

        Samples of a map-style dataset are skipped without loading them. An iterable one is read up to the
        position. A position at the end of an epoch gives one empty iteration.

        Raises:
            InputError: an entry is missing or of the wrong type, or the global batch size differs.
        """
        missing = [key for key in ("epoch", "batches", "global_batch_size") if key not in state]
        if missing:
            raise InputError(f"the loader's state lacks {missing}; it has {sorted(map(str, state))}.")
        size = state["global_batch_size"]
        if size != self.global_batch_size:
            raise InputError(
                f"the loader's state counts batches of {size} samples, but this loader's global batch has "
                f"{self.global_batch_size}, so the position does not carry over. Use the batch_size it was "
                "saved with, or start a new epoch with set_epoch."
            )
        position = _Run(
            epoch=_check_count("epoch", state["epoch"]), batches=_check_count("batches", state["batches"])
        )
        self.set_epoch(position.epoch)
        self._resume = position

    def _begin_run(self) -> tuple[_Run, int]:
        if self._run is not None:
            self._end_run(self._run)  # left early, while its iterator still exists
        epoch = self._clock.begin()
        position, self._resume = self._resume, None
        skip = position.batches if position is not None and position.epoch == epoch else 0
        self._run = _Run(epoch=epoch, batches=skip)
        return self._run, skip

    def _start_iterator(self, skip: int) -> Iterator[Any]:
        # Torch draws a seed for workers from the global random state. The resumed iteration did so when it
        # began, so the state is restored: the model's next draw is the same.
        if not skip or self.generator is not None:
            return super().__iter__()
        state = torch.get_rng_state()
        try:
            return super().__iter__()
        finally:
            torch.set_rng_state(state)

    def _end_run(self, run: _Run) -> None:
        if not run.over:  # the epoch is counted once
            run.over = True
            self._clock.end(run.epoch)


def _epoch_listener(dataset: Any) -> Any | None:
    return dataset if callable(getattr(dataset, "set_epoch", None)) else None


def _check_count(name: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise InputError(f"the loader's {name} must be a non-negative integer; it is {value!r}.")
    return value

"""Accelerator of a divided job: a process for each share of the data, and an optimizer for all ranks."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any, Final

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import gather_object, recursively_apply
from torch import nn

from atorch_ns.checkpoint.contents import capture_rng, restore_rng
from atorch_ns.cluster import gather_values
from atorch_ns.job import TrainStep
from atorch_ns.merak import mpu

_CPU: Final = torch.device("cpu")


class DataAccelerator(Accelerator):  # type: ignore[misc]  # accelerate has no types
    """An ``Accelerator`` that treats ranks working on the same samples as one process.

    A data loader gives them the same samples, and metrics are gathered from one of them. Nothing is wrapped.
    """

    train_step: TrainStep | None = None

    @property
    def num_processes(self) -> int:
        """Number of ranks that see different data."""
        return mpu.get_grid().get_dim("data") if mpu.is_decided() else self.state.num_processes

    @property
    def process_index(self) -> int:
        """Index of this rank among them."""
        return mpu.get_grid().position("data") if mpu.is_decided() else self.state.process_index

    @property
    def optimizer_step_was_skipped(self) -> bool:
        """True if the last step was skipped because gradients were infinite or NaN."""
        return self.train_step is not None and self.train_step.skipped

    def prepare_data_loader(self, data_loader: Any, *args: Any, **kwargs: Any) -> Any:
        """Divides the loader over the data ranks. Workers of ranks with the same samples draw the same."""
        init = data_loader.worker_init_fn
        if isinstance(init, partial) and "rank" in init.keywords:  # transformers' seed_worker
            data_loader.worker_init_fn = partial(init, rank=self.process_index)
        return super().prepare_data_loader(data_loader, *args, **kwargs)

    def gather(self, tensor: Any) -> Any:
        """Concatenates the tensors of all ranks that see different data along the first dimension."""
        tensors, num_processes = super().gather(tensor), self.state.num_processes
        if not mpu.is_decided() or mpu.get_grid().get_dim("data") == num_processes:
            return tensors  # each rank has samples of its own
        ranks = _first_ranks()

        def select(whole: torch.Tensor) -> torch.Tensor:
            parts = whole.reshape(num_processes, -1, *whole.shape[1:])  # [process, sample, ...]
            return parts[ranks].reshape(-1, *whole.shape[1:])

        return recursively_apply(select, tensors)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Like :meth:`gather`, without the samples that pad the last batch on all ranks."""
        if not use_gather_object:
            return super().gather_for_metrics(input_data)
        every = gather_object([input_data])  # a list by process
        objects = [item for rank in _first_ranks() for item in every[rank]]
        remainder = self.gradient_state.remainder  # samples of the last global batch
        return objects[:remainder] if self.gradient_state.end_of_dataloader and remainder > 0 else objects


class DataDraws:
    """Random numbers for data, separate from the model's. Ranks with the same samples draw the same.

    Dropout changes a rank's states. Collators and datasets would draw differently from them. Collective.
    """

    def __init__(self) -> None:
        every = gather_values(capture_rng(_CPU), distributed=True)  # random states of all ranks
        # Ranks with the same samples take the random states of the first of them.
        self._states = every[_first_ranks()[mpu.get_grid().position("data")]]

    @contextlib.contextmanager
    def apart(self) -> Iterator[None]:
        """A context in which draws come from this stream."""
        backup = capture_rng(_CPU)
        restore_rng(self._states, _CPU)
        try:
            yield
        finally:
            self._states = capture_rng(_CPU)
            restore_rng(backup, _CPU)


class SteppedOptimizer(AcceleratedOptimizer):  # type: ignore[misc]
    """The job's optimizer for transformers' loop. A step is the training step's ``update``."""

    def __init__(self, optimizer: torch.optim.Optimizer, train_step: TrainStep) -> None:
        super().__init__(optimizer, device_placement=False)
        self._train_step = train_step

    def step(self, closure: Any = None) -> None:
        """Updates the weights."""
        self._train_step.update()

    @property
    def step_was_skipped(self) -> bool:
        """True if the last step was skipped."""
        return self._train_step.skipped


class DistributedModel(nn.Module):
    """The job's model for transformers' loop. Every rank gets whole evaluation outputs. Collective.

    Args:
        train_step, roots: the job's training step, and the modules that this rank runs.
        name: the class of the undivided model.
    """

    def __init__(self, train_step: TrainStep, roots: list[nn.Module], name: str) -> None:
        super().__init__()
        self.roots = nn.ModuleList(roots)
        self._train_step = train_step
        self._name = name

    def _get_name(self) -> str:
        return self._name  # Trainer looks up this name for models whose labels are shifted

    def forward(self, **inputs: Any) -> Any:
        """The outputs for one batch."""
        (output,) = self._train_step.infer([(inputs, None, None)]).outputs  # no loss is wanted
        return output


def _first_ranks() -> list[int]:
    # One rank of each group that works on the same samples.
    grid = mpu.get_grid()
    return [grid.get_rank(pipe=0, data=index, sequence=0, model=0) for index in range(grid.get_dim("data"))]


class Batches:
    """A data loader with separate random numbers."""

    def __init__(self, loader: Any, draws: DataDraws) -> None:
        self._loader, self._draws = loader, draws

    def __iter__(self) -> Iterator[Any]:
        batches, end = iter(self._loader), object()
        while True:
            with self._draws.apart():
                batch = next(batches, end)
            if batch is end:
                return
            yield batch

    def __len__(self) -> int:
        return len(self._loader)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)


class First(torch.utils.data.IterableDataset[Any]):
    """The first samples of a dataset without a length."""

    def __init__(self, dataset: Iterable[Any], most: int) -> None:
        self._dataset, self._most = dataset, most

    def __iter__(self) -> Iterator[Any]:
        return itertools.islice(iter(self._dataset), self._most)

"""Result: what auto_accelerate returns to train with."""

from __future__ import annotations

import atexit
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from atorch_ns.tracking import StepMeter, Tracker, Tracking

if TYPE_CHECKING:
    from torch import nn

    from atorch_ns.data import TrainLoader
    from atorch_ns.job._job import Job
    from atorch_ns.job._loss import LossFunction
    from atorch_ns.job._report import Report
    from atorch_ns.job._train_step import TrainStep
    from atorch_ns.report import TrainingReport

__all__ = ["Result"]


class _Fields(NamedTuple):
    model: nn.Module
    optim: torch.optim.Optimizer | None
    dataloader: TrainLoader | None
    loss_func: LossFunction | None
    prepare_input: Any
    lr_scheduler: Any
    args: dict[str, bool]


class Result(_Fields):
    """The objects to train with; a named tuple of seven, with the step and the report as attributes.

    Attributes:
        model: call it as before.
        optim: the optimizer, or ``None`` if no ``optim_func`` was given.
        dataloader: gives this rank's part of every global batch, or ``None`` if no ``dataset`` was given.
        loss_func: ``(batch, output) -> loss``.
        prepare_input: ``(batch, device) -> batch``; moves the batch to the device by default.
        lr_scheduler: the scheduler, or ``None``. Stepping it is the user's.
        args: ``use_optim_backward`` and ``requires_set_gradient_accumulation_boundary``.
        train_step: ``batch -> loss``: the whole step, right for every strategy.
        make_applied: makes :attr:`applied`.
        make_report: makes :attr:`report`.
    """

    train_step: TrainStep
    job: Job
    make_applied: Callable[[], Report]
    make_report: Callable[[], Any]

    @classmethod
    def of(
        cls, *, train_step: TrainStep, make_applied: Callable[[], Report], job: Job, **fields: Any
    ) -> Result:
        """Makes a result from its seven fields and its attributes."""
        result = cls(**fields)
        result.train_step = train_step
        result.job = job
        result.make_applied = make_applied
        result.make_report = make_applied
        return result

    @property
    def applied(self) -> Report:
        """What was applied and why, with what methods have found since, as with the first batch."""
        return self.make_applied()

    @property
    def report(self) -> TrainingReport:
        """What was applied and why, what was searched, and, after some steps, what they took."""
        report: TrainingReport = self.make_report()
        return report

    @property
    def device(self) -> torch.device:
        """This process's device."""
        return self.job.device

    @property
    def rank(self) -> int:
        """This process, 0 to the number of processes less one."""
        return self.job.cluster.rank

    def no_sync(self) -> AbstractContextManager[None]:
        """A context in which backward passes add to local gradients and communicate nothing.

        For the plain loop: all micro-batches but the last run in it. ``train_step`` does so by itself.
        """
        return self.job.skip_sync()

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Clips the gradients of all ranks together to ``max_norm``; returns the norm before, 0-d.

        Call it between the backward pass and ``optim.step()``. Collective where gradients are sharded.
        """
        return self.train_step.clip_grad_norm_(max_norm, norm_type)

    def track(self, tracker: Tracker, *, every: int = 10, samples_per_step: int | None = None) -> Tracking:
        """Gives the metrics of every so many steps of ``train_step`` to a tracker; see ``atorch_ns.tracking``.

        Call it on every rank, or on rank 0 alone: nothing is communicated, and only rank 0 measures and writes.
        A logged step waits for the device; the others do not. A tracker that fails is one warning.

        Args:
            tracker: where the metrics go.
            every: steps from one logged step to the next.
            samples_per_step: samples in a global batch; ``None`` for that of ``dataloader``.

        Returns:
            What ends it, and takes metrics of your own. The end of the interpreter ends it too.

        Raises:
            InputError: if ``every`` is no number of steps.
        """
        if samples_per_step is None and self.dataloader is not None:
            samples_per_step = self.dataloader.global_batch_size
        observers = self.train_step.observers

        def closed(tracking: Tracking) -> None:
            observers.remove(tracking)
            atexit.unregister(tracking.close)

        meter = StepMeter(self.device, self.optim, samples_per_step)
        tracking = Tracking(tracker if self.rank == 0 else None, meter, every=every, on_close=closed)
        if self.rank == 0:
            observers.append(tracking)
            atexit.register(tracking.close)
        return tracking

"""Result: what auto_accelerate returns to train with."""

from __future__ import annotations

import atexit
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from os import PathLike
from typing import Any, Final, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import nn

from atorch_ns._version import __version__
from atorch_ns.data import TrainLoader
from atorch_ns.errors import InputError
from atorch_ns.job.job import Job
from atorch_ns.job.loss import LossFunction
from atorch_ns.job.optimizer.step_optimizer import StepOptimizer
from atorch_ns.job.reducer import GradientReducer
from atorch_ns.job.states import WeightAverage
from atorch_ns.job.train_step import TrainStep
from atorch_ns.strategy import Step, Strategy
from atorch_ns.text import bytes_text, count_text
from atorch_ns.tracking import StepMeter, Tracker, Tracking


@dataclass(frozen=True, kw_only=True)
class MethodRow:
    """One method of the strategy as applied.

    Attributes:
        name: the method.
        settings: its config where it differs from the defaults, as text.
        why: why it is here and what it chose.
    """

    name: str
    settings: str
    why: str


@dataclass(frozen=True, kw_only=True)
class Report:
    """What was decided and done.

    Attributes:
        strategy: the strategy as saved, with methods that are left out here and apply on other clusters.
        rows: one for every method, in order of application.
        notes: methods added, left out and fitted, each a sentence.
        world_size: number of processes.
        axes: the mesh, ``(name, size)``, innermost first.
        device: this rank's device.
        num_parameters: parameter elements of the whole model.
        parameter_bytes_per_rank: bytes of parameters that this rank keeps between steps (measured).
    """

    strategy: Strategy
    rows: tuple[MethodRow, ...]
    notes: tuple[str, ...]
    world_size: int
    axes: tuple[tuple[str, int], ...]
    device: str
    num_parameters: int
    parameter_bytes_per_rank: int

    def __str__(self) -> str:
        mesh = " × ".join(f"{name}={size}" for name, size in self.axes) or "one process"
        lines = [
            f"{count_text(self.num_parameters)} parameters on {self.world_size} process(es) ({mesh}), "
            f"{self.device}; {bytes_text(self.parameter_bytes_per_rank)} of parameters per rank (measured)"
        ]
        width = max((len(row.name) for row in self.rows), default=0)
        for row in self.rows:
            settings = f" [{row.settings}]" if row.settings else ""
            lines.append(f"  {row.name:<{width}}  {row.why}{settings}")
        lines += [f"  note: {note}" for note in self.notes]
        return "\n".join(lines)


class _Fields(NamedTuple):
    model: nn.Module
    optim: torch.optim.Optimizer | None
    dataloader: TrainLoader | None
    loss_func: LossFunction | None
    prepare_input: Any
    lr_scheduler: Any
    args: dict[str, bool]


class ReadableReport(Protocol):
    """Report of a job as its user reads it; ``atorch_ns.report.TrainingReport`` is the one that jobs have."""

    @property
    def strategy(self) -> Strategy:
        """The strategy as it is saved."""

    @property
    def rows(self) -> tuple[MethodRow, ...]:
        """One row for every method, in order of application."""

    @property
    def notes(self) -> tuple[str, ...]:
        """Methods added, left out and fitted, each a sentence."""

    @property
    def search(self) -> Any:
        """Outcome of the search, ``None`` where nothing was searched."""

    def to_json(self) -> str:
        """The report as JSON."""

    def to_html(self) -> str:
        """The report as one HTML page."""

    def save(self, path: str | PathLike[str]) -> None:
        """Writes the report in the form that the ending of ``path`` names."""

    def refit(self, path: str | PathLike[str] | None = None) -> Any:
        """Corrections of the estimate that this job's measurements give, saved to ``path``."""


def _with_settings(step: Step, options: Mapping[str, Any]) -> Step:
    config = step.config if isinstance(step.config, dict) else {}
    # Paths of files that a method has read are replaced by what was in the files.
    read = [
        key for key, value in config.items() if isinstance(value, str) and isinstance(options.get(key), dict)
    ]
    return Step(step.name, {**options, **{key: value for key, value in config.items() if key not in read}})


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

    def having(self, **changes: Any) -> Result:
        """The same objects with others in some fields."""
        fields = {**self._asdict(), **changes}
        result = Result.of(train_step=self.train_step, make_applied=self.make_applied, job=self.job, **fields)
        result.make_report = self.make_report
        return result

    @property
    def reducer(self) -> GradientReducer | None:
        """What averages the gradients, where ``ddp`` has ``reducer: own``."""
        return self.job.gradients.reducer

    @property
    def applied(self) -> Report:
        """What was applied and why, with what methods have found since, as with the first batch."""
        return self.make_applied()

    @property
    def strategy(self) -> Strategy:
        """The strategy as applied, with methods' findings; ``strategy.save(path)`` is for all front ends."""
        strategy, options = self.applied.strategy, self.job.resolved_settings
        return Strategy(
            [_with_settings(step, options[step.name]) if step.name in options else step for step in strategy],
            requires=strategy.requires,
            provenance={
                **strategy.provenance,
                "made_by": f"atorch_ns {__version__}",
                "model": self.job.original.model_class,
                "num_parameters": self.applied.num_parameters,
            },
        )

    @property
    def report(self) -> ReadableReport:
        """What was applied and why, what was searched, and, after some steps, what they took."""
        report: ReadableReport = self.make_report()
        return report

    @property
    def device(self) -> torch.device:
        """This process's device."""
        return self.job.device

    @property
    def rank(self) -> int:
        """This process, 0 to the number of processes less one."""
        return self.job.cluster.rank

    @property
    def world_size(self) -> int:
        """The number of processes."""
        return self.job.cluster.world_size

    def mean(self, value: torch.Tensor | float) -> torch.Tensor:
        """The mean of a number over all data ranks, 0-d float32 and detached; collective.

        Raises:
            InputError: if ``value`` is not one number.
        """
        try:
            total = (
                torch.as_tensor(value, dtype=torch.float32, device=self.device).detach().reshape(()).clone()
            )
        except (TypeError, ValueError, RuntimeError) as error:
            raise InputError(f"mean takes one number; it got {value!r}.") from error
        if self.job.mesh is not None and self.job.num_data_ranks > 1:
            dist.all_reduce(total, group=self.job.mesh.data_group)
            total /= self.job.num_data_ranks
        return total

    def infer_step(self, samples: Sequence[Any]) -> tuple[Any, ...]:
        """The model's outputs for micro-batches, in evaluation mode, without gradients; collective.

        Every rank gets those of its samples; in a pipeline all of its ranks give the same samples.
        """
        return self.train_step.infer(samples).outputs

    def no_sync(self) -> AbstractContextManager[None]:
        """A context in which backward passes add to local gradients and communicate nothing.

        For the plain loop: all micro-batches but the last run in it; ``train_step`` does so by itself. It
        does nothing where ``reduce_each_micro_batch`` of fsdp or zero2 is true: gradients are then sharded.
        """
        return self.job.gradients.no_sync()

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Clips the gradients of all ranks together to ``max_norm``; returns the norm before, 0-d.

        Call it between the backward pass and ``optim.step()``. Collective where gradients are sharded.
        """
        return self.train_step.clip_grad_norm_(max_norm, norm_type)

    def prepare_gradients(self) -> None:
        """Makes the gradients in ``optim.param_groups`` complete and unscaled, for a loop that changes them.

        Call it after the last backward pass of a step. Collective.
        """
        self.train_step.reduce()
        if isinstance(self.optim, StepOptimizer):
            self.optim.prepare_gradients()

    def average(self, decay: float | None = 0.999) -> WeightAverage:
        """An average of the weights (EMA), divided as they are; call its ``update()`` after a step.

        The numbers are those of ``AveragedModel`` with ``get_ema_multi_avg_fn(decay)`` in one process;
        ``decay=None`` is the mean of all updates.

        Raises:
            InputError: for a decay outside of 0 to 1.
        """
        return WeightAverage(partial(self.job.make_states, self.job, self.optim), decay)

    def track(self, tracker: Tracker, *, every: int = 10, samples_per_step: int | None = None) -> Tracking:
        """Gives metrics of every so many steps of ``train_step`` to a tracker (``atorch_ns.tracking``).

        Call it on every rank, or on rank 0 alone: nothing is sent, and only rank 0 measures and writes.
        A logged step waits for the device; the others do not. A tracker that fails is one warning.

        Args:
            tracker: where the metrics go.
            every: steps from one logged step to the next.
            samples_per_step: samples in a global batch; ``None`` for that of ``dataloader``.

        Returns:
            What ends it, and takes metrics of your own. The end of the interpreter ends it too.

        Raises:
            InputError: if ``every`` is not a number of steps.
        """
        if samples_per_step is None and self.dataloader is not None:
            samples_per_step = self.dataloader.global_batch_size
        observers = self.train_step.observers

        def stop_observing(tracking: Tracking) -> None:
            observers.remove(tracking)
            atexit.unregister(tracking.close)

        meter = StepMeter(self.device, self.optim, samples_per_step)
        tracking = Tracking(tracker if self.rank == 0 else None, meter, every=every, on_close=stop_observing)
        if self.rank == 0:
            observers.append(tracking)
            atexit.register(tracking.close)
        return tracking


class Watch(Protocol):
    """What front ends meet in a script that is watched.

    Attributes:
        strategy: in the place of each ``load_strategy``; ``None`` leaves the script's own.
    """

    strategy: Any

    def follow(self, result: Result) -> None:
        """Called on every rank with each job that has an optimizer, once it has one."""


WATCH: Final[ContextVar[Watch | None]] = ContextVar("watch", default=None)
"""The watch of the script that runs in this context; ``None`` for almost all."""

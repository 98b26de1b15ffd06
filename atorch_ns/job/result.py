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
        settings: non-default settings of its config, as text.
        why: why it was chosen, and its own choices.
    """

    name: str
    settings: str
    why: str


@dataclass(frozen=True, kw_only=True)
class Report:
    """Decisions and actions of a job.

    Attributes:
        strategy: the strategy as saved, including methods omitted here that apply on other clusters.
        rows: one for every method, in order of application.
        notes: methods added, omitted and fitted, each a sentence.
        world_size: number of processes.
        axes: the mesh, ``(name, size)``, innermost first.
        device: this rank's device.
        num_parameters: number of parameter elements in the whole model.
        parameter_bytes_per_rank: bytes of parameters that this rank holds between steps (measured).
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
    """Report of a job for its user. Jobs have an ``atorch_ns.report.TrainingReport``."""

    @property
    def strategy(self) -> Strategy:
        """The strategy as it is saved."""

    @property
    def rows(self) -> tuple[MethodRow, ...]:
        """One row for every method, in order of application."""

    @property
    def notes(self) -> tuple[str, ...]:
        """Methods added, omitted and fitted, each a sentence."""

    @property
    def search(self) -> Any:
        """Outcome of the search, or ``None`` without a search."""

    def to_json(self) -> str:
        """The report as JSON."""

    def to_html(self) -> str:
        """The report as one HTML page."""

    def save(self, path: str | PathLike[str]) -> None:
        """Writes the report in the format given by the suffix of ``path``."""

    def refit(self, path: str | PathLike[str] | None = None) -> Any:
        """Corrections of the estimate from this job's measurements, saved to ``path``."""


def _with_settings(step: Step, options: Mapping[str, Any]) -> Step:
    config = step.config if isinstance(step.config, dict) else {}
    # Replaces paths of files read by a method with the contents of the files.
    read = [
        key for key, value in config.items() if isinstance(value, str) and isinstance(options.get(key), dict)
    ]
    return Step(step.name, {**options, **{key: value for key, value in config.items() if key not in read}})


class Result(_Fields):
    """The objects to train with; a named tuple of seven, with the step and the report as attributes.

    Attributes:
        model: call it as before.
        optim: the optimizer, or ``None`` if no ``optim_func`` was given.
        dataloader: yields this rank's part of each global batch, or ``None`` if no ``dataset`` was given.
        loss_func: ``(batch, output) -> loss``.
        prepare_input: ``(batch, device) -> batch``; moves the batch to the device by default.
        lr_scheduler: the scheduler, or ``None``. The user steps it.
        args: ``use_optim_backward`` and ``requires_set_gradient_accumulation_boundary``.
        train_step: ``batch -> loss``. Runs the whole step, correct for every strategy.
        make_applied: creates :attr:`applied`.
        make_report: creates :attr:`report`.
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
        """The same objects with some fields replaced."""
        fields = {**self._asdict(), **changes}
        result = Result.of(train_step=self.train_step, make_applied=self.make_applied, job=self.job, **fields)
        result.make_report = self.make_report
        return result

    @property
    def reducer(self) -> GradientReducer | None:
        """The reducer that averages the gradients, if ``ddp`` has ``reducer: own``."""
        return self.job.gradients.reducer

    @property
    def applied(self) -> Report:
        """Applied methods and the reasons, with their later findings, as with the first batch."""
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
        """Report of what was applied and why, of the search, and, after some steps, of their times."""
        report: ReadableReport = self.make_report()
        return report

    @property
    def device(self) -> torch.device:
        """This process's device."""
        return self.job.device

    @property
    def rank(self) -> int:
        """Rank of this process, from 0."""
        return self.job.cluster.rank

    @property
    def world_size(self) -> int:
        """The number of processes."""
        return self.job.cluster.world_size

    def mean(self, value: torch.Tensor | float) -> torch.Tensor:
        """The mean of a number over all data ranks, 0-d float32 and detached. Collective.

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
        """The model's outputs for micro-batches, in evaluation mode, without gradients. Collective.

        Every rank gets the outputs of its samples. All ranks of a pipeline pass the same samples.
        """
        return self.train_step.infer(samples).outputs

    def no_sync(self) -> AbstractContextManager[None]:
        """A context in which backward passes add to local gradients without communication.

        In a plain loop, run all micro-batches but the last in it. ``train_step`` does so itself. The context
        does nothing if ``reduce_each_micro_batch`` of fsdp or zero2 is true. Gradients are then sharded.
        """
        return self.job.gradients.no_sync()

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Clips the gradients of all ranks together to ``max_norm``. Returns the 0-d norm before clipping.

        Call it between the backward pass and ``optim.step()``. Collective where gradients are sharded.
        """
        return self.train_step.clip_grad_norm_(max_norm, norm_type)

    def prepare_gradients(self) -> None:
        """Completes and unscales the gradients, of masters in fp32, for a loop that reads or changes them.

        Call it after the last backward pass of a step. Collective.
        """
        self.train_step.reduce()
        if isinstance(self.optim, StepOptimizer):
            self.optim.prepare_gradients()

    def average(self, decay: float | None = 0.999) -> WeightAverage:
        """An average of the weights (EMA), sharded like them. Call its ``update()`` after a step.

        Its values are those of ``AveragedModel`` with ``get_ema_multi_avg_fn(decay)`` in one process.
        ``decay=None`` is the mean of all updates.

        Raises:
            InputError: for a decay outside of 0 to 1.
        """
        return WeightAverage(partial(self.job.make_states, self.job, self.optim), decay)

    def track(self, tracker: Tracker, *, every: int = 10, samples_per_step: int | None = None) -> Tracking:
        """Sends metrics of every so many steps of ``train_step`` to a tracker (``atorch_ns.tracking``).

        Call it on every rank, or only on rank 0. Nothing is communicated. Only rank 0 measures and writes.
        A logged step waits for the device, but other steps do not. A failing tracker causes one warning.

        Args:
            tracker: the receiver of the metrics.
            every: number of steps between logged steps.
            samples_per_step: samples in a global batch; ``None`` for that of ``dataloader``.

        Returns:
            An object that ends tracking and accepts your own metrics. Interpreter exit also ends tracking.

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
    """Interface between front ends and a script that is being watched.

    Attributes:
        strategy: replaces each ``load_strategy``. ``None`` keeps the script's own.
    """

    strategy: Any

    def follow(self, result: Result) -> None:
        """Called on every rank for each job with an optimizer, as soon as it has one."""


WATCH: Final[ContextVar[Watch | None]] = ContextVar("watch", default=None)
"""The watch of the script in this context, or ``None`` as in most scripts."""

"""Training step, right for every strategy, and its times."""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Final

import torch
import torch.distributed as dist

from atorch_ns.data import call_model
from atorch_ns.errors import StepError
from atorch_ns.job.job import BatchRunner, Job
from atorch_ns.job.loss import LossFunction, first_loss
from atorch_ns.job.optimizer import StepOptimizer, inner_optimizer
from atorch_ns.text import seconds_text

_KEPT: Final = 256
_FIRST_STEPS: Final = 2
"""Not kept: they compile, make the optimizer's states, and open connections."""


@dataclass(frozen=True, kw_only=True)
class StepSummary:
    """Steps in a few numbers; measured.

    Attributes:
        num_steps: number of steps.
        median_seconds: seconds of one step.
        p25_seconds, p75_seconds: a quarter of the steps was shorter, a quarter longer.
    """

    num_steps: int
    median_seconds: float
    p25_seconds: float
    p75_seconds: float

    def __str__(self) -> str:
        spread = f"{seconds_text(self.p25_seconds)} to {seconds_text(self.p75_seconds)}"
        return f"{seconds_text(self.median_seconds)} (measured, n={self.num_steps}, quartiles {spread})"


class StepTimes:
    """Durations of the last steps of this rank.

    :meth:`start` and :meth:`stop` surround a step. On the CPU a clock is read twice. On CUDA two events are
    put on the current stream and read when somebody asks, so that no step waits for the device; a step that
    the device has not finished is left out.

    A step that raised was started and never stopped, and does not count.

    Args:
        device: the device on which the step computes.
        kept: number of steps that are remembered.
        clock: seconds, for devices without events.
    """

    def __init__(
        self, device: torch.device, *, kept: int = _KEPT, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._clock = clock
        self._uses_events = device.type == "cuda"
        self._device = device
        self._skip = _FIRST_STEPS
        self._begun: Any = None
        self._seconds: deque[float] = deque(maxlen=kept)
        self._events: deque[tuple[Any, Any]] = deque(maxlen=kept)

    def start(self) -> None:
        """A step begins."""
        self._begun = self._event() if self._uses_events else self._clock()

    def stop(self) -> None:
        """The step that began last has ended."""
        begun, self._begun = self._begun, None
        if begun is None:
            return
        if self._skip:
            self._skip -= 1
        elif self._uses_events:
            self._events.append((begun, self._event()))
        else:
            self._seconds.append(self._clock() - begun)

    @property
    def seconds(self) -> tuple[float, ...]:
        """The last steps, oldest first, without the first two of all."""
        if not self._uses_events:
            return tuple(self._seconds)
        return tuple(begin.elapsed_time(end) / 1e3 for begin, end in self._events if end.query())

    def summary(self) -> StepSummary | None:
        """The last steps in a few numbers; ``None`` before the third step."""
        seconds = self.seconds
        if not seconds:
            return None
        quarters = statistics.quantiles(seconds, n=4, method="inclusive") if len(seconds) > 1 else seconds * 3
        return StepSummary(
            num_steps=len(seconds),
            median_seconds=statistics.median(seconds),
            p25_seconds=quarters[0],
            p75_seconds=quarters[2],
        )

    def _event(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event


StepObserver = Callable[[int, torch.Tensor, torch.Tensor | None], None]
"""Called after a training step with the steps so far, the loss, and the norm of the gradients if they were clipped."""


class TrainStep:
    """Runs forward, backward, clipping and the optimizer on one batch, as the strategy needs it.

    A batch is this rank's part of a global batch, as the data loader gives it. It is split into as many
    micro-batches as ``gradient_accumulation_steps`` or the method ``gradient_accumulation`` says; gradients
    are synchronised with the last one only. The loss is taken to be a mean over the batch.

    Gradients stay in ``grad`` after a step, to be looked at, and are cleared when the next one begins. A loop of
    one's own that follows it and clears them only at its end must call ``optim.zero_grad()`` first.

    Attributes:
        num_steps: batches trained on.
        grad_norm: the norm of the last step's gradients, 0-d; ``None`` unless they were clipped.
        skipped: whether the last optimizer step was skipped for infinite or NaN gradients.
        times: how long the last steps took on this rank.
        observers: called after every step of this rank, as ``(num_steps, loss, grad_norm)``. They must not
            communicate; those that read a tensor wait for the device.
    """

    def __init__(
        self,
        *,
        job: Job,
        optimizer: torch.optim.Optimizer | None,
        loss_func: LossFunction | None,
        prepare_input: Callable[[Any, torch.device], Any],
        runner: BatchRunner | None = None,
    ) -> None:
        self.num_steps = 0
        self._num_calls = 0
        self.grad_norm: torch.Tensor | None = None
        self.times = StepTimes(job.device)
        self.observers: list[StepObserver] = []
        self._job = job
        self._optimizer = optimizer
        self._loss_func = loss_func
        self._prepare_input = prepare_input
        self._runner = runner

    @property
    def skipped(self) -> bool:
        """Whether the last optimizer step was skipped."""
        return bool(getattr(self._optimizer, "skipped", False))

    def __call__(self, batch: Any) -> torch.Tensor:
        """Trains on ``batch``.

        Args:
            batch: batch from the data loader, before ``prepare_input``.

        Returns:
            The loss, 0-d and detached, averaged over all data-parallel ranks.

        Raises:
            StepError: if the job has no optimizer or no loss function.
            BatchSizeError: if the micro-batches do not divide the batch.
            RankError: if another rank has failed.
        """
        optimizer, _ = self._require()
        self._num_calls += 1
        with self._job.cluster.sharing_failures("a training step", turn=self._num_calls):
            self.times.start()
            optimizer.zero_grad()
            loss = self.forward_backward(batch)
            if self._job.inputs.max_grad_norm is not None:
                self.grad_norm = self.clip_grad_norm_(self._job.inputs.max_grad_norm)
            optimizer.step()
            self.times.stop()
        self.num_steps += 1
        for observer in tuple(self.observers):  # one may take itself out
            observer(self.num_steps, loss, self.grad_norm)
        return loss

    def forward_backward(self, batch: Any) -> torch.Tensor:
        """Adds the gradients of ``batch``, in micro-batches, and returns the loss as :meth:`__call__` does."""
        with self._job.step.context():
            return self._mean_over_ranks(self._accumulate(batch))

    def _accumulate(self, batch: Any) -> torch.Tensor:
        optimizer, _ = self._require()
        job = self._job
        micro_batches = self._micro_batches(batch)
        if self._runner is not None:
            job.gradients.sums.expect(job.module)
            total = self._runner.forward_backward(micro_batches)
            if isinstance(optimizer, StepOptimizer) and optimizer.scaler is not None:
                optimizer.scaler.expect_scaled_gradients(job.device)
            job.gradients.sums.run(job.module)
            return total
        total = torch.zeros((), device=job.device)
        for position, micro_batch in enumerate(micro_batches):
            last = position == len(micro_batches) - 1
            if job.optimizer.requires_boundary:
                optimizer.set_gradient_accumulation_boundary(last)  # type: ignore[attr-defined]
            with nullcontext() if last else job.gradients.skip_sync():
                total += self._forward_backward(micro_batch) / len(micro_batches)
        job.gradients.sums.run(job.module)
        return total

    @torch.no_grad()
    def evaluate(self, batch: Any) -> torch.Tensor:
        """The loss on ``batch`` without training on it, as :meth:`__call__` returns it.

        The model is in evaluation mode meanwhile. Collective, as a step is.

        Raises:
            StepError: if the job has no loss function.
            BatchSizeError: if the micro-batches do not divide the batch.
        """
        if self._loss_func is None:
            raise StepError("evaluate needs loss_func; pass it to auto_accelerate.")
        job = self._job
        micro_batches = self._micro_batches(batch)
        roots = (job.model, *job.parts.stages)
        modes = {module: module.training for root in roots for module in root.modules()}
        for root in roots:
            root.eval()
        try:
            with job.step.context():
                if self._runner is not None:
                    total = self._runner.forward(micro_batches)
                else:
                    total = torch.stack([self._forward(part)[0] for part in micro_batches]).mean()
        finally:
            for root in roots:
                root.train(modes[root])
            for module, training in modes.items():  # a part may have been in another mode than the whole
                module.training = training
        return self._mean_over_ranks(total)

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Clips the gradients of all ranks together; call it between the backward pass and the step.

        Returns:
            The norm before clipping, 0-d, the same on every rank.

        Raises:
            StepError: if the job has no optimizer.
        """
        optimizer = self._optimizer
        if optimizer is None:
            raise StepError("clip_grad_norm_ needs an optimizer; pass optim_func to auto_accelerate.")
        self._job.gradients.sums.run(self._job.module)
        if isinstance(optimizer, StepOptimizer):
            optimizer.prepare_gradients()
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        return self._job.gradients.clip(parameters, max_norm, norm_type)

    def _require(self) -> tuple[torch.optim.Optimizer, LossFunction]:
        if self._optimizer is None or self._loss_func is None:
            missing = "optim_func" if self._optimizer is None else "loss_func"
            raise StepError(f"train_step needs {missing}; pass it to auto_accelerate.")
        if isinstance(inner_optimizer(self._optimizer), torch.optim.LBFGS):
            raise StepError(
                "LBFGS evaluates the model several times in one step; write the loop with optim.step(closure)."
            )
        return self._optimizer, self._loss_func

    def _micro_batches(self, batch: Any) -> list[Any]:
        return self._job.step.micro_batches(self._prepare_input(batch, self._job.device))

    def _forward_backward(self, micro_batch: Any) -> torch.Tensor:
        job = self._job
        optimizer, _ = self._require()
        seen, loss = self._forward(micro_batch)
        count = job.step.num_micro_batches
        share = loss if count == 1 else loss / count
        if job.optimizer.use_optim_backward:
            optimizer.backward(share)  # type: ignore[attr-defined]
        else:
            share.backward()
        return seen

    def _forward(self, micro_batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """The loss of a micro-batch: for people, 0-d float32 and detached, and for the backward pass."""
        job = self._job
        assert self._loss_func is not None
        output = call_model(job.model, micro_batch, job.inputs.model_input_format)
        loss = first_loss(self._loss_func(micro_batch, output))
        return loss.detach().to(torch.float32).reshape(()), loss

    def _mean_over_ranks(self, loss: torch.Tensor) -> torch.Tensor:
        job = self._job
        if job.mesh is not None and job.num_data_ranks > 1:
            dist.all_reduce(loss, group=job.mesh.data_group)
            loss /= job.num_data_ranks
        return loss

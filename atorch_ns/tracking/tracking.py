"""Tracking of training steps: the metrics and their units, the tracker protocol, and a tracker's errors."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol, final, runtime_checkable

import torch

from atorch_ns.errors import InputError
from atorch_ns.system import table_rows
from atorch_ns.text import error_text

log = logging.getLogger("atorch_ns")


class Metric(NamedTuple):
    """One name under which trackers are given a number.

    Attributes:
        name: name that trackers show.
        unit: unit of the number.
        meaning: the quantity, and when it is absent.
    """

    name: str
    unit: str
    meaning: str


METRICS: Final = tuple(Metric(**row) for row in table_rows(Path(__file__).with_name("metrics.csv")))
"""Metrics that :meth:`Result.track <atorch_ns.job.Result.track>` gives to trackers."""


@runtime_checkable
class Tracker(Protocol):
    """Takes the metrics of steps. It exists on every rank and is called on rank 0 only.

    So its constructor opens nothing: files and connections are opened by the first :meth:`log`.
    """

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Takes the numbers of one step.

        Args:
            metrics: numbers by name, of :data:`METRICS` or a caller's own. :class:`Tracking` gives floats.
                This package's trackers take whatever holds one number, and leave out the rest with a warning.
            step: training steps so far, from 1; never smaller, except after a checkpoint was loaded.
        """
        ...

    def close(self) -> None:
        """Writes pending numbers, and ends. May be called twice, and without any :meth:`log`."""
        ...


class Numbers:
    """Turns metrics into floats and leaves out the others, with one warning for each name."""

    def __init__(self) -> None:
        self._reported_names: set[str] = set()

    def of(self, metrics: Mapping[str, Any]) -> dict[str, float]:
        """Converts numbers, booleans, tensors and arrays without a dim to floats. Waits for CUDA tensors."""
        floats = {}
        for name, value in metrics.items():
            try:
                floats[name] = _to_float(value)
            except Exception as error:  # whatever an object's own code raises
                self._warn_about_value(name, value, error)
        return floats

    def _warn_about_value(self, name: str, value: object, error: Exception) -> None:
        if str(name) in self._reported_names:
            return
        self._reported_names.add(str(name))
        log.warning(
            "the metric %r is skipped, in this and later steps: its value is a %s, which is not a number (%s). Pass a "
            "float or a tensor without dimensions.",
            name,
            type(value).__qualname__,
            error,
        )


def _to_float(value: Any) -> float:
    if isinstance(value, (bool, int, float)):
        return float(value)
    if hasattr(value, "placements"):  # reading a DTensor may wait for other ranks, which do not log
        raise TypeError("it is divided over ranks: call full_tensor() on all of them first")
    if getattr(value, "ndim", None) != 0 or not callable(getattr(value, "item", None)):
        shape = getattr(value, "shape", None)
        raise TypeError("it has no float" if shape is None else f"it has the shape {tuple(shape)}")
    item = value.item()
    if not isinstance(item, (bool, int, float)):
        raise TypeError(f"it holds a {type(item).__qualname__}")
    return float(item)


class StepMeter:
    """Numbers of one rank's training steps, under the names of ``METRICS``, without communication.

    Args:
        device: the rank's device.
        optimizer: the optimizer; ``None`` for none.
        samples_per_step: samples in a global batch; ``None`` if unknown.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        device: torch.device,
        optimizer: Any,
        samples_per_step: int | None,
        *,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._device, self._optimizer, self._samples = device, optimizer, samples_per_step
        self._clock = clock
        self._since: float | None = None
        self._num_steps = 0

    def step(self) -> None:
        """Notes that a step was given to the device. Reads a clock once, at the first step."""
        if self._since is None:
            self._since = self._clock()
        else:
            self._num_steps += 1

    def read(self, loss: torch.Tensor, grad_norm: torch.Tensor | None) -> dict[str, float]:
        """The numbers now, and the time of the steps since the last call. Waits for the device."""
        metrics = {"train/loss": float(loss)}
        if grad_norm is not None:
            metrics["train/grad_norm"] = float(grad_norm)
        metrics |= self._of_optimizer() | self._of_time()
        metrics["memory/peak_gib"] = peak_bytes(self._device) / 2**30
        return metrics

    def _of_time(self) -> dict[str, float]:
        now, begun, count = self._clock(), self._since, self._num_steps
        self._since, self._num_steps = now, 0
        if begun is None or count == 0 or now <= begun:  # the first step starts the clock alone
            return {}
        seconds = (now - begun) / count
        rate = {} if self._samples is None else {"train/samples_per_second": self._samples / seconds}
        return {"train/step_seconds": seconds, **rate}

    def _of_optimizer(self) -> dict[str, float]:
        optimizer = self._optimizer
        if optimizer is None:
            return {}
        rates = [group.get("lr") for group in optimizer.param_groups]
        metrics = {
            "train/lr" if position == 0 else f"train/lr/{position}": float(rate)
            for position, rate in enumerate(rates)
            if rate is not None
        }
        metrics["train/skipped_steps"] = float(getattr(optimizer, "num_skipped", 0))
        # Under fp16 the job's optimizer has a loss scaler, which holds torch's.
        scaler = getattr(getattr(optimizer, "scaler", None), "scaler", None)
        if isinstance(scaler, torch.amp.GradScaler):
            metrics["train/loss_scale"] = float(scaler.get_scale())
        return metrics


@final
class Tracking:
    """A tracker at work; :meth:`close` ends it, and so does leaving it as a context manager.

    Whatever the tracker raises is one warning, and training goes on. The next logged step calls it again.

    Args:
        tracker: receives the numbers; ``None`` on ranks that write nothing.
        meter: measures the steps.
        every: steps from one logged step to the next.
        on_close: called once when it ends.
    """

    def __init__(
        self,
        tracker: Tracker | None,
        meter: StepMeter,
        *,
        every: int,
        on_close: Callable[[Tracking], None] = lambda tracking: None,
    ) -> None:
        check_every(every)
        self._tracker, self._meter, self._every = tracker, meter, every
        self._on_close = on_close
        self._numbers = Numbers()
        self._num_lost = 0
        self._is_closed = tracker is None

    def __call__(self, step: int, loss: torch.Tensor, grad_norm: torch.Tensor | None) -> None:
        """Logs a finished step if it is due."""
        if self._is_closed:
            return
        self._meter.step()
        if step % self._every == 0:
            self.log(self._meter.read(loss, grad_norm), step)

    def log(self, metrics: Mapping[str, Any], step: int) -> None:
        """Gives numbers of the caller's own to the tracker, such as ``{"eval/loss": 1.5}``; on rank 0.

        Integers, booleans, numpy's numbers and tensors without a dim are given on as floats. Other values are
        left out, with one warning for each name.
        """
        if self._tracker is None or self._is_closed:
            return
        try:
            self._tracker.log(self._numbers.of(metrics), step)
        except Exception as error:  # a full disk or a lost connection ends no training
            self._log_failure(f"lost the metrics of step {step}", error)

    def close(self) -> None:
        """Ends the tracker; may be called twice."""
        if self._tracker is None or self._is_closed:
            return
        self._is_closed = True
        self._on_close(self)
        try:
            self._tracker.close()
        except Exception as error:
            self._log_failure("could not be closed", error)
        if self._num_lost > 1:
            log.warning("%s failed %d times.", type(self._tracker).__name__, self._num_lost)

    def __enter__(self) -> Tracking:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _log_failure(self, what: str, error: Exception) -> None:
        self._num_lost += 1
        log.log(
            logging.WARNING if self._num_lost == 1 else logging.DEBUG,
            "%s %s: %s. Training goes on; later failures are counted, and not shown.",
            type(self._tracker).__name__,
            what,
            error_text(error),
        )


def check_every(every: object) -> None:
    """Raises :class:`InputError` unless it is a number of steps."""
    if isinstance(every, bool) or not isinstance(every, int) or every < 1:
        raise InputError(f"every={every!r} is not a number of steps. Use a positive integer.")


def peak_bytes(device: torch.device) -> int:
    """Returns the peak memory since the process began: tensors on CUDA, else the process's resident set."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    import resource  # not on Windows

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # KiB on Linux: getrusage(2)

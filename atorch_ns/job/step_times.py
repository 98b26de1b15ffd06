"""Times of training steps."""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import torch

from atorch_ns.text import seconds_text

_KEPT: Final = 256  # steps
_FIRST_STEPS: Final = 2
"""The first steps, not recorded: they compile, create optimizer states, and open connections."""


@dataclass(frozen=True, kw_only=True)
class StepSummary:
    """Summary of measured step times.

    Attributes:
        num_steps: number of steps.
        median_seconds: seconds of one step.
        p25_seconds, p75_seconds: quartiles of the step times.
    """

    num_steps: int
    median_seconds: float
    p25_seconds: float
    p75_seconds: float

    def __str__(self) -> str:
        spread = f"{seconds_text(self.p25_seconds)} to {seconds_text(self.p75_seconds)}"
        return f"{seconds_text(self.median_seconds)} (measured, n={self.num_steps}, quartiles {spread})"


class StepTimes:
    """Durations of this rank's last steps.

    :meth:`start` and :meth:`stop` surround a step. On the CPU a clock is read twice. On CUDA two events are
    put on the current stream and read on request, so that no step waits for the device. A step that
    the device has not finished is omitted.

    A step that raised has no stop and does not count.

    Args:
        device: the device on which the step computes.
        kept: number of remembered steps.
        clock: returns seconds, for devices without events.
    """

    def __init__(
        self, device: torch.device, *, kept: int = _KEPT, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._clock = clock
        self._uses_events = device.type == "cuda"
        self._device = device
        self._skip = _FIRST_STEPS
        self._begin: Any = None
        self._seconds: deque[float] = deque(maxlen=kept)
        self._events: deque[tuple[Any, Any]] = deque(maxlen=kept)

    def start(self) -> None:
        """Marks the start of a step."""
        self._begin = self._record_event() if self._uses_events else self._clock()

    def stop(self) -> None:
        """Marks the end of the step that started last."""
        begin, self._begin = self._begin, None
        if begin is None:  # stop() without start()
            return
        if self._skip:
            self._skip -= 1
        elif self._uses_events:
            self._events.append((begin, self._record_event()))
        else:
            self._seconds.append(self._clock() - begin)

    @property
    def seconds(self) -> tuple[float, ...]:
        """Durations of the last steps, oldest first, except for the first two of all."""
        if not self._uses_events:
            return tuple(self._seconds)
        return tuple(begin.elapsed_time(end) / 1e3 for begin, end in self._events if end.query())

    def summary(self) -> StepSummary | None:
        """Summary of the last steps, or ``None`` before the third step."""
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

    def _record_event(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

"""Metrics on the terminal: a progress bar there, a line now and then elsewhere."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, Final, TextIO, final

from atorch_ns.tracking._numbers import Numbers

__all__ = ["ProgressTracker"]

_SHOWN: Final = (
    ("train/loss", "loss {:.4g}"),
    ("train/grad_norm", "norm {:.3g}"),
    ("train/lr", "lr {:.3g}"),
    ("train/samples_per_second", "{:,.1f} samples/s"),
    ("memory/peak_gib", "{:.2f} GiB"),
)
"""What a line shows, in this order, of what there is."""


@final
class ProgressTracker:
    """Shows how far training is: a bar of rich on a terminal, else one line every ``every_s`` seconds.

    The first and the last logged step always have a line.

    Args:
        num_steps: steps of the whole run; ``None`` if nobody knows.
        stream: where to write; ``None`` for standard error.
        every_s: seconds between lines where the stream is no terminal.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        num_steps: int | None = None,
        *,
        stream: TextIO | None = None,
        every_s: float = 30.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._num_steps = num_steps
        self._stream = sys.stderr if stream is None else stream
        self._every_s, self._clock = every_s, clock
        self._numbers = Numbers()
        self._bar: _Bar | None = None
        self._written_s: float | None = None
        self._waiting: str | None = None

    def log(self, metrics: Mapping[str, Any], step: int) -> None:
        """Shows the metrics of one step, or keeps them for later."""
        found = self._numbers.of(metrics)
        shown = "  ".join(text.format(found[name]) for name, text in _SHOWN if name in found)
        if self._stream.isatty() and os.environ.get("TERM", "") not in ("", "dumb"):
            if self._bar is None:
                self._bar = _Bar(self._stream, self._num_steps)
            self._bar.show(step, shown)
            return
        of = "" if self._num_steps is None else f"/{self._num_steps}"
        self._waiting = f"step {step}{of}  {shown}\n"
        now = self._clock()
        if self._written_s is None or now - self._written_s >= self._every_s or step == self._num_steps:
            self._written_s = now
            self._write()

    def close(self) -> None:
        """Ends the bar, or writes the line of the last logged step."""
        bar, self._bar = self._bar, None
        if bar is not None:
            bar.close()
        self._write()

    def _write(self) -> None:
        line, self._waiting = self._waiting, None
        if line is not None:
            self._stream.write(line)
            self._stream.flush()


class _Bar:
    """One line at the bottom of a terminal."""

    def __init__(self, stream: TextIO, num_steps: int | None) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        self._progress = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[shown]}", markup=False),
            TimeRemainingColumn(),
            console=Console(file=stream, highlight=False),
            # The user's own output goes where it always went.
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._task = self._progress.add_task("", total=num_steps, shown="")
        self._progress.start()

    def show(self, step: int, shown: str) -> None:
        self._progress.update(self._task, completed=step, shown=shown)

    def close(self) -> None:
        self._progress.stop()

"""How a training run looks while it goes on: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import statistics
import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

__all__ = ["TrainingProgress", "smoothed"]


def smoothed(losses: list[float], num_last: int = 10) -> float:
    """The mean of the last few losses, since that of a single batch jumps."""
    return statistics.fmean(losses[-num_last:])


class TrainingProgress:
    """Shows step, loss and tokens per second. A context manager around the training loop.

    Args:
        console: where to; a quiet one shows nothing.
        num_steps: steps of the whole run.
        line_every: steps between two lines where the console is not a terminal.

    Attributes:
        losses: of every step so far.
        num_tokens: trained on so far, over all processes.
        seconds: that the loop has taken so far.
    """

    def __init__(self, console: Console, num_steps: int, *, line_every: int) -> None:
        self.losses: list[float] = []
        self.num_tokens = 0
        self._console = console
        self._num_steps = num_steps
        self._line_every = line_every
        self._begin = self._now = time.perf_counter()
        self._bar = Progress(
            TextColumn("training"),
            BarColumn(bar_width=30),
            MofNCompleteColumn(),
            TextColumn("loss {task.fields[loss]:.3f}  {task.fields[speed]:,.0f} tokens/s"),
            TimeRemainingColumn(compact=True),
            console=console,
            disable=console.quiet or not console.is_terminal,
        )
        self._task = self._bar.add_task("training", total=num_steps, loss=float("nan"), speed=0.0)

    def __enter__(self) -> TrainingProgress:
        self._begin = self._now = time.perf_counter()
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    @property
    def seconds(self) -> float:
        """From the beginning of the loop to the end of the last step."""
        return self._now - self._begin

    @property
    def tokens_per_second(self) -> float:
        """The mean over the run so far."""
        return self.num_tokens / self.seconds if self.losses else 0.0

    def advance(self, loss: float, num_tokens: int) -> None:
        """One step is done; ``loss`` and ``num_tokens`` are those of its global batch."""
        self._now = time.perf_counter()
        self.losses.append(loss)
        self.num_tokens += num_tokens
        step = len(self.losses)
        self._bar.update(self._task, advance=1, loss=smoothed(self.losses), speed=self.tokens_per_second)
        if not self._console.is_terminal and (step % self._line_every == 0 or step in (1, self._num_steps)):
            self._console.print(
                f"step {step:>4}/{self._num_steps}  loss {smoothed(self.losses):.3f}  "
                f"{self.tokens_per_second:,.0f} tokens/s"
            )
